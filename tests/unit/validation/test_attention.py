"""Kernels, windows, biases and dropout of attention."""

from pathlib import Path

import pytest

from planner.errors import RequestError
from tests.unit.validation.runs import BRIDGE, EXPERTS, machine


@pytest.mark.parametrize(
    ("release", "slow"), [("25.11", True), ("26.04", True), ("26.06", False), ("26.06.01", True), ("26.08", False)]
)
def test_learned_sinks_are_slow_in_some_releases(tmp_path: Path, release: str, slow: bool) -> None:
    known = {**EXPERTS, "profile": "gb300-288gb", "model": "GPT OSS 120B"}
    software = machine(tmp_path, 1, **known, source=BRIDGE.format(release))[0].software
    assert software.has_sinks
    assert (software.sinks > 1) == slow
    other = {**known, "model": "Qwen3_30B_a3B"}
    assert not machine(tmp_path, 1, **other, source=BRIDGE.format(release))[0].software.has_sinks


def test_learned_sinks_are_cheap_in_flex_attention(tmp_path: Path) -> None:
    known = {**EXPERTS, "profile": "b200-180gb", "model": "gpt-oss-20b", "flash_attention": "FlexAttention"}
    assert machine(tmp_path, 1, **known)[0].software.sinks == 1


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({"flash_attention": "False"}, "unfused"),
        ({"flash_attention": "True", "date": "2023-11"}, "flash1"),
        ({"flash_attention": "True", "date": "2024-03"}, "flash2"),
        ({"flash_attention": "True", "date": "2024-03", "precision": "fp32"}, "unfused"),  # FlashAttention has 16 bits
        ({"flash_attention": "True", "date": "2025-03"}, "best"),
        ({"flash_attention": "SDPA FA2", "date": "2025-03"}, "flash2"),
        ({"flash_attention": "FA3", "date": "2024-03"}, "best"),
        ({"flash_attention": "True", "date": "2023-11", "profile": "b200-180gb"}, "best"),  # has no older kernels
        ({"flash_attention": "", "other_flags": "Megatron-DeepSpeed", "date": "2024-09"}, "unfused"),
        ({"flash_attention": "True", "other_flags": "JAX, Pax", "date": "2024-03", "profile": "h100-80gb"}, "best"),
        ({"flash_attention": "", "model": "Maxtext LLAMA3 70B", "date": "2024-03", "profile": "h100-80gb"}, "best"),
        ({"flash_attention": "False", "other_flags": "JAX, Pax", "date": "2024-03"}, "unfused"),
        ({"flash_attention": "", "profile": "v100-32gb", "date": "2025-03"}, "unfused"),  # no FlashAttention for Volta
        ({"flash_attention": "", "profile": "a100-80gb", "date": "2025-03"}, "best"),
    ],
)
def test_attention_kernels_by_name_or_date(tmp_path: Path, changes: dict[str, str], attention: str) -> None:
    assert machine(tmp_path, **changes)[0].software.attention == attention


@pytest.mark.parametrize(
    ("flags", "window"),
    [
        ("", 0),
        ("sliding_window=1024", 1024),
        ("sliding window of 4096", 4096),
        ("no swa", 0),
        ("sliding_window 0", 0),
        ("window_size=(-1, -1)", 0),
        ("window pattern SSSL", 290),  # three layers of four leave 3/4, one all: 2 x - x^2 = 0.8125 of 512 keys
        ("window pattern SSSS", 290),  # the last layer sees all
        ("window pattern LL", 512),
        ("sliding_window null", 0),
    ],
)
def test_windows_of_attention(tmp_path: Path, flags: str, window: int) -> None:
    assert machine(tmp_path, other_flags=flags)[0].software.window == window


