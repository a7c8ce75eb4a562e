"""Coalesced all-gathers: which weights a run of operators gathers together (`Update.gathers` = "block", "ahead").

    each     gather q ─> q_proj, gather k ─> k_proj, ...        a message for each weight, when it is used
    block    gather q, k, v, o, up, down ─> the whole block     one message, before the block begins; one more before
                                                                its backward pass; and one for all of its gradients
    ahead    the same, while the block before it runs           prefetch, also across passes: only the first gather and
                                                                the last gradients of a step are exposed; a single
                                                                weight of a block, or behind the blocks, is prefetched
                                                                too

Gradients that are sharded while their weights are whole (ZeRO-2) are reduced together in the same way.

FSDP groups the parameters of a module in this way (Zhao et al. 2023, "PyTorch FSDP", section 3.2.1). Weights of a block
go together if they take the same collectives on the same axes, in the same dtype, there and back. A weight goes by
itself if several operators read it, if its operator hands on its memory, or if its weight gradient is deferred. A
gathered weight is there until the block is done, and again until the backward pass of the block is done.

The objective of the search charges every weight its share of the longest message that it may be in, all unsharded
weights of its run (`longest_gather`), and its part of the time to start a message: a lower bound of what it takes. The
actual messages are in the segments of a stage (`planner.plan.layout.segments`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from hardware_profiles import Bytes
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.pricing.narrow_weights import DTYPE, in_8_bits
from planner.pricing.parameter_price import reduced
from planner.sharding.buckets import Bucket, Traveller, traveller
from planner.sharding.update import Update


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGather:
    """Weights of a run of operators that are gathered in one message, `there`, and whose gradients are reduced in one,
    `back`; `again` says whether the backward pass of the run needs the weights. `uses` has for each weight the operator
    that reads it, and the place of the operand."""

    there: Bucket
    back: Bucket
    uses: tuple[tuple[int, int], ...]
    again: bool

    @property
    def names(self) -> tuple[str, ...]:
        return self.there.names

    @property
    def narrow(self) -> bool:
        """Whether the weights are cast to 8 bits before they are sent."""
        return self.there.members[0].dtype == DTYPE

    @property
    def comes(self) -> bool:
        """Whether the gathered weights have memory of their own: they are sent, or cast."""
        return _is_new(self.there.members[0])

    @property
    def refills(self) -> bool:
        """Whether weights that are regathered land in the memory that they had: they are not cast, and the last step of
        each is an all-gather."""
        return not self.narrow and all(
            member.moves and member.steps[-1].kind == "all_gather" for member in self.there.members
        )


Known: TypeAlias = dict[tuple[int, ...], tuple[Traveller, Traveller]]
"""The redistributions of weights and of their gradients, by the identity of all that decides them; blocks share
them."""


def block_gathers(bound: BoundPlan, operators: Sequence[int], known: Known) -> tuple[BlockGather, ...]:
    """The coalesced gathers of a run of operators; none where the plan gathers each weight by itself. A single weight
    has a gather of its own where it is prefetched while the run before it computes; else it is gathered when it is
    used. `known` has the redistributions found for other runs of the plan."""
    update = bound.plan.training.update
    if not update.by_block:
        return ()
    key = ("gathers", update, bound.plan.schedule_kind.splits_backward, tuple(operators))
    return bound.once(key, lambda: _gathers(bound, operators, known))


def _gathers(bound: BoundPlan, operators: Sequence[int], known: Known) -> tuple[BlockGather, ...]:
    update, blocks = bound.plan.training.update, bound.blocks
    fewest = 1 if update.ahead and blocks.count and operators[0] >= blocks.start else 2
    together: dict[object, list[tuple[Traveller, Traveller, tuple[int, int]]]] = {}
    weights, defers = _weights(bound.graph), bound.plan.schedule_kind.splits_backward
    for at in operators:
        op, places = bound.operators[at], weights.get(at, ())
        later = deferred_weight_gradients(bound, at) if places and defers else ()
        for place in places:
            if place not in later and _goes_along(bound, op, place):
                there, back = _ways(bound, op, place, known)
                if there.moves or back.moves or place in op.rule.narrow:
                    key = (there.moves, there.dtype, back.moves, back.dtype)
                    together.setdefault(key, []).append((there, back, (at, place)))
    return tuple(
        BlockGather(
            there=Bucket(members=tuple(there for there, _, _ in members)),
            back=Bucket(members=tuple(back for _, back, _ in members)),
            uses=tuple(use for _, _, use in members),
            again=_is_new(members[0][0]) and any(_needed(bound, *use) for _, _, use in members),
        )
        for members in together.values()
        if len(members) >= fewest or members[0][0].dtype == DTYPE
    )


def longest_gather(graph: OperatorGraph, run: Iterable[int], update: Update) -> tuple[Bytes, Bytes]:
    """Most bytes of a message with the weights of a run of operators, and of one with their gradients; none where there
    is one weight, which goes by itself."""
    parameters = {parameter.name for parameter in graph.parameters}
    names = {name for at in run for name in graph.operators[at].operands if name in parameters}
    tensors = [graph.types[name] for name in names] if len(names) > 1 else []
    return float(sum(one.nbytes for one in tensors)), float(sum(reduced(one, update).nbytes for one in tensors))


def kinds_of_runs(blocks: Blocks, operators: int) -> list[range]:
    """The runs of a graph with `operators` operators where the weights of a block are gathered together: what comes
    before the blocks, the first block of each kind, and what follows the blocks."""
    return [range(blocks.start), *map(blocks.operators, blocks.firsts), range(blocks.stop, operators)]


def run_of(blocks: Blocks, at: int) -> int:
    """Index in `kinds_of_runs` of the run that an operator is in, or of a run like it."""
    block = blocks.block_of(at)
    return blocks.kinds[block] + 1 if block is not None else 0 if at < blocks.start else -1


def _weights(graph: OperatorGraph) -> Mapping[int, tuple[int, ...]]:
    """For every operator the places of the trained weights that no other operator reads."""
    if ("weights read once",) not in graph.derived:
        found: dict[int, tuple[int, ...]] = {}
        for name in graph.parameter_names & set(graph.consumers):
            uses = tuple(graph.consumers[name])
            if len(uses) == 1 and (name in graph.differentiable or not graph.trains):
                operands = graph.operators[uses[0]].operands
                if operands.count(name) == 1:
                    found[uses[0]] = tuple(sorted((*found.get(uses[0], ()), operands.index(name))))
        graph.derived["weights read once",] = found
    return cast("Mapping[int, tuple[int, ...]]", graph.derived["weights read once",])


def _goes_along(bound: BoundPlan, op: BoundOperator, place: int) -> bool:
    name, update = op.operator.operands[place], bound.plan.training.update
    return (
        op.rule.op_class not in ("view", "copy")  # whose results may be the memory of the weight
        and not (bound.offloads_weights and bound.parameters[name].weight_offloaded)
        and not (update.local_parameters and update.is_local(name))
        and not bound.sequences.get(name)
    )


def _is_new(there: Traveller) -> bool:
    return bool(there.moves) or there.dtype == DTYPE


def _ways(bound: BoundPlan, op: BoundOperator, place: int, known: Known) -> tuple[Traveller, Traveller]:
    """The redistribution of a weight to its operator, and of its gradient back."""
    mesh, name = bound.plan.mesh, op.operator.operands[place]
    tensor, stored, wanted = bound.graph.types[name], bound.parameters[name], op.layouts.operands[place]
    key = (id(tensor), id(stored), id(wanted), place in op.rule.narrow)  # objects that the plan and its graph keep
    if key not in known:
        wide = reduced(tensor, bound.plan.training.update)
        gradient = wanted.gradient if bound.graph.trains else stored.gradient  # there is no gradient
        sent = in_8_bits(tensor) if place in op.rule.narrow else tensor
        known[key] = (
            traveller(name, tensor.shape, sent.dtype, sent.element_bytes, mesh, stored.weight, wanted.forward),
            traveller(name, wide.shape, wide.dtype, wide.element_bytes, mesh, gradient, stored.gradient),
        )
    there, back = known[key]
    return there.called(name), back.called(name)


def _needed(bound: BoundPlan, at: int, place: int) -> bool:
    """Whether the gradients of an operator need this operand."""
    op, graded = bound.operators[at], bound.graph.differentiable
    needing = [other for kept, needed_by in op.rule.saves if kept == place for other in needed_by]
    return not graded.isdisjoint([op.operator.operands[other] for other in needing])
