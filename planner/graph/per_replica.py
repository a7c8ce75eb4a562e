"""An operator that every data-parallel replica computes by itself, as a call of the graph.

    aten.mean.dim(x, [0])                       x (8, d) -> (d)
    planner.per_replica(x, [0])  of 4 replicas  x (8, d) -> (4, d): one mean for the 2 samples of each replica

The arguments are those that the operator has in one replica. Four keywords say the rest: the number of replicas, the
operator, and for every operand and result where the replicas are. They are equal contiguous pieces of a dim of samples
(its number), or steps of a leading dim of their own (`OWN`); with None all replicas have the same value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeVar, cast

from planner.graph.operator_graph import Argument, Operator, TensorType

PER_REPLICA: Final = "planner.per_replica"

OWN: Final = -1
"""Instead of a dim: the value has a leading dim, with one step for each replica."""

_Value = TypeVar("_Value")

Places = tuple[int | None, ...]
_KEYS = ("replicas", "called", "operand_places", "result_places")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The number of replicas of a batch, and where replicas are in operands and results."""

    count: int
    called: str
    operands: Places
    results: Places


def wrapped(op: Operator, replicas: Replicas, results: tuple[str | None, ...]) -> Operator:
    """The call of all replicas, from the operator as one replica calls it."""
    values = (replicas.count, replicas.called, replicas.operands, replicas.results)
    keywords = (*op.keywords, *zip(_KEYS, values, strict=True))
    return replace(op, op=PER_REPLICA, keywords=cast("tuple[tuple[str, Argument], ...]", keywords), results=results)


def replicas_in(keywords: Sequence[tuple[str, object]]) -> Replicas:
    """The `Replicas` that the keywords of such a call describe."""
    count, called, operands, results = (dict(keywords)[key] for key in _KEYS)
    return Replicas(
        count=cast("int", count),
        called=cast("str", called),
        operands=cast("Places", operands),
        results=cast("Places", results),
    )


def unwrapped(op: Operator) -> Operator:
    """The operator as one replica calls it; any other operator unchanged."""
    if op.op != PER_REPLICA:
        return op
    return replace(op, op=called(op), keywords=own_keywords(op.keywords))


def own_keywords(keywords: Sequence[tuple[str, _Value]]) -> tuple[tuple[str, _Value], ...]:
    """The keywords of the operator itself."""
    return tuple((key, value) for key, value in keywords if key not in _KEYS)


def called(op: Operator) -> str:
    """The PyTorch operator that is called, by each replica or by all together."""
    return op.op if op.op != PER_REPLICA else replicas_in(op.keywords).called


def of_one(tensor: TensorType, place: int | None, count: int) -> TensorType:
    """The part of a value that one replica has."""
    return replace(tensor, shape=shape_of_one(tensor.shape, place, count))


def shape_of_one(shape: Sequence[int], place: int | None, count: int) -> tuple[int, ...]:
    """The shape of the part of a value that one replica has."""
    if place is None:
        return tuple(shape)
    if place == OWN:
        return tuple(shape[1:])
    assert shape[place] % count == 0, f"{count} replicas do not divide dim {place} of {tuple(shape)}"
    return (*shape[:place], shape[place] // count, *shape[place + 1 :])


def types_of_one(op: Operator, types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """The types of an operator's values in one replica."""
    replicas = replicas_in(op.keywords)
    results = tuple(name for name in op.results if name is not None)
    placed = (*zip(op.operands, replicas.operands, strict=True), *zip(results, replicas.results, strict=True))
    return {name: of_one(types[name], place, replicas.count) for name, place in placed}
