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
where in it each parameter lies. A device that has all of the weight computes it sooner as one product, so a plan is for
either graph (`planner.strategy_search.variants`). Results and gradients are the same. Where weights are apart, Muon and
LAMB update each matrix by itself.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from planner.graph.operator_graph import Cut, Operator, OperatorGraph, Parameter, TensorType, ValueRef
from planner.graph.rewriting.calls import SPLITS, said_dim, said_slice
from planner.graph.rewriting.unjoined import TAKES_PARTS, keeps_last, opened_into, with_parts_unjoined

_CAT, _SLICE = "aten.cat.default", "aten.slice.Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The positions of weight and bias among the arguments of a product, and the dim of the weight with the outputs."""

    weight: int
    outputs: int
    bias: int | None = None


PART = re.compile(r"\[\d+\]$")
"""The end of the name of a parameter that is a part of a weight."""

_KEY = ("fused weights apart",)
_PLACE, _NUMBER = re.compile(r"( part)?( \d+)+$"), re.compile(r"_\d+$")
"""The ends of names of new operators, and of operators with a stem that others have, too."""

_LAYERS = {
    "aten.linear.default": _Layer(weight=1, outputs=0, bias=2),
    "aten.addmm.default": _Layer(weight=2, outputs=1, bias=0),  # `Conv1D` of transformers
    "aten.matmul.default": _Layer(weight=1, outputs=1),
}


def with_fused_weights_apart(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with a parameter for each matrix in the weight of a linear layer whose result is only read in parts;
    `graph` itself where there is no such layer."""
    if _KEY not in graph.derived:
        graph.derived[_KEY] = _with_fused_weights_apart(graph)
    found: OperatorGraph = graph.derived[_KEY]
    return found


def _with_fused_weights_apart(graph: OperatorGraph) -> OperatorGraph:
    if all(op.op not in TAKES_PARTS for op in graph.operators):
        return graph
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
            return _named(graph, apart)
        layers = left
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """A linear layer: its operator, the number of outputs of each matrix in its weight, and the dim in which weight and
    bias have them."""

    op: Operator
    sizes: tuple[int, ...]
    parameters: Mapping[str, int]

    @property
    def parts(self) -> tuple[str, ...]:
        """The values that are its result, part by part."""
        return tuple(f"{self.op.results[0]} part {number}" for number in range(len(self.sizes)))


def _fused(graph: OperatorGraph, op: Operator, known: Mapping[str, Parameter]) -> _Fused | None:
    layer = _LAYERS.get(op.op)
    if layer is None or op.keywords:
        return None
    given = {place: argument for place, argument in enumerate(op.arguments) if isinstance(argument, ValueRef)}
    held = {given[at].name: dim for at, dim in ((layer.weight, layer.outputs), (layer.bias, 0)) if at in given}
    alone = all(name in known and not known[name].aliases and len(graph.consumers[name]) == 1 for name in held)
    (result,) = op.results
    if not alone or layer.weight not in given or result is None:
        return None
    if len(graph.types[given[layer.weight].name].shape) != 2:
        return None
    sizes = _sizes(graph, result)
    fits = sizes is not None and all(graph.types[name].shape[dim] == sum(sizes) for name, dim in held.items())
    return _Fused(op=op, sizes=sizes, parameters=held) if fits and sizes is not None else None


def _sizes(graph: OperatorGraph, name: str) -> tuple[int, ...] | None:
    """The lengths of the parts of the last dim in which a tensor is read; None where it is not read in two or more."""
    shape = graph.types[name].shape
    last, extent = len(shape) - 1, shape[-1]
    readers = [graph.operators[at] for at in graph.consumers.get(name, ())]
    if len(readers) == 1 and keeps_last(graph, readers[0]):
        (viewed,) = readers[0].results
        return None if viewed is None else _sizes(graph, viewed)
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
    lengths = tuple(end - start for start, end in ends)
    return lengths if covered and len(lengths) > 1 and min(lengths) > 1 else None  # one output cannot be cut


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
    known = {parameter.name: parameter for parameter in graph.parameters}
    pieces = dict[str, tuple[Parameter, ...]]()
    for op in graph.operators:
        if op.name not in layers:
            operators.append(op)
            continue
        layer = layers[op.name]
        for name, dim in layer.parameters.items():
            pieces[name] = tuple(_pieces(known[name], dim, layer.sizes))
            whole = types.pop(name)
            for piece, size in zip(pieces[name], layer.sizes, strict=True):
                types[piece.name] = replace(whole, shape=(*whole.shape[:dim], size, *whole.shape[dim + 1 :]))
        operators += _apart(op, layer, pieces, types)
    parameters = tuple(piece for one in graph.parameters for piece in pieces.get(one.name, (one,)))
    return replace(graph, types=types, parameters=parameters, operators=tuple(operators))


def _pieces(whole: Parameter, dim: int, sizes: Sequence[int]) -> Iterator[Parameter]:
    for number, (start, end) in enumerate(pairwise(_ends(sizes))):
        cut = Cut(of=whole.name, dim=dim, start=start, length=end - start)
        yield Parameter(name=f"{whole.name}[{number}]", trainable=whole.trainable, cut=cut)


def _apart(
    op: Operator, layer: _Fused, pieces: Mapping[str, Sequence[Parameter]], types: dict[str, TensorType]
) -> Iterator[Operator]:
    (result,) = op.results
    assert result is not None
    for number, (part, size) in enumerate(zip(layer.parts, layer.sizes, strict=True)):
        types[part] = replace(types[result], shape=(*types[result].shape[:-1], size))
        own = {name: pieces[name][number].name for name in layer.parameters}
        yield replace(op.reading(own), name=part, results=(part,))
    yield replace(op, op=_CAT, arguments=(tuple(map(ValueRef, layer.parts)), -1), keywords=())


def _named(before: OperatorGraph, graph: OperatorGraph) -> OperatorGraph:
    """`graph` with operators that are new since `before` called as the others are: by their stem and a number."""
    old = {op.name for op in before.operators}
    new = {name for op in graph.operators if op.name not in old for name in (op.name, *op.results)}
    taken, names = {*(op.name for op in graph.operators), *graph.types} - new, dict[str, str]()
    for op in graph.operators:
        if op.name not in old:
            stem, number = _NUMBER.sub("", _PLACE.sub("", op.name)), 1
            while (name := stem if number == 1 else f"{stem}_{number}") in taken:
                number += 1
            taken.add(name)
            names[op.name] = name
    return replace(
        graph,
        types={names.get(name, name): kind for name, kind in graph.types.items()},
        operators=tuple(
            replace(
                op.reading(names),
                name=names.get(op.name, op.name),
                results=tuple(name and names.get(name, name) for name in op.results),
            )
            for op in graph.operators
        ),
        updates=tuple((buffer, names.get(value, value)) for buffer, value in graph.updates),
        loss=names.get(graph.loss, graph.loss),
    )
