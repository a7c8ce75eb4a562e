"""Cost tables of a template on one mesh at one micro-batch size: all numbers that do not depend on the pipeline, on
recomputation, or on the number of micro-batches. `table_builder` makes them, `stage_problem` weighs them.

There is one variable per operator (its strategies) and one per parameter (its stored layouts). Seconds are per
micro-batch or per step, bytes per device.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.pricing import OperatorPrices, ParameterPrices
from planner.pricing.operator_price import only as priced_only
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.template import Key, Template, ValueEdge
from planner.strategy_search.tables.candidates import Candidates
from planner.strategy_search.tables.launches import Shares
from planner.strategy_search.tables.products import products_of
from planner.strategy_search.tables.under_products import Later

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorTable:
    """One operator with K candidates.

    `kept` has the bytes kept for its backward pass; `own` is the part that nothing outside of its block reads.
    `transient` has the bytes that live while it runs, and `weights` those of its weights if each is gathered
    separately. `again` has the price of its forward pass during recomputation, if that counts differently."""

    candidates: Candidates
    prices: OperatorPrices
    kept: Array
    own: Array
    transient: Array
    weights: Array
    again: OperatorPrices | None = None

    @property
    def prices_again(self) -> OperatorPrices:
        """The price of the forward pass during recomputation."""
        return self.prices if self.again is None else self.again

    def only(self, candidate: int) -> "OperatorTable":
        """The table of one candidate."""
        row = slice(candidate, candidate + 1)
        return OperatorTable(
            candidates=self.candidates.only(candidate),
            prices=priced_only(self.prices, candidate),
            kept=self.kept[row],
            own=self.own[row],
            transient=self.transient[row],
            weights=self.weights[row],
            again=None if self.again is None else priced_only(self.again, candidate),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class EdgeTable:
    """One edge; arrays are (K_producer, K_consumer).

    `forward` and `backward` are seconds. `kept` has the bytes kept; `own` is the part that only the consumer's block
    reads. `under` has the seconds saved by overlap with the product whose result the edge takes: once, and again during
    recomputation; None without such a product. `beneath` has all seconds saved under products, forward and backward.
    `later` has the seconds saved if an operand is gathered again for products whose results are kept. Recomputation in
    the backward pass counts `share_again` of the forward seconds. `confined` is the part of the forward seconds by
    which the edge before an identity saves less (`under_products`); `beneath` then counts less, too."""

    edge: ValueEdge
    forward: Array
    backward: Array
    kept: Array
    own: Array
    under: tuple[Array, Array] | None = None
    beneath: Array | None = None
    later: Later | None = None
    share_again: float = 1.0
    confined: Array | None = None

    def among(self, rows: slice, columns: slice, later: Later | None) -> "EdgeTable":
        """The table for some candidates of the producer and of the consumer; `later` for these."""

        def of(values: Array) -> Array:
            return values[rows, columns]

        return replace(
            self,
            forward=of(self.forward),
            backward=of(self.backward),
            kept=of(self.kept),
            own=of(self.own),
            under=None if self.under is None else (of(self.under[0]), of(self.under[1])),
            beneath=None if self.beneath is None else of(self.beneath),
            later=later,
            confined=None if self.confined is None else of(self.confined),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UseTable:
    """One use of a parameter; arrays are (K, K_consumer).

    `gather` and `reduce` are the seconds to gather the weight, and to reduce its gradient. `gathered` has the bytes of
    the weight where gathering needs memory of its own. `needed` says whether the backward pass reads the weight.
    `together` is the same use with a coalesced all-gather of the weights of a block; None if it was not asked for.
    There, `first_gather` and `first_reduce` are the seconds of the first collective in each direction, which may
    overlap with the computation of other blocks; None if the weight is gathered separately."""

    consumer: int
    needed: bool
    gather: Array
    reduce: Array
    gathered: Array
    together: "UseTable | None" = None
    first_gather: Array | None = None
    first_reduce: Array | None = None

    def among(self, rows: slice, columns: slice) -> "UseTable":
        """The table for some stored layouts, and some candidates of the consumer."""
        return replace(
            self,
            gather=self.gather[rows, columns],
            reduce=self.reduce[rows, columns],
            gathered=self.gathered[rows, columns],
            together=None if self.together is None else self.together.among(rows, columns),
            first_gather=None if self.first_gather is None else self.first_gather[rows, columns],
            first_reduce=None if self.first_reduce is None else self.first_reduce[rows, columns],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterTable:
    """One parameter: its stored layouts (K), prices per step, and uses."""

    name: str
    stored: tuple[StoredParameter, ...]
    prices: ParameterPrices
    uses: tuple[UseTable, ...]

    def only(self, stored: int) -> "ParameterTable":
        """The table with one of the stored layouts."""
        row = slice(stored, stored + 1)
        return replace(
            self,
            stored=self.stored[row],
            prices=ParameterPrices(**{one.name: getattr(self.prices, one.name)[row] for one in fields(self.prices)}),
            uses=tuple(use.among(row, slice(None)) for use in self.uses),
        )


Launched: TypeAlias = tuple[tuple[OperatorTable, ...], tuple[EdgeTable, ...], tuple[ParameterTable, ...], Shares | None]
"""Tables in which kernels and collectives count with shares and launches for the rest; and the shares."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CostTables:
    """All tables of a template.

    `result_bytes` has the local bytes of each value under the candidates of its producer. `shares` has the shares of
    kernels if hosts launch ahead. `apart` has all tables with separate shares per pass and kind of block, if these
    differ: they give bounds for single micro-batches and pipelines only (`planner.strategy_search.tables.launches`).
    """

    template: Template
    mesh: Mesh
    operators: tuple[OperatorTable, ...]
    edges: tuple[EdgeTable, ...]
    parameters: tuple[ParameterTable, ...]
    result_bytes: Mapping[str, Array]
    update: Update = PLAIN
    shares: Shares | None = None
    apart: Launched | None = None

    @property
    def launched_apart(self) -> "CostTables":
        """The tables with separate shares per pass and kind of block."""
        if self.apart is None:
            return self
        operators, edges, parameters, shares = self.apart
        return replace(self, operators=operators, edges=edges, parameters=parameters, apart=None, shares=shares)

    def agreeing(self, agreed: Mapping[Key, int]) -> "CostTables":
        """The tables with some parameters fixed to one of their stored layouts, and some operators to one of their
        strategies; with a single share for all passes and blocks."""
        if not agreed:
            return self
        of = {at: slice(one, one + 1) for at, one in agreed.items() if isinstance(at, int)}
        parameters = tuple(one.only(agreed[one.name]) if one.name in agreed else one for one in self.parameters)
        if not of:
            return replace(self, parameters=parameters, apart=None)
        every, graph = slice(None), self.template.graph

        def edge(table: EdgeTable) -> EdgeTable:
            products = [of.get(at, every) for at in products_of(self.template, table.edge)] if table.later else []
            if of.keys().isdisjoint((table.edge.producer, table.edge.consumer)) and all(
                one is every for one in products
            ):
                return table
            places = of.get(table.edge.producer, every), of.get(table.edge.consumer, every)
            return table.among(*places, None if table.later is None else table.later.among(*places, products))

        def uses(table: ParameterTable) -> ParameterTable:
            if of.keys().isdisjoint(use.consumer for use in table.uses):
                return table
            return replace(table, uses=tuple(use.among(every, of.get(use.consumer, every)) for use in table.uses))

        made = {name: at for at in of for name in graph.operators[at].results if name is not None}
        return replace(
            self,
            operators=tuple(one.only(agreed[at]) if at in of else one for at, one in enumerate(self.operators)),
            edges=tuple(map(edge, self.edges)),
            parameters=tuple(map(uses, parameters)),
            result_bytes={
                name: values[of[made[name]]] if name in made else values for name, values in self.result_bytes.items()
            },
            apart=None,
        )

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tables of edges and of uses of parameters, which are most of all bytes."""
        uses = [use for parameter in self.parameters for use in parameter.uses]
        every = self.edges if self.apart is None else (*self.edges, *self.apart[1])
        edges = {id(edge.forward): edge.forward.nbytes for edge in every}  # several edges may share an array
        return 4 * sum(edges.values()) + sum(8 * use.gather.nbytes for use in uses)
