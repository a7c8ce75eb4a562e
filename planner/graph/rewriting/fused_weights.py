"""Weights of linear layers that hold several matrices, as several parameters.

    x ─ linear, (3 h) i ─> b s (3 h) ─ split ─┬─ q        cut along 3 h, a rank would have all of the queries, and
                                              ├─ k        others all of the keys: attention needs them gathered
                                              └─ v
    x ─┬─ linear, h i ─> q                                each rank has its heads of all three, as in Megatron-LM
       ├─ linear, h i ─> k
       └─ linear, h i ─> v

The same holds for gate and up of a gated MLP, and for `nn.MultiheadAttention`. A layer is taken apart where all that
reads its result takes it apart at the same places (`planner.graph.rewriting.unjoined`), where all parts are read, and
where its weight and bias have no other reader and no other name. The module keeps its weight: `Parameter.cut` says
where in it each parameter lies. Results and gradients are the same. Muon and LAMB update each matrix by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.graph.operator_graph import Cut, Operator, OperatorGraph, Parameter, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, said_dim, said_slice
from planner.graph.rewriting.unjoined import opened_into, with_parts_unjoined

_LINEAR, _CAT, _SLICE = "aten.linear.default", "aten.cat.default", "aten.slice.Tensor"


def with_fused_weights_apart(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with a parameter for each matrix in the weight of a linear layer whose result is only read in parts."""
    known = {parameter.name: parameter for parameter in graph.parameters}
    layers = {op.name: found for op in graph.operators if (found := _fused(graph, op, known)) is not None}
    while layers:
        apart = with_parts_unjoined(_with_layers(graph, layers))
        joined = {op.name for op in apart.operators if op.op == _CAT}
        left = {
            name: layer
            for name, layer in layers.items()
            if name not in joined and all(part in apart.consumers for part in layer.parts)
        }
        if len(left) == len(layers):
            return apart
        layers = left
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """A linear layer: its operator, the rows of each matrix in its weight, and the weight and bias."""

    op: Operator
    sizes: tuple[int, ...]
    parameters: tuple[Parameter, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        """The values that are its result, part by part."""
        return tuple(f"{self.op.results[0]} part {number}" for number in range(len(self.sizes)))


def _fused(graph: OperatorGraph, op: Operator, known: Mapping[str, Parameter]) -> _Fused | None:
    if op.op != _LINEAR or any(name not in known for name in op.operands[1:]):
        return None
    held = tuple(known[name] for name in op.operands[1:])
    (result,) = op.results
    assert result is not None
    alone = all(not one.aliases and len(graph.consumers[one.name]) == 1 for one in held)
    if not alone or len(held) != len(set(held)) or result == graph.loss:
        return None
    sizes = _sizes(graph, result)
    return None if sizes is None else _Fused(op=op, sizes=sizes, parameters=held)


def _sizes(graph: OperatorGraph, name: str) -> tuple[int, ...] | None:
    """The lengths of the parts of the last dim in which a tensor is read; None where it is not read in two or more."""
    shape = graph.types[name].shape
    last, extent = len(shape) - 1, shape[-1]
    readers = [graph.operators[at] for at in graph.consumers.get(name, ())]
    spans = set[tuple[int, int]]()
    for reader in readers:
        if reader.op in SPLITS and _dim(reader, SPLITS[reader.op], last) == last and None not in reader.results:
            sizes = [graph.types[part].shape[-1] for part in reader.results if part is not None]
            spans.update(pairwise(_ends(sizes)))
        elif reader.op == _SLICE and _dim(reader, 1, last) == last and (said := said_slice(reader, extent)) is not None:
            spans.add(said[:2])
        elif (count := opened_into(graph, reader)) > 1:
            spans.update(pairwise(_ends([extent // count] * count)))
        else:
            return None
    ends = sorted(spans)
    covered = bool(ends) and ends[0][0] == 0 and ends[-1][1] == extent
    covered = covered and all(before[1] == after[0] for before, after in pairwise(ends))
    return tuple(end - start for start, end in ends) if covered and len(ends) > 1 else None


def _dim(op: Operator, place: int, last: int) -> int | None:
    said = said_dim(op, place)
    return None if said is None else said % (last + 1)


def _ends(sizes: Sequence[int]) -> Iterator[int]:
    at = 0
    yield at
    for size in sizes:
        at += size
        yield at


def _with_layers(graph: OperatorGraph, layers: Mapping[str, _Fused]) -> OperatorGraph:
    """`graph` with a linear layer for each matrix, and their results joined, in place of these layers."""
    types, operators = dict(graph.types), list[Operator]()
    pieces = dict[str, tuple[Parameter, ...]]()
    for op in graph.operators:
        if op.name not in layers:
            operators.append(op)
            continue
        layer = layers[op.name]
        for one in layer.parameters:
            pieces[one.name] = tuple(_pieces(one, layer.sizes))
            whole = types.pop(one.name)
            for piece, size in zip(pieces[one.name], layer.sizes, strict=True):
                types[piece.name] = replace(whole, shape=(size, *whole.shape[1:]))
        operators += _apart(op, layer, pieces, types)
    parameters = tuple(piece for one in graph.parameters for piece in pieces.get(one.name, (one,)))
    return replace(graph, types=types, parameters=parameters, operators=tuple(operators))


def _pieces(whole: Parameter, sizes: Sequence[int]) -> Iterator[Parameter]:
    for number, (start, end) in enumerate(pairwise(_ends(sizes))):
        cut = Cut(of=whole.name, dim=0, start=start, length=end - start)
        yield Parameter(name=f"{whole.name}[{number}]", trainable=whole.trainable, cut=cut)


def _apart(
    op: Operator, layer: _Fused, pieces: Mapping[str, Sequence[Parameter]], types: dict[str, TensorType]
) -> Iterator[Operator]:
    (result,) = op.results
    assert result is not None
    for number, (part, size) in enumerate(zip(layer.parts, layer.sizes, strict=True)):
        types[part] = replace(types[result], shape=(*types[result].shape[:-1], size))
        held = (ValueRef(pieces[one.name][number].name) for one in layer.parameters)
        given = (op.arguments[0], *held)
        yield replace(op, name=part, arguments=(*given, *op.arguments[len(given) :]), results=(part,))
    yield replace(op, op=_CAT, arguments=(tuple(map(ValueRef, layer.parts)), -1), keywords=())
