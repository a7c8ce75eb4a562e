"""The imbalance of routers: where it is said, and what it changes."""

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from hardware_profiles import load_profile
from planner.errors import ModelError, PlanFileError, RequestError
from planner.graph.constant_batch import check_numbers
from planner.graph.expert_load import EXPERTS_OPERATOR, router_groups, with_imbalance
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.plan.compare.verify import verify
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.space import Pinned
from tests.refusals import refused

CLUSTER = load_profile("h100-80gb").with_devices(8)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    built = build_model("mixtral-tiny", dtype="bfloat16", sequence_length=16)
    return trace(built.module, built.args, built.kwargs)


def planned(graph: OperatorGraph, imbalance: float, expert: int = 4) -> Plan:
    pinned = Pinned(data=8, expert=expert, micro_batches=1, recompute="none", zero=0)
    return planner.search(graph, CLUSTER, batch=2, pinned=pinned, imbalance=imbalance).plan


def test_even_routers_leave_the_graph_as_it_is(graph: OperatorGraph) -> None:
    assert with_imbalance(graph, 1.0) is graph
    uneven = with_imbalance(graph, 1.5)
    changed = [op for op, known in zip(uneven.operators, graph.operators, strict=True) if op != known]
    assert {op.op for op in changed} == {EXPERTS_OPERATOR}
    assert all(op.arguments[-2:] == (0, 1.5) for op in changed)


@pytest.mark.slow
def test_what_a_plan_sets_is_no_number_of_the_batch() -> None:
    """Experts of a config have other settings by name: each number is compared with the one at its own place."""
    built = build_model(str(CONFIGS / "nemotron-h"), dtype="bfloat16", sequence_length=8)
    traced = trace(built.module, built.args, built.kwargs)
    check_numbers(with_imbalance(traced, 1.25), traced)
    operators = tuple(
        replace(op, keywords=tuple((key, 3.0 if key == "slope" else value) for key, value in op.keywords))
        for op in traced.operators
    )
    with refused(ModelError, "model.layers.1.mixer.experts", "1.0", "3.0"):
        check_numbers(replace(with_imbalance(traced, 1.25), operators=operators), traced)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_it_makes_a_plan_slower_and_larger_where_experts_are_divided(graph: OperatorGraph) -> None:
    even, uneven = planned(graph, 1.0).prediction, planned(graph, 2.0).prediction
    assert uneven.objective_seconds > even.objective_seconds
    assert uneven.step_seconds >= even.step_seconds  # as quick as its hosts launch it
    assert uneven.peak_bytes > even.peak_bytes
    whole = [planned(graph, imbalance, expert=1).prediction for imbalance in (1.0, 2.0)]
    assert whole[0] == whole[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_plan_states_it_and_is_verified_with_it(graph: OperatorGraph) -> None:
    plan = planned(graph, 1.5)
    text = dump_plan(plan)
    assert '"imbalance": 1.5' in text
    assert "imbalance" not in dump_plan(planned(graph, 1.0))
    assert parse_plan(text) == plan
    assert verify(plan, graph, 2, CLUSTER).as_stated
    other = replace(plan, training=replace(plan.training, imbalance=1.0))
    assert any(remark.startswith("objective_seconds is") for remark in verify(other, graph, 2, CLUSTER).remarks)
    with refused(PlanFileError, "training.imbalance", 0.5):
        parse_plan(text.replace('"imbalance": 1.5', '"imbalance": 0.5'))


def test_what_cannot_be_is_refused(graph: OperatorGraph) -> None:
    with refused(RequestError, "imbalance", 0.5):
        planned(graph, 0.5)
    with refused(RequestError, "imbalance = 2"):
        planner.search("llama-tiny", CLUSTER, imbalance=2.0)
    with refused(RequestError, "expert = 3", 8, 2, 4):
        planner.search(graph, CLUSTER, batch=2, pinned=Pinned(expert=3))


@pytest.mark.thorough
def test_tokens_are_sent_once_to_the_nodes_of_a_plan(graph: OperatorGraph) -> None:
    """Experts are cut over two nodes of two devices each; what has no experts, or another stack, is refused."""
    pinned = Pinned(data=8, expert=4, micro_batches=1, recompute="none", zero=0)
    plan = planner.search(graph, CLUSTER, batch=2, pinned=pinned, tokens_once=2).plan
    assert plan.mesh.sizes == (2, 2, 2)
    assert plan.training.tokens_once
    assert '"tokens_once": true' in dump_plan(plan)
    assert parse_plan(dump_plan(plan)) == plan
    assert verify(plan, graph, 2, CLUSTER).as_stated
    with refused(RequestError, "tokens_once"):
        planner.search("llama-tiny", CLUSTER, tokens_once=2)
    with refused(RequestError, "tokens_once", 0):
        planner.search(graph, CLUSTER, batch=2, pinned=pinned, tokens_once=0)
    with refused(RequestError, "tokens_once", "megatron"):
        planner.search(graph, CLUSTER, batch=2, pinned=pinned, tokens_once=2, software="megatron")
    with refused(RequestError, "tokens_once", "engine='torch'"):
        planner.search("mixtral-tiny", CLUSTER, pinned=pinned, tokens_once=2, engine="torch")
    for expert in (None, 3):
        with refused(RequestError, "tokens_once = 2", "multiple of 2"):
            planner.search(graph, CLUSTER, batch=2, pinned=Pinned(expert=expert), tokens_once=2)


def test_groups_are_those_that_a_router_chooses_from(graph: OperatorGraph) -> None:
    built = build_model("deepseek-tiny", dtype="bfloat16")
    limited = trace(built.module, built.args, built.kwargs)
    for model, groups in ((graph, {(1, 1)}), (limited, {(4, 2)})):
        assert {router_groups(model, op) for op in model.operators if op.op == EXPERTS_OPERATOR} == groups
