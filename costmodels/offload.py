"""Optimizer states that are offloaded, and travel there and back around their update.

    fetch     f0 f1 .. f2 .. f3          from the host or a disk, over the link towards the device
    update       u0 u1 .  u2 .  u3       on the device, one parameter after the other
    store           s0 s1 .. s2 .. s3    back, over the other direction of the link

Two parameters' states have room on the device at a time: while one is updated the next arrives, and that one comes when
the last but one has left. So the step of the optimizer is a flow shop of three machines with two places,

    fetch_i  begins when fetch_(i-1) has ended and store_(i-2) has       (the place of i - 2 is free)
    update_i begins when update_(i-1) has ended and fetch_i has
    store_i  begins when store_(i-1) has ended and update_i has

whose last store ends the step. What is hidden under what follows from that, parameter by parameter. In the long run a
parameter takes as long as the busiest of the three machines, or as half of all three where the two places are what
it waits for:

    pace = max(fetch, update, store, (fetch + update + store) / 2)

Sources: Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (optimizer states in
host memory; there the host updates them, here they come to the device, which costs the link more and the host nothing);
Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", SC 2021, sections 5
and 6 (disks behind the host, transfers in both directions beside the work, buffers of fixed size).

Left out: other traffic on the link, and what host and disk make of files that are cached in memory.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from costmodels.units import Array, Bytes, QuantityT, Seconds
from hardware_profiles import Store

PLACES = 2
"""States of parameters that are on the device at a time while they are updated."""


class Visit(NamedTuple):
    """Seconds of one parameter's state: to the device, its update there, and back."""

    fetch: Seconds
    update: Seconds
    store: Seconds


def visit_seconds(nbytes: Array, store: Store, latency: Seconds) -> tuple[Array, Array]:
    """Seconds to fetch states of so many bytes from a store, and to write them back there; each has a latency."""
    return latency + nbytes / store.read, latency + nbytes / store.write


def away_seconds(nbytes: Array | Bytes, store: Store, latency: Seconds) -> tuple[Array, Array]:
    """Seconds to fetch values of so many bytes from a store, and to write them there; nothing for those of none."""
    fetch, back = visit_seconds(np.asarray(nbytes), store, latency)
    return np.where(np.greater(nbytes, 0), fetch, 0.0), np.where(np.greater(nbytes, 0), back, 0.0)


def visit_pace(fetch: Array, update: Array, store: Array) -> Array:
    """Seconds that one more parameter of this kind takes in a long row of them: never less than its update."""
    return np.maximum(np.maximum(np.maximum(fetch, store), update), (fetch + update + store) / PLACES)


def visits_time(visits: Iterable[Visit], before: Seconds = 0.0) -> Seconds:
    """Seconds of an optimizer's step over offloaded states in this order, where the updates of those that are on the
    device come first and take `before`: fetching begins with them."""
    fetched = stored = last = 0.0
    updated = before
    for visit in visits:
        fetched = max(fetched, last) + visit.fetch
        last = stored
        updated = max(updated, fetched) + visit.update
        stored = max(stored, updated) + visit.store
    return max(updated, stored)


def offloaded_bytes(nbytes: QuantityT) -> QuantityT:
    """Bytes of a device in which states of at most so many bytes each pass through."""
    return PLACES * nbytes
