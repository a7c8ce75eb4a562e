"""The schedule of a plan: which turns its pipeline ranks take, and how much they have in flight.

A plan names one of `planner.plan.plan.SCHEDULES`, each of which is an order of `costmodels.orders`. Those who execute a
plan, price it or follow its memory all take the turns from here.
"""

from collections.abc import Iterable
from functools import cache, lru_cache

from costmodels import Orders, Turn, in_flight_of_chunks, schedule_orders
from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.plan import ASYNCHRONOUS, INTERLEAVED, Plan


def orders_of(plan: Plan) -> Orders:
    """The turns of every pipeline rank in a step."""
    return orders(plan.schedule, plan.pipeline, plan.training.turns, plan.virtual_stages, plan.slices)


@lru_cache(maxsize=256)
def orders(schedule: str, ranks: int, turns: int, virtual: int = 1, slices: int = 1) -> Orders:
    """What so many pipeline ranks with `virtual` stages each do in which order."""
    return schedule_orders(schedule, ranks, turns, virtual=virtual, slices=slices)


def ends(turn: Turn) -> bool:
    """Whether a turn is the last of its micro-batch (or slice of one) through its chunk: what was kept for it goes."""
    return turn.kind in ("backward", "weight_gradient")


@cache
def splits(schedule: str) -> bool:
    """Whether a schedule takes the backward pass apart."""
    return any(turn.kind == "weight_gradient" for turn in orders(schedule, 2, 2)[0])


def put_off_at_most(plan: Plan, rank: int) -> int:
    """Micro-batches between the two turns of their backward pass at most."""
    waiting = most = 0
    for turn in orders_of(plan)[rank]:
        waiting += (turn.kind == "input_gradient") - (turn.kind == "weight_gradient")
        most = max(most, waiting)
    return most


def most_in_flight(turns: Iterable[Turn]) -> int:
    """Most micro-batches, counted in every chunk, at once between their forward and the last of their backward turns:
    what `runtime.pipeline` counts on the processes."""
    live = most = 0
    for turn in turns:
        live += (turn.kind == "forward") - ends(turn)
        most = max(most, live)
    return most


def in_flight_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """Micro-batches, or slices of them, of which each chunk of a pipeline rank holds at most all that its backward pass
    needs: of one that is taken apart, until its first turn."""
    turns, copies = plan.training.turns, plan.training.copies
    if plan.schedule == "gpipe":
        return (turns * copies,)
    if plan.schedule == "seqpipe":
        return (most_in_flight(orders_of(plan)[rank]) * copies,)
    return tuple(copies * n for n in in_flight_of_chunks(rank, plan.pipeline, plan.virtual_stages, turns))


def whole_in_flight(plan: Plan, rank: int) -> int:
    """Micro-batches of which a pipeline rank holds any slice at most."""
    begun = most = 0
    for turn in orders_of(plan)[rank]:
        begun += (turn.kind == "forward" and turn.slice == 0) - (ends(turn) and turn.slice == 0)
        most = max(most, begun)
    return most * plan.training.copies


def telling_micro_batches(plan: Plan) -> int:
    """As many micro-batches of a step as tell what all of them hold and send: as many as are ever in flight, and one
    more."""
    ranks, turns, copies = plan.pipeline, plan.training.turns, plan.training.copies
    if plan.schedule == "gpipe":
        return turns * copies
    if plan.virtual_stages > 1:  # a cycle of the order after its warm-up, in whole rounds
        return min(turns, 3 * ranks) * copies
    return min(turns, max(2, (2 * ranks if splits(plan.schedule) else ranks) + 1)) * copies


def check_schedule(plan: Plan) -> None:
    """Raise PlanFileError where the schedule of a plan cannot be had with its ranks, stages and micro-batches."""
    virtual, parts, ranks = plan.virtual_stages, plan.training.turns, plan.pipeline
    if len(plan.stages) % virtual:
        raise PlanFileError(
            f"virtual_stages: {virtual} on each pipeline rank do not divide {len(plan.stages)} stages; make them even"
        )
    interleaved = plan.schedule == INTERLEAVED
    if interleaved and virtual == 1:
        raise PlanFileError(
            f"schedule: '{plan.schedule}' with virtual_stages 1; that takes '1f1b' or another schedule of whole stages"
        )
    if virtual > 1 and not interleaved:
        raise PlanFileError(f"schedule: '{plan.schedule}' with virtual_stages {virtual}; that takes '{INTERLEAVED}'")
    if virtual > 1 and ranks < 2:
        raise PlanFileError(
            f"virtual_stages: {virtual} of {len(plan.stages)} stages on one pipeline rank; interleaving takes at least"
            " 2 ranks, so set virtual_stages to 1 or add stages"
        )
    if ranks < 2 and plan.schedule != "1f1b":
        raise PlanFileError(
            f"schedule: '{plan.schedule}' with 1 pipeline rank, which has nobody to wait for; that takes '1f1b'"
        )
    if plan.schedule in ASYNCHRONOUS:
        _check_asynchronous(plan)
    if (plan.slices > 1) != (plan.schedule == "seqpipe"):
        raise PlanFileError(
            f"schedule: '{plan.schedule}' with slices {plan.slices}; a sequence in slices takes 'seqpipe', and that 2"
            " slices or more"
        )
    if splits(plan.schedule) and plan.training.copies > 1:
        raise PlanFileError(
            f"schedule: '{plan.schedule}' with copies {plan.training.copies}; a backward pass that is taken apart takes"
            " one micro-batch at a time, so set copies to 1 or take '1f1b'"
        )
    if virtual > 1 and parts % ranks:
        raise PlanFileError(
            f"training.micro_batches: {parts} is no multiple of {ranks} pipeline ranks, which virtual stages take in"
            f" rounds; {nearest_rounds(parts, ranks, plan.training.global_batch)}, or set virtual_stages to 1"
        )


def _check_asynchronous(plan: Plan) -> None:
    """What waits for all stages has no place in a schedule without a flush."""
    parts, ranks, training = plan.training.micro_batches, plan.pipeline, plan.training
    if training.copies > 1:
        raise PlanFileError(f"training.copies: {training.copies} with schedule '{plan.schedule}'; set copies to 1")
    if training.update.clip_norm is not None:
        raise PlanFileError(
            f"training.clip_norm: the norm of all gradients is known when all stages are done, and '{plan.schedule}'"
            " lets none wait; leave clip_norm out, or take '1f1b'"
        )
    if plan.schedule == "pipedream_2bw" and parts < ranks:
        raise PlanFileError(
            f"training.micro_batches: {parts} with {ranks} pipeline ranks; two versions of the weights are enough from"
            f" {ranks} micro-batches a step on"
        )


def check_stale(plan: Plan, graph: OperatorGraph, tied: Iterable[str]) -> None:
    """Raise PlanFileError for a model that cannot be trained with older weights on some stages: `tied` are the
    parameters that several stages use."""
    if plan.schedule not in ASYNCHRONOUS:
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


def nearest_rounds(micro_batches: int, ranks: int, global_batch: int) -> str:
    """In words, the numbers of micro-batches next to that which a batch divides into and which come in whole rounds."""
    legal = [number for number in range(ranks, global_batch + 1, ranks) if global_batch % number == 0]
    if not legal:
        return f"a global batch of {global_batch} divides into none, so make it a multiple of {ranks}"
    below = [number for number in legal if number < micro_batches][-1:]
    above = [number for number in legal if number > micro_batches][:1]
    return f"the nearest of a global batch of {global_batch} {'are' if below and above else 'is'} " + " and ".join(
        map(str, (*below, *above))
    )