@pytest.mark.parametrize(
    ("changes", "biased"),
    [
        ({"other_flags": "PaddlePaddle", "notes": "ALiBi"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Baichuan2-13B"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Baichuan2-7B"}, False),
        ({"other_flags": "PaddlePaddle", "model": "bigscience/bloom-7b1"}, True),
        ({"other_flags": "PaddlePaddle", "model": "Liger-bloom"}, False),
        ({"other_flags": "PaddlePaddle", "model": "BLOOM-like GPT"}, False),
        ({"other_flags": "PaddlePaddle, no ALiBi", "model": "Bloom-7B1"}, False),
        ({"other_flags": "FSDP; alibi", "zero_stage": "3", "flash_attention": "SDPA"}, True),
        ({"other_flags": "FSDP; alibi", "zero_stage": "3", "flash_attention": "FA2"}, False),  # alibi_slopes
        ({"other_flags": "PaddlePaddle; alibi", "flash_attention": "False"}, True),  # scores are in memory
        ({"other_flags": "Megatron-DeepSpeed; alibi", "flash_attention": "False"}, True),
        ({"other_flags": "Megatron-DeepSpeed", "flash_attention": "False"}, False),
    ],
)
def test_alibi_is_a_mask_where_kernels_know_no_slopes(tmp_path: Path, changes: dict[str, str], biased: bool) -> None:
    zero = int(changes.get("zero_stage", "1"))
    assert (
        machine(tmp_path, zero, **{"date": "2024-01", "flash_attention": "True", **changes})[0].software.biased
        == biased
    )


@pytest.mark.parametrize(
    ("changes", "masked", "kernels"),
    [
        ({"flash_attention": "SDPA"}, True, "flash1"),
        ({"flash_attention": "FA2"}, False, "flash2"),  # leaves padded tokens out
        ({"flash_attention": "False"}, False, "unfused"),
        ({"flash_attention": "SDPA", "other_flags": "FSDP; no padding mask"}, False, "flash2"),
        ({"flash_attention": "SDPA", "date": "2026-05", "profile": "h200-141gb"}, True, "cudnn"),  # takes a mask
    ],
)
def test_padding_is_a_mask_for_kernels_of_pytorch(
    tmp_path: Path, changes: dict[str, str], masked: bool, kernels: str
) -> None:
    known = {"zero_stage": "3", "date": "2025-03", "other_flags": "FSDP; padding mask", "profile": "a100-80gb"}
    software = machine(tmp_path, 3, **{**known, **changes})[0].software
    assert (software.masked, software.attention) == (masked, kernels)


@pytest.mark.parametrize(
    ("changes", "apart"),
    [
        ({"stack": "PyTorch"}, True),
        ({"stack": "PyTorch", "flash_attention": "SDPA"}, False),
        ({"stack": "Megatron-LM"}, False),
        ({"stack": "torchtitan"}, False),
    ],
)
def test_a_model_that_writes_attention_out_masks_scores_apart(
    tmp_path: Path, changes: dict[str, str], apart: bool
) -> None:
    known = {"flash_attention": "unfused", "date": "2025-03", "tp": "1", "pp": "1", "dp": "8"}
    assert machine(tmp_path, 0, **{**known, **changes})[0].software.masks_apart == apart


@pytest.mark.parametrize(
    ("changes", "repeats"),
    [
        ({"date": "2025-03"}, True),
        ({"date": "2025-08"}, False),
        ({"date": "2025-08", "other_flags": "Hugging Face transformers; padding mask"}, True),
        ({"date": "2025-03", "other_flags": "eager"}, False),
        ({"date": "2025-03", "flash_attention": "FA2"}, False),
    ],
)
def test_transformers_repeat_keys_for_pytorch(tmp_path: Path, changes: dict[str, str], repeats: bool) -> None:
    known = {"zero_stage": "3", "other_flags": "Hugging Face transformers; FSDP", "flash_attention": "SDPA"}
    assert machine(tmp_path, 3, **{**known, **changes})[0].software.repeats_keys == repeats


@pytest.mark.parametrize("flags", ["sliding window", "sliding_window=512 alternating with global layers"])
def test_windows_that_nobody_can_price_are_refused(tmp_path: Path, flags: str) -> None:
    with pytest.raises(RequestError, match="window"):
        machine(tmp_path, other_flags=flags)


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"date": "2026-04", "flash_attention": "SDPA"}, "cudnn"),
        ({"date": "2026-04", "flash_attention": "True"}, "cudnn"),
        ({"date": "2026-04", "flash_attention": "FA2"}, "flash2"),
        ({"date": "2025-12", "flash_attention": "SDPA"}, "flash2"),
        ({"date": "2026-04", "flash_attention": "FlexAttention"}, "flash2"),
        ({"date": "2026-04", "flash_attention": "SDPA", "other_flags": "latent attention"}, "flash1"),
    ],
)
def test_kernels_of_pytorch(tmp_path: Path, changes: dict[str, str], kernels: str) -> None:
    assert machine(tmp_path, 3, profile="h200-141gb", zero_stage="3", **changes)[0].software.attention == kernels


