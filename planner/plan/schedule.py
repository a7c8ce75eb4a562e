"""The schedule of a plan: the schedule steps ("turns") of its pipeline ranks, and how many micro-batches are in flight.

A plan names one of `costmodels.SCHEDULES`. Execution, pricing and the memory account all take the schedule steps
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
    """The schedule steps of every pipeline rank in a step."""
    return orders(*_order(plan))


def _order(plan: Plan) -> tuple[str, int, int, int, int]:
    """What decides the order of all schedule steps of a plan."""
    return plan.schedule, plan.pipeline, plan.training.turns, plan.virtual_stages, plan.slices


@lru_cache(maxsize=256)
def orders(schedule: str, ranks: int, turns: int, virtual: int = 1, slices: int = 1) -> Orders:
    """The schedule steps, in order, of `ranks` pipeline ranks with `virtual` stages each."""
    return schedule_orders(schedule, ranks, turns, virtual=virtual, slices=slices)


def pairs_of(plan: Plan, rank: int) -> frozenset[int]:
    """The forward steps of a pipeline rank, by their places in its order, that run together with the backward step
    behind them, of the other chunk: under DualPipeV with overlapped expert exchange. Then one computes while rows of
    the other are sent. None where anything that a block keeps or reads is offloaded, because an offloading pass runs
    alone."""
    if not runs_in_pairs(plan):
        return frozenset()
    return paired_turns(orders_of(plan)[rank])


def runs_in_pairs(plan: Plan) -> bool:
    """Whether forward and backward steps run together (`pairs_of`)."""
    if not plan.schedule_kind.paired or not plan.training.expert_overlap:
        return False
    stored = (parameter for group in plan.groups for _, parameter in group.parameters)
    return all(group.activations_home == "device" for group in plan.groups) and all(
        parameter.weight_home == "device" for parameter in stored
    )


def relays(plan: Plan) -> bool:
    """Whether a pass prefetches the weights with which the next pass of its rank begins, and finishes reducing the
    gradients with which the pass before ended (`runtime.executor.relay`): where weights are gathered ahead and do not
    change in between."""
    return plan.training.update.ahead and plan.schedule_kind.flushes


def passes_of(order: Sequence[Turn], paired: Collection[int] = ()) -> list[list[int]]:
    """The passes of a rank in a step, each as the places of its schedule steps in `order`: one step, or two that run
    together, the first of which is in `paired`. Steps of weight gradients gather nothing, and are no passes."""
    found = list[list[int]]()
    for at, turn in enumerate(order):
        if at - 1 in paired:
            found[-1].append(at)
        elif turn.kind != "weight_gradient":
            found.append([at])
    return found


def most_deferred(plan: Plan, rank: int) -> int:
    """Most micro-batches whose backward pass has made its input gradients but not yet its weight gradients."""
    waiting = most = 0
    for turn in orders_of(plan)[rank]:
        waiting += (turn.kind == "input_gradient") - (turn.kind == "weight_gradient")
        most = max(most, waiting)
    return most


def in_flight_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Most micro-batches, or slices of them, for which each chunk of a pipeline rank holds all that their backward pass
    needs; a split backward pass needs it until its first step."""
    in_flight = plan.schedule_kind.in_flight(rank, plan.pipeline, plan.training.turns, plan.virtual_stages, plan.slices)
    return tuple(plan.training.interleave * number for number in in_flight)


class Moment(NamedTuple):
    """Micro-batches of each chunk of a rank at one time: `live` for which it holds all that the backward pass needs,
    `waiting` for which only weight gradients are still to come."""

    live: tuple[int, ...]
    waiting: tuple[int, ...]


NO_MOMENT = Moment((), ())


@lru_cache(maxsize=256)
def moments(turns: tuple[Turn, ...], chunks: int) -> tuple[Moment, ...]:
    """The moments of a rank at which no other moment holds as much or more of everything."""
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
    """When a pipeline rank may hold most. Where its chunks reach their maxima at different times, interleaved or in a
    V: all moments that may be the peak; else one moment, with the maximum of each chunk."""
    if plan.schedule_kind.v_shaped:
        return moments(orders_of(plan)[rank], plan.virtual_stages)
    if plan.schedule_kind.interleaved:
        interleave, none = plan.training.interleave, (0,) * plan.virtual_stages
        counts = moments_in_flight(rank, plan.pipeline, plan.virtual_stages, plan.training.turns)
        return tuple(Moment(tuple(interleave * number for number in one), none) for one in dict.fromkeys(counts))
    waiting = most_deferred(plan, rank) if plan.schedule_kind.splits_backward else 0
    return (Moment(in_flight_of(plan, rank), (waiting,) * plan.virtual_stages),)


def weight_versions(plan: Plan, rank: int) -> int:
    """Number of weight versions that a pipeline rank holds: without a flush one for every micro-batch that may be in
    flight (PipeDream, and at least two, as it updates), or two (2BW)."""
    versions = plan.schedule_kind.versions
    return max(2, in_flight_of(plan, rank)[0]) if versions is None else versions


def updates_of(plan: Plan) -> int:
    """Number of weight updates in a step: PipeDream treats every micro-batch as a batch of its own."""
    return plan.training.micro_batches if plan.schedule_kind.updates_each else 1


def whole_in_flight(plan: Plan, rank: int, chunk: int) -> int:
    """Most micro-batches of which a chunk of a pipeline rank holds any slice."""
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
    """Number of micro-batches that suffices to tell what all micro-batches of a step hold and send: the most that are
    ever in flight, and one more."""
    ranks, turns, interleave = plan.pipeline, plan.training.turns, plan.training.interleave
    if plan.schedule_kind.holds_all:
        return turns * interleave
    if plan.virtual_stages > 1:  # a cycle of the order after its warm-up, in whole rounds
        return min(turns, 3 * ranks) * interleave
    held = 2 * ranks if plan.schedule_kind.splits_backward else max(ranks, in_flight_of(plan, 0)[0] // interleave)
    return min(turns, max(2, held + 1)) * interleave


def check_stale(plan: Plan, graph: OperatorGraph, tied: Iterable[str]) -> None:
    """Raise PlanFileError for a model that cannot be trained with stale weights on some stages: `tied` are the
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
