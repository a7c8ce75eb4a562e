"""The timeline of a step as trace events for Perfetto and chrome://tracing.

    process  pipeline rank                          one for each, named and in order
    thread   computation, communication, parameters 0, 1 and 2: passes, their communication, gradients and new weights
             operators, collectives                 3 and 4: the content of the spans above
    X        a span: name, start and length in microseconds, and in `args` its numbers
    s, f     an arrow from the end of the sending pass to the transfer
    C        a counter: bytes in use on a device of the rank

Operators and collectives are drawn for the first micro-batch of each chunk, and for the end of the step; other
micro-batches are alike. They share the time of their span in proportion to their time alone, because the prediction
does not know when they run in it.

Source: "Trace Event Format", Google, 2016 (the JSON object format; complete, metadata, flow and counter events).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from planner.plan.prediction.timeline import GATHERING, HIDDEN, INSIDE, REDUCTION, Span, StepTimeline
from planner.report.data.inside import Collective, Inside, OperatorTime
from planner.report.data.memory import Curve
from planner.report.data.report import Reported
from planner.report.units import bytes_text

Event = dict[str, Any]

_THREADS = {"computation": 0, "communication": 1, "parameters": 2, "operators": 3, "collectives": 4, "transfers": 5}
_NANO = 1e9  # whole nanoseconds, so that ends and begins meet exactly
_PER_MICRO = 1000  # the format counts in microseconds
_BEFORE = 10  # nanoseconds


def trace_events(found: Reported) -> dict[str, Any]:
    """The content of a plan's trace file."""
    timeline = found.timeline
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "plan": found.report.job,
            "step_seconds": timeline.seconds,
            "operators": "of the first micro-batch of each chunk, sharing its passes by what each takes alone",
        },
        "traceEvents": [
            *_names(len(timeline.ranks)),
            *_events(timeline),
            *_insides(timeline, found.inside),
            *(event for curve in found.report.memory.curves for event in _counter(curve)),
        ],
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
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)  # end of each thread, in nanoseconds
    for span in timeline.spans:
        thread = _thread(span)
        start = max(ends[span.rank, thread], round(span.start * _NANO))  # spans of a thread may not overlap
        end = ends[span.rank, thread] = max(start, round(span.end * _NANO))
        yield _complete(span, thread, start, end)
        if span.source >= 0:
            yield from _arrow(span, thread, arrows, (start + end) // 2)
            arrows += 1


def _thread(span: Span) -> int:
    """Gradients and new weights have their own thread, beside the communication of passes, and so have transfers to
    other stages while a rank computes."""
    if span.source == span.rank:
        return _THREADS["transfers"]
    return _THREADS["parameters" if span.kind in (REDUCTION, GATHERING) else span.stream]


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


def _arrow(span: Span, thread: int, number: int, middle: int) -> Iterator[Event]:
    """An arrow from just before the end of the sending work: arrows bind to the span that is open at their time."""
    common = {"cat": "send", "name": "send", "id": number}
    sent = max(0, round(span.sent * _NANO) - _BEFORE)
    yield {"ph": "s", **common, "pid": span.source, "tid": _THREADS["computation"], "ts": sent / _PER_MICRO}
    yield {
        "ph": "f",
        "bp": "e",
        **common,
        "pid": span.rank,
        "tid": thread,
        "ts": middle / _PER_MICRO,
    }


def _insides(timeline: StepTimeline, inside: Sequence[Inside]) -> Iterator[Event]:
    """Operators and collectives of the first pass in each direction through each chunk, and of the end of the step."""
    seen: set[tuple[int, int, str]] = set()
    passing: dict[int, Span] = {}  # the last pass of each rank
    ends: defaultdict[tuple[int, int], int] = defaultdict(int)
    for span in timeline.spans:
        found: Sequence[tuple[str, float, Event]] = ()
        key = (span.rank, span.chunk, span.kind)
        if span.stream == "computation" and span.kind in ("forward", "backward", "input_gradient"):
            passing[span.rank] = span
            found = () if key in seen else _operators_in(inside[span.rank].chunks[span.chunk], span)
        elif span.stream == "communication":
            backward = passing[span.rank].kind != "forward" if span.kind in (INSIDE, HIDDEN) else None
            key = (*key[:2], f"{span.kind} {backward}")
            found = () if key in seen else _collectives_in(inside[span.rank].collectives, span, backward)
        seen.add(key)
        yield from _shared(span, found, ends)


def _operators_in(operators: Sequence[OperatorTime], span: Span) -> list[tuple[str, float, Event]]:
    forward = span.kind == "forward"
    ordered = operators if forward else reversed(operators)
    return [(one.name, one.forward if forward else one.backward, {"op": one.op}) for one in ordered]


def _collectives_in(
    collectives: Sequence[Collective], span: Span, backward: bool | None
) -> list[tuple[str, float, Event]]:
    """The collectives of a span: by direction if inside of a pass, else by the kind of the span."""
    part = "" if backward is not None else span.kind
    own = [one for one in collectives if one.part == part and backward in (None, one.backward)]
    return [(_name_of(one), one.seconds, _about_collective(one)) for one in own]


def _name_of(one: Collective) -> str:
    """`all_gather axis0 (8 devices), 1.2 GiB`."""
    where = "to a neighbouring stage" if one.kind == "send_recv" else f"{one.along} ({one.devices} devices)"
    return f"{one.kind} {where}, {bytes_text(one.nbytes)}"


def _about_collective(one: Collective) -> Event:
    return {
        "kind": one.kind,
        "group": one.along,
        "devices": one.devices,
        "messages": one.messages,
        "bytes": round(one.nbytes),
    }


def _shared(
    span: Span, found: Sequence[tuple[str, float, Event]], ends: defaultdict[tuple[int, int], int]
) -> Iterator[Event]:
    """Events that share a span in proportion to their weights, one after the other; events without weight are left
    out."""
    total = sum(weight for _, weight, _ in found)
    thread = _THREADS["operators" if span.stream == "computation" else "collectives"]
    passed = 0.0
    for name, weight, about in found:
        if weight <= 0:
            continue
        begin = span.start + (span.end - span.start) * passed / total
        passed += weight
        until = span.start + (span.end - span.start) * passed / total
        start = max(ends[span.rank, thread], round(begin * _NANO))
        end = ends[span.rank, thread] = max(start, round(until * _NANO))
        common = {"ph": "X", "pid": span.rank, "tid": thread, "name": name}
        times = {"ts": start / _PER_MICRO, "dur": (end - start) / _PER_MICRO}
        yield {**common, "cat": "operator" if thread == _THREADS["operators"] else "collective", **times, "args": about}


def _counter(curve: Curve) -> Iterator[Event]:
    """Memory of a rank over time."""
    for time, nbytes in zip(curve.times, curve.nbytes, strict=True):
        at = round(time * _NANO) / _PER_MICRO
        yield {"ph": "C", "pid": curve.rank, "tid": 0, "name": "memory", "ts": at, "args": {"bytes": round(nbytes)}}
