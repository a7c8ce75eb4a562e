"""Rows that say in words that they were run in a way that is not priced, or that is."""

from pathlib import Path

import pytest

from planner.validation.pricing.evaluate import evaluate_chunk
from planner.validation.request.configuration import run_of
from planner.validation.stack.states import States
from planner.validation.unsupported import UnsupportedError
from tests.unit.validation.runs import one

EXPERTS = {"arch": "moe", "n_experts": "8", "topk": "2", "moe_ffn_hidden": "512", "n_params_B": ""}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "Llama 8B QLoRA"}, "LoRA"),
        ({"other_flags": "optimizer=Adafactor"}, "AdamW"),
        ({"other_flags": "8-bit Adam (bitsandbytes)"}, "AdamW"),
        ({"other_flags": "DualPipe"}, "dualpipe"),
        ({"other_flags": "zero bubble pipeline"}, "zero bubble"),
        ({"other_flags": "cp-comm-type=a2a+p2p"}, "by a ring outside"),
        ({"intra_bw": "PCIe 4.0 x16"}, "PCIe"),
        ({"device": "A100 PCIe"}, "PCIe"),
        ({"device": "H100 NVL"}, "PCIe"),
        ({"model": "BERT-large"}, "no decoder"),
        ({"model": "T5-11B"}, "no decoder"),
        ({"model": "Llama 8B DPO"}, "second model"),
        ({"model": "Llama 8B SFT (packed)"}, "documents"),
        ({"other_flags": "Megatron-SWIFT; packing true"}, "documents"),
        ({"other_flags": "use_sequence_packing=true"}, "documents"),
        ({"other_flags": "_use_doc_masking: true"}, "documents"),
        ({**EXPERTS, "other_flags": "Hugging Face transformers; DeepSpeed ZeRO-3"}, "experts one by one"),
        ({**EXPERTS, "stack": "transformers"}, "experts one by one"),
        ({"other_flags": "frozen embeddings"}, "frozen"),
        ({"other_flags": "inference"}, "nothing is trained"),
        ({"other_flags": "zero_hpz_partition_size=8"}, r"ZeRO\+\+"),
        ({"other_flags": "offload_param=cpu"}, "outside of the device"),
        ({"other_flags": "enable_cpu_offload=true"}, "outside of the device"),
        ({"other_flags": "offload_activations=True"}, "wait on the host"),
        ({"other_flags": "activation offloading by save_on_cpu"}, "wait on the host"),
        ({"precision": "fp16", "other_flags": "no master weights"}, "no fp32 copy"),
        ({"other_flags": "paged_adamw_32bit"}, "AdamW"),
        ({"notes": "trained with Shampoo"}, "AdamW"),
        ({"notes": "schedule: GPipe"}, "gpipe"),
        ({"intra_bw": "NVLink off, PCIe"}, "not joined by NVLink"),
        ({"notes": "time of the first step, including compilation"}, "more than a step"),
        ({"other_flags": "no 1F1B, GPipe"}, "gpipe"),
        ({"other_flags": "PipeDream-2BW"}, "pipedream"),
        ({"other_flags": "LoRA by DoRA"}, "DoRA"),
        ({"other_flags": "packing no recomputation"}, "documents"),
        ({"model": "CLIP ViT-L"}, "no decoder"),
    ],
)
def test_a_run_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run_of(one(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": "full fine-tuning, no LoRA"},
        {"profile": "l40s-48gb", "device": "L40S PCIe", "notes": "no NVLink"},
        {"notes": "phase=sft/lora"},  # a script for both; the flag says which
        {"other_flags": "dp_replicate=1; dp_shard=2"},
        {"other_flags": "untie-embeddings-and-output-weights"},
        {"notes": "twice as fast as GPipe"},
        {"notes": "AdamW, 3% slower than Muon"},
        {"notes": "LoRA disabled"},
        {"other_flags": "use_lora=False; dpo: no"},
        {"other_flags": "act cpu offload False; FSDP mixed precision mode PURE"},
        {"other_flags": "zero_hpz_partition_size=1; no frozen layers"},
        {"other_flags": "optimizer=adamw_torch_fused"},
        {"other_flags": "DualPipe", "pp": "1", "dp": "4"},
        {"other_flags": "Megatron-SWIFT; packing false"},
        {"other_flags": "packing is off; no_lora; lora_r 0; dpo no; muon not used"},
        {"other_flags": "offload_param none; zero_hpz_partition_size 0; offload_optimizer disabled"},
        {"other_flags": "grad_clip_norm=1.0; clip-grad 1.0; gradient clip 1.0; clip: 1.0"},
        {"other_flags": "BERT tokenizer; T5 vocabulary; mamba environment"},
        {"other_flags": "disable packing"},
        {"notes": "does not include compilation; no warning of nvlink, which is NVLink 4"},
        {"intra_bw": "NVLink bridges between PCIe cards"},
    ],
)
def test_words_that_say_nothing_of_the_kind(tmp_path: Path, changes: dict[str, str]) -> None:
    assert run_of(one(tmp_path, **changes)).pinned.schedule == "1f1b"


