"""Checks in the first step of a plan that every tensor has the content that the plan promises.

Local shapes are checked in every step. Here contents are checked too: where a layout says that an axis has replicas,
the ranks of that axis must hold equal tensors. Nothing is sent while operators run, because ranks of a pipeline are at
different ones. Each rank records checksums, and after the backward pass they are compared, once along every axis:

    forward     operands as they arrive, results        of every operator and micro-batch
    backward    gradients of the same                   seen by hooks
    beside      inputs, parameters, accumulated gradients

A tensor is recorded where some axis has replicas of it: a shard or a term of a sum can only be checked by shape.
Results of a recomputed block are compared with those of its first run. The first difference in execution order, over
all ranks, is raised on all of them.

Replicas are computed by the same kernels from the same values, or by a collective that gives all ranks the same bits
(gloo's do; `tests/distributed/test_checking.py` checks both), so on CPUs of one kind they are bit-identical. `ROUNDING`
allows for accelerator kernels, some of which sum in a different order each time.

Tensors are processed in pieces, in memory that is allocated once (`runtime.step.checksums`): the first step takes 3 MiB
more than every other on a CPU, 48 MiB on an accelerator, whatever the plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from planner.errors import StrategyError
from planner.plan.binding.bind import BoundPlan
from planner.pricing.narrow_weights import DTYPE
from planner.sharding.layout import REPLICATE, Layout, format_layout, local_shape
from planner.sharding.rule import strategy_names
from runtime.comm.agreement import Finding, Moment, first_of_all
from runtime.comm.device_mesh import RankMesh, stage_line
from runtime.comm.exchange import gather
from runtime.executor.instruction import Instruction, Operand
from runtime.observer import Observer
from runtime.parameters.shards import LocalParameter
from runtime.step.checksums import Checksum, Checksums

ROUNDING: Mapping[str, float] = {"cpu": 0.0}
"""By device type, the difference between the sums of two replicas that counts as rounding: relative to the sum of their
absolute values, in units of the last place of their dtype."""
OTHER_ROUNDING = 4.0  # of all other types: assumed

# A moment is a phase, a micro-batch, a position in the phase, and a position in the operator.
_BESIDE, _FORWARD, _BACKWARD, _ADDED_UP = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A recorded tensor: its description, what may be wrong with it, its layout, and how far replicas may differ."""

    what: str
    suspect: str
    layout: Layout
    tolerance: float


