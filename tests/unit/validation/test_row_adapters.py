"""Rows of runs that train adapters."""

from pathlib import Path

import pytest

from planner.models.adapters import Adapters
from planner.validation.request.configuration import run_of
from tests.unit.validation.runs import one

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(
    ("changes", "adapters"),
    [
        ({"model": "Llama 8B LoRA"}, Adapters(rank=16, alpha=32.0)),
        ({"other_flags": "peft lora; lora_r=64"}, Adapters(rank=64, alpha=128.0)),
        ({"notes": "LoRA", "source": "NVIDIA DGXC recipes"}, Adapters(rank=16, alpha=32.0, layers=QKV)),
        ({"notes": "phase=sft/lora"}, None),
        ({"notes": "full fine-tuning, no LoRA"}, None),
        ({"other_flags": "use_lora=False"}, None),
    ],
)
def test_adapters_of_a_row(tmp_path: Path, changes: dict[str, str], adapters: Adapters | None) -> None:
    run = run_of(one(tmp_path, **changes))
    assert run.job.model.adapters == adapters
    assert any("adapters (LoRA)" in note for note in run.notes) == (adapters is not None)
