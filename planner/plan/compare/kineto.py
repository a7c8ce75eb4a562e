"""A trace of PyTorch's profiler (Kineto's JSON, as `export_chrome_trace` writes it), read into the terms of a step.

    device   |== compute ==|   |=== compute ===|      |== adam ==|
             |     |-- all-gather --|   |-- send --|             |
    term      computation       comm.  comp.  transfer  rest  update

Every moment of a step belongs to one term, the first of these that is at work then:

    computation     kernels that compute, all classes but the optimizer's
    update          kernels of the optimizer
    communication   collectives that nothing covers
    transfer        what is sent between stages, and waiting for it, that nothing covers
    rest            nothing runs: launches of the host, data, gaps

so that terms sum to the step, however many streams there are. The steps are those that `torch.profiler` marks
("ProfilerStep#7"); a trace without marks is one step. Of several devices in a trace the busiest counts. A trace without
kernels of a device is one of a CPU: there operators are what runs, each without those that it calls.

    with torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=3)) as profiler:
        ...                                                  # a step, then profiler.step()
    profiler.export_chrome_trace("trace.json")
"""

import gzip
import io
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hardware_profiles import Seconds
from hardware_profiles.foreign import ForeignTextError, Limits, decoded, parse_json, read_bytes
from planner.errors import RequestError
from planner.plan.compare.kernel_names import class_of_kernel, class_of_operator, collective_of

_EXPANDED = 60
"""How many times longer than its compressed form a trace is at most; those of torch.profiler are 10 to 25 times."""
_LATEST = 2.0**63
"""Of a time, microseconds."""
LIMITS = Limits(size=2**29, values=2**25, finite=False)
"""Of a trace: traces of a few steps of large models have some hundred MB."""

TRACE_TERMS = ("computation", "update", "communication", "transfer", "rest")

_MARK = "ProfilerStep#"
_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_OPERATOR = "cpu_op"
_ATEN = "aten::"
_P2P = "send_recv"
_MICROSECOND = 1e-6
_GZIP = b"\x1f\x8b"

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedClass:
    """Kernels, or collectives, of one class in a step: how many, their seconds, and those of them that nothing else
    covers."""

    name: str
    calls: float
    seconds: Seconds
    exposed: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """What a trace says of a step: its seconds, by `TRACE_TERMS` too, in the mean of so many `steps`; kernels by class
    and collectives by kind, the longest first; of how many `ranks` the run was, where the profiler noted it."""

    step_seconds: Seconds
    steps: int
    terms: Mapping[str, Seconds]
    kernels: tuple[TracedClass, ...]
    collectives: tuple[TracedClass, ...]
    ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """Something that ran from `start` to `end`, in microseconds: a kernel of a class, or a collective of a kind. `own`
    is what it took itself, without what it called."""

    name: str
    communicates: bool
    start: float
    end: float
    own: float


def read_trace(path: Path) -> TracedRun:
    """The steps of a trace, as text or compressed by gzip. Raises RequestError where it is no trace, or one in which
    nothing runs."""
    try:
        found = parse_json(decoded(_content(path)), LIMITS)
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; give what export_chrome_trace of torch.profiler wrote") from error
    events = found.get("traceEvents") if isinstance(found, dict) else found
    if not isinstance(events, list):
        raise RequestError(f"{path}: no traceEvents; give what export_chrome_trace of torch.profiler wrote")
    complete = [event for event in events if _is_complete(event)]
    ran = _busiest(complete) or _on_cpu(complete)
    if not ran:
        raise RequestError(f"{path}: the trace has no kernels and no operators; profile a step")
    begin, end, steps = _window(complete, ran)
    inside = [one for one in ran if one.start < end and one.end > begin]
    if not inside or not end > begin:
        raise RequestError(
            f"{path}: the marked steps have no kernels and no operators; give the profiler's schedule more active steps"
        )
    run = _run(inside, begin, end, steps)
    if not 0 < run.step_seconds < math.inf:
        raise RequestError(f"{path}: the steps have no duration; profile a step")
    return replace(run, ranks=_ranks(found))


def _ranks(trace: Any) -> int | None:
    """Processes of the group that torch.profiler notes beside the events of a distributed run."""
    noted = trace.get("distributedInfo") if isinstance(trace, dict) else None
    size = noted.get("world_size") if isinstance(noted, dict) else None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


def _content(path: Path) -> bytes:
    content = read_bytes(path, LIMITS.size)
    if not content.startswith(_GZIP):
        return content
    most = min(LIMITS.size, _EXPANDED * len(content) + 2**20)
    try:
        with gzip.open(io.BytesIO(content)) as file:
            found = file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ForeignTextError(f"cannot be read: not a whole gzip file ({error})") from error
    if len(found) > most:
        raise ForeignTextError(f"cannot be read: larger than {most} bytes, the limit for such a file")
    return found


def _is_complete(event: Any) -> bool:
    """Whether an event has a name, a beginning and a duration."""
    return (
        isinstance(event, dict)
        and event.get("ph") == "X"
        and isinstance(event.get("name"), str)
        and all(_is_time(event.get(key)) for key in ("ts", "dur"))
        and event["dur"] >= 0
    )


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LATEST


def _text(event: Mapping[str, Any], key: str) -> str:
    value = event.get(key)
    return value if isinstance(value, str) else ""


