"""Tables of embeddings that no device holds, as the graph of the devices sees them.

    traced graph    table V H ─┐
                    ids B ─────┴─> embedding ─> B H
    placed          ids B ───────> rows from the host, or from servers ─> B H

A table that is placed elsewhere is no parameter of the graph any more: devices neither keep nor reduce nor update it.
Its look-up becomes an operator that gets rows by their numbers, and sends the gradients of these rows back. Keywords
give it the table, the number of rows and the width; its name is that of the look-up. Everything else (candidates,
prices, memory, execution) follows from its rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import RequestError, did_you_mean
from planner.graph.operator_graph import ROWS_FROM, Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.bags import BAG
from planner.matching import matches

PLACES = ("host", "servers")
"""Where a table may be instead of the devices: in the memory of the hosts of the ranks, shared out over them; or on
servers, which are processes of their own, reached over the network."""

Placed = tuple[tuple[str, str], ...]
"""Patterns of parameters, and the place of these; the first pattern that matches counts."""

_EMBEDDING = "aten.embedding.default"
_BY_FREQUENCY = 3  # positions of arguments of an embedding
_PADDING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideTable:
    """A table of a placed graph: `rows` of `width` numbers, in the dtype of its look-ups, and where it is."""

    name: str
    where: str
    rows: int
    width: int
    dtype: str
    trainable: bool


def tables_outside(graph: OperatorGraph) -> tuple[OutsideTable, ...]:
    """The tables from which a placed graph gets rows, each once, in the order of their first look-ups."""
    found: dict[str, OutsideTable] = {}
    for op in graph.operators:
        where = next((place for place, name in ROWS_FROM.items() if name == op.op), None)
        if where is not None:
            words: dict[str, Any] = dict(op.keywords)
            table = OutsideTable(
                name=words["table"],
                where=where,
                rows=words["rows"],
                width=words["width"],
                dtype=graph.types[str(op.results[0])].dtype,
                trainable=words["trainable"],
            )
            found.setdefault(table.name, table)
    return tuple(found.values())


def place_of(name: str, placed: Placed) -> str | None:
    """The place of a parameter; None on the devices."""
    return next((place for pattern, place in placed if matches(name, pattern)), None)


def placed_tables(graph: OperatorGraph, placed: Placed) -> dict[str, str]:
    """The parameters of a traced graph that are placed elsewhere, and where. Raises RequestError for a pattern that no
    parameter matches, and for a parameter that any other operator than a look-up of its rows reads."""
    for pattern, _ in placed:
        if not any(matches(parameter.name, pattern) for parameter in graph.parameters):
            tables = tables_of(graph)
            hint = did_you_mean(pattern, tables, f"it has the tables {_listed(tables)}")
            raise RequestError(f"place: no parameter of the model matches '{pattern}'; {hint}")
    found = {p.name: place for p in graph.parameters if (place := place_of(p.name, placed)) is not None}
    for name in found:
        fault = _fault(graph, name)
        if fault is not None:
            raise RequestError(
                f"place: parameter '{name}' cannot be on {found[name]}: {fault}; only tables can, whose rows are"
                f" looked up"
            )
    return found


def tables_of(graph: OperatorGraph) -> tuple[str, ...]:
    """The parameters of a traced graph that could be placed elsewhere."""
    return tuple(parameter.name for parameter in graph.parameters if _fault(graph, parameter.name) is None)


def with_places(graph: OperatorGraph, placed: Placed) -> OperatorGraph:
    """`graph` without the tables that are placed elsewhere, their look-ups getting rows from there. Raises RequestError
    as `placed_tables` does."""
    if not placed:
        return graph
    tables = placed_tables(graph, placed)
    trainable = {parameter.name: parameter.trainable for parameter in graph.parameters}
    operators = tuple(
        _from(graph, op, tables[op.operands[0]], trainable[op.operands[0]])
        if op.operands and op.operands[0] in tables
        else op
        for op in graph.operators
    )
    return replace(
        graph,
        types={name: tensor for name, tensor in graph.types.items() if name not in tables},
        parameters=tuple(parameter for parameter in graph.parameters if parameter.name not in tables),
        operators=operators,
    )


def _from(graph: OperatorGraph, op: Operator, place: str, trainable: bool) -> Operator:
    table = op.operands[0]
    rows, width = graph.types[table].shape
    padding = op.arguments[_PADDING] if op.op == _EMBEDDING and len(op.arguments) > _PADDING else None
    keywords: tuple[tuple[str, Argument], ...] = (
        ("table", table),
        ("rows", rows),
        ("width", width),
        ("trainable", trainable),
        ("bag", op.op == BAG),
        *((("padding_idx", padding),) if op.op == _EMBEDDING else ()),
    )
    return replace(op, op=ROWS_FROM[place], arguments=op.arguments[1:2], keywords=(*keywords, *op.keywords))


def _fault(graph: OperatorGraph, name: str) -> str | None:
    """Why a parameter cannot be a table elsewhere; None for one that can."""
    uses = [graph.operators[at] for at in graph.consumers.get(name, ())]
    if not uses:
        return "no operator reads it"
    for op in uses:
        alone = op.operands[0] == name and op.operands.count(name) == 1
        if op.op not in (_EMBEDDING, BAG) or not alone:
            return f"operator '{op.name}' ({op.op}) reads it"
        if op.op == _EMBEDDING and len(op.arguments) > _BY_FREQUENCY and op.arguments[_BY_FREQUENCY]:
            return f"operator '{op.name}' scales gradients by frequency, which looks at the whole batch"
        if op.op == BAG and (len(op.operands) != 2 or not isinstance(op.arguments[1], ValueRef)):
            return f"operator '{op.name}' has bags of different lengths or weights of its samples"
    if not graph.types[name].floating or len(graph.types[name].shape) != 2:
        return "it is no matrix of floating point numbers"
    return None


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
