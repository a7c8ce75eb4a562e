"""Finds where a non-finite loss or gradient comes from.

Checking every tensor of every step would cost about as much as computing them. So only the loss is checked, before the
update; every rank has it anyway. If it is not finite, the forward pass is run again, micro-batch by micro-batch, with
an observer that counts NaN and infinities:

    parameters, buffers, inputs ── operands ──> operator ── results     the first non-finite results with finite
                                                                        operands

Random numbers depend only on positions (`runtime.ops.randomness`), so it is the same pass. The first finding in
execution order, over all ranks and stages, is raised on all ranks. Infinities that a model writes on purpose (masks) do
not count: those in the arguments of a call, in a buffer, or in values that depend on no input.

Gradients are checked only on request, because it reads all of them once more and needs a collective. Otherwise the loss
of the next step shows the damage, and the error names the parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist

from planner.errors import NonFiniteError
from planner.graph.operator_graph import Argument, OperatorGraph
from runtime.comm.agreement import Finding, Moment, first_of_all
from runtime.comm.exchange import rank_number
from runtime.executor.instruction import Instruction
from runtime.observer import Observer
from runtime.parameters.shards import LocalParameter

Counts = tuple[int, int]
"""The numbers of NaN and of infinite elements."""
_WEIGHT, _GIVEN = -2, -1  # positions before the first operator


@dataclass(kw_only=True)
class FiniteWatch(Observer):
    """Looks for the first operator of a micro-batch with a non-finite result: an observer of
    `runtime.executor.executor`.

    `finding` is the finding of one rank, None while everything is finite.
    """

    graph: OperatorGraph
    finding: Finding | None = None
    _made: dict[str, Counts] = field(default_factory=dict)
    _operands: Counts = (0, 0)

    def given(
        self,
        parameters: Mapping[str, LocalParameter],
        buffers: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        step: int,
    ) -> None:
        """Check the inputs of the first operator, in optimizer step number `step`."""
        since = f"from the update of step {step - 1}" if step > 1 else "from building or loading the model"
        for place, parameter in enumerate(self.graph.parameters):
            if parameter.name in parameters:
                piece, what = parameters[parameter.name].present, f"parameter '{parameter.name}'"
                self._find((_WEIGHT, place), what, piece, _counts(piece), f" before step {step}, {since}")
        for place, (name, tensor) in enumerate([*buffers.items(), *inputs.items()]):
            nan, _ = _counts(tensor)
            self._find((_GIVEN, place), f"{'buffer' if name in buffers else 'input'} '{name}'", tensor, (nan, 0))

    def operands(self, instruction: Instruction, operands: Sequence[torch.Tensor]) -> None:
        if self.finding is not None:
            return
        counts = [_counts(operand) for operand in operands]
        self._operands = (sum(nan for nan, _ in counts), sum(infinite for _, infinite in counts))
        for slot, (operand, tensor, found) in enumerate(zip(instruction.operands, operands, counts, strict=True)):
            if self._made.get(operand.name) == (0, 0) and operand.transfer is not None and operand.transfer.sums:
                what = f"operand '{operand.name}' of {_words(instruction)}"
                self._find((instruction.index, slot), what, tensor, found, ", summed over ranks from finite terms")

    def results(self, instruction: Instruction, results: Sequence[torch.Tensor]) -> None:
        if self.finding is not None:
            return
        names = [promise[0] for promise in instruction.results if promise is not None]
        meant = _writes_infinity(instruction) or not any(name in self.graph.data_dependent for name in names)
        nan_before, infinite_before = self._operands
        for slot, (name, tensor) in enumerate(zip(names, results, strict=True), len(instruction.operands)):
            nan, infinite = self._made[name] = _counts(tensor)
            made = (0 if nan_before else nan, 0 if nan_before or infinite_before or meant else infinite)
            what = f"{_words(instruction)} is the first whose results are not finite: '{name}'"
            self._find((instruction.index, slot), what, tensor, made)

    def _find(self, moment: Moment, what: str, tensor: torch.Tensor, counts: Counts, more: str = "") -> None:
        if self.finding is None:
            self.finding = _finding(moment, what, tensor, counts, more)


def explain(
    loss: float, step: int, graph: OperatorGraph, micro_batches: int, again: Callable[[int, FiniteWatch], None]
) -> NoReturn:
    """Raise NonFiniteError, on every rank, for the loss of optimizer step number `step` (from 1). Collective.

    `again` runs the forward pass of a micro-batch under an observer.
    """
    for part in range(micro_batches):
        watch = FiniteWatch(graph=graph)
        with torch.no_grad():
            again(part, watch)
        found = first_of_all([] if watch.finding is None else [watch.finding])
        if found is not None:
            raise NonFiniteError(
                f"the loss of step {step} is {loss}: in micro-batch {part} {found.message}; this step has changed no"
                " weight"
            )
    raise NonFiniteError(
        f"the loss of step {step} is {loss}, but all results of operators are finite when the {micro_batches}"
        " micro-batches are computed again: an operator is not deterministic, or a device is faulty; this step has"
        " changed no weight"
    )


def check_gradients(parameters: Iterable[LocalParameter], step: int, device: torch.device) -> None:
    """Raise NonFiniteError, on every rank, where a gradient of step number `step` (from 1) is not finite. Collective:
    one message of four bytes if all are finite."""
    gradients = {p.name: p.gradient for p in parameters if p.gradient is not None}
    bad = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in gradients.values():
        bad = bad.maximum((~gradient.isfinite()).any().to(torch.float32))
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad:
        return
    found = first_of_all(
        finding
        for name, gradient in gradients.items()
        if (finding := _finding((name,), f"the gradient of parameter '{name}'", gradient, _counts(gradient)))
    )
    assert found is not None, "some rank has found one"
    raise NonFiniteError(f"the loss of step {step} is finite, but {found.message}; this step has changed no weight")


def _finding(moment: Moment, what: str, tensor: torch.Tensor, counts: Counts, more: str = "") -> Finding | None:
    if not any(counts):
        return None
    kinds = " and ".join(f"{n} {kind}" for n, kind in zip(counts, ("NaN", "infinite"), strict=True) if n)
    rank = rank_number()
    held = f"{kinds} among the {tensor.numel()} elements of local shape {tuple(tensor.shape)} on rank {rank}"
    return Finding(moment=moment, message=f"{what} holds {held}{more}")


def _counts(tensor: torch.Tensor) -> Counts:
    if not tensor.is_floating_point():
        return 0, 0
    return int(tensor.isnan().sum()), int(tensor.isinf().sum())


def _words(instruction: Instruction) -> str:
    op = instruction.bound.operator
    return f"operator '{op.name}' ({op.op}{f' in module {op.module}' if op.module else ''})"


def _writes_infinity(instruction: Instruction) -> bool:
    """Whether the arguments of the call contain an infinity, as in a masked fill."""
    op = instruction.bound.operator
    return any(_infinite(argument) for argument in (*op.arguments, *(value for _, value in op.keywords)))


def _infinite(argument: Argument) -> bool:
    return isinstance(argument, float) and math.isinf(argument)
