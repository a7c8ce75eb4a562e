"""Plans written by hand: their decisions are counted as their authors would, and patterns have the usual names."""

from dataclasses import replace

from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.layout.decisions import decisions
from planner.plan.layout.patterns import Patterns
from planner.plan.layout.roles import roles
from planner.strategy_search.request.space import Configuration
from tests.unit.search.by_hand import ALL_CUT, COPIES, UPDATE_CUT, Option, by_hand
from tests.unit.search.cases import BATCH, make_case, plan_of, traced


def bound_of(axes: tuple[str, ...], mesh: tuple[int, ...], on_data: Option, stages: int = 1) -> BoundPlan:
    case = make_case("llama-4", "h100-80gb", Configuration(pipeline=stages, mesh=mesh, micro_batches=2), 16)
    return bind(plan_of(case, by_hand(case, axes, on_data)), traced("llama-4"), BATCH)


def words_of(bound: BoundPlan) -> tuple[str, ...]:
    return decisions(bound, roles(bound))


def named(bound: BoundPlan) -> dict[str, tuple[tuple[str, ...], str]]:
    """By the end of its module's path what each axis does to an operator, and how its parameter is kept."""
    found = Patterns(bound=bound, roles=tuple(axis.role for axis in roles(bound).axes))
    return {
        one.operator.name.partition("/")[0].rpartition(".")[2]: (
            found.of_operator(at),
            next((found.of_parameter(name) for name in one.operator.operands if name in bound.parameters), ""),
        )
        for at, one in enumerate(bound.operators)
    }


def test_conventional_plans_are_a_few_decisions() -> None:
    assert words_of(bound_of(("data",), (4,), COPIES)) == ("data 4 (axis0)",)
    assert words_of(bound_of(("data",), (4,), ALL_CUT)) == ("data 4 (axis0)", "ZeRO-3 over axis0")
    assert words_of(bound_of(("data",), (4,), UPDATE_CUT, stages=2)) == (
        "data 4 (axis0)",
        "pipeline 2",
        "ZeRO-1 over axis0",
    )


def test_patterns_have_the_names_that_people_use() -> None:
    found = named(bound_of(("data", "tensor"), (2, 4), ALL_CUT))
    assert found["q_proj"][0] == ("data parallel", "column parallel")
    assert found["o_proj"][0] == ("data parallel", "row parallel")
    assert found["down_proj"][0] == ("data parallel", "row parallel")
    assert "FSDP" in found["q_proj"][1]
    assert found["norm"][1] == "FSDP over axis0"  # copies of it on a tensor axis are no HSDP
    assert "tensor shards" in found["q_proj"][1]
    assert named(bound_of(("data",), (4,), ALL_CUT))["q_proj"] == (("data parallel",), "FSDP")
    assert named(bound_of(("data",), (4,), UPDATE_CUT))["q_proj"] == (("data parallel",), "ZeRO-1")
    assert named(bound_of(("data",), (4,), COPIES))["q_proj"] == (("data parallel",), "DDP")


def test_what_departs_from_the_pattern_is_a_decision_of_its_own() -> None:
    usual = bound_of(("data", "tensor"), (2, 4), COPIES)
    groups = []
    for group in usual.plan.groups:
        operators = tuple(
            (name, ("b", None) if name.endswith("k_proj/linear") or "k_proj" in name else strategy)
            for name, strategy in group.operators
        )
        groups.append(replace(group, operators=operators))
    changed = bind(replace(usual.plan, groups=tuple(groups)), traced("llama-4"), BATCH)
    more = set(words_of(changed)) - set(words_of(usual))
    assert more == {"k_proj replicated on axis1", "ZeRO-3 over axis1"}  # its weight is gathered there
