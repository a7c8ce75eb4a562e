"""Which collectives of tensor parallelism overlap with its matrix products, and in how many chunks.

The search chooses layouts by what overlap leaves exposed (`planner.strategy_search.tables.under_products`). For the
plan found, the overlaps (`planner.plan.layout.overlapped_products`) are chosen here. Each is priced with several
numbers of chunks, forward and backward, and gets the best of them, if any saves time. As passes are sums, this is the
best choice for the plan. The prediction prices the plan with the memory that the overlaps take. As many overlaps as fit
are taken, if they save `WORTH` of the step. With interleaved micro-batches, or a backward pass in two parts, there are
no overlaps: then the plan without the former is compared with the plan without the latter. On CPUs there are none
unless the user asks for them: their communication takes the cores that compute."""

import functools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hardware_profiles import Bytes, Machine, Seconds, device_type_of
from planner.errors import RequestError
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.overlapped_products import (
    Overlap,
    in_chunks,
    name_of,
    overlaps_of,
    possible_overlaps,
    unlike_overlaps,
)
from planner.plan.plan import Prediction
from planner.plan.prediction.predict import predict
from planner.plan.prediction.walk.product_overlap import ProductOverlap
from planner.plan.prediction.walk.walk import Walk, walks_of
from planner.plan.schedule_checks import tensor_overlap_fault
from planner.strategy_search.engine.scheduling import WORTH, all_fit
from planner.strategy_search.request.checks import runs_here
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.tables.products import CHUNKS

Chunked = tuple[str, int, int, int]
Chosen = tuple[Chunked, ...]


class OverlapError(RequestError):
    """The request asks for an overlap that the plan cannot have; if only memory is missing, it needs `needed` bytes
    left free."""

    def __init__(self, message: str, *, needed: Bytes = 0.0) -> None:
        super().__init__(message)
        self.needed = needed


class Overlapped(NamedTuple):
    """A plan with its overlaps, if any; the bytes that the rank with the largest lack needs for other overlaps that
    would save `WORTH` of its step; and the seconds that these save and no objective counts."""

    bound: BoundPlan
    missing: Bytes = 0.0
    saves: Seconds = 0.0


class Everything(NamedTuple):
    """A plan with all overlaps that save time, priced, whether they fit or not; without overlaps if they save less than
    `WORTH`. `missing`: bytes that the rank with the largest lack needs for them."""

    bound: BoundPlan
    missing: Bytes = 0.0

    @property
    def seconds(self) -> Seconds:
        """Seconds of a step with all of them."""
        return self.bound.plan.prediction.step_seconds


def may_overlap(pinned: Pinned, cluster: Machine) -> bool:
    """Whether collectives may overlap with matrix products: the request must allow it, and our runtime must run the
    devices."""
    asked = pinned.tensor_overlap
    return runs_here(cluster) and asked != 1 and (asked is not None or device_type_of(cluster) != "cpu")


def with_tensor_overlap(
    bound: BoundPlan,
    pinned: Pinned,
    cluster: Machine,
    limits: Sequence[Bytes],
    everything: Everything | None = None,
) -> Overlapped:
    """The same plan with overlaps, if that is faster or asked for, within each rank's limit of bytes. `everything`: the
    plan with all overlaps, if known.

    Raises OverlapError if the request asks for a number of chunks that nothing in the plan can have.
    """
    found, missing = everything or with_everything(bound, pinned, cluster, limits)
    if not missing:
        return Overlapped(found)
    fewer = _fitting(found, cluster, limits)
    if fewer is None or fewer.plan.prediction.step_seconds >= bound.plan.prediction.step_seconds * (1 - WORTH):
        return Overlapped(bound, missing)
    rest = fewer.plan.prediction.step_seconds - found.plan.prediction.step_seconds
    return Overlapped(fewer, missing if rest > WORTH * bound.plan.prediction.step_seconds else 0.0)


def with_everything(bound: BoundPlan, pinned: Pinned, cluster: Machine, limits: Sequence[Bytes]) -> Everything:
    """The same plan with all overlaps that save time, or that the request asks for.

    Raises OverlapError if the request asks for a number of chunks that nothing in the plan can have, or that does not
    fit.
    """
    asked = pinned.tensor_overlap
    if not may_overlap(pinned, cluster):
        return Everything(bound)
    tried = _tried(bound, pinned, cluster)
    if tried is None:
        if asked:
            raise OverlapError(
                "the plan that was found has no collective of tensor parallelism, next to a linear layer, whose rows"
                f" {asked} chunks divide; take --tensor-overlap auto, or decide about --tensor"
            )
        return Everything(bound)
    prediction = predict(tried, cluster)
    missing = lacking(prediction, limits)
    if asked and missing:
        raise OverlapError(
            f"{asked} chunks under products need more memory than the plan that was found leaves; take --tensor-overlap"
            " auto, or off",
            needed=taken_by(prediction, bound.plan.prediction),
        )
    if not asked and prediction.step_seconds >= bound.plan.prediction.step_seconds * (1 - WORTH):
        return Everything(bound)
    return Everything(replace(tried, plan=replace(tried.plan, prediction=prediction)), missing)


def _fitting(overlapped: BoundPlan, cluster: Machine, limits: Sequence[Bytes]) -> BoundPlan | None:
    """The plan with as many of its overlaps as fit, those that need the least memory; None if none fits."""
    chosen = [one for one, _ in _by_need(overlapped, cluster)]
    fitting, overfull, best = 0, len(chosen), None
    while overfull - fitting > 1:
        middle = (fitting + overfull) // 2
        fewer = _with(overlapped, chosen[:middle], cluster)
        if all_fit(fewer.plan.prediction, limits, cluster):
            fitting, best = middle, fewer
        else:
            overfull = middle
    return best


