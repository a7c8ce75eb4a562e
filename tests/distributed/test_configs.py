"""Models of Hugging Face that are made of other operators than a Llama: each under the degrees that people ask for,
beside the model that is not sharded.

Of each model the layers that differ, each once, as what another one computes is the same; stages are cut between alike
layers, and of all of them, and alike layers are recomputed.
"""

import json
from pathlib import Path

import pytest
from rich.console import Console

from planner.cli.options import Options
from planner.cli.requesting import request_of
from planner.plan.file import dump_plan
from planner.strategy_search.objectives import plan_for
from tests.distributed.language import CONFIGS

WAYS: dict[str, dict[str, object]] = {
    "tensor": {"tensor": 2},
    "experts": {"data": 2, "expert": 2},
    "fp8": {"data": 2, "expert": 2, "fp8": "delayed", "fp8_experts": True, "fp8_dispatch": True},
    "zero3": {"data": 2, "zero": 3, "recompute": "full"},
    "stages": {"pipeline": 2, "micro_batches": 2},
    "ring": {"context": 2, "context_by": "ring"},
    "heads": {"context": 2, "context_by": "heads"},
}
LAYERS = {
    "deepseek-v32": 1,
    "falcon": 1,
    "gemma2": 2,
    "gpt-oss": 2,
    "kimi-linear": 3,
    "llama4": 2,
    "nemotron-h": 2,
    "qwen3-next": 2,
}
"""How many of its first layers a model is cut to; others stay whole."""
MODELS = {
    "falcon": ("tensor",),
    "deepseek-v32": ("tensor", "experts", "stages"),
    "gemma2": ("tensor", "zero3", "stages", "ring"),
    "gpt2": ("tensor",),
    "gpt-oss": ("tensor", "experts", "zero3", "stages", "ring", "heads"),
    "kimi-linear": ("tensor", "stages"),
    "llama4": ("tensor", "experts", "zero3", "stages"),
    "modernbert": ("tensor",),
    "mpt": ("tensor",),
    "nemotron-h": ("tensor", "experts", "fp8", "zero3", "stages"),
    "phi3": ("tensor", "zero3", "stages"),
    "qwen3-next": ("tensor", "experts", "zero3", "stages"),
    "switch": ("tensor", "experts", "zero3"),
}
CASES = [(model, way) for model, ways in MODELS.items() for way in ways]


_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")


def shortened(name: str, folder: Path) -> Path:
    """A folder with the config of a model with its first layers alone."""
    config, layers = json.loads((CONFIGS / name / "config.json").read_text()), LAYERS[name]
    whole = {kind: tuple(config[kind]) for kind in _KINDS if kind in config}
    kept = {kind: kinds[:layers] for kind, kinds in whole.items()}
    assert set(zip(*kept.values(), strict=True)) == set(zip(*whole.values(), strict=True))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers, **kept}))
    return folder


def planned(model: Path, **options: object) -> str:
    """The plan that `plan --model` makes of a config, as the text of its file."""
    given = Options(model=str(model), devices=2, hardware="cpu", global_batch=4, seq_len=16, as_json=True, **options)
    return dump_plan(plan_for(request_of(given, Console(quiet=True)), lambda _: None, lambda: False).plan)


@pytest.mark.cases(0, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_a_config_learns_as_the_model_that_is_not_sharded(name: str, way: str, pair, tmp_path: Path) -> None:
    whole = {"pipeline", "recompute"} & WAYS[way].keys()  # these want blocks that are alike
    model = CONFIGS / name if whole or name not in LAYERS else shortened(name, tmp_path)
    text = planned(model, **WAYS[way])
    assert max(pair.run("tasks_brought", "difference", text)) < 1.0
