"""Scales of linear layers in fp8 that are known before their tensors are: from the largest elements of steps before.

    step t    x ──> amax ──> seen = max over micro-batches and slices     q(x) = round(x / s), s from the step before
    its end   seen = max over the devices of a stage                      one message for all layers, on each axis
              history = [seen, history without its last]
              s = largest of the history / largest number of the dtype * 2^margin; 1 where the history has zeros alone

So nothing is said between devices while layers run. A layer has three tensors: what flows in, its weight, and the
gradient of what flows out. The history is state: it is saved with every checkpoint, whole on all ranks that have the
layer, and scales follow from it. A step that is not made leaves it as it was; evaluation reads scales and adds nothing.
Elements beyond what the scale was made for become the largest number of the dtype.

Source: Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine, `common.recipe.DelayedScaling` with
`amax_compute_algo` "max" (which keeps the scale of a history of zeros, instead of 1), `reduce_amax`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import Fp8, delayed_layers
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from runtime.comm import collectives
from runtime.comm.device_mesh import RankMesh

_PARTS = 16
"""Of a history, of which one is copied at a time."""

INPUT, WEIGHT, GRADIENT = range(3)
"""The tensors of a layer."""


def scales_of_rank(bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> "DelayedScales":
    """Those of the layers in the stages of a rank."""
    operators = [bound.graph.operators[at] for cut in cuts for at in cut.operators]
    names = delayed_layers(operators)
    dtypes = {bound.graph.types[name].dtype for name in names}
    return DelayedScales(names, bound.plan.training.fp8, place.device, wide=dtypes == {"float64"})


class DelayedScales:
    """Those of the layers of a rank, by the names of their weights; `wide` of a model in float64."""

    def __init__(self, names: Sequence[str], fp8: Fp8, device: torch.device, *, wide: bool = False) -> None:
        recipe, dtype = RECIPES["delayed"], torch.float64 if wide else torch.float32
        self.names = tuple(names)
        self._rows = {name: row for row, name in enumerate(self.names)}
        lows = [recipe.forward, recipe.forward, recipe.gradients]
        self.most = torch.tensor([torch.finfo(getattr(torch, low)).max for low in lows], dtype=dtype, device=device)
        self._margin = 2.0**fp8.margin
        self._history = torch.zeros((len(names), len(lows), fp8.history), dtype=dtype, device=device)
        self._seen = torch.zeros((len(names), len(lows)), dtype=dtype, device=device)
        self._scales = torch.ones_like(self._seen)

    def __bool__(self) -> bool:
        return bool(self.names)

    def of(self, name: str) -> "LayerScales":
        """Those of a layer."""
        return LayerScales(name=name, row=self._rows[name], every=self)

    def scale(self, row: int, tensor: int) -> torch.Tensor:
        """By which elements are divided, ()."""
        return self._scales[row, tensor]

    def see(self, row: int, tensor: int, values: torch.Tensor) -> None:
        """Take notice of the largest element of a piece."""
        seen = self._seen[row, tensor]
        torch.maximum(seen, values.detach().abs().amax().to(seen.dtype), out=seen)

    def history_of(self, name: str) -> torch.Tensor:
        """The largest elements of the steps before, the last one first, (3, steps): memory of its own."""
        return self._history[self._rows[name]]

    def kept(self) -> list[torch.Tensor]:
        """What is there of the layers between steps."""
        return [self._history, self._seen, self._scales]

    def forget(self) -> None:
        """What was seen in a step that is not made."""
        self._seen.zero_()

    @torch.no_grad()
    def end_step(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        """Agree with the devices of `groups` on what was seen, and make the scales of the next step. Collective."""
        if not self.names:
            return
        for group in groups:
            self._seen.copy_(collectives.all_reduce_max(self._seen, group))
        known = torch.where(self._seen.isfinite(), self._seen, 0.0)
        self._remember(known)
        self.forget()
        self.settle()

    def _remember(self, known: torch.Tensor) -> None:
        """Let the history have these largest elements in front, without its last; a part at a time is copied."""
        count = self._history.shape[-1]
        part = -(-count // _PARTS)
        for stop in range(count, 1, -part):
            start = max(1, stop - part)
            self._history[..., start:stop] = self._history[..., start - 1 : stop - 1].clone()
        self._history[..., 0] = known

    def settle(self) -> None:
        """Make the scales from the history."""
        top = self._history.amax(dim=-1)
        self._scales.copy_(torch.where(top > 0, top / self.most * self._margin, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """Those of one layer."""

    name: str
    row: int
    every: DelayedScales

    def scale(self, tensor: int) -> torch.Tensor:
        """By which elements of one of its tensors are divided, ()."""
        return self.every.scale(self.row, tensor)

    def see(self, tensor: int, values: torch.Tensor) -> None:
        """Take notice of the largest element of a piece of one of its tensors."""
        self.every.see(self.row, tensor, values)
