"""How much of the redistributions next to linear layers overlaps with the matrix products of these layers.

A plan splits such a collective into chunks where that saves time (`planner.plan.layout.overlapped_products` has the
rules, `planner.plan.prediction.walk.product_overlap` the price). This file computes the most that each pair of
candidates can save, with the best number of chunks for each pass, so that layouts are chosen by the exposed time:

    result      product ─edge─> reader                   the products of the producer's candidate
    operand     maker ─edge─> product                    the products of the reader's candidate
                maker ─edge─> identity ─> products       all candidates of these products that read the layout of the
                                                         identity; those that save most count
                                       ─> others         if others read it, too, products may read another layout:
                                                         the identity has a candidate for each set of its three largest
                                                         products that may read its layout (`told_apart`)

A recomputed block gathers an operand again under the same products. If their results are kept, it gathers the operand
under the gradients of its rows, which may save more (`Later`).

The savings are at least those of a plan. They are larger where a plan may have no overlap: for rows that chunks do not
divide; for results that a recomputed block keeps and sends (the loss is charged where the search decides what to keep);
and for blocks that recompute only one of producer and product. Products in fp8 run without overlap. If a layer may be
in fp8 or not, its other candidates save; and a value shared by an identity saves as if some of its readers were not in
fp8.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from costmodels import arriving_time, leaving_time, operator_time
from hardware_profiles import Cluster
from planner.graph.operator_graph import TensorType
from planner.plan.layout.overlapped_products import BACK, THERE, Kind
from planner.pricing import RedistributionPricer
from planner.pricing.redistribution_price import SingleSteps
from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.strategy_search.request.template import Template, ValueEdge
from planner.strategy_search.tables.candidates import Candidates, DuplexColumn, LayoutColumn
from planner.strategy_search.tables.products import (
    CHUNKS,
    WHOLE,
    Array,
    Indices,
    ProductPrices,
    Products,
    place_of,
    products_of,
    takes_result,
)

_Moves: TypeAlias = tuple[tuple[str, int, float], ...]
"""Steps of redistributions: kind, axis and bytes."""

_TOGETHER = 64
"""The largest number of joint candidates of the products of one operand for which all are examined."""

_TOGETHER_APART = 4096
"""The same where an identity is told apart by its products."""

_APART, _REST, _ONE_WAY = 3, 8, 16
"""How many of the largest products of an identity are told apart; `Candidates.under` if only others read its layout;
and what is added to it if something is sent backward only."""

_NOTHING = -1
"""No step: nothing is sent."""

_FORBIDDEN = 10.0
"""How many times the seconds that an identity saves under a product it takes, if the product reads another layout: more
than it saves in all passes, so an identity that saves nothing is better."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beside:
    """A product under which an operand may be gathered: its `share` of the bytes of all results, and which of its
    candidates read the layouts of each candidate of the edge's consumer, (K_consumer, K); None if it is the
    consumer."""

    share: float
    reads: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Later:
    """Seconds that an edge saves in addition to its forward savings, (K_producer, K_consumer), if a recomputed block
    keeps the results of all products of the operand: the operand is then gathered again under the gradients of its
    rows. `products` are in the order of `products_of`."""

    seconds: Array
    products: tuple[Beside, ...]

    def among(self, rows: slice, columns: slice, of_products: Sequence[slice]) -> "Later":
        """The same for some candidates of the producer, the consumer, and each of the products."""
        products = tuple(
            one if one.reads is None else replace(one, reads=one.reads[columns, own])
            for one, own in zip(self.products, of_products, strict=True)
        )
        return Later(seconds=self.seconds[rows, columns], products=products)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saved:
    """Seconds that an edge saves each time it runs forward, and backward, (K_producer, K_consumer). Under some
    candidates of the products of an identity that is told apart it saves less: `less` has by how much, forward and
    backward, (K_consumer, K_product), by the number of the product."""

    forward: Array
    backward: Array
    later: Later | None = None
    less: Mapping[int, tuple[Array, Array]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Confined:
    """Seconds that an edge from an identity to a product takes longer, forward and backward, (K_producer, K_consumer):
    by how much less is saved under this candidate of the product than under that which saves most, and more than is
    saved if the product does not read the layout that is gathered under it."""

    forward: Array
    backward: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Way:
    """One direction of a value: forward, or back as a gradient.

    `steps` has the single step between every pair of candidates of producer and consumer, (K_producer, K_consumer),
    with `_NOTHING` where nothing is sent. `legal`: whether at most one step is needed, and it is one that may be split
    into chunks. `moves` lists all steps."""

    steps: Indices
    legal: NDArray[np.bool_]
    moves: _Moves
    arrives: bool
    forward: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Beside:
    """The products that run beside an edge, under N choices of their candidates.

    If products read a value shared by an identity, `groups` has the number of its layouts for each candidate of the
    consumer, (K,), and `number` is how many there are. `among` are the layouts for which products are listed; `starts`
    says where the choices of each begin. `any_of` are layouts with too many choices: each may save all that is sent.
    `reads` has the candidates of each product that read each of the layouts, (number, K). A layout that is told apart
    by products (`Candidates.under`) counts once for each. `sides` has for each of `among` the products, which of their
    candidates are listed, and whether they may read another layout.
    """

    products: Products | None
    groups: Indices | None = None
    number: int = 0
    among: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    any_of: tuple[int, ...] = ()
    reads: tuple[NDArray[np.bool_], ...] = ()
    sides: tuple[tuple[tuple[int, Indices, bool], ...], ...] = ()


@dataclass(kw_only=True)
class UnderProducts:
    """The savings of the edges of a template. Caches the prices of products."""

    mesh: Mesh
    cluster: Cluster
    pricer: RedistributionPricer
    _saved: dict[object, tuple[object, Saved | None]] = field(default_factory=dict)
    _taken: dict[tuple[_Moves, int], Array] = field(default_factory=dict)
    _apart: dict[tuple[int, bytes, bytes], tuple[Candidates, Candidates]] = field(default_factory=dict)
    _confined: dict[tuple[int, int, int], tuple[object, Confined]] = field(default_factory=dict)
    _prices: ProductPrices = field(init=False)

    def __post_init__(self) -> None:
        self._prices = ProductPrices(mesh=self.mesh, cluster=self.cluster)

    def clear(self) -> None:
        """Forget the products of a template, and the savings of its edges."""
        self._prices.clear()
        self._saved.clear()
        self._taken.clear()
        self._confined.clear()

    def told_apart(
        self, template: Template, edge: ValueEdge, made: DuplexColumn, lists: Sequence[Candidates]
    ) -> Candidates:
        """The candidates of an edge's consumer. Those of an identity that products and other operators read are told
        apart by the products that read its layout, where something is sent that may overlap with them."""
        candidates, products = lists[edge.consumer], products_of(template, edge)
        handed = edge.consumer in {*template.shared, *template.twins, *template.twins.values()}
        if handed or edge.kind != "inside" or not _differentiable(template, edge):
            return candidates
        if not products or _are_all(template, edge.consumer, products):
            return candidates
        sends = _sends(*self._legal_ways(template, edge, "operand", made, candidates))
        pairs, groups = _layouts_of(candidates)
        reads = [np.any(_reading(lists[at], candidates.results[0], pairs), axis=1)[groups] for at in products]
        first, rest = reads[:_APART], np.any([np.zeros(len(groups), dtype=np.bool_), *reads[_APART:]], axis=0)
        sets = {those: [one for at, one in enumerate(first) if those >> at & 1] for those in range(1, 1 << len(first))}
        every = {0: np.ones(len(groups), dtype=np.bool_)}
        for ways in (0, _ONE_WAY):
            sent = (sends == ways).any(axis=0)
            every |= {ways + those: sent & np.all(needed, axis=0) for those, needed in sets.items()}
            every[ways + _REST] = sent & rest
        number, places = np.nonzero(list(every.values()))
        under = np.array(list(every))[number]
        if len(places) == len(groups):
            return candidates
        key = (id(candidates), places.tobytes(), under.tobytes())
        if key not in self._apart:
            self._apart[key] = (candidates, candidates.told_apart(places, under))
        return self._apart[key][1]

    def confined(self, template: Template, edge: ValueEdge, lists: Sequence[Candidates]) -> Confined | None:
        """What an edge from an identity that is told apart to one of its products takes longer; None for other
        edges."""
        shared, reader = lists[edge.producer], lists[edge.consumer]
        if shared.under is None or edge.operand != 0:
            return None
        before = next(one for one in template.edges if one.consumer == edge.producer)
        products = products_of(template, before)
        if edge.consumer not in products:
            return None
        number = products.index(edge.consumer)
        saved = self.saved(template, before, lists[before.producer].results[place_of(template, before)], lists)
        if saved is None:
            return None
        key = (id(saved), id(reader), number)
        if key not in self._confined:
            most = (saved.forward + saved.backward).max(axis=0)
            pairs, groups = _layouts_of(shared)
            wrong = ~_reading(reader, shared.results[0], pairs)[groups]
            wrong &= _needs(shared.under, number, len(products))[:, None]
            forbidden = np.where(wrong, _FORBIDDEN * most[:, None], 0.0)
            forward, backward = saved.less.get(number, (np.zeros_like(forbidden),) * 2)
            self._confined[key] = ((saved, reader), Confined(forward=forward, backward=backward + forbidden))
        return self._confined[key][1]

    def saved(
        self, template: Template, edge: ValueEdge, made: DuplexColumn, lists: Sequence[Candidates]
    ) -> Saved | None:
        """The savings of an edge; None if there are none. `made` are the layouts of the producer's result, `lists`
        the candidates of all operators. Edges with equal tensors between the same candidates and products share one
        result."""
        graph = template.graph
        if not _differentiable(template, edge):
            return None
        kind: Kind = "result" if takes_result(template, edge) else "operand"
        products = (edge.producer,) if kind == "result" else products_of(template, edge)
        if not products:
            return None
        told = tuple(self._prices.key(template, at, lists[at]) for at in products)
        alone, reader, tensor = products == (edge.consumer,), lists[edge.consumer], graph.types[edge.name]
        key = (kind, alone, edge.operand, tensor, edge.name in graph.differentiable, id(made), id(reader), told)
        if key not in self._saved:
            kept = (made, reader, *(lists[at] for at in products))  # held so that their ids stay valid
            self._saved[key] = (kept, self._found(template, edge, kind, products, made, lists))
        return self._saved[key][1]

    def _found(
        self,
        template: Template,
        edge: ValueEdge,
        kind: Kind,
        products: Sequence[int],
        made: DuplexColumn,
        lists: Sequence[Candidates],
    ) -> Saved | None:
        legal, ways = self._legal_ways(template, edge, kind, made, lists[edge.consumer])
        sends, under = _sends(legal, ways), lists[edge.consumer].under
        if not (sends >= 0).any():
            return None
        if under is not None and kind == "operand":
            legal &= (under > 0) & (sends == (under & _ONE_WAY))
        beside = self._beside(template, edge, kind, products, lists)
        beneath = [self._saves(beside, kind, way) for way in ways]
        there, *back = (self._seconds(beside, way, seconds) for way, seconds in zip(ways, beneath, strict=True))

        def of_pairs(way: _Way, saved: Array) -> Array:
            sides = np.arange(saved.shape[1])
            return np.where(legal, saved[way.steps, sides[:, None] if kind == "result" else sides[None, :]], 0.0)

        forward = of_pairs(ways[0], there)
        later = None
        if kind == "operand" and under is None:  # a value that others read, too, is gathered again before these run
            more = of_pairs(ways[0], self._seconds(beside, ways[0], self._later(beside, ways[0]))) - forward
            if (more > 0).any():
                some = self._shares(template, products, beside)
                later = Later(seconds=np.maximum(more, 0.0), products=some)
        less = [_less(beside, way, seconds, legal) for way, seconds in zip(ways, beneath, strict=True)]
        return Saved(
            forward=forward,
            backward=of_pairs(ways[1], back[0]) if back else np.zeros_like(forward),
            later=later,
            less={at: (there, less[1][at] if back else np.zeros_like(there)) for at, there in less[0].items()},
        )

    def _legal_ways(
        self, template: Template, edge: ValueEdge, kind: Kind, made: DuplexColumn, reader: Candidates
    ) -> tuple[NDArray[np.bool_], list[_Way]]:
        """Which pairs of candidates of an edge need steps that may overlap in both directions, and the directions."""
        tensor, wanted = template.graph.types[edge.name], reader.operands[edge.operand]
        ways = [self._way(kind, tensor, made, wanted, forward=True)]
        if edge.name in template.graph.differentiable:
            ways.append(self._way(kind, tensor, made, wanted, forward=False))
        return np.logical_and.reduce([way.legal for way in ways]), ways

    def _shares(self, template: Template, products: Sequence[int], beside: _Beside) -> tuple[Beside, ...]:
        """The products of an operand, each with its share of the bytes of all their results."""
        if beside.groups is None:
            return (Beside(share=1.0, reads=None),)
        graph, groups = template.graph, beside.groups
        results = ([name for name in graph.operators[at].results if name is not None] for at in products)
        made = [sum(graph.types[name].nbytes for name in names) for names in results]
        return tuple(
            Beside(share=nbytes / sum(made), reads=reads[groups])
            for nbytes, reads in zip(made, beside.reads, strict=True)
        )

    def _way(self, kind: Kind, tensor: TensorType, made: DuplexColumn, wanted: DuplexColumn, *, forward: bool) -> _Way:
        source, target = (made.forward, wanted.forward) if forward else (wanted.gradient, made.gradient)
        single = self.pricer.single_steps(tensor, source.distinct, target.distinct)
        allowed = (THERE if forward else BACK)[kind]
        legal = _legal(single, source.distinct, target.distinct, allowed, len(tensor.shape) - 1)
        every, nbytes = (source.index[:, None], target.index[None, :]), tensor.nbytes
        steps, fine = single.steps[every], legal[every]
        return _Way(
            steps=steps if forward else steps.T,
            legal=fine if forward else fine.T,
            moves=tuple([(name, axis, fraction * nbytes) for name, axis, fraction in single.moves]),
            arrives=(kind == "operand") == forward,
            forward=forward,
        )

    def _beside(
        self, template: Template, edge: ValueEdge, kind: Kind, products: Sequence[int], lists: Sequence[Candidates]
    ) -> _Beside:
        own = [self._prices.of(template, at, lists[at]) for at in products]
        if kind == "result" or products == (edge.consumer,):
            return _Beside(products=own[0])
        shared = lists[edge.consumer]
        pairs, groups = _layouts_of(shared)
        reads = tuple([_reading(lists[at], shared.results[0], pairs) for at in products])
        together, any_of, starts, length = list[tuple[int, Products]](), list[int](), list[int](), 0
        sides = list[tuple[tuple[int, Indices, bool], ...]]()
        for number, under in enumerate(pairs[2].tolist()):
            every = [(one, there[number].nonzero()[0]) for one, there in zip(own, reads, strict=True)]
            needed = {at for at in range(_APART) if under > 0 and under >> at & 1}
            counts = needed | set(range(_APART if under > 0 else 0, len(every) if under else 0))
            fitting = [(at, *one, at not in needed) for at, one in enumerate(every) if at in counts and one[1].size]
            either = not needed  # then the last combination has no product
            combinations = math.prod(choices.size + free for _, _, choices, free in fitting) - either
            if combinations > (_TOGETHER if under < 0 else _TOGETHER_APART):
                any_of.append(number)
            elif combinations:  # choices for the products that read it, or for some of them
                every_one = (one.taken(choices, or_none=free) for _, one, choices, free in fitting)
                *_, some = accumulate(every_one, Products.beside)
                together.append((number, some.taken(np.arange(combinations))))
                sides.append(tuple([(at, choices, free) for at, _, choices, free in fitting if needed]))
                starts.append(length)
                length += combinations
        return _Beside(
            products=Products.joined([some for _, some in together]) if together else None,
            groups=groups,
            number=pairs.shape[1],
            among=tuple(number for number, _ in together),
            starts=tuple(starts),
            any_of=tuple(any_of),
            reads=reads,
            sides=tuple(sides),
        )

    def _seconds(self, beside: _Beside, way: _Way, seconds: Array | None) -> Array:
        """Seconds that each step saves for each candidate of the side with the products, (steps + 1, K), from the
        seconds that it saves beside each choice of products. The last row is for nothing sent."""
        if beside.groups is None:
            assert seconds is not None
            return seconds
        found = np.zeros((len(way.moves) + 1, beside.number))
        if beside.any_of:
            found[:-1, beside.any_of] = self._sent(way.moves, 1)
        if seconds is not None:
            found[:, beside.among] = np.maximum.reduceat(seconds, beside.starts, axis=1)
        return found[:, beside.groups]

    def _saves(self, beside: _Beside, kind: Kind, way: _Way) -> Array | None:
        """Seconds that each step saves beside each choice of products, with the best number of chunks, (steps + 1, N);
        None without products."""
        if beside.products is None:
            return None
        forward, backward, weights, read, made = beside.products.rows[:WHOLE]
        pieces, gradients = np.split(beside.products.rows[WHOLE:], 2)
        saved, (rows, moves) = np.zeros((len(way.moves) + 1, len(forward))), _chunked(way)
        moved = made if kind == "operand" else read
        copied = np.asarray(
            operator_time(op_class="copy", flops=0.0, bytes_moved=2 * moved, dtype="fp32", device=self.cluster.device)
        )
        whole, under, parts = (forward, 0.0, pieces) if way.forward else (backward, weights, gradients)
        time = arriving_time if way.arrives else leaving_time
        sent = self._sent(moves, 1)
        for chunks, chunk in zip(CHUNKS, parts, strict=True):
            taken = time(chunk, self._sent(moves, chunks), chunks, under) + (copied if chunks > 1 else 0.0)
            saved[rows] = np.maximum(saved[rows], whole + sent - taken)
        return saved

    def _later(self, beside: _Beside, way: _Way) -> Array | None:
        """Seconds that each step saves under the gradients of the rows of the products, (steps + 1, N); None without
        products."""
        if beside.products is None:
            return None
        gradients = beside.products.rows[WHOLE + len(CHUNKS)]
        saved, (rows, moves) = np.zeros((len(way.moves) + 1, len(gradients))), _chunked(way)
        saved[rows] = np.minimum(self._sent(moves, 1), gradients)
        return saved

    def _sent(self, moves: _Moves, chunks: int) -> Array:
        """Seconds of one chunk of each of some steps that may overlap, (steps, 1)."""
        key = (moves, chunks)
        if key not in self._taken:
            found = [self.pricer.message_seconds(kind, axis, nbytes / chunks) for kind, axis, nbytes in moves]
            self._taken[key] = np.array(found).reshape(-1, 1) * self.cluster.device.overlapped
        return self._taken[key]


def _chunked(way: _Way) -> tuple[list[int], _Moves]:
    """The numbers of the steps that are sent in chunks, and these steps."""
    rows = [row for row, (name, _, _) in enumerate(way.moves) if name in THERE["operand"] | THERE["result"]]
    return rows, tuple([way.moves[row] for row in rows])


def _sends(legal: NDArray[np.bool_], ways: Sequence[_Way]) -> Indices:
    """What pairs of candidates send that may overlap, as in `Candidates.under`: 0 forward, and perhaps backward;
    `_ONE_WAY` backward only; -1 nothing."""
    there, *back = (legal & (way.steps != _NOTHING) for way in ways)
    found: Indices = np.where(there, 0, np.where(back[0] if back else False, _ONE_WAY, -1))
    return found


def _less(beside: _Beside, way: _Way, seconds: Array | None, legal: NDArray[np.bool_]) -> dict[int, Array]:
    """How much less is saved under each candidate of the products of an identity that is told apart, (K_identity, K),
    by the number of the product. `seconds` are those of `_saves`.

    Of what a choice of candidates saves less than the best, for every step that may be needed, each product in turn
    gets as much as all choices with its candidate have left. So the parts of a choice are no more than what it saves
    less."""
    if seconds is None or beside.groups is None or not any(beside.sides):
        return {}
    found = {at: np.zeros_like(one, dtype=np.float64) for at, one in enumerate(beside.reads)}
    for number, start, sides in zip(beside.among, beside.starts, beside.sides, strict=True):
        steps = np.unique(way.steps[legal & (beside.groups == number)[None, :]])
        if not sides or not steps.size:
            continue
        shape = [len(choices) + free for _, choices, free in sides]
        saved = seconds[steps, start : start + math.prod(shape)]
        left = (saved.max(axis=1, keepdims=True) - saved).min(axis=0).reshape(shape)
        for axis, (at, choices, free) in enumerate(sides):
            if not free:
                part = left.min(axis=tuple([other for other in range(len(shape)) if other != axis]), keepdims=True)
                found[at][number, choices] = part.ravel()
                left = left - part
    return {at: one[beside.groups] for at, one in found.items()}


def _needs(under: Indices, number: int, count: int) -> NDArray[np.bool_]:
    """Whether the candidates of an identity need that one of its `count` products reads their layout."""
    if number < _APART:
        return (under >> number & 1).astype(np.bool_)
    alone: NDArray[np.bool_] = (under == _REST) & (count == _APART + 1)
    return alone


def _are_all(template: Template, at: int, products: Sequence[int]) -> bool:
    """Whether some products are all operators that read the value of an identity."""
    return all(one.operand == 0 and one.consumer in products for one in template.leaving.get(at, ()))


def _differentiable(template: Template, edge: ValueEdge) -> bool:
    """Whether the value of an edge depends on the data, and a gradient goes back along it if the model trains."""
    graph = template.graph
    graded = not graph.trains or graph.returns(graph.operators[edge.consumer], edge.name)
    return edge.name in graph.data_dependent and graded


def _layouts_of(identity: Candidates) -> tuple[Indices, Indices]:
    """The different layouts of an identity's value: forward, of its gradient, and the product under which it is
    gathered (-1: any), (3, number); and which of them each candidate has."""
    shared = identity.results[0]
    under = np.full_like(shared.forward.index, -1) if identity.under is None else identity.under
    every = np.stack([shared.forward.index, shared.gradient.index, under])
    found, groups = np.unique(every, axis=1, return_inverse=True)
    return found, groups.ravel()


def _reading(candidates: Candidates, shared: DuplexColumn, pairs: Indices) -> NDArray[np.bool_]:
    """The candidates of a product whose operand has the layouts of each of some `pairs` of a shared value, forward and
    for its gradient, in its first two rows, (pairs, K); none in fp8."""
    operand = candidates.operands[0]
    there, back = _places(operand.forward, shared.forward), _places(operand.gradient, shared.gradient)
    found: NDArray[np.bool_] = (pairs[0][:, None] == there) & (pairs[1][:, None] == back)
    found[:, : candidates.narrow or 0] = False
    return found


def _places(column: LayoutColumn, among: LayoutColumn) -> Indices:
    """For each candidate of a column the number of its layout in another column; -1 where that does not have it."""
    known = {layout: place for place, layout in enumerate(among.distinct)}
    return np.array([known.get(layout, -1) for layout in column.distinct], dtype=np.intp)[column.index]


def _legal(
    single: SingleSteps, sources: Sequence[Layout], targets: Sequence[Layout], allowed: frozenset[str], last: int
) -> NDArray[np.bool_]:
    """Whether each source becomes each target with no step, or with a single step that may be split into chunks: one of
    the allowed kinds, and not along the dim that is summed."""
    legal = single.alone.copy()
    for number, (kind, axis, _) in enumerate(single.moves):
        here = single.steps == number
        if kind not in allowed:
            legal &= ~here
        elif kind != "all_reduce":
            ends = sources if kind == "all_gather" else targets
            summed = np.array([layout[axis].dim == last for layout in ends])
            legal &= ~(here & (summed[:, None] if kind == "all_gather" else summed[None, :]))
    return legal