@pytest.mark.parametrize(
    ("flags", "around"),
    [("", "ring"), ("cp-comm-type=p2p", "ring"), ("cp_comm_type: a2a", "heads"), ("DeepSpeed Ulysses", "heads")],
)
def test_how_context_is_parallel(tmp_path: Path, flags: str, around: str) -> None:
    run = run_of(one(tmp_path, tp="1", pp="1", cp="2", dp="4", other_flags=flags))
    assert run.pinned.context_by == around


@pytest.mark.parametrize(
    ("detail", "blocks"),
    [
        ("every 3rd layer", 2),  # of the 6 of a stage
        ("every other layer", 3),
        ("full (block n=5)", 5),
        ("recompute-method=block recompute-num-layers=4", 4),
        ("50% of layers", 3),
        ("uniform, recompute-num-layers=1", 0),
        ("full; mp_comm_recompute", 0),
    ],
)
def test_full_recomputation_of_some_blocks(tmp_path: Path, detail: str, blocks: int) -> None:
    run = run_of(one(tmp_path, n_layers="12", n_params_B="", recompute_detail=detail))
    assert run.spared.recomputed == blocks
    assert run.pinned.recompute == ("none" if blocks else "full")


@pytest.mark.parametrize("detail", ["full (block n=0)", "recompute_num_layers 0", "0% of layers"])
def test_no_blocks_are_no_recomputation(tmp_path: Path, detail: str) -> None:
    run = run_of(one(tmp_path, n_layers="12", n_params_B="", recompute_detail=detail))
    assert not run.spared.by_block
    assert run.pinned.recompute == "none"


@pytest.mark.parametrize(
    ("recompute", "detail"),
    [
        ("full", "first 5 layers"),
        ("full", "2/3 layers"),
        ("selective", "mlp"),
        ("full", "layers 0-15"),
        ("selective", "attn, mlp"),
    ],
)
def test_details_that_do_not_say_what_is_computed_again(tmp_path: Path, recompute: str, detail: str) -> None:
    with pytest.raises(UnsupportedError, match=f"recompute_detail '{detail}'"):
        run_of(one(tmp_path, recompute=recompute, recompute_detail=detail))


def test_weights_that_stay_gathered_are_no_zero_3(tmp_path: Path) -> None:
    for flags, stage in (("reshard_after_forward=never", 2), ("no reshard after forward", 2), ("FSDP2", 3)):
        assert run_of(one(tmp_path, zero_stage="3", other_flags=flags)).pinned.zero == stage


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        ({}, States()),
        ({"other_flags": "optimizer=Muon"}, States(optimizer="muon")),
        ({"notes": "trained with LAMB"}, States(optimizer="lamb")),
        ({"other_flags": "optim: sgd"}, States(optimizer="sgd")),
        ({"notes": "faster than runs with Muon"}, States()),
        ({"precision_detail": "pure bf16, no master weights"}, States(master_weights=False, moment_dtype="bf16")),
        ({"other_flags": "bf16-true"}, States(master_weights=False, moment_dtype="bf16")),
        ({"other_flags": "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"}, States(moment_dtype="bf16")),
        ({"other_flags": "exp_avg_dtype fp32"}, States()),
        ({"other_flags": "bf16 optimizer"}, States(moment_dtype="bf16")),
        ({"other_flags": "DeepSpeed bf16 optimizer"}, States()),
        ({"precision": "fp32", "other_flags": "no master weights"}, States()),
    ],
)
def test_what_is_kept_of_weights(tmp_path: Path, changes: dict[str, str], states: States) -> None:
    assert run_of(one(tmp_path, **changes)).states == states


def test_states_in_16_bits_are_priced(tmp_path: Path) -> None:
    """Less is kept, and less moved by the update, with moments in bf16, and less again where all is."""
    flags = ("", "optimizer states in bf16", "pure bf16")
    rows = [one(tmp_path, other_flags=flag, tp="1", pp="1", dp="8", zero_stage="3") for flag in flags]
    found = evaluate_chunk(rows)
    peaks = [each.predicted_peak_bytes or 0.0 for each in found]
    updates = [dict(each.time)["optimizer"] for each in found]
    assert [each.error for each in found] == [None] * 3
    assert peaks[0] > peaks[1] > peaks[2] > 0
    assert updates[0] > updates[1] > updates[2] > 0
