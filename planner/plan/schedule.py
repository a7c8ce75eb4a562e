"""The schedule of a plan: which turns its pipeline ranks take, and how much they have in flight.

A plan names one of `planner.plan.plan.SCHEDULES`, each of which is an order of `costmodels.orders`. Those who execute a
plan, price it or follow its memory all take the turns from here.
"""

from functools import cache, lru_cache

from costmodels import Orders, Turn, in_flight_of_chunks, schedule_orders
from planner.errors import PlanFileError
from planner.plan.plan import INTERLEAVED, Plan


def orders_of(plan: Plan) -> Orders:
    """The turns of every pipeline rank in a step."""
    return orders(plan.schedule, plan.pipeline, plan.training.micro_batches, plan.virtual_stages)


@lru_cache(maxsize=256)
def orders(schedule: str, ranks: int, micro_batches: int, virtual: int = 1) -> Orders:
    """The turns of so many pipeline ranks with `virtual` stages each."""
    return schedule_orders(schedule, ranks, micro_batches, virtual=virtual)


def ends(turn: Turn) -> bool:
    """Whether a turn is the last of its micro-batch (or slice of one) through its chunk: what was kept for it goes."""
    return turn.kind in ("backward", "weight_gradient")


@cache
def splits(schedule: str) -> bool:
    """Whether a schedule takes the backward pass apart."""
    return any(turn.kind == "weight_gradient" for turn in orders(schedule, 2, 2)[0])


def in_flight_of(schedule: str, rank: int, ranks: int, virtual: int, micro_batches: int) -> tuple[int, ...]:
    """Micro-batches of which each chunk of a pipeline rank holds at most all that its backward pass needs: of one that
    is taken apart, until its first turn."""
    if schedule == "gpipe":
        return (micro_batches,)
    return in_flight_of_chunks(rank, ranks, virtual, micro_batches)


def put_off_at_most(plan: Plan, rank: int) -> int:
    """Micro-batches between the two turns of their backward pass at most."""
    waiting = most = 0
    for turn in orders_of(plan)[rank]:
        waiting += (turn.kind == "input_gradient") - (turn.kind == "weight_gradient")
        most = max(most, waiting)
    return most


def telling_micro_batches(plan: Plan) -> int:
    """As many micro-batches of a step as tell what all of them hold and send: as many as are ever in flight, and one
    more."""
    ranks, parts = plan.pipeline, plan.training.micro_batches
    if plan.schedule == "gpipe":
        return parts
    if plan.virtual_stages > 1:  # a cycle of the order after its warm-up, in whole rounds
        return min(parts, 3 * ranks)
    return min(parts, max(2, (2 * ranks if splits(plan.schedule) else ranks) + 1))


def check_schedule(plan: Plan) -> None:
    """Raise PlanFileError where the schedule of a plan cannot be had with its ranks, stages and micro-batches."""
    virtual, parts, ranks = plan.virtual_stages, plan.training.micro_batches, plan.pipeline
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
    if virtual > 1 and parts % ranks:
        raise PlanFileError(
            f"training.micro_batches: {parts} is no multiple of {ranks} pipeline ranks, which virtual stages take in"
            f" rounds; {nearest_rounds(parts, ranks, plan.training.global_batch)}, or set virtual_stages to 1"
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
