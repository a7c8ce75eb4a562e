"""--top, --pareto, --objective, --explain, --certify, limits, and what is said about the proof."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.plan.compare.explanation import RESOURCE_OF, Alternative, Explanation
from planner.plan.prediction.step import (
    AHEAD,
    BESIDE,
    BETWEEN_STAGES,
    COVERED,
    GATHERED_AHEAD,
    PIPELINE_BUBBLE,
    REDUCED_AHEAD,
    UNCOVERED,
    UNDER_EXCHANGE,
    UNDER_PRODUCTS,
)
from planner.plan.prediction.walk.stage_cost import (
    ACTIVATIONS,
    FETCHED,
    OFFLOAD,
    RETURNED,
    TIME_PER_MICRO_BATCH,
    TIME_PER_STEP,
)
from planner.report.explanation import explanation_lines
from planner.report.html.colours import STEP
from planner.report.search import proof_text, simulated_text
from planner.strategy_search import objectives

pytestmark = pytest.mark.usefixtures("searched_once")

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")


@pytest.mark.slow
@pytest.mark.thorough
def test_the_best_plans(plan: Any, here: Path) -> None:
    content = plan.json(*TINY, "--top", "3", "-o", "plan.json")
    seconds = [found["step_seconds"] for found in content["plans"]]
    assert len(seconds) == 3
    assert seconds == sorted(seconds)
    assert [found["plan_file"] for found in content["plans"]] == ["plan.json", None, None]
    assert [path.name for path in here.iterdir()] == ["plan.json"]
    outcome = plan(*TINY, "--top", "2", "--write-all", "-o", "plan.json")
    assert "The best plans" in outcome.out
    assert "slower by" in outcome.out
    assert plan("verify", "plan-2.json").code == 0


@pytest.mark.exhaustive
@pytest.mark.slow
def test_time_against_memory(plan: Any, here: Path) -> None:
    plans = plan.json(*TINY, "--pareto", "--mesh", "2")["plans"]
    assert len(plans) > 1
    seconds, peaks = [p["step_seconds"] for p in plans], [p["peak_bytes"] for p in plans]
    assert seconds == sorted(seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert "Time against memory" in plan(*TINY, "--pareto", "--mesh", "2").out


@pytest.mark.thorough
@pytest.mark.slow
def test_time_against_cost(plan: Any) -> None:
    asked = (*TINY, "--pareto", "--objective", "cost", "--pipeline", "1", "--tensor", "1")
    plans = plan.json(*asked)["plans"]
    assert [one["devices"] for one in plans] == [4, 2, 1]
    costs = [one["step_seconds"] * one["devices"] for one in plans]
    assert costs == sorted(costs, reverse=True)
    assert "Time against cost" in plan(*asked).out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_objectives(plan: Any) -> None:
    fast, lean = plan.json(*TINY), plan.json(*TINY, "--objective", "memory")
    assert lean["peak_bytes"] < fast["peak_bytes"]
    assert lean["objective"] == "memory"
    cheap = plan.json(*TINY, "--objective", "cost")
    assert cheap["step_seconds"] * cheap["devices"] <= fast["step_seconds"] * fast["devices"]
    assert "within this memory" in plan(*TINY, "--objective", "memory").out


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_limit_on_memory(plan: Any) -> None:
    free = plan.json(*TINY)
    tight = plan.json(*TINY, "--memory-limit", "545MiB")
    assert tight["peak_bytes"] <= 545 * 2**20 < free["peak_bytes"]
    assert tight["step_seconds"] > free["step_seconds"]


@pytest.mark.slow
@pytest.mark.thorough
def test_an_explanation(plan: Any) -> None:
    content = plan.json(*TINY, "--simplicity", "0", "--explain")
    why = content["explanation"]
    assert sum(why["seconds"].values()) == pytest.approx(content["step_seconds"])
    assert not why["memory_binds"]
    assert why["next_best"]["step_seconds"] >= content["step_seconds"]
    assert len(content["plans"]) == 1
    out = plan(*TINY, "--explain", "--simplicity", "0").out
    for words in ("Why it takes that long", "memory does not bind", "The next best plan takes", "instead of"):
        assert words in out


def test_launches_ahead_are_explained(plan: Any) -> None:
    """On a machine whose host takes time to launch, some of it is saved: a part of the time that is negative."""
    content = plan.json("--model", "llama-tiny", "--devices", "2", "--mesh", "2", "--micro-batches", "2", "--explain")
    assert content["time_seconds"][AHEAD] < 0
    assert sum(content["explanation"]["seconds"].values()) == pytest.approx(content["step_seconds"])


def test_every_part_of_the_time_has_a_resource_and_a_colour() -> None:
    parts = {*TIME_PER_MICRO_BATCH, *TIME_PER_STEP, PIPELINE_BUBBLE, UNCOVERED, COVERED, AHEAD, UNDER_PRODUCTS}
    parts |= {UNDER_EXCHANGE, BETWEEN_STAGES, REDUCED_AHEAD}
    assert set(RESOURCE_OF) <= set(STEP)  # and a colour
    assert set(RESOURCE_OF) == parts | {OFFLOAD, ACTIVATIONS, FETCHED, RETURNED, BESIDE, GATHERED_AHEAD}


def test_an_explanation_in_words() -> None:
    found = Explanation(
        step_seconds=10.0,
        shares=(("compute", 8.0), ("communication", 2.0)),
        memory_price=0.5 / 2**30,
        free_bytes=0.0,
        ranks=4,
        slowest=1,
        fullest=0,
        next_best=Alternative(step_seconds=11.0, peak_bytes=1.0, differences=(("mesh", "8", "2x4"),)),
    )
    memory, other = explanation_lines(found)
    assert "1 GiB more per device would save about 500 ms (5.0%), at pipeline rank 1 of 4" in memory
    assert other == "The next best plan takes 11 s (10.0% more), with mesh 2x4 instead of 8."


def test_a_certificate(plan: Any) -> None:
    found = plan.json(*TINY, "--mesh", "4", "--micro-batches", "1", "--certify")["search"]["certificate"]
    assert found["solver"] == "ilp"
    assert found["bound_seconds"] <= found["busy_seconds"]
    assert "Certified by ilp" in plan(*TINY, "--mesh", "4", "--micro-batches", "1", "--certify").out


def test_no_time_at_all(plan: Any) -> None:
    assert "give it more time" in plan.refused(*TINY, "--time-limit", "0", code=3)


@pytest.mark.parametrize(
    ("status", "gap", "words"),
    [
        ("optimal", 0.0, "Proved optimal: no plan in the search space is faster"),
        ("feasible", 0.0049, "Proved: no plan in the search space is more than 0.5% faster"),
        ("feasible", 0.13201, "Proved: no plan in the search space is more than 13.3% faster"),
        ("feasible", 0.0004, "Proved: no plan in the search space is more than 0.04% faster"),
        ("feasible", 0.0, "Proved: no plan in the search space is faster"),
        ("feasible", 1e-7, "Proved: no plan in the search space is more than 0.01% faster"),
    ],
)
def test_what_is_proved(status: str, gap: float, words: str) -> None:
    assert proof_text(status, gap, "in the search space") == words


def test_a_proof_says_about_which_plans_it_is_where_the_best_is_none_of_them() -> None:
    """One of three axes, or with a ring, is found around those of which something is proved."""
    said = proof_text("feasible", 0.004, "in the search space", ["1f1b"], covered=False)
    assert said == (
        "Proved: no plan in the search space, with one or two mesh axes, equal virtual stages and no ring attention, is"
        " more than 0.4% faster, if steps are counted under 1F1B with exposed stage transfers"
    )


def test_a_proof_says_apart_what_is_known_of_stages_in_a_v() -> None:
    first, second = proof_text("feasible", 0.4, "in the search space", ["in order"], apart=("v", 0.0)).splitlines()
    assert first == (
        "Proved: no plan in the search space with stages one after the other is faster, if steps are counted with"
        " micro-batches one after the other;"
    )
    assert second == "no plan with stages in a V is more than 40.0% faster (bound: the busy time of its slowest rank)"
    sliced = proof_text("feasible", 0.4, "in the search space", apart=("slices", 0.01)).splitlines()
    assert sliced[0] == "Proved: no plan in the search space with whole sequences is more than 1.0% faster;"
    assert sliced[1].startswith("no plan with sequence slices is more than 40.0% faster (")
    assert "in a V" not in proof_text("feasible", 0.4, "in the search space", apart=("v", 0.4))


def test_a_proof_says_what_it_is_about_where_that_is_not_the_step() -> None:
    assert simulated_text(1.0, 1.0 + 1e-12) == simulated_text(10.1, 10.0) == ""
    text = simulated_text(9.9, 10.0)
    assert text.startswith(
        "Counted so, this plan takes 10 s. Simulated with its own schedule and overlaps, it takes 9.9 s"
    )
    assert "(1.0% less), the shortest step that was simulated." in text
    assert "(1.0% less). No bound" in simulated_text(9.9, 10.0, fastest=False)


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("options", "assumed", "words"),
    [
        (["--pipeline", "1", "--interleave", "1"], [], ""),
        (["--pipeline", "1"], ["in order"], "with micro-batches one after the other"),
        (
            ["--forward-only"],
            ["forward"],
            "at the pace of the slowest stage with exposed stage transfers",
        ),
        ([], ["1f1b"], "under 1F1B with exposed stage transfers"),
        (["--pipeline", "2", "--schedule", "zb_v", "--micro-batches", "4"], [], ""),
        (
            ["--offload", "auto"],
            ["1f1b", "offload"],
            "under 1F1B with exposed stage transfers and with exposed offload",
        ),
    ],
)
def test_a_proof_says_how_plans_are_compared(plan: Any, options: list[str], assumed: list[str], words: str) -> None:
    found = plan.json(*TINY, *options)["search"]
    assert (found["assumed"], found["covered"]) == (assumed, True)
    said = proof_text(found["status"], found["gap"], "in the search space", assumed)
    assert said.partition(", if steps are counted ")[2] == words


def test_json_says_where_a_plan_lies_outside_of_what_is_proved(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one with a ring does, which takes longer to find."""
    found = objectives.plan_for
    monkeypatch.setattr(objectives, "plan_for", lambda *asked: replace(found(*asked), covered=False))
    assert plan.json(*TINY, "--pipeline", "1", "--interleave", "1")["search"]["covered"] is False
