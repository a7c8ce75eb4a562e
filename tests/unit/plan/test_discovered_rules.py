"""Rules that were found by trial in plans: they travel in the file, and whoever binds the plan uses them."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import planner
from planner.errors import PlanFileError, RuleError
from planner.graph.operator_graph import OperatorGraph, WrittenRule
from planner.graph.trace import trace
from planner.plan.binding.bind import bind
from planner.plan.binding.discovered import discovered
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Plan
from planner.sharding.discover import discover, written_rules
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from tests.refusals import refused


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.glu(layer(x))
        return x.mean()


X = torch.empty(8, 16)


@cache
def graph() -> OperatorGraph:
    return trace(Gated(), (X,))


@cache
def plan() -> Plan:
    return planner.search(Gated(), "cpu", args=(X,), devices=2, global_batch=8, precision="fp32").plan


def test_a_line_with_two_calls_that_are_not_split_is_named_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return torch.add(torch.trace(x), torch.trace(x[:, :8]))

    notes: list[str] = []
    discover(trace(Twice(), (X,)), on_note=notes.append)
    (note,) = notes
    assert "aten.trace.default" in note


def test_calls_with_2_and_with_2_0_both_carry_a_rule() -> None:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return (x.norm(dim=-1, keepdim=True) * nn.functional.normalize(x, dim=-1)).mean()

    found = discover(trace(Norms(), (X,)))
    norms = [op for op in found.operators if op.op == "aten.linalg_vector_norm.default"]
    assert [str(op.arguments[1]) for op in norms] == ["2", "2.0"]
    assert all(op.rule is not None for op in norms)


def test_equal_calls_are_tried_once_and_blocks_stay_blocks() -> None:
    found = discover(graph())
    assert len(written_rules(found)) == 1
    carried = [op.rule for op in found.operators if op.op == "aten.glu.default"]
    assert len(carried) == 3
    assert len(set(carried)) == 1
    assert found.fingerprint() == graph().fingerprint()
    assert discover(found) is found
    rules = {id(rule_of(found, op)) for op in found.operators if op.op == "aten.glu.default"}
    assert len(rules) == 1


def test_another_batch_needs_no_other_trial() -> None:
    scaled = rescale_batch(discover(graph()), 8, 4)
    rule = next(rule_of(scaled, op) for op in scaled.operators if op.op == "aten.glu.default")
    assert [factor.extent for factor in rule.factors] == [4, 32, 16]


def test_a_plan_reads_back_exactly_and_binds_to_a_graph_without_rules() -> None:
    text = dump_plan(plan())
    assert parse_plan(text) == plan()
    bound = bind(parse_plan(text), graph(), 8)
    (found,) = discovered(bound)
    assert (found.op, found.factors, found.reason) == ("aten.glu.default", ("d0",), "")
    assert list(json.loads(text)["rules"]) == ["aten.glu.default(float32[8,32]) -> float32[8,16]"]


def test_without_its_rules_a_plan_is_refused() -> None:
    with refused(RuleError, "aten.glu.default", "planner.discover(graph)"):
        bind(replace(plan(), rules=()), graph(), 8)


def test_a_rule_for_a_call_that_the_model_lacks_is_refused() -> None:
    more = replace(plan(), rules=(*plan().rules, ("aten.flip.default(1)", WrittenRule(text="none -> none"))))
    with refused(RuleError, "aten.flip.default(1)"):
        bind(more, graph(), 8)


def test_plans_without_such_operators_say_nothing_of_rules() -> None:
    assert '"rules"' not in dump_plan(replace(plan(), rules=()))


def test_version_1_had_no_rules() -> None:
    content = json.loads(dump_plan(plan())) | {"schema_version": 1, "recomputation": "none"}
    del content["virtual_stages"]
    with refused(PlanFileError, "version 1", "rules"):
        parse_plan(json.dumps(content))


def test_what_is_not_split_is_told() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.trace(self.linear(x)).mean()

    with pytest.warns(UserWarning, match=r"aten\.trace\.default.*\(root\)"):
        planner.search(Whole(), "cpu", args=(X,), devices=2, global_batch=8, precision="fp32", pinned=ONE_PART)


ONE_PART = planner.Pinned(micro_batches=1)
