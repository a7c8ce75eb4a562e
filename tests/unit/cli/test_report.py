"""`plan report`: the page, the trace, JSON."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("searched_once")

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


@pytest.mark.thorough
@pytest.mark.slow
def test_other_plans_are_the_candidates_of_the_search(plan: Any, here: Path, file: str) -> None:
    choices = plan.json("report", file, "-o", "page.html")["choices"]
    plans = choices["plans"]
    assert sum(one["this"] for one in plans) == 1
    best = plan.json(*TINY, "--top", "5", "-o", "best.json")["plans"]
    assert sum(not one["this"] and not one["name"] for one in plans) == len(best)
    assert plans[0]["step_seconds"] == pytest.approx(best[0]["step_seconds"])
    assert [one["name"] for one in plans if one["name"]] == ["FSDP over all devices"]
    assert {one["decision"] for one in choices["reasons"]} <= {"degrees", "ZeRO", "recomputation", "micro-batches"}
    assert choices["reasons"]
    page = (here / "page.html").read_text()
    assert "Why this plan" in page
    assert "Alternatives" in page
    assert plan.json("report", file)["choices"] == choices, "no clock decides what is found"


def test_days_and_cost_are_those_of_the_step(plan: Any, file: str) -> None:
    content = plan.json("report", file, "--no-search", "--tokens", "1B", "--price", "2")
    figures, step = dict(content["figures"]), content["prediction"]["step_seconds"]
    shown = plan.json("estimate", file)
    seconds = step * 1e9 / (shown["global_batch"] * shown["sequence_length"])
    assert float(figures["device-hours"].split(" ")[0].replace(",", "")) == pytest.approx(4 * seconds / 3600, abs=0.5)
    cost = figures["cost at 2 a device-hour"].split(" ")[0].replace(",", "")
    assert float(cost) == pytest.approx(8 * seconds / 3600, abs=0.5)
    assert "--price needs --tokens" in plan.refused("report", file, "--price", "2")
    for other in ("--no-search",), ("--trace", "trace.json"):
        assert "--time-limit 3" in plan.refused("report", file, "--time-limit", "3", *other)


@pytest.mark.thorough
def test_the_command_asks_for_the_same_job(plan: Any, file: str) -> None:
    command = shlex.split(plan.json("report", file, "--no-search")["command"])
    assert command[0] == "plan"
    again, known = plan.json(*command[1:], "-o", "again.json"), plan.json("estimate", file)
    for name in ("model", "hardware", "devices", "sequence_length", "global_batch", "precision", "optimizer"):
        assert again[name] == known[name], name


def test_no_time_to_search_leaves_the_plan_alone(plan: Any, file: str) -> None:
    choices = plan.json("report", file, "--time-limit", "0")["choices"]
    assert [one["this"] for one in choices["plans"]] == [True]
    assert "stopped before its end" in choices["note"]


@pytest.mark.thorough
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
