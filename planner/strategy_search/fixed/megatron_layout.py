"""The plan of a usual configuration: degrees, stages and recomputation by hand; operators sharded as all frameworks do.

The pattern (`planner.sharding.usual_pattern`) leaves open the operators between matrix products, whose sharding costs
next to nothing. The search decides them with unlimited memory, so that no block runs in a leaner way than its twins.
Then the wanted stages and recomputation are set in its plan. With several kinds of devices, the first kind stands for
all during the search; the plan is then placed and priced on the real machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from planner.plan.binding.bind import BoundPlan, prepare
from planner.plan.layout.kept import NOTHING_KEPT, Kept, block_words, kept_places
from planner.plan.plan import Group
from planner.sharding.labels import factor_labels
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.sharding.usual_pattern import usual_factors
from planner.strategy_search.fixed.fixed_schedule import Order, around, arranged, blocks_like, without_limits
from planner.strategy_search.request.folding import fold
from planner.strategy_search.request.request import SearchRequest, Shard
from planner.strategy_search.request.space import Pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """A configuration that leaves nothing open.

    Attributes:
        pinned: every degree, the micro-batches, ZeRO and sequence parallelism; no schedule or recomputation.
        stages: the number of blocks of every stage, virtual ones included, in the order of the model.
        full, selective: the number of recomputed blocks of every stage: its first blocks are fully recomputed, the next
            ones keep what `kept` says.
    """

    pinned: Pinned
    stages: tuple[int, ...]
    virtual_stages: int = 1
    schedule: str = "1f1b"
    interleave: int = 1
    slices: int = 1
    vocabulary: bool = True
    full: tuple[int, ...]
    selective: tuple[int, ...]
    kept: Kept = NOTHING_KEPT


def usual_plan(request: SearchRequest, usual: Usual) -> BoundPlan:
    """The plan of a configuration for the model, machine and batch of a request, priced.

    It may not fit in memory; its prediction says so. Raises RequestError or PlanFileError if no plan can have the
    configuration.
    """
    pinned = replace(usual.pinned, tensor_overlap=1, expert_overlap=False)  # engines have no such setting
    found = without_limits(replace(request, pinned=pinned, shards=_shards(request, usual)))
    order = Order(
        stages=usual.stages,
        virtual_stages=usual.virtual_stages,
        schedule=usual.schedule,
        slices=usual.slices,
        interleave=usual.interleave,
    )
    return arranged(request, found.plan, order, _groups(found, usual))


def _groups(found: BoundPlan, usual: Usual) -> tuple[Group, ...]:
    """Equal neighbouring blocks form one group, as in plans of the search."""
    ways = _ways(usual)
    keys = list(zip(found.blocks.kinds, ways, strict=True)) if ways else []
    inside, first = [], 0
    for (_, way), equal in groupby(keys):
        count = len(list(equal))
        inside.append(_group(found, usual, first, count, way))
        first += count
    return around(found, inside)


def _ways(usual: Usual) -> list[str]:
    """How every block is run."""
    ways: list[str] = []
    for blocks, full, selective in zip(usual.stages, usual.full, usual.selective, strict=True):
        ways += ["full"] * full + ["selective"] * selective + ["none"] * (blocks - full - selective)
    return ways


def _group(found: BoundPlan, usual: Usual, first: int, count: int, way: str) -> Group:
    """Blocks from `first` on, with the strategies of the first block of their kind."""
    known = found.blocks.firsts[found.blocks.kinds[first]]
    kept: list[int] = []
    if way == "selective":
        kept = kept_places(block_words(found.graph, found.blocks.operators(known)), usual.kept)
    return blocks_like(found, first, count, "full" if way == "selective" and not kept else way, kept)


def _shards(request: SearchRequest, usual: Usual) -> tuple[Shard, ...]:
    """The decisions for matrix products and embeddings."""
    pinned = usual.pinned
    tensor = pinned.tensor or 1
    if tensor == 1:
        return ()
    prepared, blocks = prepare(
        request.graph, request.imbalance, request.update.placed, request.fp8, once=request.tokens_once
    )
    graph = fold(prepared, blocks, request.cluster.software).graph
    cuts = {"batch": pinned.data or 1, "sequence": pinned.context or 1}
    labels = factor_labels(graph)
    shards = []
    factors = usual_factors(graph, vocabulary=usual.vocabulary)
    for at, (op, chosen) in enumerate(zip(graph.operators, factors, strict=True)):
        rule = rule_of(graph, op)
        if chosen is not None and rule.factors[chosen].extent % tensor == 0:
            pieces = [tensor if f == chosen else cuts.get(label, 1) for f, label in enumerate(labels[at])]
            shards.append(Shard(pattern=op.name, cuts=_cuts(rule, pieces)))
    return tuple(shards)


def _cuts(rule: Rule, pieces: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    def product(factors: tuple[int, ...]) -> int:
        found = 1
        for factor in factors:
            found *= pieces[factor]
        return found

    return tuple(tuple(product(factors) for factors in dims) for dims in rule.operands)
