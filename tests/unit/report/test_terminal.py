"""What a terminal says of a plan beside its figures."""

from dataclasses import replace

import pytest

from planner.plan.layout.roles import Roles, roles
from planner.report.rows import degree_rows
from planner.report.terminal import counted
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
