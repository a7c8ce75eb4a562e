"""How the graph of a changed model differs from the one that a plan was made for, in words."""

from dataclasses import replace

import pytest

from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.llama import Llama, LlamaConfig
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from tests.distributed import plans
from tests.refusals import refused

torch = pytest.importorskip("torch")


def traced(length: int = plans.SEQUENCE, dtype: str = "float32", **changes: object) -> OperatorGraph:
    config = replace(plans.LLAMA, sequence_length=length, **changes)  # type: ignore[arg-type]
    tokens = torch.zeros(plans.BATCH, length, dtype=torch.int64)
    return trace(Llama(LlamaConfig(**_fields(config))).to(getattr(torch, dtype)), (tokens, tokens))


def _fields(config: LlamaConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


@pytest.mark.cases(4, 1)
@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"length": 6}, ("args_0", "int64 4x6", "int64 4x8")),
        ({"ffn_size": 48}, ("model.layers.*.mlp.gate_proj.weight", "float32 48x32", "float32 64x32")),
        ({"dtype": "bfloat16"}, ("model.embed_tokens.weight", "bfloat16 32x32", "float32 32x32")),
        ({"num_layers": 3}, ("29,920", "20,640")),
        ({"num_heads": 4, "num_kv_heads": 2}, ("model.layers.0.self_attn/unflatten",)),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_differs_is_said(changes: dict[str, object], facts: tuple[object, ...]) -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4))
    with refused(PlanFileError, *facts):
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
    with refused(PlanFileError, "llama", f"{plan.model.fingerprint[:19]}...", "version"):
        bind(older, traced(length=6), plans.BATCH)