def with_fewer(
    overlapped: BoundPlan, cluster: Machine, limits: Sequence[Bytes], below: Seconds = math.inf
) -> Iterator[Everything]:
    """A plan with ever more of its overlaps, but not all, those first that need the least memory; only those that lack
    memory and take less than `below`. In `overlapped` all overlaps that save time are priced. More overlaps take less
    time and no less memory. So the last plan says whether there are any such plans, and bisection finds where they
    begin."""
    chosen = _by_need(overlapped, cluster)
    counts = [count for count in range(1, len(chosen)) if chosen[count][1] > chosen[count - 1][1]]

    @functools.cache
    def priced(count: int) -> Everything:
        fewer = _with(overlapped, [one for one, _ in chosen[:count]], cluster)
        return Everything(fewer, lacking(fewer.plan.prediction, limits))

    def wanted(count: int) -> bool:
        return priced(count).missing > 0 and priced(count).seconds < below

    if counts and wanted(counts[-1]):
        yield from map(priced, counts[bisect_left(counts, True, key=wanted) :])


def _by_need(overlapped: BoundPlan, cluster: Machine) -> list[tuple[Chunked, Bytes]]:
    """The overlaps of a plan, with the bytes used while their operators run, the least first."""
    walks, needs = walks_of(overlapped, cluster), dict[str, Bytes]()
    for one in overlaps_of(overlapped):
        name, products = name_of(one, overlapped), walks[walks[0].rank_of[one.at]].products
        needs[name] = max(needs.get(name, 0.0), products.moment(one))
    chosen = overlapped.plan.training.tensor_overlap
    return sorted(((one, needs[one[0]]) for one in chosen), key=lambda pair: (pair[1], pair[0][0]))


def _with(overlapped: BoundPlan, chosen: Sequence[Chunked], cluster: Machine) -> BoundPlan:
    """The plan with some of its overlaps, priced."""
    training = replace(overlapped.plan.training, tensor_overlap=tuple(sorted(chosen)))
    fewer = replace(overlapped, plan=replace(overlapped.plan, training=training))
    return replace(fewer, plan=replace(fewer.plan, prediction=predict(fewer, cluster)))


def lacking(prediction: Prediction, limits: Sequence[Bytes]) -> Bytes:
    """Bytes that the rank with the largest lack needs."""
    return max(0.0, *(stage.peak_bytes - limit for stage, limit in zip(prediction.stages, limits, strict=True)))


def taken_by(overlapped: Prediction, plain: Prediction) -> Bytes:
    """Bytes that overlaps take on the rank where they take most."""
    pairs = zip(overlapped.stages, plain.stages, strict=True)
    return max(one.peak_bytes - other.peak_bytes for one, other in pairs)


def best_overlaps(bound: BoundPlan, cluster: Machine, chunks: Sequence[int] = CHUNKS) -> Chosen:
    """The overlaps of a plan that save time, each with the numbers of chunks that save most."""
    walks, found = tuple[Walk, ...](), dict[str, tuple[int, int, int]]()
    for one in unlike_overlaps(bound):
        name = name_of(one, bound)
        if name not in found:
            walks = walks or walks_of(bound, cluster)
            best = _best(one, bound, walks[walks[0].rank_of[one.at]].products, chunks)
            if best is not None:
                found[name] = best
    return tuple((name, *both) for name, both in sorted(found.items()))


def _best(
    one: Overlap, bound: BoundPlan, products: ProductOverlap, chunks: Sequence[int]
) -> tuple[int, int, int] | None:
    """The numbers of chunks forward and backward, and the first product in chunks, that save most; None if none saves
    time."""
    there, back = [(0.0, 1, 0)], [(0.0, 1)]
    for number in chunks:
        for first in range(len(one.products)):
            cut = in_chunks(one, bound, (number, number), first)
            if cut is not None:
                saved = products.saves(cut)
                there.append((saved[0], number, first))
                back.append((saved[1], number))
    saves, forward, first = max(there, key=lambda way: way[0])
    returns, backward = max(back, key=lambda way: way[0])
    return (forward, backward, first) if saves + returns > 0 else None


def _all(bound: BoundPlan, chunks: int) -> Chosen:
    """All overlaps of a plan that this number of chunks divides."""
    every = (one for one in possible_overlaps(bound) if in_chunks(one, bound, (chunks, chunks)) is not None)
    return tuple((name, chunks, chunks, 0) for name in sorted({name_of(one, bound) for one in every}))


def _tried(bound: BoundPlan, pinned: Pinned, cluster: Machine) -> BoundPlan | None:
    """The plan with the overlaps that the request asks for, or its best, perhaps in 1F1B; None if it can have none."""
    plan, asked = bound.plan, pinned.tensor_overlap
    free = pinned.schedule is None and pinned.interleave is None and pinned.slices is None
    free = free and not plan.schedule_kind.v_shaped  # its stages lie differently
    for schedule in dict.fromkeys((plan.schedule, "1f1b")) if free else (plan.schedule,):
        if tensor_overlap_fault(True, schedule, plan.training.interleave, plan.slices) is not None:
            continue
        other = replace(bound, plan=replace(plan, schedule=schedule))
        chosen = _all(other, asked) if asked else best_overlaps(other, cluster)
        if chosen:
            training = replace(plan.training, tensor_overlap=chosen)
            return replace(other, plan=replace(other.plan, training=training))
    return None
