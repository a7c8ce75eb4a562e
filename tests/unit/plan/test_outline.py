"""How the graph of a changed model differs from the one that a plan was made for, in words."""

from dataclasses import replace

import pytest

from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.llama import Llama, LlamaConfig
from planner.plan.bind import bind
from planner.plan.file import dump_plan, parse_plan
from tests.distributed import plans

torch = pytest.importorskip("torch")


def traced(length: int = plans.SEQUENCE, dtype: str = "float32", **changes: object) -> OperatorGraph:
    config = replace(plans.LLAMA, sequence_length=length, **changes)  # type: ignore[arg-type]
    tokens = torch.zeros(plans.BATCH, length, dtype=torch.int64)
    return trace(Llama(LlamaConfig(**_fields(config))).to(getattr(torch, dtype)), (tokens, tokens))


def _fields(config: LlamaConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"length": 6}, "input 'args_0' is int64 4x6, the plan has int64 4x8"),
        ({"ffn_size": 48}, r"parameter 'model\.layers\.\*\.mlp\..*' is float32 .*48.*, the plan has float32 .*64"),
        ({"dtype": "bfloat16"}, "is bfloat16 32x32, the plan has float32 32x32"),
        ({"num_layers": 3}, "equal layers, but another number of them"),
        ({"num_heads": 4, "num_kv_heads": 2}, "operator 'model.layers.0.self_attn/unflatten' is called otherwise"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_differs_is_said(changes: dict[str, object], words: str) -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    with pytest.raises(PlanFileError, match=words):
        bind(plan, traced(**changes), plans.BATCH)  # type: ignore[arg-type]


def test_the_outline_is_in_the_file() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    assert plan.model.outline is not None
    assert parse_plan(dump_plan(plan)).model == plan.model
    assert dict(plan.model.outline.parameters)["model.layers.*.mlp.up_proj.weight"] == "float32 64x32"


def test_an_older_plan_says_that_it_cannot_tell() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    older = replace(plan, model=replace(plan.model, outline=None, batch=None))
    assert '"outline"' not in dump_plan(older)
    assert parse_plan(dump_plan(older)) == older
    with pytest.raises(PlanFileError, match="does not say in what"):
        bind(older, traced(length=6), plans.BATCH)
