"""A plan under Hugging Face's Trainer and under Lightning: what they log is what they log alone, on one process."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import planner

TOLERANCE = 1e-5
UPDATE = {"clip_norm": 0.5}
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
SWITCH, PHI = CONFIGS / "switch/config.json", CONFIGS / "phi3/config.json"
WINDOWS = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "head_dim": 8,
    "sliding_window": 4,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
FEW = {
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_sparse_encoder_layers": 1,
    "num_sparse_decoder_layers": 1,
    "num_experts": 2,
}


def same(found: Any, wanted: Any) -> bool:
    """Whether numbers in equal places differ by no more than `TOLERANCE`, and all else is equal."""
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return found == wanted or math.isclose(found, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def same_weights(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all((found[k] - wanted[k]).abs().max() <= TOLERANCE for k in wanted)


def plan_file(folder: Path, model: str, seq_len: int | None = None, **pinned: Any) -> str:
    given = {"devices": 2, "global_batch": 8, "precision": "fp32", "update": UPDATE, "simplicity": 0.0}
    result = planner.search(model, "cpu", seq_len=seq_len, pinned=pinned, **given)
    planner.save(result.plan, folder / "plan.json")
    return str(folder / "plan.json")


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trainer_of_hugging_face(pair, tmp_path: Path) -> None:
    """Two stages and two micro-batches: losses, gradient norms, rates and weights; and again from the checkpoint."""
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'parallel-planner[integrations]'"
    )
    from tests.distributed import tasks_huggingface as tasks

    config = str(tasks.config_file(tmp_path / "config"))
    plan = plan_file(tmp_path, config, pipeline=2, micro_batches=2)
    wanted, weights = tasks.fitted(str(tmp_path / "plain"), config, None, False)
    assert [row["step"] for row in wanted if "loss" in row] == list(range(1, tasks.STEPS + 1))
    for resumed in (False, True):
        for rows, found in pair.run("tasks_huggingface", "fitted", str(tmp_path / "run"), config, plan, resumed):
            assert same(rows, wanted)
            assert same_weights(found, weights)


def trained_alike(pair: Any, folder: Path, content: dict[str, Any] | None, *samples: str, **pinned: Any) -> None:
    """The Trainer under a plan of a model logs and saves what it does alone, there with `samples` that are stacked."""
    pytest.importorskip(
        "accelerate", reason="accelerate is not installed: pip install 'parallel-planner[integrations]'"
    )
    from tests.distributed import tasks_huggingface as tasks

    config = str(tasks.config_file(folder / "config", tasks.CONFIG if content is None else content))
    planned = (config, tasks.LENGTH) if not samples else ("tests.distributed.tasks_huggingface:stacked", None)
    plan = plan_file(folder, *planned, **pinned)
    wanted, weights = tasks.fitted(str(folder / "plain"), config, None, False)
    for rows, found in pair.run("tasks_huggingface", "fitted", str(folder / "run"), config, plan, False, *samples):
        assert same(rows, wanted)
        assert same_weights(found, weights)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trainer_keeps_the_windows_of_a_model(pair, tmp_path: Path) -> None:
    """Gemma 3, of whose layers two look back through a window of 4 tokens and one has none: two kinds of blocks."""
    trained_alike(pair, tmp_path, WINDOWS, pipeline=2, micro_batches=2)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trainer_takes_stacked_samples(pair, tmp_path: Path) -> None:
    """All columns are those of the model in them, and files have its names."""
    trained_alike(pair, tmp_path, None, "stacked", tensor=2)


@pytest.mark.thorough
@pytest.mark.slow
def test_experts_that_the_trainer_gets_as_modules_are_divided_and_saved_as_modules(pair, tmp_path: Path) -> None:
    """Switch Transformers, whose experts each device has half of, and whose files have a matrix for each of them."""
    trained_alike(pair, tmp_path, json.loads(SWITCH.read_text()) | FEW, expert=2)


@pytest.mark.thorough
@pytest.mark.slow
def test_the_trainer_divides_fused_weights_and_saves_them_whole(pair, tmp_path: Path) -> None:
    """Phi-3, each device with half of the gate and half of what it multiplies."""
    trained_alike(pair, tmp_path, json.loads(PHI.read_text()), tensor=2)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_strategy_of_lightning(pair, tmp_path: Path) -> None:
    """Two-way tensor parallel: losses of training, of validation, also alone, and weights; and from a checkpoint."""
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install 'parallel-planner[integrations]'")
    from tests.distributed import tasks_lightning as tasks

    plan = plan_file(tmp_path, "tests.distributed.tasks_lightning:planned", tensor=2)
    for resumed in (False, True):
        wanted, weights = tasks.fitted(str(tmp_path / "plain"), None, resumed)
        first = tasks.SAVED + 1 if resumed else 1
        assert [row[0] for row in wanted if len(row) > 1] == list(range(first, tasks.STEPS + 1))
        for rows, found in pair.run("tasks_lightning", "fitted", str(tmp_path / "run"), plan, resumed):
            assert same(rows, wanted)
            assert same_weights(found, weights)
    assert pair.run("tasks_lightning", "reduced", plan) == [(0.5, 0.0), (0.5, 1.0)]
