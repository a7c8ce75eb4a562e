"""Gradients and states of the optimizer: their dtypes and buckets."""

from itertools import product
from pathlib import Path

import pytest

from hardware_profiles import load_software
from planner.validation.pricing.priced_run import gradient_dtype
from tests.unit.validation.runs import BRIDGE, machine

NEMO_1 = {"stack": "nemo", "date": "2024-05", "hidden": "64", "vocab": "1000", "n_params_B": "0.1", "n_layers": "24"}
LAYER = (100e6 - 2 * 64 * 1000) / 24


@pytest.mark.parametrize(
    ("changes", "stored"),
    [
        ({"source": BRIDGE.format("26.04"), "date": "2026-04"}, (2, 2, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "precision": "fp8"}, (2, 4, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "zero_stage": "3"}, (2, 4, 4)),
        ({"source": BRIDGE.format("26.04"), "date": "2026-04", "model": "DeepSeekV3"}, (2, 2, 2)),
        ({"source": "NVIDIA DGXC benchmarking recipes v24.11.1", "date": "2024-11"}, (2, 2, 4)),
        ({"source": "NVIDIA DGXC benchmarking recipes v25.05", "date": "2025-05"}, (2, 4, 4)),
        ({"source": "NeMo 24.07 perf table", "date": "2024-07"}, (2, 2, 4)),
        ({"date": "2025-09", "other_flags": "NeMo 25.07 performance recipe"}, (2, 4, 4)),
        ({"date": "2025-09", "other_flags": "NeMo 25.07; overlap-grad-reduce"}, (4, 4, 4)),
        ({"date": "2026-04", "other_flags": "Megatron Bridge; NeMo 26.04"}, (4, 4, 4)),
        ({"source": "NeMo 24.07, Llama 2 7B on 4 A100", "date": "2024-08"}, (4, 4, 4)),
        ({"notes": "NeMo"}, (4, 4, 4)),
        ({"other_flags": "NeMo; grad_sync_dtype: bf16"}, (2, 4, 4)),
        ({"source": "NeMo 24.07 perf table", "date": "2024-07", "other_flags": "grad_reduce_in_fp32=True"}, (4, 4, 4)),
        ({"other_flags": "grad-reduce-in-bf16"}, (2, 4, 4)),
    ],
)
def test_what_recipes_keep_in_bf16(tmp_path: Path, changes: dict[str, str], stored: tuple[int, int, int]) -> None:
    """Gradients, the master weight beside the weight itself, and moments."""
    own = machine(tmp_path, 1, **{"flash_attention": "True", "other_flags": "NeMo", **changes})[0].software.stored
    assert (own.bf16, own.master, own.moment) == stored


@pytest.mark.parametrize(
    ("changes", "parameters", "per_device"),
    [
        ({"stack": "megatron", "date": "2024-03"}, 40e6, 0),
        ({"stack": "megatron", "date": "2024-04"}, 40e6, 1e6),
        ({"stack": "megatron"}, 40e6, 1e6),
        ({"stack": "nemo", "date": "2024-09"}, 2**27, 0),
        ({"stack": "nemo"}, 2**27, 0),
        ({**NEMO_1, "tp": "1", "pp": "1"}, LAYER, 0),
        ({**NEMO_1, "tp": "4", "pp": "2"}, LAYER / 4, 0),
        ({**NEMO_1, "tp": "4", "pp": "2", "vpp": "3"}, LAYER * 4 / 4, 0),
        ({**NEMO_1, "date": "2024-10", "source": "MLPerf Training v4.1", "tp": "1"}, LAYER, 0),
        ({**NEMO_1, "arch": "moe"}, 2**27, 0),
    ],
)
def test_buckets_are_those_of_their_time(
    tmp_path: Path, changes: dict[str, str], parameters: float, per_device: float
) -> None:
    """Of NeMo 1 a layer, or the layers of a virtual stage."""
    software = machine(tmp_path, 1, flash_attention="True", **changes)[0].software
    assert (software.bucket_parameters, software.bucket_per_device) == (round(parameters), per_device)


