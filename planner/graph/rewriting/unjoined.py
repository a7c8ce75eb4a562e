"""Tensors that are joined and taken apart again at the same places.

    q ─┐                    ┌─ split ──> q                q ──────────────────────> q
    k ─┼─ cat ─> b s (3 h) ─┼─ slice ──> k      becomes   k ──────────────────────> k
    v ─┘                    └─ ...  ───> v                v ──────────────────────> v

    q, k, v ─ cat ─> b s (3 h) ─ view ─> b s 3 n d ─ permute ─> 3 b n s d ─ unbind ─> q, k, v

In the second case each of them is viewed and permuted by itself. Parts of a weight that lie in one tensor are joined so
(`planner.models.huggingface.taken_apart`, `planner.graph.rewriting.fused_weights`).
Cut along h, each device has all of the joined tensor in its own order; each part by itself is cut like any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, VIEWS, said_dim, said_slice
from planner.graph.rewriting.unread import rewired, without_unread

_CAT, _SLICE, _UNBIND, _SELECT = "aten.cat.default", "aten.slice.Tensor", "aten.unbind.int", "aten.select.int"
_UNFLATTEN = "aten.unflatten.int"
_OPENS = VIEWS | {_UNFLATTEN}
"""Operators that may give the parts a dim of their own."""


def with_parts_unjoined(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without joined tensors that are read in the parts that were joined, and in no other way."""
    found = _Unjoined(graph)
    for op in graph.operators:
        if op.op == _CAT:
            found.visit(op)
    if not found.names:
        return graph
    operators = [new for op in graph.operators for new in (*found.views.get(op.name, ()), op.reading(found.names))]
    left = replace(rewired(graph, operators, found.names), types={**graph.types, **found.types})
    return without_unread(left, found.gone)


