"""Which of the solved prices bound a pipeline rank.

A price is usable if it was solved with no more micro-batches in flight than the rank has.

Chunks that run unlike each other have own flights n_c. The value g of a block at a price is a minimum of sums that are
linear in n. So g is concave, and between two solved numbers it is at least the chord:

    1/v sum_c g(n_c) >= 1/v sum_c (chord of g at n_c)

With no micro-batch in flight, g is at least the value for free memory, and at least zero bytes.
"""

import functools
import itertools
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from planner.strategy_search.decomposition.pieces import Passes
from planner.strategy_search.decomposition.priced import Priced, States, picked
from planner.strategy_search.decomposition.setting import Setting

Array = NDArray[np.float64]

Combination: TypeAlias = tuple[tuple[int, float], ...]
"""Numbers of solved prices, and the share with which the values of each count. The number -1 stands for zeros."""

Usable: TypeAlias = tuple[tuple[Combination, Combination], ...]
"""The prices that bound a rank: pairs of a combination for its inner blocks and one for the head on the first rank."""


def usable_prices(priced: Sequence[Priced], setting: Setting, rank: int, *, unlike: bool) -> Usable:
    """The prices that bound a rank. `unlike`: its chunks run unlike each other."""
    if unlike:
        return tuple(_on_chords(priced, setting, rank))
    flights = setting.flights(rank) * (1 + 1e-12)
    return tuple(
        (((at, 1.0),), ((at, 1.0),))
        for at, known in enumerate(priced)
        if known.proves and (not known.price or known.flights <= flights)
    )


def _on_chords(priced: Sequence[Priced], setting: Setting, rank: int) -> list[tuple[Combination, Combination]]:
    groups: dict[tuple[float, Passes, float], list[int]] = {}
    for at, known in enumerate(priced):
        if known.proves:
            groups.setdefault((known.price, known.under, known.at_tail), []).append(at)
    found = []
    for (price, under, _), own in groups.items():
        points = sorted((priced[at].flights if price else math.inf, at) for at in own)
        if price and points[0][0] > 0:  # the point with none in flight
            free = None if math.isinf(price) else groups.get((0.0, under, 0.0))
            if free is None and price < math.inf:
                continue
            points = [(0.0, -1 if free is None else free[0]), *points]
        flights = [number for number, _ in points]
        chunks = [_on_chord(points, flights, number) for number in setting.in_flight[rank]]
        inside: dict[int, float] = {}
        for at, share in itertools.chain.from_iterable(chunks):
            inside[at] = inside.get(at, 0.0) + share / setting.chunks
        highest = points[-1][1]  # stands last, also where no chunk uses it
        last = inside.pop(highest, 0.0)
        found.append(((*inside.items(), (highest, last)), chunks[0]))
    return found


def _on_chord(points: Sequence[tuple[float, int]], flights: Sequence[float], number: float) -> Combination:
    """Shares of two neighbouring points, sorted by their `flights`, whose chord meets `number`; the last point alone
    beyond them."""
    behind = min(bisect_left(flights, number), len(points) - 1)
    high, at = points[behind]
    if not behind or number >= high:
        return ((at, 1.0),)
    low, before = points[behind - 1]
    share = (number - low) / (high - low)
    return ((before, 1 - share), (at, share))


def combined(priced: Sequence[Priced], combination: Combination, place: int, some: States | None) -> Array:
    """A combination of `Priced.values[place]`, for every state or for those of `some`."""
    known = [(share, picked(priced[at].values[place], some)) for at, share in combination if at >= 0]
    if len(known) == 1 and known[0][0] == 1.0:
        return known[0][1]
    with np.errstate(invalid="ignore"):  # an impossible state stays infinite, however small its share
        counted = [np.where(np.isinf(values), values, share * values) for share, values in known]
    return functools.reduce(np.add, counted, np.zeros(()))
