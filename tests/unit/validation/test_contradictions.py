"""Rows that say a thing twice, otherwise."""

from pathlib import Path

import pytest

from planner.validation.request.configuration import run_of
from planner.validation.request.contradictions import refuse_peak, refuse_rate
from planner.validation.unsupported import UnsupportedError
from tests.unit.validation.runs import one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "MI300X"}, "none of profile a100-80gb"),
        ({"device": "H100-SXM"}, "none of profile a100-80gb"),
        ({"device": "A100-SXM-40GB"}, "other memory than profile a100-80gb"),
        ({"device": "GH200 144GB", "profile": "gh200-96gb"}, "other memory than profile gh200-96gb"),
        ({"global_batch": "65536", "seq_len": "8192", "n_params_B": ""}, "tokens a step"),
        ({"other_flags": "gradient_accumulation_steps=4", "pp": "1", "dp": "4"}, "not global_batch 16"),
        ({"recompute": "none", "other_flags": "recompute-granularity=full"}, "computed again"),
        ({"recompute": "none", "notes": "gradient checkpointing enabled"}, "computed again"),
        ({"precision_detail": "fp8 linear layers"}, "names fp8"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run_of(one(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"iter_time_s": "1e30"}, "iter_time_s is 1e30; runs with 0.0001 to 100000 are evaluated"),
        ({"iter_time_s": "1e-30"}, "iter_time_s is 1e-30"),
        ({"iter_time_s": "", "tokens_per_s_per_device": "1e30"}, "iter_time_s is 1.024e-27 by tokens_per_s_per_device"),
        (
            {"iter_time_s": "", "tokens_per_s_per_device": "1e-30"},
            r"iter_time_s is 1.024e\+33 by tokens_per_s_per_device",
        ),
        (
            {"iter_time_s": "", "tokens_per_s_per_device": "0.009", "seq_len": "2", "global_batch": "16"},
            "tokens_per_s_per_device is 0.009; runs with 0.01 to",
        ),
        ({"peak_mem_GB": "1e-30"}, "peak_mem_GB is 1e-30; runs with 0.001 to 10000 are evaluated"),
        ({"peak_mem_GB": "4e9"}, "peak_mem_GB is 4e9"),
    ],
)
def test_what_no_run_measures_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run_of(one(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"iter_time_s": "100000"},
        {"peak_mem_GB": "0.001"},
        {"device": "A100 (SXM; memory size not stated)"},
        {"device": "A100-SXM-80GB (HBM2e 2.0TB/s)"},
        {"device": "A100, 600GB/s NVLink"},
        {"other_flags": "gradient_accumulation_steps=2", "pp": "1", "dp": "4"},
        {"other_flags": "no-gradient-accumulation-fusion"},
        {"recompute": "none", "notes": "without gradient checkpointing enabled"},
        {"precision_detail": "bf16, not fp8"},
    ],
)
def test_words_that_agree(tmp_path: Path, changes: dict[str, str]) -> None:
    assert run_of(one(tmp_path, **changes)).job.devices == 8


def test_a_peak_in_another_unit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"63488, and the device has 85.9 GB: say its unit"):
        refuse_peak(one(tmp_path, peak_mem_GB="63488"), 80 * 2**30)
    refuse_peak(one(tmp_path, peak_mem_GB="63488 MiB"), 80 * 2**30)


def test_a_step_that_no_device_can_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"took 0.1 s, and 1e\+15 FLOP take 0.2 s"):
        refuse_rate(one(tmp_path, iter_time_s="0.1"), 1e15, 5e15)
    refuse_rate(one(tmp_path, iter_time_s="0.3"), 1e15, 5e15)
