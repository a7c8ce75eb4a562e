"""Rows that say in words that they were run in a way that is not priced, or that is."""

from pathlib import Path

import pytest

from planner.validation.configuration import run_of
from planner.validation.unsupported import UnsupportedError
from tests.unit.validation.test_software import one


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"notes": "LoRA fine-tuning"}, "LoRA"),
        ({"model": "Llama 8B QLoRA"}, "LoRA"),
        ({"other_flags": "optimizer=Muon"}, "AdamW"),
        ({"other_flags": "8-bit Adam (bitsandbytes)"}, "AdamW"),
        ({"other_flags": "JAX MaxText"}, "JAX"),
        ({"other_flags": "DualPipe"}, "dualpipe"),
        ({"other_flags": "zero bubble pipeline"}, "zero bubble"),
        ({"other_flags": "cp-comm-type=a2a+p2p"}, "by a ring outside"),
        ({"intra_bw": "PCIe 4.0 x16"}, "PCIe"),
        ({"device": "A100 PCIe"}, "PCIe"),
    ],
)
def test_a_run_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run_of(one(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"notes": "full fine-tuning, no LoRA"},
        {"notes": "phase=sft/lora"},  # a script for both; the flag says which
        {"other_flags": "dp_replicate=1; dp_shard=2"},
        {"other_flags": "untie-embeddings-and-output-weights"},
        {"notes": "twice as fast as GPipe"},
        {"other_flags": "DualPipe", "pp": "1", "dp": "4"},
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


def test_full_recomputation_of_some_blocks(tmp_path: Path) -> None:
    run = run_of(one(tmp_path, n_layers="12", n_params_B="", recompute_detail="every 3rd layer"))
    assert run.spared.recomputed == 2  # of the 6 of a stage
    assert run.pinned.recompute == "none"
    assert "full recomputation of one block in 3" in run.notes
