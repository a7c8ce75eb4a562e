"""The scales of a rank that are known before its layers run: of steps before (`runtime.ops.delayed_scales`), or of
weights that travel in 8 bits (`runtime.ops.weight_scales`)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.graph.fp8 import delayed_weight, reads_fp8
from planner.graph.operator_graph import Operator
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from runtime.comm.device_mesh import RankMesh
from runtime.ops.delayed_scales import WEIGHT, DelayedScales, LayerScales, scales_of_rank
from runtime.ops.weight_scales import CurrentScales, WeightScales

Known = LayerScales | WeightScales
"""What a layer knows of its scales."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scales:
    """Those of steps before, and those of weights as they are now; `cast` are the weights that travel in 8 bits."""

    delayed: DelayedScales
    current: CurrentScales
    cast: tuple[str, ...]

    def of(self, op: Operator) -> Known | None:
        """What a layer in fp8, or experts, know; None for every other operator."""
        name = delayed_weight(op)
        if name is not None:
            return self.delayed.of(name)
        return self.current.of(op.operands[1]) if reads_fp8(op) else None

    def of_weight(self, name: str) -> Known:
        """By which a weight is cast that travels in 8 bits."""
        found = self.current.of(name)
        return self.delayed.of(name) if found is None else found

    def begin_step(self, pieces: Mapping[str, torch.Tensor], *, trains: bool) -> None:
        """Look for the largest elements of weights that are gathered in 8 bits: for the scales of this step, or, where
        it `trains`, of those to come. Collective."""
        self.current.agree(pieces)
        for name in self.cast if trains and self.delayed else ():
            self.delayed.of(name).see(WEIGHT, pieces[name])

    def kept(self) -> list[torch.Tensor]:
        """What is there of the layers between steps."""
        return [*self.delayed.kept(), *self.current.kept()]


def fp8_scales_of_rank(bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> Fp8Scales:
    """Those of the layers and experts in the stages of a rank."""
    operators = [bound.graph.operators[at] for cut in cuts for at in cut.operators]
    return Fp8Scales(
        delayed=scales_of_rank(bound, cuts, place),
        current=CurrentScales(bound, cuts, place),
        cast=tuple(dict.fromkeys(op.operands[1] for op in operators if reads_fp8(op))),
    )
