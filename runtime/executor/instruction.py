"""One operator as a rank runs it, and the micro-batch on which it runs.

An instruction has all that the plan decides about an operator: the redistribution of each operand from its promised to
its wanted layout, the call on local tensors, the required shapes of the results, and the values that are dropped
afterwards.
"""

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from costmodels import Then
from planner.errors import StrategyError
from planner.plan.binding.bind import BoundOperator
from planner.sharding.rule import strategy_names
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import Transfer
from runtime.executor.deferred_weight_gradients import Call, DeferredGradients
from runtime.executor.expert_parts import ExpertsPart
from runtime.executor.interleaving import Turn
from runtime.observer import Observer
from runtime.offload.regather import Gathered, gather_again, memory_of
from runtime.offload.saved_tensors import SavedMemory
from runtime.ops.experts import ExpertsCall
from runtime.ops.kept_results import KeptResults
from runtime.ops.local.local_ops import LocalCall
from runtime.ops.randomness import Draw

Values = MutableMapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """The name of an operand, its redistribution, and whether it is a weight."""

    name: str
    transfer: Transfer | None
    weight: bool

    @property
    def yields(self) -> bool:
        """Whether interleaved micro-batches switch while it is in flight: where it is sent, and for a weight also where
        only its gradient is sent, because nothing waits for that."""
        return self.transfer is not None and self.transfer.departs and (self.weight or self.transfer.gathers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Operator number `index` of the graph, ready to run. `results` has names and promised local shapes, None for a
    result that is not a tensor. `last`: values that nothing after it reads. `kept`: its results are kept for the
    recomputation of its block. `repeated`: the recomputation of its block runs it again. `deferred`: the gradients of
    its weights are deferred. `then`: how interleaved micro-batches continue after it. It may be a `part` of its
    operator; then its operands and results are those of the operator from the `first` on."""

    index: int
    bound: BoundOperator
    operands: tuple[Operand, ...]
    call: LocalCall
    results: tuple[tuple[str, tuple[int, ...]] | None, ...]
    last: tuple[str, ...]
    kept: bool = False
    repeated: bool = False
    deferred: bool = False
    then: Then = "work"
    part: ExpertsPart | None = None
    first: int = 0

    @property
    def sends(self) -> bool:
        """Whether it leaves a transfer in flight, for which another part of its operator waits."""
        return self.part is not None and self.part.part != "arrive"

    def broken_promise(self, slot: int, result: torch.Tensor) -> StrategyError:
        """The error to raise where result number `slot` has another shape than its rule promises."""
        bound, promise = self.bound, self.results[slot]
        assert promise is not None, "it is a tensor"
        name, shape = promise
        names = ",".join(str(factor) for factor in strategy_names(bound.rule, bound.strategy))
        return StrategyError(
            f"operator '{bound.operator.name}' ({bound.rule.format()}, split {names}): its local result '{name}' has"
            f" shape {tuple(result.shape)}, its rule promises {shape};"
            f" the rule of {bound.operator.op} is wrong for this call"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch on its way through the program. It has the tensors before the first operator (weights and
    buffers, and the autograd leaves of weights that are no leaves), the key of random numbers, the observer, and the
    live values. `kept`: results that a recomputed block keeps, None where nothing is recomputed. `deferred`: deferred
    weight gradients, if any. `saved`: the memory of the tensors that an offloading block saves. `watched`: whether
    results are compared with the promises of their rules, None to let the program decide. `under_way`: experts that run
    in parts, by operator. `turn` is its turn among interleaved micro-batches."""

    tensors: Mapping[str, torch.Tensor]
    stubs: Mapping[str, torch.Tensor]
    draw: Draw
    observer: Observer | None
    values: Values
    deferred: DeferredGradients | None = None
    kept: KeptResults | None = None
    saved: SavedMemory | None = None
    watched: bool | None = None
    turn: Turn
    under_way: dict[int, ExpertsCall] = field(default_factory=dict)

    def piece(self, name: str) -> torch.Tensor:
        """This rank's piece of a value, weight or buffer."""
        return self.values[name] if name in self.values else self.tensors[name]

    def looking(self, instruction: Instruction) -> AbstractContextManager[None]:
        """What happens inside of this context belongs to the operator."""
        return nullcontext() if self.observer is None else self.observer.operator(instruction)


def called(
    instruction: Instruction, batch: MicroBatch, operands: Sequence[torch.Tensor], place: RankMesh
) -> Sequence[Any]:
    """The results of an operator on operands in the wanted layouts, with everything around the call: gathered weights
    are freed, results are kept for the recomputation of their block, weight gradients are deferred."""
    gathered = {
        memory_of(moved): Gathered(piece=batch.piece(operand.name), steps=operand.transfer, place=place)
        for operand, moved in zip(instruction.operands, operands, strict=True)
        if batch.kept is None and operand.weight and operand.transfer is not None and operand.transfer.gathers
    }
    call: Call = partial(instruction.call, draw=batch.draw)
    if instruction.part is not None:
        call = partial(instruction.part.run, batch.under_way)
    if batch.deferred is not None and instruction.deferred:
        call = partial(batch.deferred.run, instruction, call, batch.observer)
    if gathered:
        with gather_again(gathered) if batch.saved is None else gather_again(gathered, batch.saved.note):
            return call(operands)
    if batch.kept is not None and instruction.kept:
        bound = instruction.bound
        return batch.kept.run(bound.operator.name, call, operands, composed=bool(bound.rule.composed))
    return call(operands)


def compute(instruction: Instruction, batch: MicroBatch, operands: Sequence[torch.Tensor], place: RankMesh) -> None:
    """Run an operator, check its results, and keep them as values. Raises StrategyError for a result whose shape
    differs from the promise of its rule."""
    if batch.observer is not None:
        batch.observer.operands(instruction, operands)
    results = called(instruction, batch, operands, place)
    made = []
    for slot, (result, promise) in enumerate(zip(results, instruction.results, strict=True)):
        if promise is not None:
            name, shape = promise
            if result.shape != shape:
                raise instruction.broken_promise(slot, result)
            batch.values[name] = result
            made.append(result)
    if batch.observer is not None:
        batch.observer.results(instruction, made)
