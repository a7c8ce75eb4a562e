"""What several rewrites read of calls that take tensors apart or view them."""

from collections.abc import Mapping

from planner.graph.operator_graph import Operator

SPLITS: Mapping[str, int] = {
    "aten.split_with_sizes.default": 2,
    "aten.split.Tensor": 2,
    "aten.chunk.default": 2,
}
"""Operators that take a tensor apart along one of its dims, and the position of the argument for that dim."""

VIEWS = frozenset({"aten.reshape.default", "aten.view.default"})
"""Operators that spell out another shape."""


def said_dim(op: Operator, place: int) -> int | None:
    """The dim that the argument at a position, or the keyword `dim`, says: 0 if neither is given, None if it is no
    number. It may be negative."""
    said = op.arguments[place] if len(op.arguments) > place else dict(op.keywords).get("dim", 0)
    return said if isinstance(said, int) else None


def said_slice(op: Operator, extent: int) -> tuple[int, int, int] | None:
    """First element, end and step of a slice of a dim with this extent; None where they are no numbers."""
    said = (*op.arguments[2:], None, None, None)[:3]
    start, end, step = (usual if one is None else one for one, usual in zip(said, (0, extent, 1), strict=True))
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(step, int) or op.keywords:
        return None
    start, end = (max(0, at + extent if at < 0 else at) for at in (start, end))
    return start, min(end, extent), step
