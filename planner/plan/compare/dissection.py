"""A prediction taken apart: what every operator takes and holds, and what a micro-batch in flight holds on every rank.

    walk of a rank     op 0 | op 1 | op 2 | ...          the sums after an operator less those before it are its own
    the same, with one micro-batch more in flight        what memory grows by is what one of them holds

The walk is that of the prediction itself (`planner.plan.prediction.walk.walk`), so that the parts sum to what it says.
What is no operator's stays out: updates of parameters, transfers between stages, and what a host saves that launches
ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hardware_profiles import Bytes, Machine, Seconds, clusters_of_ranks
from planner.plan.binding.bind import BoundPlan
from planner.plan.prediction.memory.moving import hold, most_moving, receive_buffers
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.plan.prediction.walk.walk import Walk, walks_of
from planner.plan.schedule import moments_of


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """What one operator of a bound plan, number `at`, adds to the sums of a pipeline rank.

    `seconds` are of one micro-batch, by the parts of the prediction. `kept` are bytes of activations that all
    micro-batches in flight keep because of it, `again` those of a recomputed block, which are there while its own
    backward pass runs.
    """

    at: int
    rank: int
    seconds: tuple[tuple[str, Seconds], ...]
    kept: Bytes
    again: Bytes

    @property
    def total(self) -> Seconds:
        return sum(seconds for _, seconds in self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDissection:
    """One pipeline rank: the sums of the prediction, its operators, and for each of its chunks the bytes that one
    micro-batch (or a slice of one) holds from its forward until its backward pass."""

    cost: StageCost
    operators: tuple[OperatorCost, ...]
    live: tuple[int, ...]
    held: tuple[Bytes, ...]


def dissect(bound: BoundPlan, cluster: Machine) -> tuple[RankDissection, ...]:
    """Every pipeline rank of a plan. Walks over the graph once, and once more for every chunk of a rank."""
    found = tuple(_rank(walk, rank) for rank, walk in enumerate(walks_of(bound, cluster)))
    clusters = clusters_of_ranks(cluster, len(found))
    for one, moving, received, own in zip(found, most_moving(bound), receive_buffers(bound), clusters, strict=True):
        hold(one.cost, moving, received, bound.plan, own)
    return found


def _rank(walk: Walk, rank: int) -> RankDissection:
    found = _Operators(rank)
    moments = moments_of(walk.bound.plan, rank)
    moment = moments[0] if len(moments) == 1 else walk.rank(rank).fullest
    cost, live = walk.rank(rank, [moment], found.add), moment.live
    held = []
    for chunk in range(len(live)):
        one_more = tuple(count + (number == chunk) for number, count in enumerate(live))
        more = walk.rank(rank, [moment._replace(live=one_more)])
        held.append(max(0.0, more.memory["activations"] - cost.memory["activations"]))
    return RankDissection(cost=cost, operators=tuple(found.operators), live=live, held=tuple(held))


class _Operators:
    """Takes the sums of a walk apart as they grow."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.operators: list[OperatorCost] = []
        self._seconds: dict[str, Seconds] = {}
        self._kept: Bytes = 0.0
        self._again: Bytes = 0.0

    def add(self, at: int, cost: StageCost, at_once: Mapping[int, Bytes]) -> None:
        grown = {part: seconds - self._seconds.get(part, 0.0) for part, seconds in cost.micro_batch.items()}
        kept, again = cost.memory["activations"], sum(at_once.values())
        self.operators.append(
            OperatorCost(
                at=at,
                rank=self.rank,
                seconds=tuple((part, seconds) for part, seconds in grown.items() if seconds > 0),
                kept=kept - self._kept,
                again=again - self._again,
            )
        )
        self._seconds, self._kept, self._again = dict(cost.micro_batch), kept, again
