"""What a terminal says of a plan beside its figures."""

from dataclasses import replace

import pytest

from planner.graph.blocks import Blocks
from planner.graph.operator_graph import Operator
from planner.plan.layout.roles import Roles, roles
from planner.plan.words import expert_overlap_words
from planner.report.rows import degree_rows, figure_rows
from planner.report.terminal import counted, sections
from planner.report.words import short_names
from tests.unit.plan.plans import plan_named, verdict_of


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("abcbcbcd", "a b c (the 2 rows above 2 times more) d"),
        ("xabcabc", "x a b c (the 3 rows above once more)"),
        ("aaa", "a (the row above 2 times more)"),
        ("abab", "a b (the 2 rows above once more)"),
        ("aab", "a a b"),  # no shorter
        ("abcabdabc", "a b c a b d a b c"),
        ("a", "a"),
        ("", ""),
    ],
)
def test_rows_that_repeat_are_told_once(rows: str, told: str) -> None:
    assert " ".join(name for name, _ in counted([(name, "data parallel") for name in rows])) == told


def _optimizer_sharding(*shares: tuple[str, float]) -> str:
    plan = plan_named("two axes")
    found: Roles = replace(roles(verdict_of(plan).bound), zero=shares[0][0], zero_shares=shares)
    return dict(degree_rows(plan, found))["optimizer sharding"]


def test_zero_stages_are_told_with_their_shares_where_there_are_several() -> None:
    assert _optimizer_sharding(("off", 0.97), ("1 (states)", 0.03)) == "off"
    assert _optimizer_sharding(("off", 0.6), ("2 (gradients and states)", 0.4)).startswith(
        "off for 60% of the parameters; ZeRO 2 (gradients and states)"
    )


def test_few_samples_a_second_keep_their_digits() -> None:
    plan = plan_named("two axes")
    slow = replace(plan, model=replace(plan.model, sequence_length=None))
    prediction = replace(plan.prediction, samples_per_second=0.0125 * plan.cluster.devices)
    assert dict(figure_rows(slow, prediction))["samples/s per device"] == "0.0125"


def test_zero_that_has_nothing_to_shard_says_so() -> None:
    plan = plan_named("two axes")
    found = replace(roles(verdict_of(plan).bound), zero="off", zero_shares=(("off", 1.0),))
    assert dict(degree_rows(plan, found))["optimizer sharding"] == "off"
    alone = replace(found, tensor=16, replicated=1)
    assert dict(degree_rows(plan, alone))["optimizer sharding"] == "off: nothing to shard without data parallelism"


def test_shares_of_zero_stages_cover_all_parameters() -> None:
    found = roles(verdict_of(plan_named("two axes")).bound)
    assert sum(share for _, share in found.zero_shares) == pytest.approx(1)
    assert found.zero == found.zero_shares[0][0]


@pytest.mark.parametrize(
    ("kinds", "rows", "told"),
    [
        ((0, 0, 0), "eaz", [("", "eaz")]),
        (
            (0, 1, 1),
            "eabz",
            [("", "e"), ("block 0:", "a"), ("block 1 (and 1 more like it):", "b"), ("after the blocks:", "z")],
        ),
        ((0, 1, 0), "eaaz", [("", "e"), ("blocks 0, 1 (and 1 more like them):", "a"), ("after the blocks:", "z")]),
        ((0, 1), "eaa", [("", "e"), ("blocks 0, 1:", "a")]),
    ],
)
def test_kinds_of_blocks_have_headings_and_equal_ones_share_theirs(
    kinds: tuple[int, ...], rows: str, told: list[tuple[str, str]]
) -> None:
    """An embedding, blocks of one operator, and a head: operators 0, 1 to n, n + 1."""
    blocks = Blocks(borders=tuple(range(1, len(kinds) + 2)), kinds=kinds)
    places = (0, *(block + 1 for block in blocks.firsts), len(kinds) + 1)
    found = sections(blocks, [(at, (name,)) for at, name in zip(places, rows, strict=False)])
    assert [(heading, "".join(name for (name,) in section)) for heading, section in found] == told


def test_sizes_of_stages_are_told_in_order() -> None:
    plan = plan_named("pipeline")
    found = roles(verdict_of(plan).bound)
    sizes = [replace(stage, blocks=blocks) for stage, blocks in zip(plan.stages, (10, 9, 10, 10), strict=True)]
    told = dict(degree_rows(replace(plan, stages=tuple(sizes)), found))
    assert told["pipeline"].endswith("9, 10 blocks a stage")


def test_one_operator_is_told_as_one() -> None:
    assert expert_overlap_words((("a", 1),)) == "the exchange of 1 operator under other work"
    assert expert_overlap_words((("a", 1), ("b", 1))) == "the exchange of 2 operators under other work"


def _called_in(module: str) -> Operator:
    return Operator(name=module, op="aten.linear.default", arguments=(), results=("x",), module=module)


def test_modules_are_named_by_as_many_names_as_tell_them_apart() -> None:
    layers = ("query.enc.layers.0.norm1", "doc.enc.layers.0.norm1", "doc.enc.layers.1.norm1")
    told = ("query.enc.layers.norm1", "doc.enc.layers.norm1", "doc.enc.layers.norm1")
    modules = [*layers, "doc.enc.layers.0.up", ""]
    assert short_names([_called_in(module) for module in modules]) == (*told, "layers.up", "linear")


def test_a_module_with_the_last_names_of_another_is_told_apart() -> None:
    assert short_names([_called_in("enc.norm"), _called_in("outer.enc.norm")]) == ("enc.norm", "outer.enc.norm")
