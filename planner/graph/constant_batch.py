"""Numbers that a model's code computes from the batch size, which a graph rescaled to another batch does not follow."""

from collections.abc import Iterator
from typing import Any

from planner.errors import ModelError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph


def check_numbers(rescaled: OperatorGraph, traced: OperatorGraph) -> None:
    """Compare a graph whose batch was changed with the graph of the same model traced at that batch.

    Raises ModelError for a number among an operator's arguments (`loss * x.shape[0]`) that differs at the other batch,
    and for a result of another shape. Values that nothing reads do not count.
    """
    fresh = {op.name: op for op in traced.operators}
    for name, kept in rescaled.constants.items():
        if name in rescaled.consumers and not _same_values(kept, traced.constants.get(name)):
            raise ModelError(
                f"the constant '{name}', which the model's code makes, is another one at the batch of the plan than at"
                " that of its example; let samples be alike, and each have its own part of it"
            )
    for op in rescaled.operators:
        other = fresh.get(op.name)
        if op.name not in rescaled.live or other is None or other.op != op.op:
            continue
        for kept, wanted in _both(op, other):
            if _is_number(kept) and _is_number(wanted) and kept != wanted:
                raise ModelError(
                    f"operator '{op.name}', called in {op.place}, computes with {wanted} at the"
                    f" batch of the plan and with {kept} at that of its example: the model's code puts the batch size"
                    " into a number; write a mean, or make the number a tensor that the model is given"
                )
        for kept_name, wanted_name in zip(op.results, other.results, strict=True):
            if kept_name is None or wanted_name is None:
                continue
            shape, found = rescaled.own_shape(kept_name), traced.types[wanted_name].shape
            if shape != found:
                raise ModelError(
                    f"operator '{op.name}', called in {op.place}, has a result of shape {found}"
                    f" at the batch of the plan, and one of {shape} by its rule: the model's code makes a shape of"
                    " the batch size; write -1, or a size of the model, in its place"
                )


def _both(op: Operator, other: Operator) -> Iterator[tuple[Argument, Argument]]:
    """The arguments that both calls have, by place and by name: a plan may have given one of them further settings."""
    yield from zip(op.arguments, other.arguments, strict=False)
    named = dict(other.keywords)
    yield from ((value, named[key]) for key, value in op.keywords if key in named)


def _same_values(kept: Any, wanted: Any) -> bool:
    """Whether two constants are equal, if both have values and one shape; others meet operands of other shapes."""
    if wanted is None or kept.shape != wanted.shape or kept.is_meta or wanted.is_meta:
        return True
    return bool(kept.equal(wanted))


def _is_number(value: Argument) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
