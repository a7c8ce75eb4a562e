"""What MindSpeed and MindFormers can be told; see `planner.export.mindspeed` and `planner.export.mindformers`.

Left out of the spaces, though the exporters write them: ZeRO 0, ZeRO 2 and 3 beside a pipeline, copies of what ZeRO
shares out, recomputation of the activations of the MLP (as it is priced, sums of the residual stream come with it); for
MindSpeed stages whose first and last are of another size than the others; for
MindFormers interleaved micro-batches, slices of the sequence, and models with experts.
"""

from planner.engines.megatron import MODULES
from planner.engines.space import EngineSpace, Settings

MINDSPEED = EngineSpace(
    name="mindspeed",
    title="MindSpeed",
    software="mindspeed",
    settings=(Settings(zero=(1,), recomputed=("equal",), selective=MODULES, context=("heads", "ring"), even=True),),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp16", "fp32"),
)

MINDFORMERS = EngineSpace(
    name="mindformers",
    title="MindFormers",
    software="mindformers",
    settings=(
        Settings(zero=(1,), recomputed=("any",), context=("heads", "ring"), zigzag=False),
        Settings(zero=(2,), recomputed=("any",), context=("heads", "ring"), zigzag=False, fixed=(("pipeline", 1),)),
        Settings(zero=(3,), recomputed=("all",), context=("heads", "ring"), zigzag=False, fixed=(("pipeline", 1),)),
    ),
    precisions=("bf16", "fp16", "fp32"),
    wide=(2, 3),
    experts=False,
)
