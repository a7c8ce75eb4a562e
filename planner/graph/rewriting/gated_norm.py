"""A norm that is multiplied with a gate (Gated DeltaNet and Kimi Delta Attention have it behind their attention).

    y = x / sqrt(mean(x^2) + epsilon) weight a(gate)        a: SiLU, or the sigmoid alone

It is one operator, `planner::gated_rms_norm`, over the last dim, computed in float32 at least, like the kernel of
flash-linear-attention: one pass over x and the gate. Norm, activation and product would be three passes and keep twice
as much. Only x and the gate are kept for the backward pass, which computes the rest once more.

    mul(rms_norm(x, weight), silu(gate))        as it was traced, with casts or without
    gated_rms_norm(x, gate, weight)             as it is kept (`with_gated_norms`)
"""

from dataclasses import replace

import torch
import torch.nn.functional as F

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef
from planner.graph.operators import state_kernels
from planner.graph.operators.recomputed import Kernel, recomputed
from planner.graph.rewriting.norms import GATED_NORM, RMS_NORM, Reader
from planner.graph.rewriting.unread import replaced

_MULTIPLY = "aten.mul.Tensor"
_SILU, _SIGMOID = "aten.silu.default", "aten.sigmoid.default"


def composed(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, epsilon: float, silu: bool
) -> torch.Tensor:
    """Result of the shape and dtype of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = None if weight is None else weight.to(wide)
    normed = F.rms_norm(x.to(wide), x.shape[-1:], scale, epsilon)
    opened = F.silu(gate.to(wide)) if silu else gate.to(wide).sigmoid()
    return (normed * opened).to(x.dtype)


gated_rms_norm = recomputed(
    "planner::gated_rms_norm", composed, kernel=Kernel(package="fla", call=state_kernels.gated_rms_norm)
)


def with_gated_norms(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with one operator for each norm that is multiplied with a gate, where nothing else reads norm or gate."""
    reader = Reader(graph)
    found = dict(gated for op in graph.operators if op.op == _MULTIPLY and (gated := _gated(reader, op)) is not None)
    return replaced(graph, found)


def _gated(reader: Reader, product: Operator) -> tuple[str, Operator] | None:
    """The product of a norm and a gate: the name of its last operator, and the operator in its place."""
    if len(product.operands) != 2:
        return None
    for first, second in (product.operands, product.operands[::-1]):
        norm = reader.made(reader.source(first), RMS_NORM)
        opened = reader.made(reader.source(second), _SILU, _SIGMOID)
        if norm is not None and opened is not None:
            return _joined(reader, product, norm, opened)
    return None


def _joined(reader: Reader, product: Operator, norm: Operator, opened: Operator) -> tuple[str, Operator] | None:
    types = reader.graph.types
    x, gate = norm.operands[0], reader.source(opened.operands[0])
    last = reader.cast_of(product, types[x].dtype)
    _, dims, weight, epsilon = (*norm.arguments, None, None)[:4]  # the last two may be left out
    alike = types[x].shape == types[gate].shape and types[last.results[0] or ""].dtype == types[x].dtype
    alone = all(reader.read_once(between, product) for between in (norm, opened))
    if not alike or not alone or norm.keywords or not isinstance(dims, tuple) or len(dims) != 1 or epsilon is None:
        return None
    given: tuple[Argument, ...] = (ValueRef(x), ValueRef(gate), weight, epsilon, opened.op == _SILU)
    return last.name, replace(last, op=GATED_NORM, arguments=given, keywords=())
