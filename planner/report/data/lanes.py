"""The timeline of a step as lanes of bars, reduced to a number that can be drawn.

A long pipeline has millions of passes in a step, and a screen has about two thousand columns. If there are more bars
than requested, short bars that begin in the same small window of a lane are merged into one, which stores their number
and how much of its extent was busy. A window has at most one merged bar, and is as long as needed. Long bars are not
merged.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hardware_profiles import Seconds
from planner.plan.prediction.timeline import Span, StepTimeline, Stream

AT_MOST = 200_000
"""Maximum number of bars of a page; they compress well, to about a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span of a lane, or `count` merged spans that are busy for `busy` seconds."""

    start: Seconds
    end: Seconds
    kind: str
    micro_batch: int
    chunk: int
    slice: int
    count: int
    busy: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The computation or the communication of one pipeline rank, in order of time."""

    rank: int
    stream: Stream
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a rank spends the step: computing, waiting for its own communication, waiting for other ranks."""

    rank: int
    busy: Seconds
    exposed: Seconds
    idle: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The step of all ranks. Bars shorter than `window` may be merged; 0 if none is."""

    seconds: Seconds
    lanes: tuple[Lane, ...]
    window: Seconds
    uses: tuple[Use, ...]


def lanes_of(timeline: StepTimeline, at_most: int = AT_MOST) -> Lanes:
    """The lanes of a timeline with about `at_most` bars."""
    keyed = sorted(timeline.spans, key=lambda span: (span.rank, span.stream == "communication", span.start))
    grouped = [(key, list(spans)) for key, spans in groupby(keyed, key=lambda span: (span.rank, span.stream))]
    crowded = len(keyed) > at_most
    window = timeline.seconds * len(grouped) / at_most if crowded else 0.0
    return Lanes(
        seconds=timeline.seconds,
        lanes=tuple(
            Lane(rank=rank, stream=stream, bars=tuple(_bars(spans, window))) for (rank, stream), spans in grouped
        ),
        window=window,
        uses=tuple(
            Use(rank=rank, busy=use.busy, exposed=use.exposed, idle=use.idle) for rank, use in enumerate(timeline.ranks)
        ),
    )


def _bars(spans: Sequence[Span], window: Seconds) -> Iterable[Bar]:
    def place(span: Span) -> tuple[int, Seconds]:
        long = span.end - span.start >= window
        return (0, span.start) if long else (1, span.start // window)

    for _, together in groupby(spans, key=place):
        yield _together(list(together))


def _together(spans: Sequence[Span]) -> Bar:
    """One bar for neighbouring spans; its kind is that of most of their time."""
    first, busy = spans[0], defaultdict[str, Seconds](float)
    for span in spans:
        busy[span.kind] += span.end - span.start
    alone = len(spans) == 1
    return Bar(
        start=first.start,
        end=max(span.end for span in spans),
        kind=max(busy, key=lambda kind: busy[kind]),
        micro_batch=first.micro_batch if alone else -1,
        chunk=first.chunk,
        slice=first.slice,
        count=len(spans),
        busy=sum(busy.values()),
    )
