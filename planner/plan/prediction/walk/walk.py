"""The walk of a prediction over a bound plan: one pipeline rank after the other, operator by operator.

`Walk` holds what all ranks share, and `RankWalk` sums up one of them: `OperatorVisit` adds an operator,
`RankParameters` the parameters, and `RankTransfers` what crosses between ranks.

Nothing is tabulated or shared between ranks (see `planner.plan.prediction.predict`). A recomputed block keeps its
inputs, and the results of its kept operators, for every micro-batch in flight; everything else lives during its own
backward pass: one block of a rank at a time. The operators after the blocks free what they keep before the backward
pass of a block begins, so they count as one more such block.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from hardware_profiles import PYTORCH, Cluster, Hidden, Machine, Seconds, clusters_of_ranks
from planner.errors import RequestError
from planner.faults import refuse
from planner.graph.blocks import Blocks
from planner.graph.fp8 import scales_of
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.graph.projections import joined_projections
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.binding.slices import work_of_slices
from planner.plan.layout.block_gathers import run_of
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import ExpertOverlap, expert_overlaps_of, replayed
from planner.plan.layout.micro_batch_turns import turns_of_stages
from planner.plan.layout.overlapped_products import Overlap, overlaps_of
from planner.plan.layout.segments import Segment, segments_by_stage
from planner.plan.layout.shared_parameters import shared_parameters
from planner.plan.layout.stage_cut import crossing_values
from planner.plan.offload_checks import owners_fault
from planner.plan.prediction.charges import Times, charge
from planner.plan.prediction.step import ChunkCost
from planner.plan.prediction.walk.coalesced_collectives import Together
from planner.plan.prediction.walk.exchange_overlap import ExchangeOverlap
from planner.plan.prediction.walk.price_book import ParameterKind, price_books
from planner.plan.prediction.walk.product_overlap import ProductOverlap
from planner.plan.prediction.walk.rank_walk import RankWalk
from planner.plan.prediction.walk.stage_cost import (
    GATHERING,
    REDUCING,
    StageCost,
)
from planner.plan.schedule import Moment, runs_in_pairs
from planner.pricing import (
    OperatorPrices,
    RedistributionPricer,
    price_operator,
)
from planner.pricing.liveness import liveness, replays
from planner.pricing.model_flops import whole_flops
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import Layout
from planner.sharding.rule import Duplex, Rule


def hides(cluster: Machine) -> bool:
    """Whether the software overlaps any communication."""
    return cluster.software.hidden != Hidden()


@dataclass(kw_only=True)
class Walk:
    """Walks over the graph of a bound plan, operator by operator, with the prices of one cluster, which may be one
    group of the `machine`. Also used to take a prediction apart (`planner.plan.compare.dissection`)."""

    bound: BoundPlan
    stages: Sequence[Sequence[Segment]]
    cluster: Cluster
    machine: Machine | None = None
    known_overlaps: Sequence[Overlap] | None = None

    def __post_init__(self) -> None:
        graph, plan = self.bound.graph, self.bound.plan
        self.whole_machine = self.cluster if self.machine is None else self.machine
        self.update, self.bucketed = plan.training.update, plan.training.update.bucketed
        software, blocks = self.cluster.software, self.bound.blocks
        self.book, self.once = price_books(self.bound, self.cluster)
        self.pricers = self.once.pricers[0][0]
        self.alive = liveness(graph, software)
        self.replays = replays(graph, blocks, software.whole_blocks)
        self.ending = blocks.stop if _handed_alone(graph, blocks) else len(graph.operators)
        self.stage_of = stage_of_operators(self.bound)
        self.arriving = crossing_values(self.bound)
        pipeline = plan.pipeline
        ranks = [plan.rank_of(stage) for stage in range(len(plan.stages))]
        self.rank_of = {at: ranks[stage] for at, stage in self.stage_of.items()}
        self.chunk_of = {at: stage // pipeline for at, stage in self.stage_of.items()}  # the chunk of its rank
        device = self.cluster.device
        takes_turns = device.in_line or software.waits_for_kernels
        self.hosted = bool(device.host_latency * software.host) and not takes_turns
        counts = software.engine_launches and software.graphs == "none"
        self.launching = device.host_latency * software.host if counts else 0.0  # seconds to launch a collective
        self.gathers_in_autograd = software.name == PYTORCH.name  # a saved weight is gathered when autograd unpacks it
        self.counted = software.counts_rows and any(op.rule.op_class == "experts" for op in self.bound.operators)
        self.tied, self.share_overlapped = shared_parameters(self.bound), self.cluster.device.overlapped
        self._made: dict[str, Duplex] = {}
        # once a step: a gradient to its state, and the new weight back
        self.travels: dict[ParameterKind, tuple[PricedRoute, Seconds, PricedRoute, Seconds]] = {}
        self.products, self.exchanges = ProductOverlap(walk=self), ExchangeOverlap(walk=self)
        self.begin(self.bound, self.stages, self.known_overlaps)

    def begin(
        self, bound: BoundPlan, stages: Sequence[Sequence[Segment]], overlaps: Sequence[Overlap] | None = None
    ) -> None:
        """Start over with the same plan under another schedule, with the segments of its stages, and its overlaps if
        known."""
        self.bound = bound
        self.defers, self.flushes = bound.plan.schedule_kind.splits_backward, bound.plan.schedule_kind.flushes
        self.in_pairs = runs_in_pairs(bound.plan)
        self.takes_turns = self.in_pairs or bound.plan.training.interleave > 1
        self.deferred_weight_gradients = {
            op.operator.operands[place]
            for at, op in enumerate(self.bound.operators if self.defers else ())
            for place in deferred_weight_gradients(self.bound, at)
        }
        self.thens = turns_of_stages(bound, stages)
        self.waiting, self.turns = 0, False
        self.scaled = scales_of(bound.graph)
        self.flops = 0.0
        overlaps = overlaps_of(bound) if overlaps is None else overlaps
        self.overlapped = {(one.reader, one.place) for one in overlaps}
        self.overlaps: dict[int, list[Overlap]] = {}
        for one in overlaps:
            self.overlaps.setdefault(one.at, []).append(one)
        self.runs = {at: bound.operators[one.at].operator.name for one in overlaps for at in one.early}
        experts = expert_overlaps_of(bound, overlaps)
        self.in_parts: dict[int, ExpertOverlap] = {one.at: one for one in experts}
        self.replayed = {} if self.cluster.software.whole_blocks else replayed(bound, experts, overlaps)
        self.segments = {
            at: segment
            for stage, segments in enumerate(stages)
            for segment in segments
            for at in segment.operators
            if self.stage_of[at] == stage
        }
        self.together = Together(
            bound=bound, stages=stages, cluster=self.cluster, pricers=self.pricers, works=self._work
        )

    def rank(
        self,
        rank: int,
        moments: Sequence[Moment] | None = None,
        after: Callable[[int, StageCost, Mapping[int, float]], None] = lambda at, cost, at_once: None,
        *,
        keys: Mapping[int, object] = MappingProxyType({}),
    ) -> StageCost:
        """Walk the operators of all stages of one pipeline rank.

        The rank holds most at one of the `moments`, by default those of the schedule. `after` is called behind each
        operator, with the sums so far, and the bytes of each block that live during its backward pass. Blocks with the
        same `keys` add the same, in any plan for the graph; their messages are not listed."""
        return RankWalk(self, rank, moments, after, keys).run()

    def _work(self, at: int) -> tuple[Seconds, Seconds]:
        """Seconds of both passes of an operator."""
        prices = self.price(self.bound.operators[at], counted=False)
        return float(prices.forward[0]), float(prices.backward[0])

    def move(
        self,
        cost: StageCost,
        chunk: ChunkCost,
        owner: str,
        part: str,
        moved: str,
        tensor: TensorType,
        source: Layout,
        target: Layout,
        times: Times,
        later: bool = False,
        beyond: Seconds | None = 0.0,
        run: int = 0,
    ) -> None:
        """Charge a redistribution of a tensor of kind `moved`, a field of `Pricers`, to a part of the micro-batch's
        time, as often as each pass does it for its `owner`. In a backward pass, `later` says that it is deferred.
        `beyond` are the seconds of its collectives in addition to the additive sums, each time; None if its collectives
        are counted elsewhere. `run` is the kind of run with which it is coalesced."""
        route, hidden = self.book.route(moved, tensor, source, target, run)
        if not (route.messages or route.seconds or hidden or beyond):
            return
        cost.micro_batch[part] += sum(times.values()) * route.seconds
        for phase, number in times.items():
            into = chunk.forward if phase == "forward" else chunk.pass_of(later=later)
            waits = self.bound.plan.mesh.zigzag or self.in_pairs  # zigzag reorders; in pairs only experts yield
            inside = self.gathers_in_autograd and moved == "parameters" and phase == "backward"
            sent = 0.0 if waits or inside else number * route.sent * self.share_overlapped
            self.turns |= sent > 0 and moved != "activations"  # for a weight, in both passes
            more = number * (beyond or 0.0)
            into.add(waits=number * route.seconds + more, hidden=number * hidden, sent=sent)
            if more:
                cost.together[part] += more
        for message in route.messages if beyond is not None else ():
            charge(cost.messages, part, owner, message, times)

    def run_of(self, at: int) -> int:
        """The kind of run of an operator with coalesced all-gathers; 0 without them."""
        return run_of(self.bound.blocks, at) if self.update.by_block else 0

    def gather(
        self,
        cost: StageCost,
        chunk: ChunkCost,
        owner: str,
        name: str,
        moved: str,
        tensor: TensorType,
        source: Layout,
        target: Layout,
        times: Times,
        later: bool = False,
        run: int = 0,
    ) -> None:
        """Charge a weight, or its gradient, that is moved for one use in a kind of run. Coalesced collectives belong to
        no operator."""
        pricer: RedistributionPricer = getattr(self.book.pricers[run][0], moved)
        part = REDUCING if moved == "gradients" else GATHERING
        beyond = self.together.use(pricer, part, name, self.book.route(moved, tensor, source, target, run)[0], times)
        self.move(cost, chunk, owner, part, moved, tensor, source, target, times, later, beyond, run)

    def made(self, name: str) -> Duplex:
        """The layouts in which a value is made."""
        if name not in self._made:
            bound = self.bound.operators[self.bound.graph.producer[name]]
            results = [result for result in bound.operator.results if result is not None]
            self._made.update(zip(results, bound.layouts.results, strict=True))
        return self._made[name]

    def counted_for(self, bound: BoundOperator) -> BoundOperator:
        """The operator, marked where another linear layer stands for its launches."""
        counts = self.cluster.software.engine_launches
        if not counts or bound.operator.name not in joined_projections(self.bound.graph):
            return bound
        return replace(bound, rule=_joined(bound.rule))

    def price(self, bound: BoundOperator, without: Sequence[int] = (), *, counted: bool = True) -> OperatorPrices:
        """Prices of an operator, `without` the gradients of some operands. If `counted`, its work is added to that of
        the model."""
        graph, rule, op = self.bound.graph, bound.rule, bound.operator
        graded = graph.graded(op)
        if without:
            graded = tuple([gets and i not in without for i, gets in enumerate(graded)])
        key = (id(rule), bound.strategy, graded)
        known, flops = self.book.operators, self.book.flops
        if key not in known:
            types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
            plan = self.bound.plan
            optimizer = plan.training.optimizer
            prices = price_operator(rule, [bound.strategy], *types, graded, plan.mesh, self.cluster, optimizer)
            known[key] = (prices, rule)
        if counted:
            alone = (id(rule), graded)
            if alone not in flops:
                flops[alone] = (whole_flops(rule, graded), rule)
            seen = work_of_slices(rule, self.bound.plan.slices) if rule.op_class == "attention" else 1.0
            self.flops += flops[alone][0] * seen
        return known[key][0]


@lru_cache(maxsize=16384)
def _joined(rule: Rule) -> Rule:
    """The rule of a linear layer that another one stands for."""
    return replace(rule, joins_projection=True)


def walks_of(bound: BoundPlan, machine: Machine) -> tuple[Walk, ...]:
    """For every pipeline rank the walk with the prices of its devices; ranks of one group share it. Raises RequestError
    if owners of whole parameters are not possible on this machine."""
    refuse(owners_fault(bound.plan.training.update, machine), RequestError)
    clusters = clusters_of_ranks(machine, bound.plan.pipeline)
    overlaps = overlaps_of(bound)
    stages = segments_by_stage(bound, overlaps)
    known = {
        one: Walk(bound=bound, stages=stages, cluster=one, machine=machine, known_overlaps=overlaps)
        for one in dict.fromkeys(clusters)
    }
    return tuple(known[one] for one in clusters)


def _handed_alone(graph: OperatorGraph, blocks: Blocks) -> bool:
    """Whether the operators after the blocks read of the last block only the values that every block of its kind hands
    to the next."""
    key = ("handed alone", blocks.borders, blocks.kinds)
    if key not in graph.derived:
        graph.derived[key] = blocks.count > 1 and _is_handed_alone(graph, blocks)
    return bool(graph.derived[key])


def _is_handed_alone(graph: OperatorGraph, blocks: Blocks) -> bool:
    handed, left = set(), set()
    for block in range(1, blocks.count):
        for at in blocks.operators(block):
            made = {graph.producer.get(name, -1) for name in graph.operators[at].operands}
            handed |= {blocks.template(one) for one in made if blocks.start <= one < blocks.borders[block]}
    for op in graph.operators[blocks.stop :]:
        left |= {graph.producer[n] for n in op.operands if n in graph.producer and n in graph.data_dependent}
    return {blocks.template(at) for at in left if blocks.start <= at < blocks.stop} <= handed
