"""How rows are sent to experts, and what is in CUDA graphs."""

from pathlib import Path

import pytest

from hardware_profiles import load_profile
from planner.validation.frameworks.recipes import release_of
from planner.validation.stack.experts import GROUPED_SLOWER
from tests.unit.validation.runs import BRIDGE, EXPERTS, machine, one


@pytest.mark.parametrize(
    ("release", "model", "profile", "dispatcher", "graphs"),
    [
        ("25.09", "DeepSeekV3", "gb200-186gb", "alltoall", "none"),
        ("25.09", "DeepSeekV3", "h100-80gb", "once", "none"),
        ("25.11", "DeepSeekV3", "gb200-186gb", "once", "router"),
        ("25.11", "Qwen3_235B_a22B", "b200-180gb", "alltoall", "none"),
        ("26.02", "Qwen3_30B_a3B", "b300-288gb", "once", "router"),
        ("26.04.01", "DeepSeekV3", "gb300-288gb", "once", "attention"),
        ("26.04.01", "GPT OSS 120B", "h100-80gb", "alltoall", "none"),
        ("26.04.01", "Mixtral 8x7B", "gb300-288gb", "once", "none"),
    ],
)
def test_how_recipes_send_rows_and_what_they_graph(
    tmp_path: Path, release: str, model: str, profile: str, dispatcher: str, graphs: str
) -> None:
    known = {**EXPERTS, "profile": profile, "model": model, "source": BRIDGE.format(release)}
    software = machine(tmp_path, 1, **known)[0].software
    assert (software.dispatcher, software.graphs) == (dispatcher, graphs)
    for flags, told in (
        ("moe_token_dispatcher_type: alltoall", "alltoall"),
        ("alltoall dispatcher", "alltoall"),
        ("dispatcher: all-to-all", "alltoall"),
        ("flex dispatcher, hybridep", "once"),
    ):
        assert machine(tmp_path, 1, **known, other_flags=flags)[0].software.dispatcher == told


def test_recipes_before_megatron_bridge_graph_whole_layers_on_blackwell(tmp_path: Path) -> None:
    known = {**EXPERTS, "date": "2025-05", "other_flags": "NeMo framework recipe", "model": "Grok1 314b"}
    for profile, graphs in (("gb200-186gb", "step"), ("h100-80gb", "none")):
        software = machine(tmp_path, 1, **known, profile=profile)[0].software
        assert (software.dispatcher, software.graphs) == ("alltoall", graphs)


def test_mindspeed_sorts_rows_element_by_element_before_2025(tmp_path: Path) -> None:
    known = {"arch": "moe", "profile": "ascend-910b-64gb", "flash_attention": "True"}
    assert machine(tmp_path, **known, date="2024-06")[0].software.row_bytes[0]
    assert not machine(tmp_path, **known, date="2025-06")[0].software.row_bytes[0]
    flags = "moe-token-dispatcher-type=alltoall"
    assert not machine(tmp_path, **known, date="2024-06", other_flags=flags)[0].software.row_bytes[0]


def test_rows_of_experts_pass_memory_as_the_release_of_torchtitan_moves_them(tmp_path: Path) -> None:
    known = {"arch": "moe", "stack": "torchtitan", "profile": "h100-80gb", "zero_stage": "3", "ep": "2"}
    dates = ("2025-08", "2025-12", "2026-05")
    moved = [machine(tmp_path, 3, **known, date=date)[0].software.row_bytes for date in dates]
    device = load_profile("h100-80gb").device
    put_back = 0.68e-9 / 132 * device.memory_bandwidth * device.efficiency("elementwise").bandwidth
    assert 8 < put_back < 22
    wanted = [(36.0, 44 + put_back), (26.0, 20 + 2 * put_back), (32.0, 40 + 2 * put_back)]
    assert moved == [pytest.approx(one) for one in wanted]
    biased = machine(tmp_path, 3, **known, date="2026-02", model="gpt-oss-20b")[0].software.row_bytes
    assert biased == pytest.approx((26.0 + 66.0, 20 + 2 * put_back + 84.0))
    fused = {"date": "2026-06", "other_flags": "torchtitan; MinimalAsyncEP"}
    megatron = {"date": "2025-12", "stack": "Megatron-LM", "zero_stage": "1", "source": "torchtitan and Megatron-LM"}
    assert machine(tmp_path, 3, **{**known, "date": "2026-05", "ep": "1"})[0].software.row_bytes == pytest.approx(
        (24.0, 36 + put_back)
    )
    compiled = {"date": "2026-05", "compile": "True"}
    traced = {**known, **compiled, "other_flags": "aot_fx_trace"}  # runs operators one by one
    assert machine(tmp_path, 3, **traced)[0].software.row_bytes == moved[2]
    for other in (fused, megatron, compiled, {"date": ""}, {"date": "2025-08", "stack": "FSDP2"}):
        assert machine(tmp_path, 3, **{**known, **other})[0].software.row_bytes == (0.0, 0.0)


