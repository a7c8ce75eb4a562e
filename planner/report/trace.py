"""The timeline of a step as trace events, which Perfetto and chrome://tracing show.

    process  pipeline rank                          one for each, named and in order
    thread   computation, communication, parameters 0, 1 and 2: passes, what they send, gradients and new weights
    X        a span: name, start and length in microseconds, and in `args` what it is of
    s, f     an arrow from the end of the pass that sends to the transfer that brings it

Source: "Trace Event Format", Google, 2016 (the JSON object format; complete, metadata and flow events).
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from planner.plan.prediction.timeline import GATHERING, REDUCTION, Span, StepTimeline

Event = dict[str, Any]

_THREADS = {"computation": 0, "communication": 1, "parameters": 2}
_NANO = 1e9  # whole nanoseconds, so that what ends and what begins then meet
_PER_MICRO = 1000  # the format counts in microseconds
_BEFORE = 10  # nanoseconds


def trace_events(name: str, timeline: StepTimeline) -> dict[str, Any]:
    """The content of a trace file of a plan called `name`."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"plan": name, "step_seconds": timeline.seconds},
        "traceEvents": [*_names(len(timeline.ranks)), *_events(timeline)],
    }


def _names(ranks: int) -> Iterator[Event]:
    for rank in range(ranks):
        yield _about(rank, 0, "process_name", {"name": f"pipeline rank {rank}"})
        yield _about(rank, 0, "process_sort_index", {"sort_index": rank})
        for thread, number in _THREADS.items():
            yield _about(rank, number, "thread_name", {"name": thread})
            yield _about(rank, number, "thread_sort_index", {"sort_index": number})


def _about(rank: int, thread: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": args}


def _events(timeline: StepTimeline) -> Iterator[Event]:
    arrows = 0
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)  # of each thread, in nanoseconds
    for span in timeline.spans:
        thread = _thread(span)
        start = max(ends[span.rank, thread], round(span.start * _NANO))  # spans of a thread may not overlap
        end = ends[span.rank, thread] = max(start, round(span.end * _NANO))
        yield _complete(span, thread, start, end)
        if span.source >= 0:
            yield from _arrow(span, arrows, (start + end) // 2)
            arrows += 1


def _thread(span: Span) -> int:
    """Gradients and new weights have a queue of their own, beside the messages of passes."""
    word = "parameters" if span.kind in (REDUCTION, GATHERING) else span.stream
    return _THREADS[word]


def _complete(span: Span, thread: int, start: int, end: int) -> Event:
    number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
    numbers = {"micro_batch": span.micro_batch, "chunk": span.chunk, "slice": span.slice}
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": thread,
        "name": f"{span.kind}{number}",
        "cat": span.stream,
        "ts": start / _PER_MICRO,
        "dur": (end - start) / _PER_MICRO,
        "args": {key: value for key, value in numbers.items() if value >= 0},
    }


def _arrow(span: Span, number: int, middle: int) -> Iterator[Event]:
    """From just before the work that makes it ends: arrows bind to the span that is open at their time."""
    common = {"cat": "send", "name": "send", "id": number}
    sent = max(0, round(span.sent * _NANO) - _BEFORE)
    yield {"ph": "s", **common, "pid": span.source, "tid": _THREADS["computation"], "ts": sent / _PER_MICRO}
    yield {
        "ph": "f",
        "bp": "e",
        **common,
        "pid": span.rank,
        "tid": _THREADS["communication"],
        "ts": middle / _PER_MICRO,
    }