@dataclass(kw_only=True)
class LayoutCheck:
    """The records of one rank for one training step. `verify` compares them with those of all others."""

    bound: BoundPlan
    place: RankMesh
    _known: dict[Moment, Tensor] = field(default_factory=dict)
    _sums: dict[Moment, torch.Tensor] = field(default_factory=dict)
    _again: dict[Moment, torch.Tensor] = field(default_factory=dict)
    _hooked: set[Moment] = field(default_factory=set)
    _faults: list[Finding] = field(default_factory=list)
    _checksums: dict[torch.device, Checksums] = field(default_factory=dict)

    def weights(self, parameters: Mapping[str, LocalParameter]) -> None:
        """Record the stored weights, except those that every rank has for itself."""
        for place, name in enumerate(sorted(self.bound.graph.parameter_names)):
            if name in parameters and not parameters[name].local:
                self.note(
                    (_BESIDE, 0, place, 1),
                    parameters[name].present,
                    f"parameter '{name}'",
                    "the ranks were given different weights; build the module from the same seed, or load the same"
                    " checkpoint, on every rank",
                    parameters[name].stored.weight,
                )

    def gradients(self, parameters: Mapping[str, LocalParameter]) -> None:
        """Record the stored gradients, accumulated over the micro-batches."""
        for place, name in enumerate(sorted(parameters)):
            if parameters[name].trainable:
                self.note(
                    (_ADDED_UP, 0, place, 0),
                    parameters[name].local_gradient(),
                    f"the gradient of parameter '{name}'",
                    "an operator that reads it is not deterministic backward",
                    parameters[name].stored.gradient,
                )

    def micro_batch(self, number: int) -> "MicroBatchCheck":
        """The observer for the computation of a micro-batch."""
        return MicroBatchCheck(check=self, number=number)

    def note(self, moment: Moment, tensor: torch.Tensor, what: str, suspect: str, layout: Layout) -> None:
        """Record a tensor in this layout, if there are replicas to compare it with."""
        axes = zip(layout, self.place.mesh.sizes, strict=True)
        if not any(placement == REPLICATE and size > 1 for placement, size in axes) and moment[0] != _BESIDE:
            return
        if moment in self._sums:
            self._again[moment] = self._checksum(tensor)
            return
        units = ROUNDING.get(tensor.device.type, OTHER_ROUNDING)
        tolerance = units * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        self._known[moment] = Tensor(what=what, suspect=suspect, layout=layout, tolerance=tolerance)
        self._sums[moment] = self._checksum(tensor)

    def _checksum(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device not in self._checksums:
            self._checksums[tensor.device] = Checksums(tensor.device)
        return self._checksums[tensor.device].of(tensor)

    def note_gradient(self, moment: Moment, tensor: torch.Tensor, what: str, suspect: str, layout: Layout) -> None:
        """Record the gradient of a tensor when it arrives. A recomputed block has its gradients once."""
        if not tensor.requires_grad or moment in self._hooked:
            return
        self._hooked.add(moment)

        def noted(gradient: torch.Tensor | None) -> None:
            hook.remove()  # `weight.to(device)` may be the weight itself, which the next micro-batch reads too
            if gradient is not None:  # None, for example, for the sign that `slogdet` returns
                self.note(moment, gradient, what, suspect, layout)

        hook = tensor.register_hook(noted)  # type: ignore[no-untyped-call]

    def expect(
        self, moment: Moment, tensor: torch.Tensor, what: str, suspect: str, promised: tuple[tuple[int, ...], str]
    ) -> None:
        """Check the local shape and the dtype of a tensor."""
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != promised:
            words = f"{what} is {found[1]} {found[0]}, expected {promised[1]} {promised[0]}; {suspect}"
            self._faults.append(Finding(moment=moment, message=words))

    def verify(self) -> None:
        """Compare with all other ranks, after the backward pass. Collective. Raises StrategyError on every rank if
        anything differs."""
        sums = _on_the_host(self._sums)
        faults = [*self._faults, *self._recomputed(sums)]
        for axis, size in enumerate(self.place.mesh.sizes):
            if size > 1:
                own = {moment: sums[moment] for moment, known in self._known.items() if known.layout[axis] == REPLICATE}
                name = f"axis {self.place.mesh.axes[axis].name}"
                faults += self._differences(own, self.place.group(axis), name)
        if self.place.stages > 1:
            shared = {moment: found for moment, found in sums.items() if moment[0] == _BESIDE}
            faults += self._differences(
                shared,
                stage_line(self.place, tuple(range(self.place.stages)), "forward"),
                "the pipeline",
                everywhere=False,
            )
        first = first_of_all(faults)
        if first is not None:
            raise StrategyError(f"the first step does not agree with the plan: {first.message}")

    def _recomputed(self, sums: Mapping[Moment, Checksum]) -> list[Finding]:
        return [
            Finding(
                moment=moment,
                message=f"{self._known[moment].what} is {_words(again)} when its block is recomputed, and was"
                f" {_words(sums[moment])} before; the operator is not deterministic",
            )
            for moment, again in _on_the_host(self._again).items()
            if _differ(sums[moment], again, self._known[moment].tolerance)
        ]

    def _differences(
        self, own: Mapping[Moment, Checksum], group: dist.ProcessGroup, where: str, everywhere: bool = True
    ) -> list[Finding]:
        """The first difference to any other rank of a group: the ranks must have recorded the same tensors, or (if not
        `everywhere`) tensors that both have recorded must be equal."""
        every = gather(list(own.items()), list[tuple[Moment, Checksum]], group)
        ranks = dist.get_process_group_ranks(group)
        found = []
        for rank, theirs in zip(ranks, map(dict, every), strict=True):
            moments = own.keys() | theirs.keys() if everywhere else own.keys() & theirs.keys()
            for moment in moments & self._known.keys():
                here, there = own.get(moment), theirs.get(moment)
                if here is None or there is None or _differ(here, there, self._known[moment].tolerance):
                    found.append((moment, rank, here, there))
        if not found:
            return []
        moment, rank, here, there = min(found)
        known = self._known[moment]
        return [
            Finding(
                moment=moment,
                message=f"{known.what} has layout {format_layout(known.layout) or 'R'}, so it must be the same on the"
                f" ranks of {where}; rank {dist.get_rank()} has {_words(here)}, rank {rank} has {_words(there)};"
                f" {known.suspect}",
            )
        ]


@dataclass(kw_only=True)
class MicroBatchCheck(Observer):
    """Records every operator of one micro-batch: an observer of `runtime.executor.executor`."""

    check: LayoutCheck
    number: int

    def operands(self, instruction: Instruction, operands: Sequence[torch.Tensor]) -> None:
        layouts = instruction.bound.layouts.operands
        for slot, (operand, tensor, duplex) in enumerate(zip(instruction.operands, operands, layouts, strict=True)):
            self._note(instruction, slot, f"operand {slot} ('{operand.name}')", operand.name, tensor, duplex.forward)
            if not _is_narrow(instruction, slot) and (operand.transfer is not None or self._alone(operand)):
                self._note_gradient(instruction, slot, f"operand {slot} ('{operand.name}')", tensor, duplex.gradient)

    def _alone(self, operand: Operand) -> bool:
        """Whether the gradient of a tensor that is not redistributed comes from this use alone. Not for weights,
        because a hook on a weight would stay."""
        return not operand.weight and len(self.check.bound.graph.consumers[operand.name]) == 1

    def results(self, instruction: Instruction, results: Sequence[torch.Tensor]) -> None:
        names = [promise[0] for promise in instruction.results if promise is not None]
        first, layouts = len(instruction.operands), instruction.bound.layouts.results
        for slot, (name, tensor, duplex) in enumerate(zip(names, results, layouts, strict=True), first):
            self._note(instruction, slot, f"result '{name}'", name, tensor, duplex.forward)
            self._note_gradient(instruction, slot, f"result '{name}'", tensor, duplex.gradient)

    def _note(
        self, instruction: Instruction, slot: int, what: str, name: str, tensor: torch.Tensor, layout: Layout
    ) -> None:
        moment = (_FORWARD, self.number, instruction.index, instruction.first + slot)
        text, suspect = self._words(instruction, what), _suspect(instruction)
        kind = self.check.bound.graph.types[name]
        narrow = _is_narrow(instruction, slot)
        shape, dtype = local_shape(kind.shape, layout, self.check.place.mesh.sizes), DTYPE if narrow else kind.dtype
        self.check.expect(moment, tensor, text, suspect, (shape, dtype))
        tensor = tensor.float() if narrow else tensor
        bound = self.check.bound
        if name not in bound.graph.parameter_names or not bound.plan.training.update.is_local(name):
            self.check.note(moment, tensor, text, suspect, layout)  # a local parameter may differ between ranks

    def _note_gradient(
        self, instruction: Instruction, slot: int, what: str, tensor: torch.Tensor, layout: Layout
    ) -> None:
        last = len(instruction.operands) + len(instruction.results)
        moment = (_BACKWARD, self.number, -instruction.index, last - slot - instruction.first)
        self.check.note_gradient(
            moment, tensor, self._words(instruction, f"the gradient of {what}"), _suspect(instruction), layout
        )

    def _words(self, instruction: Instruction, what: str) -> str:
        bound = instruction.bound
        split = ",".join(str(factor) for factor in strategy_names(bound.rule, bound.strategy))
        operator = f"operator '{bound.operator.name}' ({bound.rule.format()}, split {split})"
        return f"{operator}, micro-batch {self.number}: {what}"


def _is_narrow(instruction: Instruction, slot: int) -> bool:
    """Whether an operand arrives in 8 bits."""
    return slot + instruction.first in instruction.bound.rule.narrow


def _suspect(instruction: Instruction) -> str:
    return (
        f"the rule of {instruction.bound.operator.op} is wrong for this call, the operator is not deterministic, or a"
        " rank computes other results than the others"
    )


def _on_the_host(sums: Mapping[Moment, torch.Tensor]) -> dict[Moment, Checksum]:
    if not sums:
        return {}
    rows = torch.stack([tensor.cpu() for tensor in sums.values()]).tolist()
    return {moment: (row[0], row[1], row[2]) for moment, row in zip(sums, rows, strict=True)}


def _differ(one: Checksum, other: Checksum, tolerance: float) -> bool:
    allowed = tolerance * max(one[2], other[2])
    return any(not math.isclose(a, b, rel_tol=0.0, abs_tol=allowed) for a, b in zip(one, other, strict=True))


def _words(found: Checksum | None) -> str:
    return "nothing" if found is None else f"sum {found[0]:.9g} (weighted {found[1]:.9g}, absolute {found[2]:.9g})"
