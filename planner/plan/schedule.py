"""The schedule of a plan: which turns its pipeline ranks take, and how much they have in flight.

A plan names one of `costmodels.SCHEDULES`. Those who execute a plan, price it or follow its memory all take the turns
from here.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from costmodels import Orders, Turn, ends, moments_in_flight, paired_turns, schedule_orders
from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import Plan


def orders_of(plan: Plan) -> Orders:
    """The turns of every pipeline rank in a step."""
    return orders(*_order(plan))


def _order(plan: Plan) -> tuple[str, int, int, int, int]:
    """What decides the order of all turns of a plan."""
    return plan.schedule, plan.pipeline, plan.training.turns, plan.virtual_stages, plan.slices


@lru_cache(maxsize=256)
def orders(schedule: str, ranks: int, turns: int, virtual: int = 1, slices: int = 1) -> Orders:
    """What so many pipeline ranks with `virtual` stages each do in which order."""
    return schedule_orders(schedule, ranks, turns, virtual=virtual, slices=slices)


def pairs_of(plan: Plan, rank: int) -> frozenset[int]:
    """The forward turns of a pipeline rank, by their places in its order, that run together with the backward turn
    behind them, of the other chunk: under DualPipeV, where experts are exchanged under other work. Then one computes
    while rows of the other are on their way. Not where anything that a block keeps or reads is offloaded, as passes
    have that to themselves."""
    if not runs_in_pairs(plan):
        return frozenset()
    return paired_turns(orders_of(plan)[rank])


def runs_in_pairs(plan: Plan) -> bool:
    """Whether forward and backward turns run together (`pairs_of`)."""
    if not plan.schedule_kind.paired or not plan.training.expert_overlap:
        return False
    stored = (parameter for group in plan.groups for _, parameter in group.parameters)
    return all(group.activations_home == "device" for group in plan.groups) and all(
        parameter.weight_home == "device" for parameter in stored
    )


def relays(plan: Plan) -> bool:
    """Whether a pass lets the weights come with which the next one of its rank begins, and the gradients land with
    which the one before ended (`runtime.executor.relay`): where weights come ahead and do not change in between."""
    return plan.training.update.ahead and plan.schedule_kind.flushes


def passes_of(order: Sequence[Turn], paired: Collection[int] = ()) -> list[list[int]]:
    """The passes of a rank in a step, each the places of its turns in an order: one, or two that run together, as those
    do whose first is `paired`. Weight gradients in a turn of their own gather nothing, and are none."""
    found = list[list[int]]()
    for at, turn in enumerate(order):
        if at - 1 in paired:
            found[-1].append(at)
        elif turn.kind != "weight_gradient":
            found.append([at])
    return found


def most_deferred(plan: Plan, rank: int) -> int:
    """Micro-batches between the two turns of their backward pass at most."""
    waiting = most = 0
    for turn in orders_of(plan)[rank]:
        waiting += (turn.kind == "input_gradient") - (turn.kind == "weight_gradient")
        most = max(most, waiting)
    return most


def in_flight_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Micro-batches, or slices of them, of which each chunk of a pipeline rank holds at most all that its backward pass
    needs: of one that is taken apart, until its first turn."""
    in_flight = plan.schedule_kind.in_flight(rank, plan.pipeline, plan.training.turns, plan.virtual_stages, plan.slices)
    return tuple(plan.training.interleave * number for number in in_flight)


class Moment(NamedTuple):
    """Micro-batches of each chunk of a rank, at one time: of which it holds all that the backward pass needs, and of
    which weight gradients alone are still to come."""

    live: tuple[int, ...]
    waiting: tuple[int, ...]


NO_MOMENT = Moment((), ())