def _busiest(events: Iterable[Mapping[str, Any]]) -> list[_Ran]:
    """What ran on the device that was busy longest."""
    devices: dict[Any, list[_Ran]] = defaultdict(list)
    for event in events:
        if _text(event, "cat").lower() not in _ON_DEVICE:
            continue
        arguments = event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        kind = collective_of(event["name"], _text(arguments, "Collective name"))
        devices[str(arguments.get("device", event.get("pid")))].append(
            _Ran(
                name=class_of_kernel(event["name"]) if kind is None else kind,
                communicates=kind is not None,
                start=float(event["ts"]),
                end=float(event["ts"]) + float(event["dur"]),
                own=float(event["dur"]),
            )
        )
    return max(devices.values(), key=lambda ran: sum(one.own for one in ran), default=[])


def _on_cpu(events: Iterable[Mapping[str, Any]]) -> list[_Ran]:
    """Operators of ATen, each without those that it calls, and collectives of gloo."""
    threads: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    found = []
    for event in events:
        kind = collective_of(event["name"])
        if kind is not None:
            start, long = float(event["ts"]), float(event["dur"])
            found.append(_Ran(name=kind, communicates=True, start=start, end=start + long, own=long))
        elif _text(event, "cat").lower() == _OPERATOR and event["name"].startswith(_ATEN):
            threads[f"{event.get('pid')}/{event.get('tid')}"].append(event)
    for of_thread in threads.values():
        found += _without_called(of_thread)
    return found


def _without_called(events: list[Mapping[str, Any]]) -> Iterator[_Ran]:
    """Events of one thread, which nest: what each takes without those inside of it."""
    inside = [0.0] * len(events)
    order = sorted(range(len(events)), key=lambda at: (events[at]["ts"], -events[at]["dur"]))
    around: list[int] = []
    for at in order:
        start = events[at]["ts"]
        while around and events[around[-1]]["ts"] + events[around[-1]]["dur"] <= start:
            around.pop()
        if around:
            inside[around[-1]] += events[at]["dur"]
        around.append(at)
    for event, called in zip(events, inside, strict=True):
        yield _Ran(
            name=class_of_operator(event["name"].removeprefix(_ATEN)),
            communicates=False,
            start=float(event["ts"]),
            end=float(event["ts"]) + float(event["dur"]),
            own=max(0.0, float(event["dur"]) - called),
        )


def _window(events: Iterable[Mapping[str, Any]], ran: Sequence[_Ran]) -> tuple[float, float, int]:
    """From where to where the trace counts, and how many steps that is. Marks of the device's own timeline are where
    its kernels run; those of the host are where they were launched. A step is counted by its name: Kineto marks it on
    every stream that has kernels of it (`GpuUserEventMap` in its CuptiActivityProfiler.cpp)."""
    marks: dict[str, dict[str, list[Interval]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event["name"].startswith(_MARK):
            cat = _text(event, "cat").lower()
            marks[cat][event["name"]].append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    found = marks.get("gpu_user_annotation") or marks.get("user_annotation") or next(iter(marks.values()), {})
    spans = [span for of_step in found.values() for span in of_step]
    if spans:
        return min(start for start, _ in spans), max(end for _, end in spans), len(found)
    return min(one.start for one in ran), max(one.end for one in ran), 1


def _run(ran: Sequence[_Ran], begin: float, end: float, steps: int) -> TracedRun:
    def spans(wanted: Iterable[_Ran]) -> list[Interval]:
        return _union((max(begin, one.start), min(end, one.end)) for one in wanted)

    of_term: dict[str, list[_Ran]] = {name: [] for name in TRACE_TERMS}
    for one in ran:
        if one.communicates:
            of_term["transfer" if one.name == _P2P else "communication"].append(one)
        else:
            of_term["update" if one.name == "optimizer" else "computation"].append(one)
    covered: list[Interval] = []
    terms = {}
    for name in TRACE_TERMS[:-1]:
        before = _length(covered)
        covered = _union([*covered, *spans(of_term[name])])
        terms[name] = (_length(covered) - before) * _MICROSECOND / steps
    terms["rest"] = max(0.0, (end - begin - _length(covered)) * _MICROSECOND / steps)
    working = spans(one for one in ran if not one.communicates)
    return TracedRun(
        step_seconds=(end - begin) * _MICROSECOND / steps,
        steps=steps,
        terms=terms,
        kernels=_classes([one for one in ran if not one.communicates], [], steps),
        collectives=_classes([one for one in ran if one.communicates], working, steps),
    )


def _classes(ran: Sequence[_Ran], covering: Sequence[Interval], steps: int) -> tuple[TracedClass, ...]:
    named: dict[str, list[_Ran]] = defaultdict(list)
    for one in ran:
        named[one.name].append(one)
    found = [
        TracedClass(
            name=name,
            calls=len(some) / steps,
            seconds=sum(one.own for one in some) * _MICROSECOND / steps,
            exposed=_beyond(some, covering) * _MICROSECOND / steps,
        )
        for name, some in named.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.name)))


def _beyond(ran: Sequence[_Ran], covering: Sequence[Interval]) -> float:
    """How long some of these run while nothing that covers them does."""
    both = _union([*covering, *((one.start, one.end) for one in ran)])
    return _length(both) - _length(covering)


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Intervals without overlaps, in order."""
    found: list[Interval] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > start:
            found.append((start, end))
    return found


def _length(spans: Iterable[Interval]) -> float:
    return math.fsum(end - start for start, end in spans)