@dataclass(slots=True)
class _Unjoined:
    """What stands for the parts that are read of joined tensors: `names` of the values, `views` of parts that are made
    before an operator, and their `types`. Nothing reads the values in `gone` any more."""

    graph: OperatorGraph
    names: dict[str, str] = field(default_factory=dict)
    views: dict[str, tuple[Operator, ...]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def visit(self, op: Operator) -> None:
        """Look at an operator that joins tensors."""
        joined = _result(op)
        dim = _along(self.graph, op, 1)
        dtypes = {self.graph.types[name].dtype for name in (*op.operands, joined)}
        read = [self.graph.operators[at] for at in self.graph.consumers.get(joined, ())]
        kept = {self.graph.loss, *(value for _, value in self.graph.updates)}
        if dim is None or not read or joined in kept or len(dtypes) > 1:  # a join may convert its parts
            return
        parts = [self._parts_read(reader, op.operands, dim) for reader in read]
        if any(each is None for each in parts):
            return
        for each in parts:
            assert each is not None
            self._take(each)
        self.gone.add(joined)

    def _take(self, found: "_Parts") -> None:
        self.names |= found.names
        self.views |= found.views
        self.types |= found.types
        self.gone |= found.gone

    def _parts_read(self, reader: Operator, parts: Sequence[str], dim: int) -> "_Parts | None":
        """What an operator reads that reads the parts joined; None where it reads something else."""
        shapes = [self.graph.types[name].shape for name in parts]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            return None
        sizes = [shape[dim] for shape in shapes]
        if reader.op in SPLITS and _along(self.graph, reader, SPLITS[reader.op]) == dim:
            results = [name for name in reader.results if name is not None]
            same = [self.graph.types[name].shape[dim] for name in results] == sizes
            return _Parts().rename(dict(zip(results, parts, strict=True))) if same else None
        if reader.op == _SLICE and _along(self.graph, reader, 1) == dim:
            span = said_slice(reader, sum(sizes))
            found = [name for name, each in zip(parts, _places(sizes), strict=True) if (*each, 1) == span]
            return _Parts().rename({_result(reader): found[0]}) if found else None
        if dim == len(shapes[0]) - 1 and len(set(sizes)) == 1 and opened_into(self.graph, reader) == len(parts):
            return self._opened(reader, parts, dim)
        return None

    def _opened(self, view: Operator, parts: Sequence[str], dim: int) -> "_Parts | None":
        """The same of a view that gives the parts a dim of their own, along which they are taken apart."""
        found, result = _Parts(), _result(view)
        shape = self.graph.types[result].shape
        own = [*shape[:dim], *shape[dim + 1 :]]
        values = {}
        for number, part in enumerate(dict.fromkeys(parts)):
            if own == list(self.graph.types[part].shape):
                values[part] = part
            else:
                op = "aten.view.default" if view.op == _UNFLATTEN else view.op
                values[part] = found.add(view, number, replace(self.graph.types[part], shape=tuple(own)), op, part)
        return found if self._apart(result, dim, [values[part] for part in parts], found) else None

    def _apart(self, joined: str, dim: int, values: Sequence[str], found: "_Parts") -> bool:
        """Whether all that reads a tensor takes it apart along a dim, maybe after it has moved dims. `values` are the
        parts; what stands for the results goes to `found`."""
        readers = [self.graph.operators[at] for at in self.graph.consumers.get(joined, ())]
        found.gone.add(joined)
        return bool(readers) and all(self._part_of(reader, dim, values, found) for reader in readers)

    def _part_of(self, reader: Operator, dim: int, values: Sequence[str], found: "_Parts") -> bool:
        rank = len(self.graph.types[reader.operands[0]].shape)
        if reader.op == _UNBIND and _along(self.graph, reader, 1) == dim:
            found.rename({name: value for name, value in zip(reader.results, values, strict=True) if name is not None})
            return True
        if reader.op == _SELECT and _along(self.graph, reader, 1) == dim:
            number = reader.arguments[2]
            if not isinstance(number, int):
                return False
            found.rename({_result(reader): values[number]})
            return True
        if len(reader.results) != 1 or reader.results[0] is None:
            return False
        kind = self.graph.types[reader.results[0]]
        move = _moved(reader, dim, rank, len(kind.shape))
        if move is None:
            return False
        kind = replace(kind, shape=(*kind.shape[: move.after], *kind.shape[move.after + 1 :]))
        made = {
            value: found.add(reader, number, kind, move.op, value, move.arguments) if move.arguments else value
            for number, value in enumerate(dict.fromkeys(values))
        }
        return self._apart(reader.results[0], move.after, [made[value] for value in values], found)


@dataclass(slots=True)
class _Parts:
    """What stands for the results of operators that read parts: the same fields as those of `_Unjoined`."""

    names: dict[str, str] = field(default_factory=dict)
    views: dict[str, tuple[Operator, ...]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def rename(self, names: Mapping[str, str]) -> "_Parts":
        """Let parts stand for results, as they are."""
        self.names |= names
        self.gone |= names.keys()
        return self

    def add(
        self, old: Operator, number: int, kind: TensorType, op: str, operand: str, arguments: tuple[Argument, ...] = ()
    ) -> str:
        """An operator on one part in place of an operator on all of them, with its result, which it returns. A view has
        the shape of its result for an argument."""
        name = f"{_result(old)} {number}"
        self.types[name] = kind
        given = (ValueRef(operand), *(arguments or (kind.shape,)))
        made = replace(old, op=op, name=name, arguments=given, keywords=(), results=(name,))
        self.views[old.name] = (*self.views.get(old.name, ()), made)
        return name


def opened_into(graph: OperatorGraph, view: Operator) -> int:
    """The number of parts of which a view of a tensor gives its last dim a dim of their own; 1 for other operators."""
    if view.op not in _OPENS:
        return 1
    before, after = graph.types[view.operands[0]].shape, graph.types[_result(view)].shape
    dim = len(before) - 1
    return after[dim] if len(after) > dim + 1 and after[:dim] == before[:dim] else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """What an operator that moves dims is for a tensor without one of them: another operator with these arguments, or
    nothing (no arguments). `after` is where that dim is afterwards."""

    op: str
    arguments: tuple[Argument, ...]
    after: int


def _moved(op: Operator, dim: int, before: int, ranks_after: int) -> _Move | None:
    """What an operator is for a tensor without a dim, of `before` dims with it; None for one that does not move dims,
    adds none of length one and drops none of the others."""
    said = op.arguments[1:]
    numbers = [one for one in said if isinstance(one, int)]
    if op.op == "aten.permute.default" and isinstance(said[0], tuple):
        return _ordered([one % before for one in said[0] if isinstance(one, int)], dim)
    if op.op == "aten.transpose.int" and len(numbers) == 2:
        order = list(range(before))
        first, second = (one % before for one in numbers)
        order[first], order[second] = second, first
        return _ordered(order, dim)
    if op.op == "aten.unsqueeze.default" and len(numbers) == 1:
        at = numbers[0] % (before + 1)
        return _Move(op=op.op, arguments=(at - (at > dim),), after=dim + (at <= dim))
    if op.op == "aten.squeeze.dim" and len(numbers) == 1 and ranks_after == before - 1:
        at = numbers[0] % before
        return None if at == dim else _Move(op=op.op, arguments=(at - (at > dim),), after=dim - (at < dim))
    return None


def _ordered(order: Sequence[int], dim: int) -> _Move:
    own = tuple(one - (one > dim) for one in order if one != dim)
    same = own == tuple(range(len(own)))
    return _Move(op="aten.permute.default", arguments=() if same else (own,), after=order.index(dim))


def _result(op: Operator) -> str:
    (name,) = op.results
    assert name is not None
    return name


def _along(graph: OperatorGraph, op: Operator, place: int) -> int | None:
    """The dim that an operator works along, counted from the first; None where it is not a number."""
    dim = said_dim(op, place)
    return None if dim is None else dim % len(graph.types[op.operands[0]].shape)


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    at = 0
    for size in sizes:
        yield at, at + size
        at += size
