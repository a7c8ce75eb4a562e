"""Tables that are not on the devices: what the graph is without them, and what cannot be placed."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import PlanFileError, RequestError
from planner.graph.placed import place_of, tables_of, with_places
from planner.graph.trace import trace
from planner.plan.binding.bind import bind, prepare
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Stage
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.sharding.update import Update, update_fault
from tests.distributed import plans
from tests.refusals import refused

TABLES = ("tables.0.weight", "tables.1.weight", "tables.2.weight")


def test_a_table_on_servers_is_no_parameter_of_the_devices() -> None:
    graph = plans.traced("dlrm")
    placed = with_places(graph, (("tables.1.*", "host"), ("tables.*", "servers")))
    assert not placed.parameter_names & {*TABLES}
    assert placed.parameter_names == graph.parameter_names - {*TABLES}
    assert not {*TABLES} & placed.types.keys()
    before = {op.name: op for op in graph.operators if op.operands[:1] and op.operands[0] in TABLES}
    after = {op.name: op for op in placed.operators if op.name in before}
    assert [op.op for op in after.values()].count("planner.rows_from_host") == 1
    for name, op in after.items():
        assert op.operands == before[name].operands[1:]
        assert op.results == before[name].results
        rows, width = graph.types[before[name].operands[0]].shape
        words = dict(op.keywords)
        assert (words["table"], words["rows"], words["width"]) == (before[name].operands[0], rows, width)
    assert placed.differentiable == graph.differentiable - {*TABLES}


def test_its_rule_splits_samples_and_nothing_of_a_row() -> None:
    graph, _ = prepare(plans.traced("wide-deep"), placed=(("tables.*", "host"), ("wide.*", "servers")))
    rules = [rule_of(graph, op) for op in graph.operators if op.op.startswith("planner.rows_from")]
    assert len(rules) > 3
    for rule in rules:
        assert rule.outside is not None
        assert rule.factors[rule.index["h"]].kind is FactorKind.BLOCKED if "h" in rule.index else True
        assert rule.factors[rule.index["b"]].kind is FactorKind.PARALLEL


def test_the_first_pattern_that_matches_counts() -> None:
    placed = (("tables.1.*", "host"), ("tables.*", "servers"))
    assert place_of("tables.1.weight", placed) == "host"
    assert place_of("tables.10.weight", placed) == "servers"
    assert place_of("top.0.weight", placed) is None


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 4, mode="sum")

    def forward(self, numbers: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(numbers, offsets).pow(2).mean()


@pytest.mark.parametrize(
    ("graph", "pattern", "facts"),
    [
        ("dlrm", "table.*", ("place", "table.*", "tables.0.weight")),
        (
            "dlrm",
            "zzz",
            ("place", "zzz", "tables.0.weight", "tables.1.weight"),
        ),
        (
            "dlrm",
            "top.0.weight",
            ("top.0.weight", "host", "top.0/linear", "aten.linear.default"),
        ),
        (
            "llama-one",
            "*embed_tokens*",
            ("model.embed_tokens.weight", "host", "aten.linear.default"),
        ),
        ("uneven", "bags.*", ("bags.weight", "host", "bags/embedding_bag")),
    ],
)
def test_what_is_no_table_is_refused(graph: str, pattern: str, facts: tuple[object, ...]) -> None:
    uneven = (torch.zeros(6, dtype=torch.int64), torch.tensor([0, 2]))
    traced = trace(Uneven(), uneven) if graph == "uneven" else plans.traced(graph)
    with refused(RequestError, *facts):
        with_places(traced, ((pattern, "host"),))


def test_tables_of_a_model_are_found() -> None:
    assert tables_of(plans.traced("dlrm")) == TABLES
    assert not any("lm_head" in name for name in tables_of(plans.traced("llama")))


def test_plan_files_say_it_and_read_it_back() -> None:
    plan = plans.random_plan("dlrm", plans.mesh_of(2), 0, placed=(("tables.1.*", "host"), ("tables.*", "servers")))
    text = dump_plan(plan)
    assert '"tables.1.*": "host"' in text
    assert parse_plan(text) == plan
    assert "placed" not in dump_plan(plans.random_plan("dlrm", plans.mesh_of(2), 0))
    with refused(PlanFileError, "training.placed", "moon", "host", "servers"):
        parse_plan(text.replace('"servers"', '"moon"'))


def test_a_look_up_of_positions_is_another_one_in_every_step() -> None:
    """It depends on no input and on no parameter of the devices any more, but on the rows."""
    graph = plans.traced("gpt-untied")
    (at,) = graph.consumers["wpe.weight"]
    assert graph.operators[at].results[0] in with_places(graph, (("wpe.*", "host"),)).data_dependent


def test_the_first_stage_alone_looks_up_rows() -> None:
    graph, words = plans.traced("llama4"), (("model.embed_tokens.*", "host"),)
    settings = {"placed": words, "stages": (2, 2), "micro_batches": 2}
    bind(plans.random_plan("llama4", plans.mesh_of(2), 0, **settings), graph, plans.BATCH)
    given, whole = plans.traced("late-table"), {**settings, "placed": (("late.*", "host"),), "stages": (4,)}
    plan = plans.random_plan("late-table", plans.mesh_of(2), 0, **whole)
    bind(plan, given, plans.BATCH)
    with refused(PlanFileError, "late/embedding", "late.weight"):
        bind(replace(plan, stages=(Stage(first_block=0, blocks=2), Stage(first_block=2, blocks=2))), given, plans.BATCH)


@pytest.mark.parametrize(
    ("schedule", "slices", "facts"),
    [
        ("pipedream", 1, ("schedule", "pipedream")),
        ("seqpipe", 2, ("slices", 2)),
    ],
)
def test_schedules_that_rows_do_not_follow(schedule: str, slices: int, facts: tuple[object, ...]) -> None:
    words = (("model.embed_tokens.*", "host"),)
    plan = plans.random_plan("llama4", plans.mesh_of(2), 0, placed=words, stages=(2, 2), micro_batches=2)
    with refused(PlanFileError, *facts):
        bind(replace(plan, schedule=schedule, slices=slices), plans.traced("llama4"), plans.BATCH)


def test_a_norm_over_all_gradients_is_not_known() -> None:
    fault = update_fault(Update(placed=(("tables.*", "host"),), clip_norm=1.0))
    assert fault is not None
    assert "no norm over all gradients is known" in fault.reason
