"""Strategy files as MindSpore writes them: two kinds, which name operators differently.

    strategy_ckpt_config        "MatMul_net.w1": the primitive and the parameter that it reads; layouts of parameters
    set_op_strategy_config      "Default/net-Net/ReLU-op0": the cells around it, the primitive and its number there

They are JSON, or protocol buffers (`strategy_ckpt_save_file`, `.ckpt`), which have no shapes of parameters. The
messages are those of `node_strategy.proto` in MindSpore:

    map       1 current_stage   2 strategy items   3 layout items
    strategy  1 node_name       2 (1 stage, 2 (1 dim)*)
    layout    1 param_name      2 (1 (1 dim) dev_matrix, 2 (1 dim)* tensor_map, 5 field, 6 step, 7 size)

Several axes may cut one dim, the outermost first. JSON then has lists in tensor_map, or, as MindSpore writes it, a
tensor_shape in which such a dim is several: all but the last are as long as their axis has devices. Protocol buffers
have a tensor_map for each dim. Operators that were given a `Layout` are in "parallel_layout_value_item".

The JSON form was learned from files that MindSpore 2.10 wrote, the rest from its sources.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.export.description import ExportError
from planner.export.files.protobuf import Value, fields, integers

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
        owner: the parameter that it reads or, if it has a `number`, its cell.
    """

    text: str
    primitive: str
    owner: str
    number: int | None
    cuts: Cuts
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The layout of a parameter, see `mindspore.py`.

    `map` has for each dim the axes that cut it, the outermost first. `shape` is None if the file has none. A `size` of
    -1 with a `step` is all devices that hold the same piece of the weight: MindSpore writes what
    `optimizer_weight_shard_size` says, whose default this is (ops_info/operator_info.cc: CreateGroupForOptShard).
    """

    name: str
    matrix: tuple[int, ...]
    map: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...] | None
    size: int
    step: int

    @property
    def sharing(self) -> tuple[tuple[int, int], ...]:
        """Devices that share out the states beyond the weight: distances and numbers, the nearest first. Raises
        ExportError if the devices that hold the same piece do not divide into groups of so many."""
        cut = {len(self.matrix) - 1 - axis for axes in self.map for axis in axes}
        free = [(math.prod(self.matrix[at + 1 :]), count) for at, count in enumerate(self.matrix) if at not in cut][
            ::-1
        ]
        all_of_them = math.prod(count for _, count in free)
        left = all_of_them if self.size < 0 < self.step else max(self.size, 1)
        begins = [stride for stride, _ in free].index(self.step) if (self.step in dict(free)) else 0
        found = list[tuple[int, int]]()
        for stride, count in free[begins:]:
            part = math.gcd(left, count)
            if part > 1:
                found.append((stride, part))
                left //= part
            if part < count:
                break
        if left > 1:
            raise ExportError(
                f"{self.name}: opt_weight_shard_size {self.size}: {all_of_them} devices hold the same piece of the"
                " weight, which are no such groups"
            )
        return tuple(found)


def parsed(file: bytes) -> tuple[tuple[Item, ...], tuple[Row, ...]]:
    """Operators and parameters of a file. Raises ExportError if it is not a strategy file."""
    try:
        content = _of_protobuf(file) if file[:1] == _STAGE_TAG else parse_json(decoded(file))
    except ForeignTextError as error:
        raise ExportError(f"{error}; a strategy file of MindSpore is JSON or a protocol buffer") from error
    if not isinstance(content, dict) or not {"parallel_strategy_item", _LAYOUTS}.intersection(content):
        raise ExportError("it has no 'parallel_strategy_item', as strategy files of MindSpore have")
    names = ("parallel_strategy_item", _LAYOUTS, "parallel_layout_item")
    items, given, rows = (content.get(name) or {} for name in names)
    for name, value in zip(names, (items, given, rows), strict=True):
        if not isinstance(value, dict) or not all(isinstance(one, dict) for one in value.values()):
            raise ExportError(f"{name}: an object for each name is wanted")
    twice = next((name for name in given if name in items), None)
    if twice is not None:
        raise ExportError(f"{twice}: it has a strategy and layouts; leave one of both")
    found = [_item(name, one) for name, one in items.items()]
    found += [_item(name, _cuts_of(name, one)) for name, one in given.items()]
    return tuple(found), tuple(_row(name, one) for name, one in rows.items())


def _cuts_of(name: str, content: dict[str, Any]) -> dict[str, Any]:
    """The strategy of an operator whose inputs have layouts, which are named by their number."""
    order = sorted(content, key=lambda key: (len(key), key))
    if order != [str(number) for number in range(len(order))] or not all(isinstance(content[k], dict) for k in order):
        raise ExportError(f"{name}: a layout for each input, '0', '1', ..., is wanted")
    if any(content[key].get("interleaved_parallel") for key in order):
        raise ExportError(f"{name}: interleaved_parallel: pieces of one operator on one device are no part of a plan")
    cuts = []
    for key in order:
        matrix, axes = _axes(f"{name}, input {key}", content[key])
        cuts.append([math.prod(matrix[len(matrix) - 1 - axis] for axis in dim) for dim in axes])
    return {"parallel_strategy": cuts, "stage": 0}


def _axes(name: str, content: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """dev_matrix, and for each dim the axes that cut it."""
    matrix = _numbers(name, "dev_matrix", content.get("dev_matrix"))
    told = content.get("tensor_map")
    if not isinstance(told, list):
        raise ExportError(f"{name}: tensor_map {json.dumps(told)}: a list of numbers is wanted")
    dims = [_numbers(name, "tensor_map", one if isinstance(one, list) else [one]) for one in told]
    if not matrix or min(matrix) < 1:
        raise ExportError(f"{name}: dev_matrix {list(matrix)}: devices on each axis are wanted")
    if any(not -1 <= axis < len(matrix) for axes in dims for axis in axes):
        raise ExportError(f"{name}: tensor_map {told} names axes that dev_matrix {list(matrix)} has not")
    found = tuple(tuple(axis for axis in axes if axis >= 0) for axes in dims)
    used = [axis for axes in found for axis in axes]
    if len(set(used)) < len(used):
        raise ExportError(f"{name}: tensor_map {told} cuts twice on one axis")
    turned = next((axes for axes in found if list(axes) != sorted(axes, reverse=True)), None)
    if turned is not None:
        raise ExportError(
            f"{name}: tensor_map {told} cuts a dim along axes {list(turned)}, the fast one outside; a plan cuts along"
            " the slow one first: turn dev_matrix"
        )
    return matrix, found


def _numbers(name: str, key: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int for n in value):
        raise ExportError(f"{name}: {key} {json.dumps(value)}: a list of numbers is wanted")
    return tuple(value)


_LAYOUTS = "parallel_layout_value_item"
_STAGE_TAG = b"\x08"
"""The first byte of a protocol buffer of this kind, its first field, a number. No JSON begins with it."""


def _of_protobuf(file: bytes) -> dict[str, Any]:
    """The content of a protocol buffer in the form of the JSON. Unknown fields are left out, as is usual."""
    found: dict[str, Any] = {"parallel_strategy_item": {}, "parallel_layout_item": {}}
    for number, value in fields(file):
        if number in _ITEMS:
            kind, read = _ITEMS[number]
            name, content = "", dict[str, Any]()
            for inner, one in fields(_message(value)):
                name = _message(one).decode("utf-8", "replace") if inner == 1 else name
                content = read(_message(one)) if inner == _CONTENT else content
            if name in found[kind]:
                raise ExportError(f"{name}: it stands twice in {kind}")
            found[kind][name] = content
    return found


def _strategy(message: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"parallel_strategy": [], "stage": 0}
    for number, value in fields(message):
        if number == 1:
            found["stage"] = value
        elif number == _CONTENT:
            found["parallel_strategy"].append(list(_dims(value)))
    return found


def _layout(message: bytes) -> dict[str, Any]:
    maps: list[list[int]] = []
    found: dict[str, Any] = {"dev_matrix": []}
    for number, value in fields(message):
        if number == 1:
            found["dev_matrix"] = list(_dims(value))
        elif number == _CONTENT:
            maps.append(list(_dims(value)))
        elif number in _OF_LAYOUT:
            found[_OF_LAYOUT[number]] = value
    lone = len(maps) == 1  # else one for each dim, with an empty one after a single one
    found["tensor_map"] = maps[0] if lone else [one for one in maps if one]
    return found


_CONTENT = 2
_ITEMS = {2: ("parallel_strategy_item", _strategy), 3: ("parallel_layout_item", _layout)}
_OF_LAYOUT = {5: "field", 6: "opt_weight_shard_step", 7: "opt_weight_shard_size"}


def _message(value: Value) -> bytes:
    if isinstance(value, int):
        raise ForeignTextError(f"not a strategy file: the number {value} stands where a message is wanted")
    return value


def _dims(value: Value) -> Iterator[int]:
    for number, one in fields(_message(value)):
        if number == 1:
            yield from integers(one)


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
    matrix, tensor_map = _axes(name, content)
    told = content.get("tensor_shape")
    shape = None if told is None else _numbers(name, "tensor_shape", told)
    if shape is not None and len(tensor_map) != len(shape):
        raise ExportError(f"{name}: dev_matrix, tensor_map and tensor_shape contradict each other")
    if content.get("field"):
        raise ExportError(f"{name}: field {content['field']}: tables in uneven pieces are no part of a plan")
    size, step = content.get("opt_weight_shard_size", 0), content.get("opt_weight_shard_step", 0)
    if not all(type(n) is int for n in (size, step)):
        raise ExportError(f"{name}: opt_weight_shard_size and opt_weight_shard_step are numbers")
    return Row(name=name, matrix=matrix, map=tensor_map, shape=shape, size=size, step=max(step, 0))


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
