"""What MindSpeed and MindFormers can be told; see `mindspeed` and `mindformers` below `planner.export`.

Left out of the spaces, though the exporters write them: ZeRO 0, and with it SGD of MindSpeed; ZeRO 2 and 3 beside a
pipeline, copies of what ZeRO shares out; for MindSpeed stages whose first and last are of another size than the others;
for MindFormers interleaved micro-batches, slices of the sequence, and beside experts contexts, selective recomputation,
and experts that tensor parallel devices cut: those have a capacity there (MoEV2), and drop tokens.
"""

from typing import TypedDict

from planner.engines.megatron import MODULES
from planner.engines.space import EngineSpace, Recomputed, Settings
from planner.plan.layout.kept import Kept

_ACTIVATIONS, _NORMS = Kept(but=("elementwise",)), Kept(but=("elementwise", "normalisation"))
"""Blocks compute activations of the MLP again (--recompute-activation-function, select_recompute), and norms, too
(select_comm_recompute). As they are priced, sums of the residual stream come with them."""

MINDSPEED = EngineSpace(
    name="mindspeed",
    title="MindSpeed",
    software="mindspeed",
    settings=(
        Settings(
            zero=(1,),
            recomputed=("equal",),
            selective=(*MODULES, ("all", _ACTIVATIONS)),
            context=("heads", "ring"),
            samples_by="context",
            even=True,
        ),
    ),
    precisions=("bf16", "fp16", "fp32"),
)


class Beside(TypedDict):
    """Of `Settings`, what is decided of models with experts."""

    whole_experts: tuple[bool, ...]
    beside_experts: tuple[tuple[str, int], ...]
    selective_experts: bool


_SELECTED: tuple[tuple[Recomputed, Kept], ...] = (("any", _ACTIVATIONS), ("any", _NORMS))

_EXPERTS: Beside = {"whole_experts": (True,), "beside_experts": (("context", 1),), "selective_experts": False}
"""Grouped products of whole experts, which lie on the innermost tensor and data parallel devices (MoEV3)."""

MINDFORMERS = EngineSpace(
    name="mindformers",
    title="MindFormers",
    software="mindformers",
    settings=(
        Settings(
            zero=(1,), recomputed=("any",), selective=_SELECTED, context=("heads", "ring"), zigzag=False, **_EXPERTS
        ),
        Settings(
            zero=(2,),
            recomputed=("any",),
            selective=_SELECTED,
            context=("heads", "ring"),
            zigzag=False,
            fixed=(("pipeline", 1),),
            **_EXPERTS,
        ),
        Settings(
            zero=(3,),
            recomputed=("all",),
            context=("heads", "ring"),
            zigzag=False,
            fixed=(("pipeline", 1),),
            **_EXPERTS,
        ),
    ),
    precisions=("bf16", "fp16", "fp32"),
    wide=(2, 3),
)
