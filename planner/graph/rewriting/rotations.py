"""Rotary position embeddings that are written out, rewritten as one operator (`planner.graph.operators.rotary`).

    x ─┬──────────────────────────────────── * cos ─┐
       └─ two parts: a, b ─ -b ─ cat (-b, a) * sin ─┴ +                            tables with each angle twice

    x ─── two parts: a, b ─── a * cos - b * sin ─┬ cat                             tables with each angle once
                          └── b * cos + a * sin ─┘

    x ─ rotary(cos, sin)                                                           as it is kept

Parts are halves or neighbours, taken by slices, `chunk`, `split`, `unbind` or `select`; results for neighbours are
joined by `stack`. Halves may be made of neighbours before (view, transpose, reshape), and x may be a part of a head,
whose other elements pass and are joined to it. A rotation is left as it is if another operator reads a value inside of
it, if its tables have gradients, or if its tensors have several dtypes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from planner.graph.operator_graph import CASTS, Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.calls import said_dim, said_slice
from planner.graph.rewriting.unread import replaced

ROTARY = "planner.rotary.default"

_ADD, _SUBTRACT, _MULTIPLY = "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"
_NEGATE, _CAT, _STACK = "aten.neg.default", "aten.cat.default", "aten.stack.default"
_SLICE, _SELECT, _UNBIND = "aten.slice.Tensor", "aten.select.int", "aten.unbind.int"
_CHUNK, _SPLIT, _SPLIT_SIZES = "aten.chunk.default", "aten.split.Tensor", "aten.split_with_sizes.default"
_TRANSPOSE, _UNSQUEEZE = "aten.transpose.int", "aten.unsqueeze.default"
_RESHAPES = (
    "aten.view.default",
    "aten.reshape.default",
    "aten._unsafe_view.default",
    "aten.unflatten.int",
    "aten.flatten.using_ints",
)


def with_rotary(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with one operator for each rotation; values that only the old operators read are gone."""
    found: dict[str, Operator] = {}
    for op in graph.operators:
        if op.op in (_ADD, _CAT, *_RESHAPES) and (turned := _Reader(graph).rotation(op)) is not None:
            last, call = _of_a_part(graph, turned) or (op, turned.call(op))
            found[last.name] = call
    return replaced(graph, found)


@dataclass(frozen=True, slots=True)
class _Turned:
    """A rotation: the rotated value, its tables, whether parts are neighbours in the operand and in the result, whether
    tables have each angle `once`, and the dim of x that they lack. `inside` are the operators that it is written out
    in, without the last."""

    x: str
    cos: str
    sin: str
    from_pairs: bool
    to_pairs: bool
    size: int
    once: bool
    last: Operator
    inside: tuple[Operator, ...]
    heads: int | None = None

    def call(self, last: Operator, x: str | None = None, start: int = 0) -> Operator:
        """The operator in place of the last one."""
        tensors = (ValueRef(x or self.x), ValueRef(self.cos), ValueRef(self.sin))
        given: tuple[Argument, ...] = (
            *tensors,
            self.from_pairs,
            self.to_pairs,
            start,
            self.size,
            self.once,
            self.heads,
        )
        return replace(last, op=ROTARY, arguments=given, keywords=())


@dataclass(frozen=True, slots=True)
class _Part:
    """One of two parts of a value: of neighbours or of halves."""

    whole: str
    pairs: bool
    second: bool


