"""One slice of the sequence as a graph: what treats positions by themselves, and what is refused by name."""

import pytest

from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import prepare
from planner.plan.binding.slices import one_slice, positional
from planner.sharding.rules import rule_of
from tests.distributed import plans
from tests.refusals import refused


def sliced(model: str, slices: int) -> OperatorGraph:
    whole, _ = prepare(plans.traced(model))
    return one_slice(whole, plans.SEQUENCE, slices)


@pytest.mark.parametrize("model", ["llama", "gpt"])
@pytest.mark.parametrize("slices", [2, 4])
def test_a_slice_is_the_graph_of_a_shorter_sequence(model: str, slices: int) -> None:
    whole, _ = prepare(plans.traced(model))
    graph = one_slice(whole, plans.SEQUENCE, slices)
    assert [op.name for op in graph.operators] == [op.name for op in whole.operators]
    assert {graph.types[name].shape[1] for name in graph.inputs} == {plans.SEQUENCE // slices}
    attention = next(op for op in graph.operators if rule_of(graph, op).op_class == "attention")
    assert {graph.types[name].shape[2] for name in attention.operands} == {plans.SEQUENCE // slices}
    assert positional(whole, graph), "positions or their tables"


def test_a_sequence_that_does_not_divide_names_the_nearest_that_do() -> None:
    with refused(PlanFileError, 3, 8, 2, 4):
        sliced("llama", 3)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("model", "facts"),
    [
        ("dropping", ("slices", "channels/feature_dropout", 1)),
        ("capped", ("slices", "model.layers.0.mlp.experts/experts", "s")),
        ("balanced", ("slices", "model/mean", "d1", 1)),
        ("vit", ("slices", 2, 8, 1)),
        ("towers", ("slices", "sum_3", "d1", 1)),
    ],
)
def test_what_looks_at_other_positions_is_refused(model: str, facts: tuple[object, ...]) -> None:
    with refused(PlanFileError, *facts):
        sliced(model, 2)


def test_a_model_without_a_sequence_is_refused() -> None:
    whole, _ = prepare(plans.traced("llama"))
    with refused(PlanFileError, "slices", 2, 1):
        one_slice(whole, None, 2)


def test_one_slice_is_all() -> None:
    graph = plans.traced("llama")
    assert one_slice(graph, plans.SEQUENCE, 1) is graph
