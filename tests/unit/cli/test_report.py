"""`plan report`: the page, the trace, JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

TINY = ("--model", "llama-tiny", "--hardware", "cpu", "--devices", "4")


@pytest.fixture
def file(plan: Any) -> str:
    """A plan in two stages."""
    plan.json(*TINY, "--pipeline", "2", "--tensor", "2", "--zero", "0", "--micro-batches", "4", "-o", "plan.json")
    return "plan.json"


@pytest.mark.thorough
def test_a_page_and_a_trace_of_a_plan(plan: Any, here: Path, file: str) -> None:
    outcome = plan("report", file, "--no-search")
    assert (outcome.code, outcome.out, outcome.err) == (0, "Report written to plan.html\n", "")
    assert "Alternatives" not in (here / "plan.html").read_text()
    (here / "plan.html").unlink()
    outcome = plan("report", file, "--trace", "trace.json")
    assert outcome.out.startswith("Trace written to trace.json")
    assert not (here / "plan.html").exists()
    content = json.loads((here / "trace.json").read_text())
    assert {event["pid"] for event in content["traceEvents"]} == {0, 1}


def test_json_has_what_the_page_shows(plan: Any, here: Path, file: str) -> None:
    content, shown = plan.json("report", file, "--no-search"), plan.json("estimate", file)
    assert content["prediction"]["step_seconds"] == shown["step_seconds"]
    assert (content["page"], content["trace"], content["choices"]) == (None, None, None)
    assert dict(content["prediction"]["time"]) == shown["time_seconds"]
    assert {path.name for path in here.iterdir()} == {"plan.json"}
    assert len(content["lanes"]["lanes"]) == 4
    assert len(content["memory"]["ranks"]) == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_other_plans_are_those_of_the_front(plan: Any, here: Path, file: str) -> None:
    plans = plan.json("report", file, "-o", "page.html", "--time-limit", "300")["choices"]["plans"]
    assert sum(one["this"] for one in plans) == 1
    front = plan.json(*TINY, "--pareto", "-o", "best.json")["plans"]
    others = [one["step_seconds"] for one in plans if not one["this"] and not one["kept"]]
    assert others == pytest.approx([one["step_seconds"] for one in front])
    assert "Alternatives" in (here / "page.html").read_text()
    kept = [dict(one["words"])["degrees"] for one in plans if one["kept"]]
    assert kept
    assert set(kept) == {dict(one["words"])["degrees"] for one in plans if one["this"]}


def test_no_time_to_search_leaves_the_plan_alone(plan: Any, file: str) -> None:
    choices = plan.json("report", file, "--time-limit", "0")["choices"]
    assert [one["this"] for one in choices["plans"]] == [True]
    assert "stopped after" in choices["note"]


def test_a_plan_that_was_changed_and_does_not_fit_says_so(plan: Any, here: Path) -> None:
    plan.json("--model", "llama-tiny", "--devices", "2", "-o", "small.json")
    content = json.loads((here / "small.json").read_text())
    content["training"]["global_batch"] = 2**23
    (here / "small.json").write_text(json.dumps(content))
    fits, changed = plan.json("report", "small.json", "--no-search")["remarks"][:2]
    assert "does not fit" in fits
    assert "was changed since it was priced" in changed


def test_what_cannot_be_written_or_read_is_said_in_a_line(plan: Any, here: Path, file: str) -> None:
    assert "is the plan file itself" in plan.refused("report", file, "-o", file)
    for option in ("-o", "--trace"):  # before anything is searched
        words = plan.refused("report", file, option, f"{file}/page.html")
        assert f"{file}/page.html: cannot be written: Not a directory; name another place" in words
    assert "none.json" in plan.refused("report", "none.json")