@pytest.mark.parametrize(
    ("changes", "kernels"),
    [
        ({"stack": "torchtitan", "zero_stage": "3", "date": "2025-05", "flash_attention": "SDPA"}, "cudnn"),
        ({"stack": "torchtitan", "zero_stage": "3", "date": "2025-04", "flash_attention": "SDPA"}, "flash2"),
        ({"stack": "torchtitan", "zero_stage": "3", "date": "", "flash_attention": "SDPA"}, "flash2"),
        ({"stack": "FSDP2", "zero_stage": "3", "date": "2025-12", "flash_attention": "SDPA"}, "flash2"),
        ({"date": "2026-07", "flash_attention": "TE", "flag": "deterministic-mode"}, "best"),
        ({"date": "2026-07", "flash_attention": "TE", "other_flags": "attention_dropout 0.1"}, "best"),
    ],
)
def test_kernels_on_blackwell(tmp_path: Path, changes: dict[str, str], kernels: str) -> None:
    assert machine(tmp_path, 3, profile="gb200-186gb", **changes)[0].software.attention == kernels


@pytest.mark.parametrize(
    ("profile", "dropout", "kernels", "ordered"),
    [
        ("gb200-186gb", "0.1", "flash2", True),
        ("gb200-186gb", "0.0", "best", False),
        ("h100-80gb", "0.1", "best", False),
        ("a100-80gb", "0.1", "best", True),
        ("a100-80gb", "0.0", "best", True),
    ],
)
def test_attention_with_dropout_and_in_one_order(
    tmp_path: Path, profile: str, dropout: str, kernels: str, ordered: bool
) -> None:
    """cuDNN has no such backward pass on A100, and none with dropout on Blackwell."""
    flags = {"other_flags": f"deterministic-mode; attention_dropout {dropout}", "flash_attention": "TE"}
    found = machine(tmp_path, profile=profile, date="2026-07", **flags)[0].software
    assert (found.attention, found.ordered, found.drops_probabilities) == (kernels, ordered, dropout == "0.1")
    assert found.hidden_dropout == "none"


@pytest.mark.parametrize(("flags", "hidden"), [("", "fused"), ("hidden-dropout 0.0", "none"), ("dropout 0.1", "fused")])
def test_megatron_of_2021_has_its_default_of_dropout(tmp_path: Path, flags: str, hidden: str) -> None:
    row = {"date": "2022-05", "flash_attention": "False", "other_flags": f"Megatron-LM; {flags}"}
    assert machine(tmp_path, **row)[0].software.hidden_dropout == hidden
    untold = machine(tmp_path, **{**row, "other_flags": "Megatron-DeepSpeed"})[0].software  # its `passes` include it
    assert untold.hidden_dropout == "none"


@pytest.mark.parametrize(
    ("changes", "starts"),
    [
        ({"date": "2022-05", "other_flags": "Megatron-LM", "pp": "8"}, (14, 2)),
        ({"date": "2022-05", "other_flags": "Megatron-LM", "pp": "1"}, (12, 0)),
        ({"date": "2022-11", "other_flags": "Megatron-LM", "pp": "8"}, (0, 0)),  # timers no longer wait
        ({"date": "2022-05", "other_flags": "NeMo", "pp": "8"}, (0, 0)),
        ({"date": "2022-05", "other_flags": "Megatron-DeepSpeed", "pp": "8"}, (0, 0)),
    ],
)
def test_megatron_of_2021_waits_for_the_device_at_every_pass(
    tmp_path: Path, changes: dict[str, str], starts: tuple[int, int]
) -> None:
    assert machine(tmp_path, flash_attention="False", **changes)[0].software.starts == starts


@pytest.mark.parametrize(
    ("flags", "hidden", "drops"),
    [
        ("hidden_dropout 0.1; attention_dropout=0.1", "fused", True),
        ("--hidden-dropout 0.0 --attention-dropout 0.0", "none", False),
        ("dropout 0.1", "fused", True),
        ("lora_dropout 0.1; fused dropout", "none", False),
        ("hidden-dropout 0.1; bias_dropout_add_fusion=False", "apart", False),
    ],
)
def test_dropout_is_what_flags_say(tmp_path: Path, flags: str, hidden: str, drops: bool) -> None:
    found = machine(tmp_path, date="2026-07", flash_attention="TE", other_flags=flags)[0].software
    assert (found.hidden_dropout, found.drops_probabilities) == (hidden, drops)
    assert machine(tmp_path, date="2021-05", flash_attention="False", other_flags=flags)[0].software.scores == 2
