"""A cache for walks over plans of one graph: prices, and the sums of blocks.

A search prices many plans of one graph on one mesh. They differ in some layouts, in the division of blocks, or in
overlap. The price of an operator depends on its rule and strategy alone, that of a redistribution on tensor and
layouts, and the sums of a block on its key (`planner.plan.prediction.repeated_blocks.block_keys`). The book is kept
with the graph. It holds every object that it finds by id, so that the id stays valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from hardware_profiles import Cluster, Hidden, Seconds
from planner.graph.operator_graph import TensorType
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.block_gathers import kinds_of_runs, longest_gather
from planner.pricing import OperatorPrices, ParameterPrices, Pricers
from planner.pricing.bucket_size import filled, total_gradients
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import Layout
from planner.sharding.rule import Rule
from planner.sharding.stored import StoredParameter
from planner.sharding.update import NO_BUCKETS, Update

if TYPE_CHECKING:
    from planner.plan.prediction.repeated_blocks import BlockSums

Graded = tuple[bool, ...]
"""For every operand of an operator whether it has a gradient."""


@dataclass(kw_only=True)
class PriceBook:
    """Prices of the operators, parameters and redistributions of one graph, for the cluster and the training settings
    of its plans.

    `pricers` are those of every kind of run (`kinds_of_runs`), each with pricers without overlap if the software has
    any.
    """

    pricers: Sequence[tuple[Pricers, Pricers | None]]
    operators: dict[tuple[int, object, Graded], tuple[OperatorPrices, Rule]] = field(default_factory=dict)
    flops: dict[tuple[int, Graded], tuple[float, Rule]] = field(default_factory=dict)
    parameters: dict[tuple[int, bool, int, bool, float | None, str], tuple[ParameterPrices, StoredParameter]] = field(
        default_factory=dict
    )
    routes: dict[tuple[str, int, int, int, int], tuple[PricedRoute, Seconds, TensorType, Layout, Layout]] = field(
        default_factory=dict
    )
    tensors: dict[tuple[int, str], TensorType] = field(default_factory=dict)
    blocks: dict[object, "BlockSums"] = field(default_factory=dict)


def price_books(bound: BoundPlan, cluster: Cluster) -> tuple[PriceBook, PriceBook]:
    """The books for plans like this one, on devices of one kind: one for passes, which do not depend on gradient
    buckets, and one for work once a step, whose sums price buckets as searches do."""
    update = bound.plan.training.update
    return _book(bound, cluster, replace(update, buckets=NO_BUCKETS)), _book(bound, cluster, update)


def _book(bound: BoundPlan, cluster: Cluster, update: Update) -> PriceBook:
    plan, graph = bound.plan, bound.graph
    key = ("price book", plan.mesh, cluster, update, plan.training.precision, plan.training.optimizer, plan.slices)
    if key not in graph.derived:
        graph.derived[key] = PriceBook(pricers=_pricers(bound, cluster, update))
    return cast("PriceBook", graph.derived[key])


def _pricers(bound: BoundPlan, cluster: Cluster, update: Update) -> list[tuple[Pricers, Pricers | None]]:
    plan, graph = bound.plan, bound.graph
    if update.bucket_size:
        update = filled(update, total_gradients(graph, update))
    found = []
    for run in kinds_of_runs(bound.blocks, len(graph.operators)) if update.by_block else (range(0),):
        longest = longest_gather(graph, run, update)
        hides = cluster.software.hidden != Hidden()
        whole = Pricers.of(plan.mesh, cluster, update, longest, bare=True) if hides else None
        found.append((Pricers.of(plan.mesh, cluster, update, longest), whole))
    return found
