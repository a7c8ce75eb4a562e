"""Scores of an indexer that are written out head by head, rewritten as one operator.

    q ─ to fp32 ───────────────────┐
    k ─ transpose ─ to fp32 ─ heads ┴ matmul ─ * c ─ relu ─┐
    w ─ unsqueeze ─────────────────────────────────────────┴ matmul ─ squeeze       as it was exported
    q, k, w ─ index_scores(c)                                                       as it is kept

(DeepSeek-V3.2, DeepSeek-V4, GLM-5 and their kin in transformers; the last matmul may also be a product and a sum over
heads, and the scale may come before or behind relu.) Written out, scores of all heads lie in memory in fp32: with 64
heads and 32,768 tokens 275 GB per sample.
"""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import CASTS, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import replaced

INDEX_SCORES = "planner.index_scores.default"
BLOCK = 2**26
"""Scores of heads that are computed at a time (`planner.graph.operators.index_scores`)."""

_MATMUL, _MULTIPLY, _RELU = "aten.matmul.default", "aten.mul.Tensor", "aten.relu.default"
_SQUEEZE, _UNSQUEEZE, _SUM = "aten.squeeze.dim", "aten.unsqueeze.default", "aten.sum.dim_IntList"
_TRANSPOSE = "aten.transpose.int"


def with_index_scores(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with one operator for the scores of each indexer; values that only the old operators read are gone."""
    reader = _Reader(graph)
    found = {op.name: made for op in graph.operators if (made := reader.scores(op)) is not None}
    return replaced(graph, found)


@dataclass(frozen=True, slots=True)
class _Reader:
    graph: OperatorGraph

    def scores(self, op: Operator) -> Operator | None:
        """The operator in place of one that makes B S T from the scores of heads and their weights."""
        joined = self._multiplied(op) or self._summed(op)
        if joined is None:
            return None
        weight, heads = joined
        found = self._of_heads(heads)
        if found is None or len(self._shape(weight)) != 3:
            return None
        query, key, scale = found
        shape, keys = self._shape(query), self._shape(key)
        if len(shape) != 4 or self._shape(weight) != shape[:3] or keys != (shape[0], self._shape(heads)[3], shape[3]):
            return None
        given = (ValueRef(query), ValueRef(key), ValueRef(weight), scale)
        return replace(op, op=INDEX_SCORES, arguments=given, keywords=())

    def _multiplied(self, op: Operator) -> tuple[str, str] | None:
        """Weights and scores of squeeze(unsqueeze(w, 2) @ scores, 2)."""
        product = self._made(op.operands[0], _MATMUL) if self._at(op, _SQUEEZE, 2, 4) else None
        if product is None or len(product.operands) != 2:
            return None
        row = self._made(product.operands[0], _UNSQUEEZE)
        return None if row is None or not self._at(row, _UNSQUEEZE, 2, 4) else (row.operands[0], product.operands[1])

    def _summed(self, op: Operator) -> tuple[str, str] | None:
        """Weights and scores of the sum of scores * unsqueeze(w, 3) over heads, dim 2."""
        if op.op != _SUM or op.keywords or op.arguments[1:] not in (((2,),), ((-2,),), ((2,), False), ((-2,), False)):
            return None
        product = self._made(op.operands[0], _MULTIPLY)
        for weight, scores in (
            ()
            if product is None or len(product.operands) != 2
            else (
                product.operands,
                product.operands[::-1],
            )
        ):
            column = self._made(weight, _UNSQUEEZE)
            if column is not None and self._at(column, _UNSQUEEZE, 3, 4):
                return column.operands[0], scores
        return None

    def _of_heads(self, name: str) -> tuple[str, str, float] | None:
        """Queries, keys B T D and the scale of relu(scale q k^T), B S H T."""
        scale, bent = 1.0, False
        while (op := self._made(name, _MULTIPLY, _RELU)) is not None:
            if op.op == _RELU:
                bent = True
            else:
                factor = op.arguments[1] if len(op.operands) == 1 else None
                if not isinstance(factor, float | int) or factor <= 0:
                    return None  # a negative factor does not commute with relu
                scale *= factor
            name = op.operands[0]
        product = self._made(name, _MATMUL)
        if not bent or product is None or len(product.operands) != 2 or len(self._shape(name)) != 4:
            return None
        key = self._key(product.operands[1])
        return None if key is None else (self._source(product.operands[0]), key, scale)

    def _key(self, name: str) -> str | None:
        """B T D of B 1 D T."""
        heads = self._made(self._source(name), _UNSQUEEZE)
        if heads is None or not self._at(heads, _UNSQUEEZE, 1, 4):
            return None
        turned = self._made(self._source(heads.operands[0]), _TRANSPOSE)
        dims = () if turned is None else turned.arguments[1:]
        if turned is None or set(dims) not in ({1, 2}, {-1, -2}, {1, -1}, {2, -2}):
            return None
        return self._source(turned.operands[0])

    def _at(self, op: Operator, kind: str, dim: int, rank: int) -> bool:
        """Whether an operator is of this kind and works on this dim, of a tensor of `rank` dims."""
        return op.op == kind and not op.keywords and op.arguments[1] in (dim, dim - rank)

    def _source(self, name: str) -> str:
        """The value before it was cast to float32: products of narrower dtypes are exact in float32."""
        op, types = self._made(name, *CASTS), self.graph.types
        if op is None or types[name].dtype != "float32":
            return name
        (source,) = op.operands
        return source if types[source].floating and types[source].element_bytes <= types[name].element_bytes else name

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.graph.types[name].shape)

    def _made(self, name: str, *by: str) -> Operator | None:
        at = self.graph.producer.get(name)
        return self.graph.operators[at] if at is not None and self.graph.operators[at].op in by else None
