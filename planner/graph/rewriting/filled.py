"""Tensors that are filled piece by piece, rewritten as the join of the pieces.

    zeros ─ slice_scatter a at 0:n ─ slice_scatter b at n:m ─>        as it was exported
    cat(a, b) ─>                                                      as it is kept

(Keys of multi-head latent attention in transformers: an empty tensor, into which the part of each head and the part
that all share are copied.) Where pieces fill all of a dim, the content of the tensor before is overwritten. Piece by
piece, the whole passes memory once for each piece, and once for the zeros.
"""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import replaced

_CAT, _COPY, _PUT = "aten.cat.default", "aten.copy.default", "aten.slice_scatter.default"
_NAMES = ("self", "src", "dim", "start", "end", "step")


def with_filled_joined(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with a join for each tensor that pieces fill; values that only the old operators read are gone."""
    reader = _Reader(graph)
    found = {op.name: made for op in graph.operators if op.op == _PUT and (made := reader.joined(op)) is not None}
    return replaced(graph, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """A value that fills places from `start` to `stop` of a dim of `base`."""

    base: str
    value: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Reader:
    graph: OperatorGraph

    def joined(self, last: Operator) -> Operator | None:
        """The join in place of the last of several pieces; None where they do not fill a dim, each place once."""
        types, pieces = self.graph.types, list[_Piece]()
        made = types[last.results[0] or ""]
        op: Operator | None = last
        while op is not None and (piece := self._piece(op)) is not None and (not pieces or piece.dim == pieces[0].dim):
            pieces.append(piece)
            op = self._made(piece.base)
        while pieces and not _fill(pieces, made.shape[pieces[0].dim]):
            pieces.pop()  # others may fill what stood there before
        if not pieces or any(types[piece.value].dtype != made.dtype for piece in pieces):
            return None
        in_order = sorted(pieces, key=lambda piece: piece.start)
        values = tuple(ValueRef(piece.value) for piece in in_order)
        return replace(last, op=_CAT, arguments=(values, pieces[0].dim), keywords=()) if len(values) > 1 else None

    def _piece(self, op: Operator) -> _Piece | None:
        if op.op != _PUT:
            return None
        said: dict[str, Argument] = dict(zip(_NAMES, op.arguments, strict=False)) | dict(op.keywords)
        base, value, dim, step = said["self"], said["src"], said.get("dim", 0), said.get("step", 1)
        if not isinstance(base, ValueRef) or not isinstance(value, ValueRef) or not isinstance(dim, int) or step != 1:
            return None
        shape = self.graph.types[base.name].shape
        dim %= len(shape)
        start, stop = (_place(said.get(name), usual, shape[dim]) for name, usual in (("start", 0), ("end", shape[dim])))
        return _Piece(base=base.name, value=self._copied(value.name), dim=dim, start=start, stop=stop)

    def _copied(self, name: str) -> str:
        """The value of the same shape and dtype that a value is a copy of."""
        op, types = self._made(name), self.graph.types
        source = op.arguments[1] if op is not None and op.op == _COPY else None
        if not isinstance(source, ValueRef):
            return name
        made, before = types[name], types[source.name]
        return source.name if (made.shape, made.dtype) == (before.shape, before.dtype) else name

    def _made(self, name: str) -> Operator | None:
        at = self.graph.producer.get(name)
        return None if at is None else self.graph.operators[at]


def _place(said: Argument | None, usual: int, extent: int) -> int:
    """Where a slice begins or ends: counted from the end where it is negative, and never outside."""
    place = said if isinstance(said, int) else usual
    return min(max(0, place + extent if place < 0 else place), extent)


def _fill(pieces: list[_Piece], extent: int) -> bool:
    """Whether these fill a dim, each place once."""
    places = sorted((piece.start, piece.stop) for piece in pieces)
    ends = [0, *(stop for _, stop in places)]
    return ends[-1] == extent and all(start == end < stop for (start, stop), end in zip(places, ends, strict=False))
