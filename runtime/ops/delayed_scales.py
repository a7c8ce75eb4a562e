"""Scales of products in fp8 that are known before their tensors are: from the largest elements of steps before.

    step t    x ──> amax ──> seen = max over micro-batches and slices     q(x) = round(x / s), s from the step before
    its end   seen = max over the devices of a stage                      one message for all layers, on each axis
              history = [seen, history without its last]
              s = largest of the history / largest number of the dtype * 2^margin; 1 where the history has zeros alone

So nothing is said between devices while layers run. A linear layer has three tensors: what flows in, its weight, and
the gradient of what flows out; each expert has eight (`planner.models.delayed_experts`). Layers that share a weight
have the largest elements of all of them, on other stages, too. The history is state: it is saved with every
checkpoint, whole on all ranks that have the layer, and scales follow from it. A step that is not made leaves it as it
was; evaluation reads scales and adds nothing. Elements beyond what the scale was made for become the largest number of
the dtype.

Source: Micikevicius et al. 2022, arXiv 2209.05433; Transformer Engine, `common.recipe.DelayedScaling` with
`amax_compute_algo` "max" (which keeps the scale of a history of zeros, instead of 1), `reduce_amax`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from planner.fp8_recipes import GRADIENTS_AMONG, LAYER_TENSORS, RECIPES
from planner.graph.fp8 import Fp8, delayed_scales
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.stage_cut import StageCut
from runtime.comm import collectives
from runtime.comm.device_mesh import RankMesh
from runtime.ops.narrow_weights import largest_of, piece_in_8_bits

_PARTS = 16
"""Of a history, of which one is copied at a time."""

INPUT, WEIGHT, GRADIENT = range(LAYER_TENSORS)
"""The tensors of a linear layer."""


def scales_of_rank(bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> "DelayedScales":
    """Those of the layers and experts in the stages of a rank."""
    types = bound.graph.types
    shapes = delayed_scales((bound.graph.operators[at] for cut in cuts for at in cut.operators), types)
    wide = {types[name].dtype for name in shapes} == {"float64"}
    return DelayedScales(shapes, bound.plan.training.fp8, place.device, wide=wide)


class DelayedScales:
    """Those of the layers and experts of a rank: how many of each, by the names of their weights (`planner.graph.fp8`);
    `wide` of a model in float64."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], fp8: Fp8, device: torch.device, *, wide: bool = False
    ) -> None:
        dtype, most = torch.float64 if wide else torch.float32, [_most(shape) for shape in shapes.values()]
        self.names = tuple(shapes)
        self._shapes = dict(shapes)
        self._places, count = {}, 0
        for name, shape in shapes.items():
            self._places[name] = slice(count, count + math.prod(shape))
            count += math.prod(shape)
        self.most = torch.tensor([largest for each in most for largest in each], dtype=dtype, device=device)
        self._margin = 2.0**fp8.margin
        self._history = torch.zeros((count, fp8.history), dtype=dtype, device=device)
        self._seen = torch.zeros(count, dtype=dtype, device=device)
        self._scales = torch.ones_like(self._seen)

    def __bool__(self) -> bool:
        return bool(self.names)

    def of(self, name: str) -> "LayerScales":
        """Those of a layer, or of experts."""
        place, shape = self._places[name], self._shapes[name]
        return LayerScales(name=name, scales=self._scales[place].view(shape), seen=self._seen[place].view(shape))

    def history_of(self, name: str) -> torch.Tensor:
        """The largest elements of the steps before, the last one first, (tensors, steps) or (tensors, experts, steps):
        memory of its own."""
        return self._history[self._places[name]].view(*self._shapes[name], -1)

    def kept(self) -> list[torch.Tensor]:
        """What is there of the layers between steps."""
        return [self._history, self._seen, self._scales]

    def forget(self) -> None:
        """What was seen in a step that is not made."""
        self._seen.zero_()

    @torch.no_grad()
    def end_step(
        self, groups: Sequence[dist.ProcessGroup] = (), shared: Iterable[tuple[str, dist.ProcessGroup]] = ()
    ) -> None:
        """Agree with the devices of `groups` on what was seen, first on that of weights that are `shared` with other
        stages with those, and make the scales of the next step. Collective."""
        if not self.names:
            return
        for name, twins in shared:
            seen = self._seen[self._places[name]]
            seen.copy_(collectives.all_reduce_max(seen, twins))
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


def _most(shape: tuple[int, ...]) -> list[float]:
    """The largest number of the dtype of each of so many tensors, of each expert where there are several."""
    recipe, gradients = RECIPES["delayed"], GRADIENTS_AMONG[shape[0]]
    lows = [recipe.forward] * (shape[0] - gradients) + [recipe.gradients] * gradients
    return [torch.finfo(getattr(torch, low)).max for low in lows for _ in range(math.prod(shape[1:]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """Those of one layer, (tensors), or of experts, (tensors, experts): the scales, and the largest elements of this
    step, which others read as well."""

    name: str
    scales: torch.Tensor
    seen: torch.Tensor

    def among(self, first: int, count: int) -> "LayerScales":
        """Those of so many experts, from the `first` on."""
        return replace(self, scales=self.scales.narrow(1, first, count), seen=self.seen.narrow(1, first, count))

    def scale(self, tensor: int) -> torch.Tensor:
        """By which elements of one of the tensors are divided, () or (experts)."""
        return self.scales[tensor]

    def see(self, tensor: int, values: torch.Tensor) -> None:
        """Take notice of the largest element of a piece of one of the tensors."""
        self.note(tensor, largest_of(values))

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor:
        """A piece of the weight as it travels."""
        made: torch.Tensor = piece_in_8_bits(piece, self.scale(WEIGHT), [])
        return made

    def note(self, tensor: int, largest: torch.Tensor) -> None:
        """Take notice of largest elements, () or (experts)."""
        seen = self.seen[tensor]
        torch.maximum(seen, largest.to(seen.dtype), out=seen)
