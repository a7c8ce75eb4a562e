"""Norms that are written out, rewritten as one operator: `aten.rms_norm` or `aten.layer_norm`.

    x ─ to fp32 ─┬─ pow 2 ─ mean ─ + eps ─ rsqrt ─┐
                 └───────────────────────────── mul ─ to 16 bits ─ mul weight         as it was exported
    x ─ rms_norm(weight, eps)                                                         as it is kept

(`LlamaRMSNorm` of transformers and its kin, which cast before or after the product with the weight, or multiply with 1
+ weight; with x - mean in place of x it is a layer norm without bias, `CohereLayerNorm`.) Operator by operator, a norm
passes memory nine times and keeps x in fp32; kernels of norms do neither. Kernels compute in fp32 and round once, where
some written-out norms round twice. So only norms that are computed in fp32 or wider are rewritten.
"""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import CASTS, Argument, Operator, OperatorGraph, TorchConstant, ValueRef
from planner.graph.rewriting.unread import replaced

RMS_NORM, LAYER_NORM = "aten.rms_norm.default", "aten.layer_norm.default"
GATED_NORM = "planner.gated_rms_norm.default"

_WIDE = ("float32", "float64")
_ADD, _SUBTRACT, _MULTIPLY = "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"
_MEAN, _POWER, _ROOT = "aten.mean.dim", "aten.pow.Tensor_Scalar", "aten.rsqrt.default"


def with_norms(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with one operator for each norm that is written out; values that only the old operators read are gone."""
    reader = Reader(graph)
    found = dict(norm for op in graph.operators if op.op == _MULTIPLY and (norm := reader.norm(op)) is not None)
    return replaced(graph, found)


@dataclass(frozen=True, slots=True)
class Reader:
    """Finds the operators that make and read the values of a graph."""

    graph: OperatorGraph

    def norm(self, product: Operator) -> tuple[str, Operator] | None:
        """The norm whose x / sqrt(...) a product is: the name of its last operator, and the operator in its place."""
        if len(product.operands) != 2:
            return None
        for x, reciprocal in (product.operands, product.operands[::-1]):
            square = self._squared(reciprocal)
            if square is not None:
                squared, epsilon = square
                if self.source(squared) == self.source(x):
                    return self._whole(product, RMS_NORM, squared, epsilon)
                centred = self._centred(squared)
                if centred is not None and centred == self._centred(x):
                    return self._whole(product, LAYER_NORM, centred, epsilon)
        return None

    def _squared(self, reciprocal: str) -> tuple[str, float] | None:
        """x and epsilon of 1 / sqrt(mean(x^2) + epsilon), computed in fp32 or wider, over the last dim."""
        root = self.made(reciprocal, _ROOT, _POWER)
        added = None if root is None or root.arguments[1:] not in ((), (-0.5,)) else self.made(root.operands[0], _ADD)
        if added is None or len(added.operands) != 1 or added.keywords:
            return None
        _, epsilon = added.arguments
        squares = self._averaged(added.operands[0])
        power = None if squares is None else self.made(squares, _POWER, _MULTIPLY)
        if power is None or not isinstance(epsilon, float) or self.graph.types[squares or ""].dtype not in _WIDE:
            return None
        first, second = power.arguments
        return (power.operands[0], epsilon) if second == (2 if power.op == _POWER else first) else None

    def _averaged(self, mean: str) -> str | None:
        """The operand of a mean over the last dim that keeps the dim."""
        op = self.made(mean, _MEAN)
        if op is None or op.keywords or len(op.arguments) != 3 or op.arguments[2] is not True:
            return None
        dims, rank = op.arguments[1], len(self.graph.types[op.operands[0]].shape)
        return op.operands[0] if dims in ((-1,), (rank - 1,)) else None

    def _centred(self, name: str) -> str | None:
        """x of x - mean(x)."""
        op = self.made(name, _SUBTRACT)
        if op is None or len(op.operands) != 2 or op.keywords:
            return None
        return op.operands[0] if self._averaged(op.operands[1]) == op.operands[0] else None

    def _whole(self, product: Operator, kind: str, wide: str, epsilon: float) -> tuple[str, Operator] | None:
        """The norm with the product with a weight and the cast back, in either order, if nothing else reads in
        between."""
        types, source = self.graph.types, self.source(wide)
        last, weight = self.cast_of(product, types[source].dtype), None
        following = self._only_reader(last)
        others = () if following is None or following.op != _MULTIPLY else following.operands
        if following is not None and len(set(others)) == 2:  # a square has no weight
            (other,) = (name for name in others if name != last.results[0])
            if types[other].shape == types[wide].shape[-1:]:
                weight, last = other, self.cast_of(following, types[source].dtype)
        made = types[last.results[0] or ""]
        x = next((name for name in (source, wide) if types[name].dtype == made.dtype), None)
        if x is None or made.shape != types[x].shape:
            return None
        if weight is not None and types[self.source(weight)].dtype == made.dtype:
            weight = self.source(weight)
        if weight is not None and kind == LAYER_NORM and types[weight].dtype != made.dtype:
            return None
        scale = None if weight is None else ValueRef(weight)
        given: tuple[Argument, ...] = (ValueRef(x), types[x].shape[-1:], scale)
        given = (*given, epsilon) if kind == RMS_NORM else (*given, None, epsilon)
        return last.name, replace(last, op=kind, arguments=given, keywords=())

    def cast_of(self, op: Operator, dtype: str) -> Operator:
        """The cast of an operator's result to a dtype, where nothing else reads the result; else the operator."""
        following = self._only_reader(op)
        casts = following is not None and following.op in CASTS and _dtype(following) == dtype
        return following if following is not None and casts else op

    def _only_reader(self, op: Operator) -> Operator | None:
        (name,), graph = op.results, self.graph
        readers = graph.consumers.get(name or "", ())
        returned = name == graph.loss or any(name == content for _, content in graph.updates)
        return graph.operators[readers[0]] if len(set(readers)) == 1 and not returned else None

    def source(self, name: str) -> str:
        """The value before it was cast to float32 or float64 from a narrower dtype, if kernels compute in the wider."""
        op = self.made(name, *CASTS)
        if op is None:
            return name
        (source,), types = op.operands, self.graph.types
        widened = types[source].floating and types[source].element_bytes < types[name].element_bytes
        narrowed = types[name].dtype == "float64" and types[source].dtype != "float64"  # kernels compute in float32
        same = types[source].dtype == types[name].dtype
        return source if same or (widened and not narrowed) else name

    def read_once(self, op: Operator, by: Operator) -> bool:
        """Whether only one operator reads the result of another, or a cast of it that nothing else reads."""
        following = self._only_reader(op)
        if following is not None and following.op in CASTS and following.name != by.name:
            following = self._only_reader(following)
        return following is not None and following.name == by.name

    def made(self, name: str, *by: str) -> Operator | None:
        """The operator that made a value, if it is one of these."""
        at = self.graph.producer.get(name)
        return self.graph.operators[at] if at is not None and self.graph.operators[at].op in by else None


def _dtype(cast: Operator) -> str | None:
    said = dict(cast.keywords).get("dtype", *cast.arguments[1:2])
    return said.name if isinstance(said, TorchConstant) else None
