"""What can be told the engines that share weights out with PyTorch's FSDP2; see `planner.export.torchtitan`,
`planner.export.accelerate` and `planner.export.torch_script`.

Left out of the spaces, though the exporters write them: plain data parallelism, copies where a context alone shares
out (HSDP), recomputation of every nth layer, GPipe; for torchtitan configurations without FSDP, which
compute on weights in bf16 alone, and models with experts.
"""

from planner.engines.space import EngineSpace, Settings
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT, Kept

_PRODUCTS = Kept(but=("elementwise", EVERY_SECOND_PRODUCT, "normalisation"))
"""Of torchtitan's selective recomputation by operators ("op")."""

TORCHTITAN = EngineSpace(
    name="torchtitan",
    title="torchtitan",
    software="fsdp",
    settings=(
        Settings(
            zero=(2, 3), recomputed=("none", "all"), selective=(("all", _PRODUCTS),), context=("ring",), shards=2,
            filled=True, replicated=True,
        ),
    ),
    precisions=("bf16", "fp32"),
    wide=(2, 3),
    experts=False,
    fp8=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    leaves_out=True,
)  # fmt: skip

ACCELERATE = EngineSpace(
    name="accelerate",
    title="Accelerate",
    software="fsdp",
    settings=(
        Settings(
            zero=(2, 3), recomputed=("none", "all"), context=("ring",), sequence_parallel=False, vocabulary=False,
            whole_experts=(), fixed=(("pipeline", 1),), shards=2, replicated=True,
        ),
    ),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp32"),
)  # fmt: skip

TORCH = EngineSpace(
    name="torch",
    title="plain PyTorch",
    software="pytorch",
    settings=(
        Settings(
            zero=(2, 3),
            recomputed=("any",),
            selective=(("any", Kept(calls=("attention",))),),
            context=("heads",),
            whole_experts=(False,),
            beside_experts=(("tensor", 1),),
            shards=2,
            filled=True,
            replicated=True,
        ),
    ),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp32"),
)
