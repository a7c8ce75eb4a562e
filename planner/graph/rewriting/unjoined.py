"""Tensors that are joined and taken apart again at the same places.

    q ─┐                    ┌─ split ──> q                q ──────────────────────> q
    k ─┼─ cat ─> b s (3 h) ─┼─ slice ──> k      becomes   k ──────────────────────> k
    v ─┘                    └─ ...  ───> v                v ──────────────────────> v

    q, k, v ─ cat ─> b s (3 h) ─ view ─> b s 3 n d ─ unbind ─> q, k, v      and each of them is viewed by itself

Parts of a weight that lie in one tensor in other libraries are joined so (`planner.models.huggingface.taken_apart`).
Cut along h, each device has all of the joined tensor in its own order; each part by itself is cut like any other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Operator, OperatorGraph, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, VIEWS, said_dim, said_slice
from planner.graph.rewriting.unread import rewired, without_unread

_CAT, _SLICE, _UNBIND = "aten.cat.default", "aten.slice.Tensor", "aten.unbind.int"


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
        for reader, each in zip(read, parts, strict=True):
            assert each is not None
            if reader.op in VIEWS:
                self._view_apart(reader, op.operands, each)
            else:
                self.names |= each
            self.gone |= each.keys()
        self.gone |= {joined, *(_result(reader) for reader in read if reader.op in VIEWS)}

    def _parts_read(self, reader: Operator, parts: Sequence[str], dim: int) -> dict[str, str] | None:
        """The part that each result is, of an operator that reads them joined; None where a result is something else.
        For a view, the results are those of the operators that read it."""
        shapes = [self.graph.types[name].shape for name in parts]
        if any(len(shape) != len(shapes[0]) for shape in shapes):
            return None
        sizes = [shape[dim] for shape in shapes]
        if reader.op in SPLITS and _along(self.graph, reader, SPLITS[reader.op]) == dim:
            results = [name for name in reader.results if name is not None]
            same = [self.graph.types[name].shape[dim] for name in results] == sizes
            return dict(zip(results, parts, strict=True)) if same else None
        if reader.op == _SLICE and _along(self.graph, reader, 1) == dim:
            span = said_slice(reader, sum(sizes))
            found = [name for name, each in zip(parts, _places(sizes), strict=True) if (*each, 1) == span]
            return {_result(reader): found[0]} if found else None
        if reader.op in VIEWS and len(set(sizes)) == 1:
            return self._unbound(reader, parts, dim)
        return None

    def _unbound(self, view: Operator, parts: Sequence[str], dim: int) -> dict[str, str] | None:
        """The same of a view that gives the parts a dim of their own, along which they are taken apart."""
        before, after = self.graph.types[view.operands[0]].shape, self.graph.types[_result(view)].shape
        if dim != len(before) - 1 or after[: dim + 1] != (*before[:dim], len(parts)):
            return None
        found: dict[str, str] = {}
        for at in self.graph.consumers.get(_result(view), ()):
            reader = self.graph.operators[at]
            if reader.op != _UNBIND or _along(self.graph, reader, 1) != dim:
                return None
            found |= {name: part for name, part in zip(reader.results, parts, strict=True) if name is not None}
        return found or None

    def _view_apart(self, view: Operator, parts: Sequence[str], found: Mapping[str, str]) -> None:
        """View every part by itself, as the view of all has it."""
        shape = self.graph.types[_result(view)].shape
        dim = len(self.graph.types[parts[0]].shape) - 1
        made = {}
        for number, part in enumerate(dict.fromkeys(parts)):
            name = made[part] = f"{_result(view)} {number}"
            self.types[name] = replace(self.graph.types[part], shape=(*shape[:dim], *shape[dim + 1 :]))
        self.views[view.name] = tuple(
            replace(view, name=name, arguments=(ValueRef(part), self.types[name].shape), keywords=(), results=(name,))
            for part, name in made.items()
        )
        self.names |= {result: made[part] for result, part in found.items()}


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