def test_deepspeed_copies_gradients_in_fp32_into_buckets(tmp_path: Path) -> None:
    """500 million elements, or all that a device has: 4 bytes each, and 2 of their cast, where fp16 has 2."""
    cut = {"other_flags": "Megatron-DeepSpeed", "tp": "8", "pp": "12"}
    buffers = {}
    for precision, size in product(("fp16", "bf16"), ("176", "9.6")):
        cluster, _ = machine(tmp_path, 1, **cut, precision=precision, n_params_B=size)
        buffers[precision, size] = cluster.software.buffers
    assert buffers["bf16", "176"] - buffers["fp16", "176"] == 4 * 5e8
    assert buffers["bf16", "9.6"] - buffers["fp16", "9.6"] == pytest.approx(4 * 9.6e9 / 96)


@pytest.mark.parametrize(
    ("stack", "precision", "dtype"),
    [
        ("deepspeed", "fp16", "parameter"),
        ("deepspeed", "bf16", "mixed"),
        ("megatron", "fp16", "parameter"),
        ("megatron", "bf16", "mixed"),
        ("fsdp", "bf16", "mixed"),
        ("megatron", "fp32", "mixed"),
        ("deepspeed-zero3", "bf16", "mixed"),
    ],
)
def test_gradients_are_reduced_as_a_stack_keeps_them(stack: str, precision: str, dtype: str) -> None:
    assert gradient_dtype(load_software(stack), precision) == dtype


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"zero_stage": "2"}, True),
        ({"zero_stage": "1", "precision": "fp16"}, True),
        ({"zero_stage": "2", "date": "2023-11"}, True),
        ({"zero_stage": "2", "date": "2023-10"}, False),
        ({"zero_stage": "1"}, False),  # 16 bits twice are as long as 32 bits once
        ({"zero_stage": "2", "other_flags": "Megatron-LM"}, False),
    ],
)
def test_deepspeed_all_reduces_what_it_shards(tmp_path: Path, changes: dict[str, str], whole: bool) -> None:
    known = {"other_flags": "DeepSpeed", "precision": "bf16", "date": "2024-05"}
    row = {**known, **changes}
    assert machine(tmp_path, int(row["zero_stage"]), **row)[0].software.reduces_whole == whole


@pytest.mark.parametrize(
    ("flags", "copies"),
    [("", 3), ("; reduce_bucket_size 5e8", 3), ('; "reduce_bucket_size": "auto"', 1), ("; reduce_bucket_size=1e4", 1)],
)
def test_deepspeed_only_divides_what_fits_no_bucket(tmp_path: Path, flags: str, copies: int) -> None:
    row = {"other_flags": f"DeepSpeed ZeRO-3{flags}", "precision": "bf16", "zero_stage": "3"}
    assert machine(tmp_path, 3, **row)[0].software.copies_gradients == copies


def test_zero_3_of_deepspeed_keeps_gradients_as_weights(tmp_path: Path) -> None:
    """engine.py, get_data_types: the dtype of the model, unless data_types.grad_accum_dtype says more."""
    asked = {"other_flags": "DeepSpeed ZeRO-3", "precision": "bf16", "zero_stage": "3"}
    plain, notes = machine(tmp_path, 3, **asked)
    assert plain.software.stored.bf16 == 2
    assert gradient_dtype(plain.software, "bf16") == "parameter"
    assert any("grad_accum_dtype" in note for note in notes)
    wide, _ = machine(tmp_path, 3, **{**asked, "other_flags": "DeepSpeed; grad_accum_dtype: fp32"})
    assert wide.software.stored.bf16 > 2
    assert gradient_dtype(wide.software, "bf16") == "mixed"


def test_gradients_of_megatron_are_narrow_where_their_main_copy_is(tmp_path: Path) -> None:
    for flags, width in (("main-grads-dtype bf16", 2.0), ("main_grads_dtype=fp32", 4.0), ("", 4.0)):
        software = machine(tmp_path, stack="Megatron-LM", date="2025-02", other_flags=flags)[0].software
        assert software.stored.bf16 == width


def test_pipelines_of_torchtitan_accumulate_gradients_by_a_pass_of_its_own(tmp_path: Path) -> None:
    known = {"stack": "torchtitan", "zero_stage": "3", "date": "2026-03"}
    wide = machine(tmp_path, 3, **known, pp="2")[0].software
    assert (wide.accumulates, wide.sums_narrow) == (True, False)
    narrow = machine(tmp_path, 3, **known, pp="2", other_flags="grad_reduce_in_fp32=False")[0].software
    assert (narrow.accumulates, narrow.sums_narrow) == (True, True)
    assert not machine(tmp_path, 3, **known, pp="1")[0].software.accumulates
    assert not machine(tmp_path, 3, **{**known, "stack": "FSDP2"}, pp="2")[0].software.accumulates
