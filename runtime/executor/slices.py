"""The sequence slices that one rank computes one at a time: their parts of constants, and their share of the loss.

    whole sequence    tokens, positions, tables   0 1 2 3 | 4 5 6 7           cut here, before sharding over ranks
    slice 1           the program of one slice,           4 5 6 7             with the constants of these positions
                      made for slice 0

The graph of a slice (`planner.plan.binding.slices`) contains the constants of the first slice. Constants that depend on
the position are computed once from the graph of the whole, and each slice is given its part.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from planner.errors import ModelError
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.graph.torch_operators import resolve
from planner.plan.binding.bind import BoundPlan
from planner.plan.binding.slices import LOSS, positional
from planner.plan.layout.stage_cut import StageCut
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import apply_steps, local_piece
from runtime.executor.executor import Executor, build_executor, build_operand
from runtime.executor.instruction import Operand
from runtime.ops.local.local_ops import filled, template
from runtime.ops.slice_pass import SlicePass, Together

Given = Mapping[str, torch.Tensor]


class Slices:
    """The additional inputs of the executors of one rank, slice by slice. Collective where targets are gathered."""

    def __init__(self, bound: BoundPlan, place: RankMesh, cuts: Sequence[StageCut], buffers: Given) -> None:
        self.count = bound.plan.slices
        self._place = place
        own = positional(bound.whole, bound.graph)
        values = _evaluated(bound.whole, own - buffers.keys(), buffers, place.device)
        promised = bound.promised
        self._constants = [
            {
                name: local_piece(_part(value, bound, name, number), promised[name].forward, place).contiguous()
                for name, value in values.items()
            }
            for number in range(self.count)
        ]
        self._tables = [
            {name: _part(buffers[name], bound, name, number) for name in own & buffers.keys()}
            for number in range(self.count)
        ]
        self._targets = [
            (chunk, _Targets(bound, place, cut, at))
            for chunk, cut in enumerate(cuts)
            for at in cut.operators
            if bound.graph.operators[at].op == LOSS
        ]
        self._together: WeakValueDictionary[tuple[int, int], Together] = WeakValueDictionary()
        self._kept: deque[Together] | None = None
        self._at_once = bound.plan.training.interleave * bound.plan.virtual_stages

    def constants(self, number: int) -> Given:
        """Constants that depend on the position, in the layouts of the plan."""
        return self._constants[number]

    def tables(self, number: int) -> Given:
        """Buffers that depend on the position."""
        return self._tables[number]

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Inside of this context the state that slices share stays alive, also where no autograd graph holds it: until
        the slices of later micro-batches come."""
        self._kept = deque(maxlen=self._at_once)
        try:
            yield
        finally:
            self._kept = None

    def part(self, micro_batch: int, number: int, inputs: Callable[[int], Given], chunk: int = 0) -> SlicePass:
        """What slice `number` of a micro-batch may know of the other slices in the same chunk of the rank; `inputs`
        gives this rank's pieces by the slice. The shared state lives as long as a returned `SlicePass`, or an autograd
        graph that was recorded under it."""
        together = None if number == 0 else self._together.get((chunk, micro_batch))
        if together is None:
            own = (target for at, target in self._targets if at == chunk)
            counted = {target.operator: target.counted(self, inputs) for target in own}
            together = self._together[chunk, micro_batch] = Together(count=self.count, counted=counted)
            if self._kept is not None:
                self._kept.append(together)
        return SlicePass(number=number, together=together)


class _Targets:
    """The number of targets in the mean of a micro-batch's loss, among those of this rank."""

    def __init__(self, bound: BoundPlan, place: RankMesh, cut: StageCut, at: int) -> None:
        op = bound.graph.operators[at]
        self.operator, self._place = op.name, place
        name = op.operands[1]
        ignored = op.arguments[4] if len(op.arguments) > 4 else dict(op.keywords).get("ignore_index", -100)
        self._ignored = int(ignored)  # type: ignore[arg-type]
        chain = _way_to(bound.graph, cut, op, name)
        alone = StageCut(stage=0, stages=2, operators=chain, receives=(), sends=(name,), parameters=frozenset())
        self._executor: Executor = build_executor(bound, place, alone)
        self._operand: Operand = build_operand(bound, name, bound.promised[name], at, 1)

    def counted(self, slices: Slices, inputs: Callable[[int], Given]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64, device=self._place.device)
        for number in range(slices.count):
            given = {**inputs(number), **slices.constants(number)}
            made = {**given, **self._executor({}, dict(slices.tables(number)), given)}
            targets = made[self._operand.name]
            if self._operand.transfer is not None:
                targets = apply_steps(targets, self._operand.transfer.forward, self._place)
            total = total + (targets != self._ignored).sum()
        return total / slices.count


def _way_to(graph: OperatorGraph, cut: StageCut, op: Operator, target: str) -> tuple[int, ...]:
    """The operators that compute the targets of the loss from inputs."""
    found: set[int] = set()
    wanted = [target]
    while wanted:
        name = wanted.pop()
        at = graph.producer.get(name)
        if at is None and name in graph.inputs:
            continue
        if at is None or at not in cut.operators:
            raise ModelError(
                f"the targets of '{op.name}' come from '{name}', which is no input of the last stage; with slices of"
                " the sequence they must be known before the first of them, so plan with slices 1"
            )
        if at not in found:
            found.add(at)
            wanted += graph.operators[at].operands
    return tuple(sorted(found))


def _part(whole: torch.Tensor, bound: BoundPlan, name: str, number: int) -> torch.Tensor:
    """The positions of a slice, from a tensor with all positions."""
    for dim, extent in enumerate(bound.graph.types[name].shape):
        if whole.shape[dim] != extent:
            whole = whole.narrow(dim, number * extent, extent)
    return whole


def _evaluated(
    graph: OperatorGraph, names: frozenset[str], buffers: Given, device: torch.device
) -> dict[str, torch.Tensor]:
    """The values of a graph's constants, whole."""
    values: dict[str, Any] = {**buffers}
    needed: set[int] = set()
    wanted = list(names)
    while wanted:
        at = graph.producer.get(wanted.pop())
        if at is not None and at not in needed:
            needed.add(at)
            wanted += graph.operators[at].operands
    for at in sorted(needed):
        op = graph.operators[at]
        operands = iter([values[name] for name in op.operands])
        arguments = filled(template(op.arguments, device), operands)
        made = resolve(op.op)(*arguments, **{k: filled(template(v, device), operands) for k, v in op.keywords})
        results = made if isinstance(made, tuple | list) else (made,)
        values.update({name: value for name, value in zip(op.results, results, strict=True) if name is not None})
    return {name: values[name] for name in sorted(names)}
