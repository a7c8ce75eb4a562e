"""Strategy files of MindSpore, as it writes them: two kinds, which differ in how operators are called.

    strategy_ckpt_config        "MatMul_net.w1": the primitive and the parameter that it reads; layouts of parameters
    set_op_strategy_config      "Default/net-Net/ReLU-op0": the cells around it, the primitive and its number there

Read from files that MindSpore 2.10 wrote.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from hardware_profiles.foreign import ForeignTextError, parse_json
from planner.export.description import ExportError

Cuts = tuple[tuple[int, ...], ...]

_IN_CELL = re.compile(r"(?:\w+/)+?(?P<cells>(?:[\w.]+-\w+/)*)(?P<primitive>\w+)-op(?P<number>\d+)")


def in_cell(name: str) -> bool:
    """Whether a name is that of an operator in a cell."""
    return _IN_CELL.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """The strategy of an operator: pieces of each dim of each input.

    Attributes:
        text: its name in the file.
        owner: the parameter that it reads, or, where it has a `number`, the cell that it stands in.
    """

    text: str
    primitive: str
    owner: str
    number: int | None
    cuts: Cuts
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The layout of a parameter, see `planner.export.mindspore`."""

    name: str
    matrix: tuple[int, ...]
    map: tuple[int, ...]
    shape: tuple[int, ...]
    size: int
    step: int


def parsed(text: str) -> tuple[tuple[Item, ...], tuple[Row, ...]]:
    """Operators and parameters of a file. Raises ExportError for what is none."""
    try:
        content = parse_json(text)
    except ForeignTextError as error:
        raise ExportError(f"{error}; strategy files that MindSpore writes as protobuf are not read") from error
    if not isinstance(content, dict) or "parallel_strategy_item" not in content:
        raise ExportError("it has no 'parallel_strategy_item', as strategy files of MindSpore have")
    items, rows = content["parallel_strategy_item"], content.get("parallel_layout_item") or {}
    for name, value in (("parallel_strategy_item", items), ("parallel_layout_item", rows)):
        if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
            raise ExportError(f"{name}: an object for each name is wanted")
    return tuple(_item(name, one) for name, one in items.items()), tuple(_row(name, one) for name, one in rows.items())


def _item(name: str, content: dict[str, Any]) -> Item:
    cuts, stage = content.get("parallel_strategy"), content.get("stage", 0)
    rows = cuts if isinstance(cuts, list) else None
    if rows is None or not all(isinstance(row, list) and all(_is_count(n) for n in row) for row in rows):
        raise ExportError(
            f"{name}: parallel_strategy {json.dumps(cuts)}: a list of numbers of pieces for each input is wanted"
        )
    if not isinstance(stage, int) or stage < 0:
        raise ExportError(f"{name}: stage {json.dumps(stage)}: a number from 0 on is wanted")
    inside = _IN_CELL.fullmatch(name)
    if inside is not None:
        cells = ".".join(cell.rpartition("-")[0] for cell in inside["cells"].split("/") if cell)
        owner, primitive, number = cells, inside["primitive"], int(inside["number"])
    else:
        primitive, _, owner = name.rpartition("/")[2].partition("_")
        number = None
    pieces = tuple(tuple(row) for row in rows)
    return Item(text=name, primitive=primitive, owner=owner, number=number, cuts=pieces, stage=stage)


def _row(name: str, content: dict[str, Any]) -> Row:
    lists = {key: content.get(key) for key in ("dev_matrix", "tensor_map", "tensor_shape")}
    for key, value in lists.items():
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise ExportError(f"{name}: {key} {json.dumps(value)}: a list of numbers is wanted")
    matrix, tensor_map, shape = (tuple(value) for value in lists.values() if value is not None)
    if not matrix or min(matrix) < 1 or len(tensor_map) != len(shape):
        raise ExportError(f"{name}: dev_matrix, tensor_map and tensor_shape contradict each other")
    if any(not -1 <= axis < len(matrix) for axis in tensor_map):
        raise ExportError(f"{name}: tensor_map {list(tensor_map)} names axes that dev_matrix {list(matrix)} has not")
    if content.get("field"):
        raise ExportError(f"{name}: field {content['field']}: tables in uneven pieces are no part of a plan")
    size, step = content.get("opt_weight_shard_size", 0), content.get("opt_weight_shard_step", 0)
    if not all(type(n) is int for n in (size, step)):
        raise ExportError(f"{name}: opt_weight_shard_size and opt_weight_shard_step are numbers")
    return Row(name=name, matrix=matrix, map=tensor_map, shape=shape, size=max(size, 0), step=max(step, 0))


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
