"""Scales of weights that are gathered in 8 bits, under recipes that scale by the current tensors.

    begin of a step    largest of each weight = max over this device's piece        one per tensor, or one per 128 x 128
                                                                                    block of the whole weight
                       maximum over the devices that have other pieces              one collective for all weights, on
                                                                                    each axis that cuts any
    each gather        piece ──> q(piece) by these scales ──> [gather] ──> product

A weight does not change within a step. So devices agree on its largest elements once, before any gather, and its layer
sends nothing for them any more. torchao does this for per-tensor scales, after the optimizer step
(`precompute_float8_dynamic_scale_for_fsdp`). A block may be split over devices: each finds the maxima of its parts, and
gets those of all blocks, four bytes per 16,384 elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.graph.fp8 import scales_on_their_way
from planner.models.experts.fp8 import largest, scale_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.per_step_communication import axes_of_maxima
from planner.plan.layout.stage_cut import StageCut
from planner.sharding.layout import Layout
from runtime.comm import collectives
from runtime.comm.device_mesh import RankMesh
from runtime.ops.fp8.narrow_weights import DTYPE, blocks_from, largest_of, piece_in_8_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScales:
    """The scales of one weight: the largest elements of the whole weight, () or (blocks of outputs, blocks of inputs);
    the divisors of its elements, of the same shape; and the start, in the weight, of the piece that this device
    stores."""

    name: str
    largest: torch.Tensor
    scales: torch.Tensor
    start: tuple[int, ...]

    def see(self, piece: torch.Tensor) -> None:
        """Set the largest elements to those of the stored piece."""
        if not self.largest.ndim:
            self.largest.copy_(largest_of(piece))
            return
        cells = self.largest.shape
        rows, columns = (
            blocks_from(start, extent, blocks, piece.device)
            for start, extent, blocks in zip(self.start, piece.shape, cells, strict=True)
        )
        self.largest.copy_(largest(piece.detach(), rows, cells[0], columns, cells[1]))

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor:
        """The stored piece in 8 bits, as it is gathered."""
        made: torch.Tensor = piece_in_8_bits(piece, self.scales, list(self.start))
        return made


class CurrentScales:
    """The scales of a rank's weights that are gathered in 8 bits, by name; empty under delayed scaling."""

    def __init__(self, bound: BoundPlan, cuts: Sequence[StageCut], place: RankMesh) -> None:
        types = bound.graph.types
        shapes = scales_on_their_way((bound.graph.operators[at] for cut in cuts for at in cut.operators), types)
        wide = {types[name].dtype for name in shapes} == {"float64"}
        dtype, count = torch.float64 if wide else torch.float32, sum(map(math.prod, shapes.values()))
        self._largest = torch.zeros(count, dtype=dtype, device=place.device)
        self._scales = torch.ones_like(self._largest)
        self._groups = [place.group(axis) for axis in axes_of_maxima(bound, shapes)]
        self._own, first = dict[str, WeightScales](), 0
        for name, shape in shapes.items():
            most, scales = (every[first : first + math.prod(shape)].view(shape) for every in self.kept())
            start = start_of(types[name].shape, bound.parameters[name].weight, place)
            self._own[name] = WeightScales(name=name, largest=most, scales=scales, start=start)
            first += math.prod(shape)

    def of(self, name: str) -> WeightScales | None:
        """The scales of a weight; None where it is not gathered in 8 bits."""
        return self._own.get(name)

    def kept(self) -> list[torch.Tensor]:
        """The tensors that are kept between steps."""
        return [self._largest, self._scales]

    @torch.no_grad()
    def agree(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Compute the scales of the current weights. Collective."""
        if not self._own:
            return
        for name, own in self._own.items():
            own.see(pieces[name])
        for group in self._groups:
            self._largest.copy_(collectives.all_reduce_max(self._largest, group))
        self._scales.copy_(scale_of(self._largest, DTYPE))


def start_of(shape: Sequence[int], layout: Layout, place: RankMesh) -> tuple[int, ...]:
    """The index in a weight at which the piece of this rank starts. Pieces are equally long, also where the last ones
    are filled up with zeros (`planner.sharding.layout.PaddedShape`); a piece of zeros alone starts behind the
    weight."""
    starts, lengths = [0 for _ in shape], list(shape)
    for placement, size, at in zip(layout, place.mesh.sizes, place.coordinate, strict=True):
        if placement.is_shard:
            lengths[placement.dim] = -(-lengths[placement.dim] // size)
            starts[placement.dim] += at * lengths[placement.dim]
    return tuple(starts)
