"""Offloaded optimizer states: they are fetched for their update and stored back.

    fetch     f0 f1 .. f2 .. f3          from the host or a disk, over the link towards the device
    update       u0 u1 .  u2 .  u3       on the device, one parameter after the other
    store           s0 s1 .. s2 .. s3    back, over the other direction of the link

The device has room for the states of two parameters: while one is updated the next one is fetched, which starts when
the last but one has been stored. So the optimizer step is a flow shop of three machines with two places,

    fetch_i  begins when fetch_(i-1) has ended and store_(i-2) has       (the place of i - 2 is free)
    update_i begins when update_(i-1) has ended and fetch_i has
    store_i  begins when store_(i-1) has ended and update_i has

and the last store ends the step. Which transfers overlap follows from that, parameter by parameter. In the long run a
parameter takes as long as the slowest of the three machines, or half of all three if the two places are the bottleneck:

    pace = max(fetch, update, store, (fetch + update + store) / 2)

Sources: Ren et al., "ZeRO-Offload: democratizing billion-scale model training", USENIX ATC 2021 (optimizer states in
host memory; there the host updates them, here they come to the device, which costs the link more and the host nothing);
Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep learning", SC 2021, sections 5
and 6 (disks behind the host, transfers in both directions beside the work, buffers of fixed size).

Left out: other traffic on the link, and file caches of the host.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from costmodels.units import Array, Bytes, QuantityT, Seconds
from hardware_profiles import Store

PLACES = 2
"""Number of parameters whose states are on the device at a time while they are updated."""


class Visit(NamedTuple):
    """Seconds of one parameter's state: fetch to the device, update there, store back."""

    fetch: Seconds
    update: Seconds
    store: Seconds


def visit_seconds(nbytes: Array, store: Store, latency: Seconds) -> tuple[Array, Array]:
    """Seconds to fetch states of `nbytes` each from a store, and to store them back; each transfer adds `latency`."""
    return latency + nbytes / store.read, latency + nbytes / store.write


def away_seconds(nbytes: Array | Bytes, store: Store, latency: Seconds) -> tuple[Array, Array]:
    """Seconds to fetch values of `nbytes` each from a store, and to write them there; 0 for no bytes."""
    fetch, back = visit_seconds(np.asarray(nbytes), store, latency)
    return np.where(np.greater(nbytes, 0), fetch, 0.0), np.where(np.greater(nbytes, 0), back, 0.0)


def visit_pace(fetch: Array, update: Array, store: Array) -> Array:
    """Seconds that one more parameter of this kind takes in a long sequence of them; never less than its update."""
    return np.maximum(np.maximum(np.maximum(fetch, store), update), (fetch + update + store) / PLACES)


def visits_time(visits: Iterable[Visit], before: Seconds = 0.0) -> Seconds:
    """Seconds of an optimizer step over offloaded states in this order.

    Parameters whose state is on the device are updated first, which takes `before` seconds; fetching starts at the same
    time.
    """
    fetched = stored = last = 0.0
    updated = before
    for visit in visits:
        fetched = max(fetched, last) + visit.fetch
        last = stored
        updated = max(updated, fetched) + visit.update
        stored = max(stored, updated) + visit.store
    return max(updated, stored)


def offloaded_bytes(nbytes: QuantityT) -> QuantityT:
    """Bytes of the device's buffers for states of at most `nbytes` each."""
    return PLACES * nbytes
