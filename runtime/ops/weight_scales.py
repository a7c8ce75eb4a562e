"""Scales of weights that travel in 8 bits, under recipes whose scales are those of the tensors as they are now.

    begin of a step    largest of each weight = max over this device's piece        one for a tensor, or one for each
                                                                                    128 x 128 of the whole weight
                       the same over the devices that have other pieces             one message for all weights, on
                                                                                    each axis that cuts any
    each gather        piece ──> q(piece) by these scales ──> [gather] ──> product

A weight is the same throughout a step. So its largest elements are agreed on once, before any of it sets out, and its
layer says nothing of them any more. torchao does so for a scale of a tensor, behind the optimizer
(`precompute_float8_dynamic_scale_for_fsdp`). Blocks need not be whole on a device: each finds the maxima of its parts,
and gets those of all blocks, four bytes for 16,384 elements.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.graph.fp8 import scales_on_their_way
from planner.models.fp8_experts import largest, scale_of
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.per_step_communication import axes_of_maxima
from planner.plan.layout.stage_cut import StageCut
from runtime.comm import collectives
from runtime.comm.device_mesh import RankMesh
from runtime.ops.narrow_weights import DTYPE, blocks_from, largest_of, piece_in_8_bits
from runtime.ops.randomness import region_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScales:
    """Those of one weight: its largest elements, () or (blocks of outputs, blocks of inputs) of all of it, the scales
    by which its elements are divided, of the same shape, and where in it the piece begins that this device stores."""

    name: str
    largest: torch.Tensor
    scales: torch.Tensor
    start: tuple[int, ...]

    def see(self, piece: torch.Tensor) -> None:
        """Take the largest elements of the stored piece for those of all."""
        if not self.largest.ndim:
            self.largest.copy_(largest_of(piece))
            return
        rows, columns = (
            blocks_from(start, extent, piece.device) for start, extent in zip(self.start, piece.shape, strict=True)
        )
        cells = self.largest.shape
        self.largest.copy_(largest(piece.detach(), rows, cells[0], columns, cells[1]))

    def in_8_bits(self, piece: torch.Tensor) -> torch.Tensor:
        """The stored piece as it travels."""
        made: torch.Tensor = piece_in_8_bits(piece, self.scales, list(self.start))
        return made


class CurrentScales:
    """Those of the weights of a rank that are gathered in 8 bits, by their names; none under delayed scales."""

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
            start = region_of(types[name].shape, bound.parameters[name].weight, place).start
            self._own[name] = WeightScales(name=name, largest=most, scales=scales, start=start)
            first += math.prod(shape)

    def of(self, name: str) -> WeightScales | None:
        """Those of a weight; None where it is not gathered in 8 bits."""
        return self._own.get(name)

    def kept(self) -> list[torch.Tensor]:
        """What is there of the weights between steps."""
        return [self._largest, self._scales]

    @torch.no_grad()
    def agree(self, pieces: Mapping[str, torch.Tensor]) -> None:
        """Find the scales of the weights as they are now. Collective."""
        if not self._own:
            return
        for name, own in self._own.items():
            own.see(pieces[name])
        for group in self._groups:
            self._largest.copy_(collectives.all_reduce_max(self._largest, group))
        self._scales.copy_(scale_of(self._largest, DTYPE))