@dataclass(frozen=True, slots=True)
class _Reader:
    """Finds the operators that make the values of a rotation; `inside` collects the operators met."""

    graph: OperatorGraph
    inside: dict[str, Operator] = field(default_factory=dict)

    def rotation(self, last: Operator) -> _Turned | None:
        """The rotation that ends with an operator; None where there is none that is understood."""
        turned = self._twice(last) if last.op == _ADD else self._once(last)
        if turned is None or not _alone(self.graph, turned.inside, last):
            return None
        types, tables = self.graph.types, (turned.cos, turned.sin)
        whole, made = types[turned.x], types[last.results[0] or ""]
        alike = all(types[name].dtype == whole.dtype for name in tables) and made.dtype == whole.dtype
        fixed = self.graph.differentiable.isdisjoint(tables)
        return self._with_whole_tables(turned) if alike and fixed and made.shape == whole.shape else None

    def _with_whole_tables(self, turned: _Turned) -> _Turned:
        """The rotation with tables from before a dim of heads was inserted and, for tables with each angle once, before
        the first half of their last dim was taken: the operator makes these views itself."""
        given = (turned.cos, turned.sin)
        put = [self._made(name, _UNSQUEEZE) for name in given]
        dims = {None if op is None else said_dim(op, 1) for op in put}
        rank = len(self._shape(turned.x))
        if len(dims) == 1 and None not in dims and all(len(self._shape(name)) == rank for name in given):
            (heads,) = (dim % rank for dim in dims if dim is not None)
            if heads < rank - 1:
                cos, sin = (op.operands[0] for op in put if op is not None)
                given, turned = (cos, sin), replace(turned, cos=cos, sin=sin, heads=heads)
        taken = [self._made(name, _SLICE) for name in given]
        spans = {_span(self.graph, name) for name in given}
        if turned.once and None not in taken and spans == {(0, turned.size // 2, 1)}:
            cos, sin = (op.operands[0] for op in taken if op is not None)
            return replace(turned, cos=cos, sin=sin)
        return turned

    def _twice(self, last: Operator) -> _Turned | None:
        """x * cos + cat(-b, a) * sin."""
        for straight, crossed in _orders(last):
            scaled, turning = self._product(straight), self._product(crossed)
            if scaled is None or turning is None:
                return None
            for (x, cos), (across, sin) in product(_orders(scaled), _orders(turning)):
                self.inside.clear()
                swapped = self._swapped(across)
                if swapped is None or not self._is_of(x, across, swapped.whole) or not self._tables(x, cos, sin, 1):
                    continue
                self._meet(scaled, turning)
                before = None if swapped.pairs or swapped.whole != x else self._put_apart(x)
                return self._found(last, before or x, cos, sin, before is not None or swapped.pairs, swapped.pairs)
        return None

    def _once(self, last: Operator) -> _Turned | None:
        """cat(a * cos - b * sin, b * cos + a * sin)."""
        self.inside.clear()
        joined = self._joined(last)
        if joined is None:
            return None
        (low, high), to_pairs = joined
        less, more = self._made(low, _SUBTRACT), self._made(high, _ADD)
        if less is None or more is None or less.keywords or more.keywords:
            return None
        products = [self._product(name) for op in (less, more) for name in op.operands]
        if len(products) != 4 or None in products:
            return None
        kept, taken, *others = (one for one in products if one is not None)
        for (a, cos), (b, sin) in product(_orders(kept), _orders(taken)):
            self.inside.clear()
            first, second = self._part(a), self._part(b)
            if first is None or second is None or (first.whole, first.pairs) != (second.whole, second.pairs):
                continue
            wanted = {frozenset((b, cos)), frozenset((a, sin))}
            rest = {frozenset(one.operands) for one in others}
            if first.second or not second.second or rest != wanted or not self._tables(first.whole, cos, sin, 2):
                continue
            self._joined(last)
            self._meet(less, more, kept, taken, *others)
            return self._found(last, first.whole, cos, sin, first.pairs, to_pairs)
        return None

    def _found(self, last: Operator, x: str, cos: str, sin: str, from_pairs: bool, to_pairs: bool) -> _Turned:
        return _Turned(
            x=x,
            cos=cos,
            sin=sin,
            from_pairs=from_pairs,
            to_pairs=to_pairs,
            size=self._shape(x)[-1],
            once=self._shape(cos)[-1] != self._shape(x)[-1],
            last=last,
            inside=tuple(self.inside.values()),
        )

    def _meet(self, *operators: Operator) -> None:
        self.inside.update((op.name, op) for op in operators)

    def _swapped(self, name: str) -> _Part | None:
        """The value whose parts b and a were joined as -b and a, and then perhaps cast."""
        cast = self._made(name, *CASTS)
        joiner = self.graph.producer.get(name if cast is None else cast.operands[0])
        joined = None if joiner is None else self._joined(self.graph.operators[joiner])
        if joined is None or joiner is None:
            return None
        (low, high), pairs = joined
        negated = self._made(low, _NEGATE)
        b, a = None if negated is None else self._part(negated.operands[0]), self._part(high)
        if negated is None or a is None or b is None or a != replace(b, second=False) or not b.second:
            return None
        self._meet(negated, self.graph.operators[joiner], *(() if cast is None else (cast,)))
        return a if a.pairs == pairs else None

    def _is_of(self, x: str, across: str, whole: str) -> bool:
        """Whether x is the value whose parts were joined in `across`: itself, or cast as the joined value was cast."""
        cast, other = self._made(x, *CASTS), self._made(across, *CASTS)
        alike = self.graph.types[x].dtype == self.graph.types[across].dtype
        return alike and (x == whole or (cast is not None and other is not None and cast.operands[0] == whole))

    def _put_apart(self, name: str) -> str | None:
        """The value from whose pairs of neighbours another has all first elements before all second ones."""
        flat = self._made(name, *_RESHAPES)
        turned = None if flat is None else self._made(flat.operands[0], _TRANSPOSE)
        viewed = None if turned is None else self._made(turned.operands[0], *_RESHAPES)
        if flat is None or turned is None or viewed is None:
            return None
        shape = self._shape(viewed.operands[0])
        dims = {dim % (len(shape) + 1) for dim in turned.arguments[1:] if isinstance(dim, int)}
        split = self._shape(viewed.results[0]) == (*shape[:-1], shape[-1] // 2, 2)
        if not split or dims != {len(shape) - 1, len(shape)} or self._shape(name) != shape:
            return None
        self._meet(flat, turned, viewed)
        return viewed.operands[0]

    def _joined(self, op: Operator) -> tuple[tuple[str, str], bool] | None:
        """Two values that an operator joins, and whether it joins them element by element."""
        if op.op == _CAT:
            return self._two_of(op, len(self._shape(op.results[0])) - 1, False)
        if op.op not in _RESHAPES or (stack := self._made(op.operands[0], _STACK)) is None:
            return None
        shape = self._shape(stack.results[0])
        if self._shape(op.results[0]) != (*shape[:-2], shape[-2] * shape[-1]):
            return None
        self._meet(stack)
        return self._two_of(stack, len(shape) - 1, True)

    def _two_of(self, op: Operator, dim: int, pairs: bool) -> tuple[tuple[str, str], bool] | None:
        said = op.arguments[1] if len(op.arguments) > 1 else dict(op.keywords).get("dim", 0)
        if len(op.operands) != 2 or not isinstance(said, int) or said % (dim + 1) != dim:
            return None
        first, second = op.operands
        return ((first, second), pairs) if self._shape(first) == self._shape(second) else None

    def _part(self, name: str) -> _Part | None:
        """The part of another value that a value is."""
        op = self._made(name, _SLICE, _CHUNK, _SPLIT, _SPLIT_SIZES, _SELECT, _UNBIND)
        if op is None:
            return None
        whole = op.operands[0]
        if op.op in (_SELECT, _UNBIND):
            viewed = self._made(whole, *_RESHAPES)
            place = op.arguments[2] if op.op == _SELECT else op.results.index(name)
            if viewed is None or place not in (0, 1) or not self._last(op, said_dim(op, 1)):
                return None
            shape = self._shape(viewed.operands[0])
            if self._shape(whole) != (*shape[:-1], shape[-1] // 2, 2):
                return None
            self._meet(op, viewed)
            return _Part(viewed.operands[0], pairs=True, second=place == 1)
        span, extent = _span(self.graph, name), self._shape(whole)[-1]
        half = extent // 2
        known = {(0, half, 1): (False, False), (half, extent, 1): (False, True)}
        known |= {(0, extent, 2): (True, False), (1, extent, 2): (True, True)}
        if span is None or extent % 2 or span not in known:
            return None
        self._meet(op)
        return _Part(whole, *known[span])

    def _tables(self, x: str, cos: str, sin: str, parts: int) -> bool:
        """Whether tables have the last dim of x, or the last dim of one of `parts` parts of it."""
        shapes = [self._shape(name)[-1:] for name in (cos, sin)]
        return all(shape == (self._shape(x)[-1] // parts,) for shape in shapes)

    def _last(self, op: Operator, dim: int | None) -> bool:
        rank = len(self._shape(op.operands[0]))
        return dim is not None and dim % rank == rank - 1

    def _product(self, name: str) -> Operator | None:
        op = self._made(name, _MULTIPLY)
        return op if op is not None and len(op.operands) == 2 and not op.keywords else None

    def _shape(self, name: str | None) -> tuple[int, ...]:
        return tuple(self.graph.types[name or ""].shape)

    def _made(self, name: str, *by: str) -> Operator | None:
        return _made(self.graph, name, *by)


def _of_a_part(graph: OperatorGraph, turned: _Turned) -> tuple[Operator, Operator] | None:
    """The rotation together with the elements of a head that are not rotated and are joined to it: the last operator,
    and the operator in its place."""
    (made,) = turned.last.results
    readers = graph.consumers.get(made or "", ())
    taker = _made(graph, turned.x, _SLICE, _SPLIT, _SPLIT_SIZES)
    join = graph.operators[readers[0]] if len(readers) == 1 else None
    if join is None or taker is None or join.op != _CAT or len(join.operands) != 2:
        return None
    dim, shape = said_dim(join, 1), graph.types[made or ""].shape
    span, whole = _span(graph, turned.x), taker.operands[0]
    if dim is None or dim % len(shape) != len(shape) - 1 or span is None:
        return None
    (other,) = {*join.operands} - {made} or {""}
    beside, passing = _made(graph, other, _SLICE, _SPLIT, _SPLIT_SIZES), _span(graph, other)
    if beside is None or passing is None or beside.operands[0] != whole:
        return None
    spans, extent = [span, passing] if join.operands[0] == made else [passing, span], graph.types[whole].shape[-1]
    inside = (*turned.inside, turned.last, taker, beside)
    follow = [(0, spans[1][0], 1), (spans[0][1], extent, 1)]
    if spans != follow or not _alone(graph, inside, join):
        return None
    return join, turned.call(join, whole, span[0])


def _alone(graph: OperatorGraph, inside: Sequence[Operator], last: Operator) -> bool:
    """Whether only these operators and the last one read their results."""
    known = {last.name, *(op.name for op in inside)}
    made = [name for op in inside for name in op.results if name is not None]
    readers = {graph.operators[at].name for name in made for at in graph.consumers.get(name, ())}
    return readers <= known and {graph.loss, *(content for _, content in graph.updates)}.isdisjoint(made)


def _orders(op: Operator) -> Iterator[tuple[str, str]]:
    """The two operands of a sum or a product, in either order; nothing for a sum that has a factor, too."""
    if len(op.operands) == 2 and not op.keywords:
        first, second = op.operands
        yield first, second
        yield second, first


def _span(graph: OperatorGraph, name: str) -> tuple[int, int, int] | None:
    """First element, end and step of a slice, or of a part of a split, of the last dim of a value."""
    op = _made(graph, name, _SLICE, _CHUNK, _SPLIT, _SPLIT_SIZES)
    if op is None:
        return None
    shape, place = graph.types[op.operands[0]].shape, 1 if op.op == _SLICE else 2
    dim = said_dim(op, place)
    if dim is None or dim % len(shape) != len(shape) - 1:
        return None
    if op.op == _SLICE:
        return said_slice(op, shape[-1])
    at = op.results.index(name)
    widths = [graph.types[one].shape[-1] for one in op.results if one is not None]
    return sum(widths[:at]), sum(widths[: at + 1]), 1


def _made(graph: OperatorGraph, name: str, *by: str) -> Operator | None:
    """The operator that made a value, if it is one of these."""
    at = graph.producer.get(name)
    return graph.operators[at] if at is not None and graph.operators[at].op in by else None
