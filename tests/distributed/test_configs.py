"""Models of Hugging Face that are made of other operators than a Llama: each under the degrees that people ask for,
beside the model that is not sharded."""

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
    "zero3": {"data": 2, "zero": 3, "recompute": "full"},
    "stages": {"pipeline": 2, "micro_batches": 2},
    "ring": {"context": 2, "context_by": "ring"},
    "heads": {"context": 2, "context_by": "heads"},
}
MODELS = {
    "gpt-oss": ("tensor", "experts", "zero3", "stages", "ring", "heads"),
    "kimi-linear": ("tensor", "stages"),
    "qwen3-next": ("tensor", "experts", "zero3", "stages"),
}
CASES = [(model, way) for model, ways in MODELS.items() for way in ways]


def planned(name: str, **options: object) -> str:
    """The plan that `plan --model` makes of a config, as the text of its file."""
    given = Options(
        model=str(CONFIGS / name), devices=2, hardware="cpu", global_batch=4, seq_len=16, as_json=True, **options
    )
    return dump_plan(plan_for(request_of(given, Console(quiet=True)), lambda _: None, lambda: False).plan)


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), CASES, ids=str)
def test_a_config_learns_as_the_model_that_is_not_sharded(name: str, way: str, pair) -> None:
    assert max(pair.run("tasks_brought", "difference", planned(name, **WAYS[way]))) < 1.0
