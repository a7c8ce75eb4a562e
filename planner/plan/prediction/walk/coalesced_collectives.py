"""The coalesced all-gathers of weights and the reductions of their gradients (`planner.plan.layout.block_gathers`), for
the prediction.

For each operator, every weight is charged its share of a long collective. This file records these charges, and at the
end of a stage adds the difference to the real collectives.
"""

from collections import defaultdict
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hardware_profiles import Cluster, Seconds
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.segments import Segment
from planner.plan.prediction.charges import A_BLOCK, Phase, Times, charge
from planner.plan.prediction.step import ChunkCost, PassCost
from planner.plan.prediction.walk.stage_cost import GATHERING, REDUCING, StageCost
from planner.plan.schedule import relays
from planner.pricing import Pricers
from planner.pricing.message import Message, bucket_messages, message_seconds
from planner.pricing.redistribution_price import PricedRoute, RedistributionPricer
from planner.sharding.buckets import Bucket

Kind: TypeAlias = Literal["there", "again", "back"]
"""Weights for the forward pass ("there"), for the backward pass ("again"), and their gradients ("back")."""


@dataclass(kw_only=True)
class Together:
    """The coalesced collectives of one walk over a plan, with the prices of a cluster. `works` returns the forward and
    backward seconds of an operator. `charged` has the charges for coalesced weights so far, by stage, part of the time
    and phase."""

    bound: BoundPlan
    stages: Sequence[Sequence[Segment]]
    cluster: Cluster
    pricers: Pricers
    works: Callable[[int], tuple[Seconds, Seconds]]
    charged: MutableMapping[tuple[int, str, Phase], Seconds] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self._by_block = self.bound.plan.training.update.by_block
        uses, stages = self.bound.graph.consumers, {}
        if self._by_block:
            stages = {at: number for number, own in enumerate(self.stages) for one in own for at in one.operators}
        self._stages = {name: stages[uses[name][0]] for name in self.bound.parameters if uses.get(name) and stages}
        self._going = {name for own in self.stages for segment in own for name in segment.gathered}

    def use(
        self, pricer: RedistributionPricer, part: str, name: str, route: PricedRoute, times: Times
    ) -> Seconds | None:
        """A weight, or its gradient, is charged a route `times` in a part of the time. Returns the seconds of its
        separate collectives in addition to that, each time; None if it is coalesced and has no separate collective."""
        if not self._by_block:
            return 0.0
        if name not in self._going:
            return sum(self._seconds(pricer, message) for message in route.messages) - route.sent
        for phase, number in times.items():
            self.charged[self._stages[name], part, phase] += number * route.sent
        return None

    def end_stage(self, cost: StageCost, chunk: ChunkCost, stage: int) -> None:
        """Add the collectives of a stage, and their seconds beyond the charges for its weights. Those that overlap with
        other blocks are hidden.

        The first weights of a pass and its last gradients overlap with the operators before the first block, if there
        are any. If passes relay, this holds once a step only: the first pass of a step waits for its weights, unless it
        waits for another rank in the meantime, and the last one for its gradients."""
        if not self._by_block:
            return
        sent: defaultdict[tuple[str, Phase], Seconds] = defaultdict(float)
        ways = self._ways(self.stages[stage])
        waited, relayed = self._waited_for(ways, self.stages[stage]), relays(self.bound.plan)
        overlapped, pipeline = self.cluster.device.overlapped, self.bound.plan.pipeline
        shade = {"there": self._before(ways, stage, "there"), "again": 0.0, "back": self._before(ways, stage, "back")}
        for way in ways:
            messages = bucket_messages(way.bucket)
            seconds = [self._seconds(way.pricer, message) for message in messages]
            for message in messages:
                charge(cost.messages, way.part, A_BLOCK, message, {way.phase: 1})
            sent[way.part, way.phase] += sum(seconds)
            first = seconds[0] * overlapped  # later collectives are exposed
            covered = first
            if way in waited:
                covered = min(first, shade[way.kind])
                shade[way.kind] -= covered
            _pass(chunk, way.phase).hide(first if relayed else covered)
            if relayed and ((way.kind == "there" and not stage) or (way.kind == "back" and stage < pipeline)):
                _pass(chunk, way.phase).uncovered += first - covered
        for phase in ("forward", "recomputation", "backward"):
            for part in (GATHERING, REDUCING):
                beyond = sent[part, phase] - self.charged.pop((stage, part, phase), 0.0)
                _pass(chunk, phase).add(waits=beyond)
                cost.together[part] += beyond

    def _ways(self, segments: Sequence[Segment]) -> list["_Way"]:
        """The coalesced collectives of the weights and gradients of a stage, run by run."""
        found = []
        for number, run in enumerate(segments):
            again: Phase = "recomputation" if run.recomputed else "backward"
            for one in run.gathers:
                found.append(_Way(number, "there", "forward", one.there, self.pricers.parameters))
                if run.recomputed or one.again:
                    found.append(_Way(number, "again", again, one.there, self.pricers.parameters))
                found.append(_Way(number, "back", "backward", one.back, self.pricers.gradients))
        return [way for way in found if way.bucket.moves]

    def _before(self, ways: Sequence["_Way"], stage: int, kind: Kind) -> Seconds:
        """Seconds of a pass for the operators before the first run of this kind, if weights are prefetched."""
        if not self.bound.plan.training.update.ahead:
            return 0.0
        runs, which = self.stages[stage][: _first(ways, kind)], 0 if kind == "there" else 1
        return sum(self.works(at)[which] for run in runs for at in run.operators)

    def _waited_for(self, ways: Sequence["_Way"], segments: Sequence[Segment]) -> Sequence["_Way"]:
        """All collectives; with prefetch, only those at the beginning or end of a pass. In the forward pass every run
        prefetches weights for later ones, in the backward pass every recomputed run."""
        if not self.bound.plan.training.update.ahead:
            return ways
        again = [number for number, run in enumerate(segments) if run.recomputed]
        again += [way.run for way in ways if way.kind == "again"]
        ends = {"there": _first(ways, "there"), "again": max(again, default=0), "back": _first(ways, "back")}
        return [way for way in ways if way.run == ends[way.kind]]

    def _seconds(self, pricer: RedistributionPricer, message: Message) -> Seconds:
        """Seconds of one collective on its own."""
        return pricer.exposed * message_seconds(message, self.bound.plan.mesh, self.cluster)


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """Weights or gradients of a run of operators, number `run` of its stage, in one coalesced collective: weights
    "there" and "again", gradients "back"."""

    run: int
    kind: Kind
    phase: Phase
    bucket: Bucket
    pricer: RedistributionPricer

    @property
    def part(self) -> str:
        """The part of the time of a micro-batch to which it belongs."""
        return REDUCING if self.kind == "back" else GATHERING


def _first(ways: Sequence[_Way], kind: Kind) -> int:
    """The first run of this kind."""
    return min((way.run for way in ways if way.kind == kind), default=0)


def _pass(chunk: ChunkCost, phase: Phase) -> PassCost:
    return chunk.forward if phase == "forward" else chunk.backward
