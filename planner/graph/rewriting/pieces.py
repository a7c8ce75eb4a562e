"""Pieces of a tensor that are joined again, and pieces that are all computed alike.

    x ─ split ─> x0, x1, ... ─ cat ─> y                          y is x: features of images, handed on as a list
    x ─ unbind ─> x0, x1, ... ─ cat ─> y                         y is x with two dims merged

    q, k, v ─ split ─> attention of each piece ─ cat ─> o        images of a packed batch, each for itself

The last becomes one attention with the pieces as samples, 1 h (n l) d -> n h l d: one operator for any number of
images, which is cut along them. Pieces of several lengths, in the same order for each sample, become one attention for
each of these lengths, over all samples. Without this the number of operators would grow with the batch of a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, VIEWS, said_dim
from planner.graph.rewriting.masks import COMPOSED_ATTENTION
from planner.graph.rewriting.unread import rewired, without_unread

_CAT, _STACK, _UNBIND = "aten.cat.default", "aten.stack.default", "aten.unbind.int"
_APART: Mapping[str, int] = {**SPLITS, _UNBIND: 1}
"""Operators that take a tensor apart, and the position of the argument for the dim."""
_RESHAPE, _PERMUTE = "aten.reshape.default", "aten.permute.default"
_TRANSPOSE = "aten.transpose.int"
_BY_SAMPLE = frozenset(
    {"aten.scaled_dot_product_attention.default", COMPOSED_ATTENTION, "aten.matmul.default", "aten.softmax.int",
     "aten.clone.default", "aten.to.dtype", "aten.dropout.default", "aten.mul.Tensor", _TRANSPOSE}
)  # fmt: skip
"""Operators whose first dim is that of samples and that compute each sample by itself, if all operands have the same
number of dims."""


def with_pieces_together(graph: OperatorGraph, samples: int) -> OperatorGraph:
    """`graph`, traced with `samples` samples, without tensors that are taken apart and joined again unchanged, and
    with pieces that are computed alike as samples of one call."""
    if not any(op.op in _APART for op in graph.operators):
        return graph
    found = _Together(graph, samples)
    for op in graph.operators:
        found.visit(op)
    if not found.replaced:
        return graph
    left = rewired(graph, found.operators, found.names)
    return without_unread(replace(left, types={**graph.types, **found.types}), found.replaced)


@dataclass(frozen=True, slots=True)
class _Tree:
    """The operators that make each of n pieces: alike, with their operands; a leaf is the operator that split them."""

    pieces: tuple[Operator, ...]
    operands: tuple["_Tree", ...] = ()

    def leaves(self) -> Iterator[Operator]:
        if not self.operands:
            yield self.pieces[0]
        for each in self.operands:
            yield from each.leaves()


_TENSOR = ValueRef("")
"""Stands for any tensor among the settings of a call, to tell it from None."""


@dataclass
class _Together:
    """The operators as they are rewritten. `names` has the value in place of a result that is gone, `replaced` the
    results that nothing reads any more."""

    graph: OperatorGraph
    samples: int
    operators: list[Operator] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)

    def visit(self, op: Operator) -> None:
        joined = op.arguments[0] if op.op in (_CAT, _STACK) else None
        names = [each.name for each in joined if isinstance(each, ValueRef)] if isinstance(joined, tuple) else []
        if len(names) < 2 or not (self._whole(op, names) or (op.op == _CAT and self._alike(op, names))):
            self.operators.append(op.reading(self.names))

    def _producer(self, name: str) -> Operator | None:
        at = self.graph.producer.get(name)
        return None if at is None else self.graph.operators[at]

    def _whole(self, op: Operator, names: Sequence[str]) -> bool:
        """Whether an operator joins the pieces of one tensor; if so, it is removed."""
        source = self._producer(names[0])
        if source is None or source.op not in _APART or source.results != tuple(names):
            return False
        dim, apart = _dim(self.graph, op, 1), _dim(self.graph, source, _APART[source.op])
        if dim != apart or (op.op == _STACK) != (source.op == _UNBIND and op.op == _STACK):
            return False
        (result,), whole = _results(op), source.operands[0]
        self.replaced.update(names)
        if self.graph.types[result].shape == self.graph.types[whole].shape:
            self.names[result] = self.names.get(whole, whole)
            self.replaced.add(result)
        else:  # unbind, cat
            shape = self.graph.types[result].shape
            call = replace(op, op=_RESHAPE, arguments=(ValueRef(whole), shape), keywords=())
            self.operators.append(call.reading(self.names))
        return True

    def _alike(self, op: Operator, names: Sequence[str]) -> bool:
        """Whether an operator joins pieces that were computed alike; if so, they become samples."""
        if self.samples < 2:  # any first dim is 1 then, that of the batch too
            return False
        tree = self._tree(tuple(names))
        dim = _dim(self.graph, op, 1)
        if tree is None or not tree.operands or dim < 1:
            return False
        lengths = {tuple(self._lengths(leaf)) for leaf in tree.leaves()}
        if len(lengths) != 1:
            return False
        sizes = lengths.pop()
        period = _period(sizes, self.samples)
        if period is None or not self._repeats(tree, period):
            return False
        times = len(sizes) // period
        apart = {leaf.name: self._apart(leaf, times, sizes[:period]) for leaf in tree.leaves()}
        made = [self._call(tree, number, times, apart) for number in range(period)]
        together = made[0]
        if period > 1:
            shape = _with(self.graph.types[names[0]].shape, {0: times, dim: self._extent(made, dim)})
            together = self._add(op, _CAT, (tuple(map(ValueRef, made)), dim), shape, f"{names[0]} together")
        shape = self._type(together).shape
        order = (*range(1, dim), 0, *range(dim, len(shape)))
        turned = self._add(
            op,
            _PERMUTE,
            (ValueRef(together), order),
            tuple(shape[d] for d in order),
            f"{names[0]} turned",
            strided=True,
        )
        (result,) = _results(op)
        final = replace(op, op=_RESHAPE, arguments=(ValueRef(turned), self.graph.types[result].shape), keywords=())
        self.operators.append(final)
        self.replaced.update(names)
        return True

    def _extent(self, names: Sequence[str], dim: int) -> int:
        return sum(self._type(name).shape[dim] for name in names)

    def _type(self, name: str) -> TensorType:
        return self.types[name] if name in self.types else self.graph.types[name]

    def _tree(self, names: tuple[str, ...]) -> _Tree | None:
        """The operators that make these values alike, each from a piece of its own; None where there are none."""
        makers = [self._producer(name) for name in names]
        first = makers[0]
        if first is None or any(len(self.graph.consumers.get(name, ())) != 1 for name in names):
            return None
        if first.op in _APART and first.op != _UNBIND and first.results == names:
            source, dim = self.graph.types[first.operands[0]], _dim(self.graph, first, _APART[first.op])
            return _Tree((first,)) if source.shape[0] == 1 and dim > 0 else None
        pieces = [op for op in makers if op is not None and op.op == first.op and _settings(op) == _settings(first)]
        if len(pieces) != len(names) or not self._by_sample(first):
            return None
        operands = []
        for place in range(len(first.operands)):
            found = self._tree(tuple(op.operands[place] for op in pieces))
            if found is None:
                return None
            operands.append(found)
        return _Tree(tuple(pieces), tuple(operands))

    def _by_sample(self, op: Operator) -> bool:
        (result,) = _results(op) if len(op.results) == 1 and op.results[0] else ("",)
        types = [self.graph.types[name] for name in (*op.operands, *([result] if result else []))]
        if not result or any(each.shape[:1] != (1,) for each in types):
            return False
        if op.op in VIEWS:
            return len(types[0].shape) > 1
        if op.op == _TRANSPOSE:
            return all(isinstance(dim, int) and dim % len(types[0].shape) != 0 for dim in op.arguments[1:])
        if op.op == "aten.softmax.int":
            return isinstance(op.arguments[1], int) and op.arguments[1] % len(types[0].shape) != 0
        least = 3 if op.op == "aten.matmul.default" else 1
        return op.op in _BY_SAMPLE and len({len(each.shape) for each in types}) == 1 and len(types[0].shape) >= least

    def _repeats(self, tree: _Tree, period: int) -> bool:
        """Whether pieces, and all values made from them, have the shapes of those one period before."""
        shapes = [self.graph.types[_results(op)[0]].shape for op in tree.pieces] if tree.operands else []
        return shapes[period:] == shapes[:-period] and all(self._repeats(each, period) for each in tree.operands)

    def _lengths(self, split: Operator) -> Iterator[int]:
        dim = _dim(self.graph, split, _APART[split.op])
        return (self.graph.types[name].shape[dim] for name in _results(split))

    def _apart(self, split: Operator, times: int, sizes: Sequence[int]) -> list[str]:
        """The pieces of a tensor as samples, one result for each of the lengths."""
        whole, dim = split.operands[0], _dim(self.graph, split, _APART[split.op])
        shape = self.graph.types[whole].shape
        within = sum(sizes)
        apart = (*shape[1:dim], times, within, *shape[dim + 1 :])
        name = self._add(split, _RESHAPE, (ValueRef(self.names.get(whole, whole)), apart), apart, f"{whole} apart")
        order = (dim - 1, *range(dim - 1), *range(dim, len(shape)))
        turned = tuple(apart[d] for d in order)
        name = self._add(split, _PERMUTE, (ValueRef(name), order), turned, f"{whole} turned", strided=True)
        self.replaced.update(_results(split))
        if len(sizes) == 1:
            return [name]
        results = [f"{whole} piece {number}" for number in range(len(sizes))]
        like = self.graph.types[whole]
        self.types |= {
            each: replace(like, shape=_with(turned, {dim: size}), contiguous=False)
            for each, size in zip(results, sizes, strict=True)
        }
        self.operators.append(
            replace(
                split,
                op="aten.split_with_sizes.default",
                arguments=(ValueRef(name), tuple(sizes), dim),
                keywords=(),
                results=tuple(results),
            )
        )
        return results

    def _call(self, tree: _Tree, number: int, times: int, apart: Mapping[str, Sequence[str]]) -> str:
        """The call for all pieces at the place `number` of every sample."""
        if not tree.operands:
            return apart[tree.pieces[0].name][number]
        op = tree.pieces[number]
        read = [self._call(each, number, times, apart) for each in tree.operands]
        (result,) = _results(op)
        name = f"{result} of all"
        self.types[name] = replace(self.graph.types[result], shape=_with(self.graph.types[result].shape, {0: times}))
        arguments = op.arguments
        if op.op in VIEWS:
            assert isinstance(arguments[1], tuple)
            arguments = (arguments[0], self.types[name].shape)
        call = replace(op, arguments=arguments, results=(name,))
        self.operators.append(call.reading(dict(zip(op.operands, read, strict=True))))
        self.replaced.update(name for each in tree.pieces for name in _results(each))
        return name

    def _add(
        self, op: Operator, call: str, arguments: tuple[Argument, ...], shape: tuple[int, ...], name: str,
        *, strided: bool = False,
    ) -> str:  # fmt: skip
        """Add a call in place of an operator. Returns its result."""
        like = self.graph.types[_results(op)[0]]
        while name in self.types:
            name += "'"
        self.types[name] = TensorType(shape=shape, dtype=like.dtype, contiguous=not strided)
        self.operators.append(replace(op, op=call, arguments=arguments, keywords=(), results=(name,)))
        return name


def _results(op: Operator) -> list[str]:
    return [name for name in op.results if name is not None]


def _dim(graph: OperatorGraph, op: Operator, place: int) -> int:
    """The dim that an operator works along, counted from the first."""
    dim = said_dim(op, place)
    assert dim is not None
    rank = len(graph.types[op.operands[0]].shape) + (op.op == _STACK)
    return dim % rank


def _settings(op: Operator) -> object:
    """The arguments of a call beside tensors, and beside shapes that are spelled out."""
    spelled = op.op in VIEWS
    said = [_TENSOR if isinstance(each, ValueRef) else None if spelled else each for each in op.arguments]
    return said, op.keywords


def _with(shape: tuple[int, ...], changed: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(changed.get(dim, extent) for dim, extent in enumerate(shape))


def _period(sizes: Sequence[int], samples: int) -> int | None:
    """After how many pieces their lengths repeat: after one, or after those of a sample; None where they do not."""
    if len(set(sizes)) == 1:
        return 1
    period, over = divmod(len(sizes), samples)
    alike = not over and all(size == sizes[place % period] for place, size in enumerate(sizes))
    return period if alike else None
