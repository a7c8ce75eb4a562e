"""A plan taken apart says the same; parts of the model by their names; names that are like others."""

from pathlib import Path

import pytest

from hardware_profiles import load_profile
from hardware_profiles.spelling import nearest_names
from planner.errors import did_you_mean, unknown_name
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.binding.bind import bind
from planner.plan.file import load_plan
from planner.plan.prediction.loosening import in_parts, loosened, part_of
from planner.plan.prediction.predict import predict

GOLDEN = Path(__file__).parents[2] / "golden" / "plans"


def test_a_loose_plan_costs_the_same_to_the_digit() -> None:
    """Of a pipeline whose blocks are all recomputed: a group for each block, the same bound plan, the same price."""
    plan = load_plan(GOLDEN / "gpt-tiny-8-h100-pipeline.json")
    built = build_model("gpt-tiny", dtype="bfloat16")
    graph = trace(built.module, built.args, built.kwargs)
    bound = bind(plan, graph, built.batch)
    loose = loosened(bound)
    assert [group.blocks for group in loose.groups] == [0, *[1] * bound.blocks.count]
    again = bind(loose, graph, built.batch)
    assert again.operators == bound.operators
    assert again.parameters == bound.parameters
    assert again.recomputed == bound.recomputed
    cluster = load_profile(plan.cluster.profile).with_devices(plan.cluster.devices)
    assert predict(again, cluster) == predict(bound, cluster)
    assert loosened(again) == loose


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.3.self_attn.q_proj/linear", "self_attn"),
        ("model.layers.3.self_attn.q_proj.weight", "self_attn"),
        ("model.layers.3.mlp.experts.2.up/linear", "mlp"),
        ("model.layers.3/add", "between the parts"),
        ("lm_head/linear", "lm_head"),
        ("lm_head.weight", "lm_head"),
        ("cross_entropy_loss", "cross_entropy_loss"),
    ],
)
def test_parts_of_a_model(name: str, part: str) -> None:
    assert part_of(name) == part
    assert in_parts([name, "other.weight"]) == {part: [name], "other": ["other.weight"]}


def test_names_that_are_like_one_that_is_not_known() -> None:
    known = ["model.layers.0.self_attn.q_proj/linear", "model.layers.0.mlp.up_proj/linear", "lm_head/linear"]
    assert nearest_names("*q_prj*", known) == [known[0]]
    assert nearest_names("lm_haed/linear", known)[0] == known[2]
    assert nearest_names("zzzz", known) == []
    assert did_you_mean("lm_hed", known, "or nothing") == "did you mean lm_head/linear?"
    assert did_you_mean("zzzz", known, "or nothing") == "or nothing"
    assert "did you mean lm_head/linear?" in unknown_name("operator", "lm_hed", known)