@lru_cache(maxsize=256)
def moments(turns: tuple[Turn, ...], chunks: int) -> tuple[Moment, ...]:
    """The moments of a rank at which no other one holds as much or more of everything."""
    live, waiting, found = [0] * chunks, [0] * chunks, dict[tuple[int, ...], None]()
    for turn in turns:
        live[turn.chunk] += (turn.kind == "forward") - (turn.kind in ("backward", "input_gradient"))
        waiting[turn.chunk] += (turn.kind == "input_gradient") - (turn.kind == "weight_gradient")
        found[(*live, *waiting)] = None
    fullest = [
        one
        for one in found
        if not any(other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in found)
    ]
    return tuple(Moment(one[:chunks], one[chunks:]) for one in fullest)


def moments_of(plan: Plan, rank: int) -> tuple[Moment, ...]:
    """When a pipeline rank may hold most. Where its chunks are not at their most together, interleaved or in a V, all
    moments that may be; else one, at which each chunk holds as much as it ever does."""
    if plan.schedule_kind.v_shaped:
        return moments(orders_of(plan)[rank], plan.virtual_stages)
    if plan.schedule_kind.interleaved:
        interleave, none = plan.training.interleave, (0,) * plan.virtual_stages
        counts = moments_in_flight(rank, plan.pipeline, plan.virtual_stages, plan.training.turns)
        return tuple(Moment(tuple(interleave * number for number in one), none) for one in dict.fromkeys(counts))
    waiting = most_deferred(plan, rank) if plan.schedule_kind.splits_backward else 0
    return (Moment(in_flight_of(plan, rank), (waiting,) * plan.virtual_stages),)


def weight_versions(plan: Plan, rank: int) -> int:
    """How often a pipeline rank holds its weights: without a flush once for every micro-batch that it may have in
    flight (PipeDream), or twice (2BW, and PipeDream while it updates)."""
    versions = plan.schedule_kind.versions
    return max(2, in_flight_of(plan, rank)[0]) if versions is None else versions


def updates_of(plan: Plan) -> int:
    """How often the weights are updated in a step: PipeDream makes of every micro-batch a batch of its own."""
    return plan.training.micro_batches if plan.schedule_kind.updates_each else 1


def whole_in_flight(plan: Plan, rank: int, chunk: int) -> int:
    """Micro-batches of which a chunk of a pipeline rank holds any slice at most."""
    return _whole_in_flight(_order(plan), rank, chunk) * plan.training.interleave


@lru_cache(maxsize=1024)
def _whole_in_flight(order: tuple[str, int, int, int, int], rank: int, chunk: int) -> int:
    begun = most = 0
    for turn in orders(*order)[rank]:
        if turn.slice == 0 and turn.chunk == chunk:
            begun += (turn.kind == "forward") - ends(turn)
            most = max(most, begun)
    return most


def telling_micro_batches(plan: Plan) -> int:
    """As many micro-batches of a step as tell what all of them hold and send: as many as are ever in flight, and one
    more."""
    ranks, turns, interleave = plan.pipeline, plan.training.turns, plan.training.interleave
    if plan.schedule_kind.holds_all:
        return turns * interleave
    if plan.virtual_stages > 1:  # a cycle of the order after its warm-up, in whole rounds
        return min(turns, 3 * ranks) * interleave
    held = 2 * ranks if plan.schedule_kind.splits_backward else max(ranks, in_flight_of(plan, 0)[0] // interleave)
    return min(turns, max(2, held + 1)) * interleave


def check_stale(plan: Plan, graph: OperatorGraph, tied: Iterable[str]) -> None:
    """Raise PlanFileError for a model that cannot be trained with older weights on some stages: `tied` are the
    parameters that several stages use."""
    if plan.schedule_kind.flushes:
        return
    for name in tied:
        raise PlanFileError(
            f"schedule: '{plan.schedule}', but several stages use parameter '{name}' and would update it at different"
            " times; take '1f1b', or untie it"
        )
    for buffer, _ in graph.updates:
        raise PlanFileError(
            f"schedule: '{plan.schedule}', but buffer '{buffer}' changes with the forward passes and belongs to no"
            " version of the weights; take '1f1b'"
        )
