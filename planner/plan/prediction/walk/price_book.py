"""A cache for walks over plans of one graph: prices, and the sums of blocks.

A search prices many plans of one graph on one mesh. They differ in some layouts, in the division of blocks, or in
overlap. The price of an operator depends on its rule and strategy alone, that of a redistribution on tensor and
layouts, and the sums of a block on its key (`planner.plan.prediction.walk.repeated_blocks.block_keys`). The book is
kept with the graph. It holds every object that it finds by id, so that the id stays valid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, cast

from hardware_profiles import Cluster, Hidden, Seconds
from planner.graph.operator_graph import TensorType
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.block_gathers import kinds_of_runs, longest_gather
from planner.pricing import OperatorPrices, ParameterPrices, Pricers
from planner.pricing.bucket_size import filled, total_gradients
from planner.pricing.narrow_weights import in_8_bits
from planner.pricing.parameter_price import reduced, summed
from planner.pricing.redistribution_price import PricedRoute, RedistributionPricer
from planner.sharding.layout import Layout
from planner.sharding.rule import Rule
from planner.sharding.stored import StoredParameter
from planner.sharding.update import NO_BUCKETS, Update

if TYPE_CHECKING:
    from planner.plan.prediction.walk.repeated_blocks import BlockSums

Graded: TypeAlias = tuple[bool, ...]
"""For every operand of an operator whether it has a gradient."""

ParameterKind: TypeAlias = tuple[int, bool, int, bool, float | None, str]
"""What the price of a parameter depends on: its tensor and stored layouts, by id; whether it is trained, and whether it
is local; the share of it that one device owns; and its optimizer."""


@dataclass(kw_only=True)
class PriceBook:
    """Prices of the operators, parameters and redistributions of one graph, for the cluster and the training settings
    of its plans.

    `pricers` are those of every kind of run (`kinds_of_runs`), each with pricers without overlap if the software has
    any. `autocasts`: weights are gathered in fp32, and rounded for their use.
    """

    pricers: Sequence[tuple[Pricers, Pricers | None]]
    update: Update
    autocasts: bool
    operators: dict[tuple[int, object, Graded], tuple[OperatorPrices, Rule]] = field(default_factory=dict)
    flops: dict[tuple[int, Graded], tuple[float, Rule]] = field(default_factory=dict)
    parameters: dict[ParameterKind, tuple[ParameterPrices, StoredParameter]] = field(default_factory=dict)
    routes: dict[tuple[str, int, int, int, int], tuple[PricedRoute, Seconds, TensorType, Layout, Layout]] = field(
        default_factory=dict
    )
    tensors: dict[tuple[int, str], TensorType] = field(default_factory=dict)
    blocks: dict[object, "BlockSums"] = field(default_factory=dict)

    def route(
        self, moved: str, tensor: TensorType, source: Layout, target: Layout, run: int = 0
    ) -> tuple[PricedRoute, Seconds]:
        """A redistribution of a tensor of kind `moved`, a field of `Pricers`, as it is charged, and its overlapped
        seconds. `run` is the kind of run with which it is coalesced. Blocks share types and layouts, so it is found by
        their ids."""
        key, routes = (moved, id(tensor), id(source), id(target), run), self.routes
        if key not in routes:
            own, bare = self.pricers[run]
            pricer: RedistributionPricer = getattr(own, moved)
            route, hidden = pricer.route(tensor, source, target), 0.0
            if bare is not None:
                whole: RedistributionPricer = getattr(bare, moved)
                hidden = max(0.0, whole.route(tensor, source, target).seconds - route.seconds)
            routes[key] = (route, hidden, tensor, source, target)
        return routes[key][:2]

    def narrow(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as it is sent in 8 bits."""
        key = (id(tensor), "narrow")
        if key not in self.tensors:
            self.tensors[key] = in_8_bits(tensor)
        return self.tensors[key]

    def gathered(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as it is gathered for its use."""
        if not self.autocasts:
            return tensor
        key = (id(tensor), "gathered")
        if key not in self.tensors:
            self.tensors[key] = replace(tensor, dtype="float32")
        return self.tensors[key]

    def reduced(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as the gradient of one use is reduced."""
        key = (id(tensor), "reduced")
        if key not in self.tensors:
            self.tensors[key] = reduced(tensor, self.update)
        return self.tensors[key]

    def summed(self, tensor: TensorType) -> TensorType:
        """A parameter of the graph as its gradient is accumulated."""
        key = (id(tensor), "summed")
        if key not in self.tensors:
            self.tensors[key] = summed(tensor, self.update)
        return self.tensors[key]


def price_books(bound: BoundPlan, cluster: Cluster) -> tuple[PriceBook, PriceBook]:
    """The books for plans like this one, on devices of one kind: one for passes, which do not depend on gradient
    buckets, and one for work once a step, whose sums price buckets as searches do."""
    update = bound.plan.training.update
    return _book(bound, cluster, replace(update, buckets=NO_BUCKETS)), _book(bound, cluster, update)


def _book(bound: BoundPlan, cluster: Cluster, update: Update) -> PriceBook:
    plan, graph = bound.plan, bound.graph
    key = ("price book", plan.mesh, cluster, update, plan.training.precision, plan.training.optimizer, plan.slices)
    if key not in graph.derived:
        graph.derived[key] = PriceBook(
            pricers=_pricers(bound, cluster, update), update=update, autocasts=cluster.software.autocasts
        )
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
