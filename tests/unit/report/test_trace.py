"""Trace events: of the form that Perfetto reads, with the times of the timeline."""

import json
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from planner.report.trace import trace_events
from tests.unit.report.reports import reported, verdict_named

NAMES = ("one axis", "pipeline", "several groups")


class Common(BaseModel):
    """What every event of the format has."""

    model_config = ConfigDict(extra="forbid", strict=True)
    ph: str
    pid: int = Field(ge=0)
    tid: int = Field(ge=0)
    name: str = Field(min_length=1)


class Metadata(Common):
    args: dict[str, str | int]


class Complete(Common):
    cat: str
    ts: float = Field(ge=0, allow_inf_nan=False)
    dur: float = Field(ge=0, allow_inf_nan=False)
    args: dict[str, int | str]


class Counter(Common):
    ts: float = Field(ge=0, allow_inf_nan=False)
    args: dict[str, int]


class Arrow(Common):
    cat: str
    id: int
    ts: float = Field(ge=0, allow_inf_nan=False)
    bp: str = "e"


FORMS: dict[str, type[Common]] = {"M": Metadata, "X": Complete, "s": Arrow, "f": Arrow, "C": Counter}
STREAMS = ("computation", "communication", "parameters")
SPANS = (0, 1, 2, 5)
"""Threads of spans: those streams, and transfers between stages."""


def events_of(name: str) -> list[dict[str, Any]]:
    found = reported(name)
    content = json.loads(json.dumps(trace_events(found), allow_nan=False))
    assert set(content) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert content["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = content["traceEvents"]
    return events


@pytest.mark.parametrize("name", NAMES)
def test_every_event_has_the_form_of_its_phase(name: str) -> None:
    for event in events_of(name):
        TypeAdapter(FORMS[event["ph"]]).validate_python(event)


@pytest.mark.parametrize("name", NAMES)
def test_processes_are_ranks_and_threads_are_streams(name: str) -> None:
    events, timeline = events_of(name), reported(name).timeline
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {
        (rank, thread): word
        for rank in range(len(timeline.ranks))
        for thread, word in enumerate((*STREAMS, "operators", "collectives", "transfers"))
    }
    assert {e["pid"] for e in events} == set(range(len(timeline.ranks)))


@pytest.mark.parametrize("name", NAMES)
def test_times_are_those_of_the_timeline(name: str) -> None:
    timeline = reported(name).timeline
    spans = [event for event in events_of(name) if event["ph"] == "X" and event["tid"] in SPANS]
    assert len(spans) == len(timeline.spans)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.seconds * 1e6, abs=2e-3)
    for event, span in zip(spans, timeline.spans, strict=True):
        assert (event["pid"], event["ts"]) == (span.rank, pytest.approx(span.start * 1e6, abs=2e-3))


@pytest.mark.parametrize("name", NAMES)
def test_spans_of_a_thread_follow_each_other(name: str) -> None:
    """What overlaps in part cannot be nested, and is dropped by those who read traces."""
    ends: dict[tuple[int, int], int] = {}
    for event in events_of(name):
        if event["ph"] == "X":
            thread = event["pid"], event["tid"]
            start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert start >= ends.get(thread, 0), event
            ends[thread] = start + length


def test_arrows_lead_from_the_pass_that_sends_to_the_transfer() -> None:
    events = events_of("pipeline")
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(span.source >= 0 for span in reported("pipeline").timeline.spans) > 0
    spans = [e for e in events if e["ph"] == "X"]

    def span_at(arrow: dict[str, Any]) -> dict[str, Any]:
        (found,) = [
            e
            for e in spans
            if (e["pid"], e["tid"]) == (arrow["pid"], arrow["tid"]) and e["ts"] <= arrow["ts"] < e["ts"] + e["dur"]
        ]
        return found

    for number, start in starts.items():
        sender, receiver = span_at(start), span_at(ends[number])
        assert receiver["name"].startswith("stage transfer")
        assert sender["args"]["micro_batch"] == receiver["args"]["micro_batch"]
        assert sender["pid"] == receiver["pid"]  # drawn where it is sent, as receives are posted ahead
        assert start["ts"] < ends[number]["ts"]


def test_one_rank_alone_sends_nothing() -> None:
    assert not [event for event in events_of("one axis") if event["ph"] in "sf"]


@pytest.mark.parametrize("name", NAMES)
def test_operators_and_collectives_are_inside_of_what_they_make_up(name: str) -> None:
    events, found = events_of(name), reported(name)
    for thread, above in ((3, (0,)), (4, (1, 2, 5))):
        spans = [e for e in events if e["ph"] == "X" and e["tid"] in above]
        inside = [e for e in events if e["ph"] == "X" and e["tid"] == thread]
        assert inside or thread == 4
        for one in inside:
            assert any(
                s["pid"] == one["pid"]
                and s["ts"] - 0.01 <= one["ts"]
                and one["ts"] + one["dur"] <= s["ts"] + s["dur"] + 0.01
                for s in spans
            ), one
    operators = {e["name"] for e in events if e["ph"] == "X" and e["tid"] == 3}
    known = {one.name for rank in found.inside for chunk in rank.chunks for one in chunk if one.forward > 0}
    assert known <= operators


def test_collectives_say_kind_group_and_bytes() -> None:
    """Those of the timeline of two stages: of a micro-batch, and as many bytes as the page counts for a step."""
    found = reported("pipeline")
    collectives = [e["args"] for e in events_of("pipeline") if e.get("cat") == "collective"]
    assert {one["kind"] for one in collectives} >= {"send_recv"}
    turns = verdict_named("pipeline").bound.plan.training.micro_batches
    network = found.report.network
    own = found.inside[network.rank].collectives
    for kind in {one.kind for one in network.crossings}:
        told = sum(one.nbytes for one in network.crossings if one.kind == kind)
        once = ("gradient reduction", "weight gathering")
        assert told == pytest.approx(
            sum(one.nbytes * (1 if one.part in once else turns) for one in own if one.kind == kind)
        )


@pytest.mark.parametrize("name", NAMES)
def test_counters_are_the_curves_of_memory(name: str) -> None:
    counters = [e for e in events_of(name) if e["ph"] == "C"]
    for curve in reported(name).report.memory.curves:
        own = [e["args"]["bytes"] for e in counters if e["pid"] == curve.rank]
        assert own == [round(nbytes) for nbytes in curve.nbytes]
