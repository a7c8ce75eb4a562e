"""FP8 scales of a rank that are known before its layers run: delayed scales (`runtime.ops.fp8.delayed_scales`), or
scales of weights that are gathered in 8 bits (`runtime.ops.fp8.weight_scales`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.graph.fp8 import delayed_weight, reads_fp8
from planner.graph.operator_graph import Operator
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from runtime.comm.device_mesh import RankMesh
from runtime.ops.fp8.delayed_scales import WEIGHT, DelayedScales, LayerScales, scales_of_rank
from runtime.ops.fp8.weight_scales import CurrentScales, WeightScales

Known = LayerScales | WeightScales
"""The known scales of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scales:
    """The delayed scales, and the current scales of weights; `cast` are the weights that are gathered in 8 bits."""

    delayed: DelayedScales
    current: CurrentScales
    cast: tuple[str, ...]

    def of(self, op: Operator) -> Known | None:
        """The known scales of a layer in fp8, or of experts; None for every other operator."""
        name = delayed_weight(op)
        if name is not None:
            return self.delayed.of(name)
        return self.current.of(op.operands[1]) if reads_fp8(op) else None

    def of_weight(self, name: str) -> Known:
        """The scales for the cast of a weight that is gathered in 8 bits."""
        found = self.current.of(name)
        return self.delayed.of(name) if found is None else found

    def begin_step(self, pieces: Mapping[str, torch.Tensor], *, trains: bool) -> None:
        """Find the largest elements of weights that are gathered in 8 bits: for the scales of this step, or, if it
        `trains`, for the delayed scales of later steps. Collective."""
        self.current.agree(pieces)
        for name in self.cast if trains and self.delayed else ():
            self.delayed.of(name).see(WEIGHT, pieces[name])

    def kept(self) -> list[torch.Tensor]:
        """The tensors that are kept between steps."""
        return [*self.delayed.kept(), *self.current.kept()]


def fp8_scales_of_rank(bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> Fp8Scales:
    """The scales of the layers and experts in the stages of a rank."""
    operators = [bound.graph.operators[at] for cut in cuts for at in cut.operators]
    return Fp8Scales(
        delayed=scales_of_rank(bound, cuts, place),
        current=CurrentScales(bound, cuts, place),
        cast=tuple(dict.fromkeys(op.operands[1] for op in operators if reads_fp8(op))),
    )
