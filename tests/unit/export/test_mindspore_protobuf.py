"""Strategy files of MindSpore as protocol buffers, and dims that several axes cut."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hardware_profiles.foreign import ForeignTextError
from planner.export.description import ExportError
from planner.export.files.protobuf import fields, integers
from planner.export.mindspore.mindspore import _map
from planner.export.mindspore.mindspore_files import parsed
from planner.sharding.layout import parse_layout
from tests.refusals import refused

SAMPLES = Path(__file__).parent / "mindspore"


def varint(number: int) -> bytes:
    number, found = number % 2**64, b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def field(number: int, value: int | bytes | str) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    content = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(content)) + content


def dims(numbers: list[int]) -> bytes:
    return b"".join(field(1, number) for number in numbers)


def protobuf(content: dict[str, Any]) -> bytes:
    """The content of a JSON file as MindSpore writes it to protocol buffers: without shapes of parameters."""
    found = field(1, content["current_stage"])
    for name, item in content["parallel_strategy_item"].items():
        cuts = b"".join(field(2, dims(row)) for row in item["parallel_strategy"])
        found += field(2, field(1, name) + field(2, field(1, item["stage"]) + cuts))
    for name, row in content.get("parallel_layout_item", {}).items():
        maps = row["tensor_map"] if isinstance(row["tensor_map"][0], list) else [row["tensor_map"]]
        layout = field(1, dims(row["dev_matrix"])) + b"".join(field(2, dims(one)) for one in maps)
        layout += field(3, b"") + field(4, b"") + field(5, 0)
        layout += field(6, row["opt_weight_shard_step"]) + field(7, row["opt_weight_shard_size"])
        found += field(3, field(1, name) + field(2, layout))
    return found


@pytest.mark.parametrize("name", ["gpt_parameter_strategy", "operator_strategy", "parameter_strategy"])
def test_a_protocol_buffer_says_what_the_json_does(name: str) -> None:
    text = (SAMPLES / f"{name}.json").read_text()
    items, rows = parsed(text.encode())
    found, layouts = parsed(protobuf(json.loads(text)))
    assert found == items
    assert [(row.name, row.matrix, row.map, row.size, row.step) for row in layouts] == [
        (row.name, row.matrix, row.map, row.size, row.step) for row in rows
    ]
    assert all(row.shape is None for row in layouts)


def layout(tensor_map: list[Any], **more: Any) -> dict[str, Any]:
    row = {"dev_matrix": [2, 4, 2], "tensor_map": tensor_map, "opt_weight_shard_step": 0, "opt_weight_shard_size": -1}
    return {"current_stage": 0, "parallel_strategy_item": {}, "parallel_layout_item": {"w": {**row, **more}}}


def test_several_axes_cut_one_dim() -> None:
    wanted = ((2, 0), (1,))
    told = layout([[2, 0], [1]])
    assert parsed(protobuf(told))[1][0].map == wanted
    assert parsed(json.dumps({**told, "parallel_layout_item": layout([[2, 0], 1], tensor_shape=[8, 8])[
        "parallel_layout_item"]}).encode())[1][0].map == wanted  # fmt: skip
    assert _map(parse_layout("S0, S1, S0"), (2, 4, 2), (8, 16)) == ([2, 4, 2], [2, 0, 1], [2, 4, 16])
    assert _map(parse_layout("S0, S0, S1"), (2, 4, 2), (8, 16)) == ([8, 2], [1, 0], [8, 16])
    with refused(ExportError, "the fast one outside"):
        parsed(protobuf(layout([[0, 2], [1]])))
    with refused(ExportError, "cuts twice on one axis"):
        parsed(protobuf(layout([[2, 1], [1]])))


def test_layouts_of_operators_are_strategies() -> None:
    inputs = {"0": {"dev_matrix": [2, 4], "tensor_map": [[1, 0], [-1]], "interleaved_parallel": False},
              "1": {"dev_matrix": [2, 4], "tensor_map": [[-1], [0]], "alias_name": ["dp", "mp"]}}  # fmt: skip
    content = {"current_stage": 0, "parallel_layout_value_item": {"MatMul_w": inputs}}
    ((item,), _) = parsed(json.dumps(content).encode())
    assert (item.primitive, item.owner, item.cuts) == ("MatMul", "w", ((8, 1), (1, 4)))
    inputs["0"]["interleaved_parallel"] = True
    with refused(ExportError, "interleaved_parallel"):
        parsed(json.dumps(content).encode())


def test_fields_are_read_as_they_are_written() -> None:
    message = field(1, -1) + field(2, b"ab") + bytes([3 << 3 | 5]) + struct.pack("<I", 7) + field(16, 300)
    assert list(fields(message)) == [(1, -1), (2, b"ab"), (3, struct.pack("<I", 7)), (16, 300)]
    assert integers(varint(5) + varint(-2)) == [5, -2]  # packed
    for wrong in (b"\x08", b"\x12\x05ab", b"\x0b", b"\x00\x01", b"\xff" * 12):
        with pytest.raises(ForeignTextError, match="not a protocol buffer"):
            list(fields(wrong))


@pytest.mark.parametrize("wrong", [b"\x08\x00\x12\x02\x0a", b"\x08\x00\x10\x01", b"not JSON", b"\xff\xfe"])
def test_what_is_neither_is_refused(wrong: bytes) -> None:
    with pytest.raises(ExportError, match="is JSON or a protocol buffer"):
        parsed(wrong)
