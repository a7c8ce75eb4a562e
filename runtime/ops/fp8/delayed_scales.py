"""Delayed scaling of fp8 products: scales are computed from the amax (largest element) history of earlier steps.

    step t    x ──> amax ──> seen = max over micro-batches and slices     q(x) = round(x / s), s from the step before
    its end   seen = max over the devices of a stage                      one collective for all layers, on each axis
              history = [seen, history without its last]
              s = largest of the history / largest number of the dtype * 2^margin; 1 where the history has only zeros

So devices exchange no scales while layers run. A linear layer has three tensors: its input, its weight, and the
gradient of its output; each expert has eight (`planner.models.experts.delayed`). Layers that share a weight use the
maximum over all of them, also on other stages. The history is state: it is saved with every checkpoint, whole on all
ranks that have the layer, and the scales follow from it. A step that is not made leaves it unchanged; evaluation reads
the scales and adds nothing to the history. Elements beyond the range of the scale saturate at the largest number of the
dtype.

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
from runtime.ops.fp8.narrow_weights import largest_of, piece_in_8_bits

_PARTS = 16
"""Elements of a history that are copied at a time."""

INPUT, WEIGHT, GRADIENT = range(LAYER_TENSORS)
"""The tensors of a linear layer."""


def scales_of_rank(bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> "DelayedScales":
    """The delayed scales of the layers and experts in the stages of a rank."""
    types = bound.graph.types
    shapes = delayed_scales((bound.graph.operators[at] for cut in cuts for at in cut.operators), types)
    wide = {types[name].dtype for name in shapes} == {"float64"}
    return DelayedScales(shapes, bound.plan.training.fp8, place.device, wide=wide)


class DelayedScales:
    """The delayed scales of a rank's layers and experts: the number of tensors of each, by the names of their weights
    (`planner.graph.fp8`); `wide` for a model in float64."""

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
        """The scales of a layer, or of experts."""
        place, shape = self._places[name], self._shapes[name]
        return LayerScales(name=name, scales=self._scales[place].view(shape), seen=self._seen[place].view(shape))

    def history_of(self, name: str) -> torch.Tensor:
        """The amax history, the last step first, (tensors, steps) or (tensors, experts, steps): its own memory."""
        return self._history[self._places[name]].view(*self._shapes[name], -1)

    def kept(self) -> list[torch.Tensor]:
        """The tensors that are kept between steps."""
        return [self._history, self._seen, self._scales]

    def forget(self) -> None:
        """Forget the amax of a step that is not made."""
        self._seen.zero_()

    @torch.no_grad()
    def end_step(
        self, groups: Sequence[dist.ProcessGroup] = (), shared: Iterable[tuple[str, dist.ProcessGroup]] = ()
    ) -> None:
        """Reduce the amax over the devices of `groups`, first that of weights `shared` with other stages, and compute
        the scales of the next step. Collective."""
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
        """Put these values at the front of the history, and drop its last; copied a part at a time."""
        count = self._history.shape[-1]
        part = -(-count // _PARTS)
        for stop in range(count, 1, -part):
            start = max(1, stop - part)
            self._history[..., start:stop] = self._history[..., start - 1 : stop - 1].clone()
        self._history[..., 0] = known

    def settle(self) -> None:
        """Compute the scales from the history."""
        top = self._history.amax(dim=-1)
        self._scales.copy_(torch.where(top > 0, top / self.most * self._margin, 1.0))


def _most(shape: tuple[int, ...]) -> list[float]:
    """The largest number of the dtype of each tensor, repeated for each expert where there are several."""
    recipe, gradients = RECIPES["delayed"], GRADIENTS_AMONG[shape[0]]
    lows = [recipe.forward] * (shape[0] - gradients) + [recipe.gradients] * gradients
    return [torch.finfo(getattr(torch, low)).max for low in lows for _ in range(math.prod(shape[1:]))]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScales:
    """The scales of one layer, (tensors), or of experts, (tensors, experts), and the amax of this step; views that
    others read too."""

    name: str
    scales: torch.Tensor
    seen: torch.Tensor

    def among(self, first: int, count: int) -> "LayerScales":
        """The scales of `count` experts, from the `first` on."""
        return replace(self, scales=self.scales.narrow(1, first, count), seen=self.seen.narrow(1, first, count))

    def scale(self, tensor: int) -> torch.Tensor:
        """The divisor of the elements of one of the tensors, () or (experts)."""
        return self.scales[tensor]

    def see(self, tensor: int, values: torch.Tensor) -> None:
        """Update the amax of one of the tensors with a piece of it."""
        self.note(tensor, largest_of(values))

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor:
        """A piece of the weight in 8 bits, as it is gathered."""
        made: torch.Tensor = piece_in_8_bits(piece, self.scale(WEIGHT), [])
        return made

    def note(self, tensor: int, largest: torch.Tensor) -> None:
        """Update the amax with maxima, () or (experts)."""
        seen = self.seen[tensor]
        torch.maximum(seen, largest.to(seen.dtype), out=seen)
