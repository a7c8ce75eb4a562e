"""The timeline of a step as lanes of bars, few enough to be drawn.

A long pipeline takes millions of passes in a step, and a screen has some two thousand columns. Where there
are more bars than asked for, short ones that begin in the same small window of a lane are put together into one, which
says how many it stands for and how much of its extent was busy. Windows are as long as they must be, so that there is
never more than one put-together bar for each, and long bars stay what they are.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hardware_profiles import Seconds
from planner.plan.prediction.timeline import Span, StepTimeline, Stream

AT_MOST = 200_000
"""Bars of a page, which compress well: a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A span of a lane, or `count` of them put together, of which `busy` seconds are not gaps."""

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
    """What one pipeline rank computes, or what it communicates, in the order of time."""

    rank: int
    stream: Stream
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """How a rank spends the step: computing, waiting for its own communication, waiting for others."""

    rank: int
    busy: Seconds
    exposed: Seconds
    idle: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The step of all ranks. Bars shorter than `window` may stand for several; 0 where each is one."""

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
    """One bar for spans that lie close; its kind is what most of their time goes to."""
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