def test_the_backward_pass_of_an_index_takes_what_it_took_on_b200(tmp_path: Path) -> None:
    """196,608 rows of 2,048 elements in 1.848 ms: pytorch/ao pull request 4623."""
    known = {"arch": "moe", "stack": "torchtitan", "profile": "b200-180gb", "zero_stage": "3", "ep": "1"}
    device = load_profile("b200-180gb").device
    put_back = machine(tmp_path, 3, **known, date="2026-05")[0].software.row_bytes[1] - 36
    rate = device.memory_bandwidth * device.efficiency("elementwise").bandwidth
    assert put_back * 196_608 * 2_048 / rate == pytest.approx(1.848e-3, rel=0.01)


def test_grouped_products_of_pytorch_are_slower_than_those_of_tables(tmp_path: Path) -> None:
    known = {"arch": "moe", "profile": "h100-80gb", "zero_stage": "3", "date": "2026-06"}
    titan = machine(tmp_path, 3, **known, stack="torchtitan")
    assert titan[0].software.grouped_slower == GROUPED_SLOWER > 1
    assert "products of experts take 1.2 times as long as those of tables (torch._grouped_mm)" in titan[1]
    others = [{"other_flags": flags} for flags in ("FSDP2; torch._grouped_mm", "FSDP2; grouped_mm")]
    assert [machine(tmp_path, 3, **known, **one)[0].software.grouped_slower for one in others] == [GROUPED_SLOWER] * 2
    fused = {**known, "stack": "torchtitan", "other_flags": "DistMoE"}  # one kernel of its own
    for other in (fused, {**known, "stack": "Megatron-LM"}, {**known, "stack": "torchtitan", "arch": "dense"}):
        assert machine(tmp_path, 3, **other)[0].software.grouped_slower == 1


def test_a_release_is_named_or_the_month_of_the_date(tmp_path: Path) -> None:
    assert release_of(one(tmp_path, source="NeMo Container")) == ""
    assert release_of(one(tmp_path, source="a table", date="2026-08")) == "26.08"
    assert release_of(one(tmp_path, source=BRIDGE.format("26.06.01"), date="2025-09..2026-07")) == "26.06.01"


@pytest.mark.parametrize(
    ("flags", "buffers"),
    [
        ("JAX, MaxText (XLA); dense_matmul; capacity_factor 1.25", 1.25),
        ("JAX, MaxText (XLA); dense_matmul; capacity_factor=1.0", 1.0),
        ("JAX, MaxText (XLA); dense_matmul; capacity_factor=-1.0", None),  # every expert computes every token
        ("JAX, MaxText (XLA); capacity_factor 1.25", None),
        ("dense_matmul; moe-expert-capacity-factor 1.25", None),
    ],
)
def test_experts_of_maxtext_with_buffers(tmp_path: Path, flags: str, buffers: float | None) -> None:
    software = machine(tmp_path, 3, **{**EXPERTS, "other_flags": flags})[0].software
    sequence = int(one(tmp_path, **EXPERTS).needed("seq_len"))
    assert software.buffers_of_experts == ((0, 1.0) if buffers is None else (sequence, buffers))
