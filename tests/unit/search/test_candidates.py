"""What a search has priced is named in its plans, so that a report need not search again."""

from dataclasses import replace

import pytest

import planner
from planner.cli.others import choice_of, plans_named
from planner.plan.file import dump_plan, parse_plan


@pytest.mark.thorough
@pytest.mark.slow
def test_plans_name_what_the_search_has_priced_where_nothing_was_decided() -> None:
    traced = planner.trace("llama-tiny", precision="fp32")
    found = planner.search(traced, "cpu", devices=4)
    plan, bound = found.plan, found.bound
    steps = [one.step_seconds for one in plan.candidates]
    assert len(steps) > 1
    assert steps == sorted(steps)
    assert found.plans[0].seconds in steps
    hidden = found.plans[0].seconds / found.plans[0].bounded  # steps may be below the sums that are bounded
    assert all(found.bound_seconds * hidden <= step * (1 + found.gap) for step in steps)
    assert parse_plan(dump_plan(plan)) == plan

    own = choice_of(bound, plan.prediction.step_seconds, plan.prediction.peak_bytes, this=True)
    assert [one.step_seconds for one in plans_named(plan, own)] == steps
    assert plans_named(plan, replace(own, step_seconds=own.step_seconds * 1.01)) == []  # priced otherwise by now

    decided = planner.search(traced, "cpu", devices=4, pinned={"pipeline": 1, "micro_batches": 1})
    assert decided.plan.candidates == ()
