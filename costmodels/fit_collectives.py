"""Fitting the latencies and bandwidths of a profile's protocols to measured collectives.

    rows (kind, devices, bytes, seconds) ──┐
    profile ── levels(x) ── affine pieces ─┴─ r_i = predicted_i / measured_i - 1 ── x minimises sum |r_i|

The fitted model is the one that prices plans (`find_pieces`). Its levels have free numbers x: `setup`, `latency`,
`efficiency` and `own` of each protocol and of in-network reductions. No number belongs to a single row, size or kind.
Numbers that are 0 stay 0, so a profile excludes a number from the fit by setting it to 0.

    minimise  sum_i |r_i(x)|    by `costmodels.descent` on log x with weights 1 / (|r_i| + 0.02), which make the squares
                                absolute values

O(iterations x parameters x rows); a few tenths of a second for 250 rows. Deterministic. Not good for: protocols that no
row needs, which stay unchanged; levels that only groups of one size cross, where setup and latency cannot be told apart
(give one of them in `fields`); starts that are far off (the least of several functions has local minima).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from costmodels.collectives import find_pieces
from costmodels.descent import Loss, Pace, least_loss
from costmodels.errors import CostModelError
from costmodels.units import Array, Bytes, Seconds
from hardware_profiles import Cluster, Group, Level, Protocol

Field: TypeAlias = Literal["setup", "latency", "efficiency", "own"]
Errors: TypeAlias = Literal["relative", "logarithmic"]
FIELDS: tuple[Field, ...] = ("setup", "latency", "efficiency", "own")
ALMOST = 0.02  # smaller |r| weigh as much as this: rows are not measured more precisely
PACE = Pace(difference=1e-4, longest=1.0, steps=40, tries=8, enough=2e-5, damped_ridge=1e-6)
"""In logarithms: a step changes no number by more than a factor e."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measured collective over `devices` neighbouring devices; `message` as in `collective_time`."""

    kind: str
    devices: int
    message: Bytes
    seconds: Seconds


class Free(NamedTuple):
    """A free number: a field of a protocol of a level. `protocol` -1 is the in-network reduction."""

    level: int
    protocol: int
    field: Field


def fit_levels(
    cluster: Cluster,
    rows: Sequence[Measured],
    *,
    levels: Iterable[int] | None = None,
    fields: Sequence[Field] = FIELDS,
    errors: Errors = "relative",
) -> Cluster:
    """The cluster with the numbers of its protocols that bring its collectives closest to the measured ones.

    Args:
        cluster: where the search starts; its zeros stay.
        rows: measured collectives of groups of neighbours; whole nodes if a group spans several.
        levels: indexes of the free levels (None: all). Fixed levels are used as they are.
        fields: free fields of their protocols.
        errors: what is minimised: "relative" is predicted over measured less one, "logarithmic" the logarithm of their
            ratio. If times scatter by factors, "relative" prefers predictions that are too short, because their error
            is below one.

    Raises:
        CostModelError: no rows, or a row with no time.
    """
    if not rows or any(row.seconds <= 0 for row in rows):
        raise CostModelError(f"a fit needs rows that took time, got {len(rows)} rows")
    chosen = range(len(cluster.levels)) if levels is None else levels
    free = [name for index in chosen for name in _free_of(index, cluster.levels[index], fields)]
    problem = _Problem(cluster, rows, free, errors)
    start = np.log([_get(cluster.levels, name) for name in free])
    loss = Loss(value=_mean_size, weights=_weights)
    found = least_loss(problem.errors, start, loss, pace=PACE)
    return problem.cluster(found.point)


def relative_errors(cluster: Cluster, rows: Sequence[Measured]) -> Array:
    """Predicted over measured, less one, for each row, (N,)."""
    return _Problem(cluster, rows, []).errors(np.zeros(0))


def _free_of(index: int, level: Level, fields: Sequence[Field]) -> list[Free]:
    protocols = list(enumerate(level.protocols))
    if level.in_network is not None:
        protocols.append((-1, level.in_network))
    return [Free(index, number, name) for number, one in protocols for name in fields if getattr(one, name) > 0]


def _get(levels: Sequence[Level], name: Free) -> float:
    level = levels[name.level]
    protocol = level.in_network if name.protocol < 0 else level.protocols[name.protocol]
    assert protocol is not None
    return float(getattr(protocol, name.field))


class _Problem:
    """Rows grouped by kind and devices, so that the pieces of each pair are found once per x."""

    def __init__(
        self, cluster: Cluster, rows: Sequence[Measured], free: list[Free], errors: Errors = "relative"
    ) -> None:
        self.base, self.free, self.logarithmic = cluster, free, errors == "logarithmic"
        node = cluster.devices_per_node or 1
        self.wide = cluster.with_devices(max(node, *(row.devices for row in rows)))
        self.pairs = sorted({(row.kind, row.devices) for row in rows})
        place = {pair: index for index, pair in enumerate(self.pairs)}
        pair = np.array([place[row.kind, row.devices] for row in rows])
        self.rows = [np.flatnonzero(pair == index) for index in range(len(self.pairs))]
        self.groups = [self.wide.group(devices, 1) for _, devices in self.pairs]
        self.message = np.array([row.message for row in rows], dtype=float)
        self.seconds = np.array([row.seconds for row in rows], dtype=float)

    def cluster(self, x: Array) -> Cluster:
        return replace(self.base, levels=self.levels(x))

    def levels(self, x: Array) -> tuple[Level, ...]:
        values: dict[tuple[int, int], dict[str, float]] = {}
        for name, value in zip(self.free, np.exp(x), strict=True):
            most = 1.0 if name.field == "efficiency" else np.inf
            values.setdefault((name.level, name.protocol), {})[name.field] = float(min(value, most))
        levels = []
        for index, level in enumerate(self.base.levels):
            protocols = tuple(_changed(one, values.get((index, number))) for number, one in enumerate(level.protocols))
            switch = level.in_network and _changed(level.in_network, values.get((index, -1)))
            levels.append(replace(level, protocols=protocols, in_network=switch))
        return tuple(levels)

    def errors(self, x: Array) -> Array:
        levels = dict(zip(self.base.levels, self.levels(x), strict=True))
        found: Array = np.empty(len(self.seconds))
        for (kind, _), group, rows in zip(self.pairs, self.groups, self.rows, strict=True):
            spans = tuple(replace(span, level=levels[span.level]) for span in group.spans)
            found[rows] = _time(kind, self.message[rows], Group(spans=spans))
        found /= self.seconds
        if self.logarithmic:
            return np.log(found)
        found -= 1
        return found


def _changed(protocol: Protocol, values: dict[str, float] | None) -> Protocol:
    return protocol if values is None else replace(protocol, **values)  # type: ignore[arg-type]


def _time(kind: str, message: Array, group: Group) -> Array:
    """As `collective_time`, but without the cache of pieces."""
    times: Array = np.min([a + b * message for a, b in find_pieces(kind, group)], axis=0)
    return times


def _mean_size(error: Array) -> float:
    return float(np.abs(error).mean())


def _weights(error: Array) -> Array:
    return np.asarray(1 / (np.abs(error) + ALMOST))
