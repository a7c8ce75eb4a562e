"""Tensors that are joined and taken apart again at the same places.

    q ─┐                    ┌─ split ──> q                q ──────────────────────> q
    k ─┼─ cat ─> b s (3 h) ─┼─ slice ──> k      becomes   k ──────────────────────> k
    v ─┘                    └─ ...  ───> v                v ──────────────────────> v

    q, k, v ─ cat ─> b s (3 h) ─ view ─> b s 3 n d ─ permute ─> 3 b n s d ─ unbind ─> q, k, v

In the second case each of them is viewed and permuted by itself. Parts of a weight are joined so, too
(`planner.graph.rewriting.fused_weights`). Cut along h, each device has all of the joined tensor in its own order; each
part by itself is cut like any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, VIEWS, said_dim, said_slice
from planner.graph.rewriting.unread import rewired, without_unread

_CAT, _SLICE, _UNBIND, _SELECT = "aten.cat.default", "aten.slice.Tensor", "aten.unbind.int", "aten.select.int"
_UNFLATTEN = "aten.unflatten.int"
TAKES_PARTS = SPLITS.keys() | {_SLICE, _UNBIND, _SELECT}
"""Operators that take parts of a tensor."""

_OPENS = VIEWS | {_UNFLATTEN}
"""Operators that may give the parts a dim of their own."""


def with_parts_unjoined(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without joined tensors that are read in the parts that were joined, and in no other way."""
    found = _Parts(graph)
    kept = {graph.loss, *(value for _, value in graph.updates)}
    for op in graph.operators:
        if op.op == _CAT and _result(op) not in kept:
            found.join(op)
    if not found.names:
        return graph
    operators = [new for op in graph.operators for new in (*found.made.get(op.name, ()), op.reading(found.names))]
    left = replace(rewired(graph, operators, found.names), types={**graph.types, **found.types})
    return without_unread(left, found.gone)


@dataclass(slots=True)
class _Parts:
    """What stands for the results of operators that read parts of joined tensors: `names` of the values, operators on
    one part `made` before an operator on all of them, and their `types`. Nothing reads the values in `gone` any more.
    """

    graph: OperatorGraph
    names: dict[str, str] = field(default_factory=dict)
    made: dict[str, tuple[Operator, ...]] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def join(self, op: Operator) -> None:
        """Look at an operator that joins tensors."""
        dim = _along(self.graph, op, 1)
        kinds = [self.graph.types[name] for name in op.operands]
        alike = len({(kind.dtype, len(kind.shape)) for kind in (*kinds, self.graph.types[_result(op)])}) == 1
        if dim is None or not alike:  # a join may convert its parts
            return
        found = _Parts(self.graph)
        if found._joined(_result(op), dim, op.operands):
            self.names |= found.names
            self.made |= found.made
            self.types |= found.types
            self.gone |= found.gone

    def _readers(self, name: str) -> list[Operator]:
        self.gone.add(name)
        return [self.graph.operators[at] for at in self.graph.consumers.get(name, ())]

    def _joined(self, name: str, dim: int, parts: Sequence[str]) -> bool:
        """Whether all that reads a tensor, in which parts lie behind each other along a dim, reads the parts."""
        readers = self._readers(name)
        return bool(readers) and all(self._of_joined(reader, dim, parts) for reader in readers)

    def _of_joined(self, reader: Operator, dim: int, parts: Sequence[str]) -> bool:
        kinds = [self._type(part) for part in parts]
        sizes = [kind.shape[dim] for kind in kinds]
        if reader.op in SPLITS and _along(self.graph, reader, SPLITS[reader.op]) == dim:
            results = [name for name in reader.results if name is not None]
            same = [self.graph.types[name].shape[dim] for name in results] == sizes
            return same and self._stand(dict(zip(results, parts, strict=True)))
        if reader.op == _SLICE and _along(self.graph, reader, 1) == dim:
            span = said_slice(reader, sum(sizes))
            found = [name for name, each in zip(parts, _places(sizes), strict=True) if (*each, 1) == span]
            return bool(found) and self._stand({_result(reader): found[0]})
        if dim != len(kinds[0].shape) - 1:
            return False
        if keeps_last(self.graph, reader):
            before = self.graph.types[_result(reader)].shape[:-1]
            own = [replace(kind, shape=(*before, size)) for kind, size in zip(kinds, sizes, strict=True)]
            return self._joined(_result(reader), len(before), self._each(reader, parts, own))
        if opened_into(self.graph, reader) != len(parts) or len(set(sizes)) > 1:
            return False
        shape = self.graph.types[_result(reader)].shape
        own = [replace(kind, shape=(*shape[:dim], *shape[dim + 1 :])) for kind in kinds]
        return self._stacked(_result(reader), dim, self._each(reader, parts, own))

    def _stacked(self, name: str, dim: int, parts: Sequence[str]) -> bool:
        """Whether all that reads a tensor, in which parts have a dim of their own, takes them apart along that dim,
        maybe after it has moved dims."""
        readers = self._readers(name)
        return bool(readers) and all(self._of_stacked(reader, dim, parts) for reader in readers)

    def _of_stacked(self, reader: Operator, dim: int, parts: Sequence[str]) -> bool:
        if reader.op == _UNBIND and _along(self.graph, reader, 1) == dim:
            results = zip(reader.results, parts, strict=True)
            return self._stand({name: part for name, part in results if name is not None})
        if reader.op == _SELECT and _along(self.graph, reader, 1) == dim:
            number = reader.arguments[2]
            return isinstance(number, int) and self._stand({_result(reader): parts[number]})
        if len(reader.results) != 1:
            return False
        result = _result(reader)
        shape = self.graph.types[result].shape
        move = _moved(reader, dim, len(self.graph.types[reader.operands[0]].shape), len(shape))
        if move is None:
            return False
        if move.arguments:
            kind = replace(self.graph.types[result], shape=(*shape[: move.after], *shape[move.after + 1 :]))
            parts = self._each(reader, parts, [kind] * len(parts), move)
        return self._stacked(result, move.after, parts)

    def _type(self, name: str) -> TensorType:
        return self.types[name] if name in self.types else self.graph.types[name]

    def _stand(self, names: Mapping[str, str]) -> bool:
        """Let parts stand for results, as they are."""
        self.names |= names
        self.gone |= names.keys()
        return True

    def _each(
        self, old: Operator, parts: Sequence[str], kinds: Sequence[TensorType], move: "_Move | None" = None
    ) -> list[str]:
        """Parts after a view of each to its shape, or after a move of its dims, where an operator did so with all."""
        found: dict[str, str] = {}
        for number, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
            if part in found or (move is None and kind.shape == self._type(part).shape):
                found.setdefault(part, part)
                continue
            name = found[part] = f"{_result(old)} {number}"
            self.types[name] = kind
            op = move.op if move is not None else old.op if old.op in VIEWS else "aten.view.default"
            given = move.arguments if move is not None else (kind.shape,)
            new = replace(old, op=op, name=name, arguments=(ValueRef(part), *given), keywords=(), results=(name,))
            self.made[old.name] = (*self.made.get(old.name, ()), new)
        return [found[part] for part in parts]


def keeps_last(graph: OperatorGraph, view: Operator) -> bool:
    """Whether an operator views other dims of a tensor than the last one."""
    if view.op not in VIEWS:
        return False
    before, after = graph.types[view.operands[0]].shape, graph.types[_result(view)].shape
    return bool(before) and bool(after) and before[-1] == after[-1]


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
