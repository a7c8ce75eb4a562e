"""Several kinds of devices in one pipeline: the prediction and the tables agree, bounds hold, and the search finds what
a brute force over every order, division and recomputation finds."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hardware_profiles import OP_CLASSES, Cluster, MixedCluster, load_profile
from planner.errors import InfeasibleError
from planner.plan.binding.bind import bind
from planner.plan.plan import Prediction
from planner.plan.prediction.predict import predict
from planner.plan.prediction.step import REDUCED_AHEAD
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.engine.contenders import NEAR
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.request.orders import orders
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.unit.search.cases import (
    Case,
    bytes_of,
    make_mixed,
    plan_of,
    random_ranks,
    random_state,
    request_of,
    seconds_of,
    small_memory,
    traced,
)

ALL = 1 + 1e-9
BATCH = 8
MICRO_BATCHES = 4


def kind(name: str, speed: float, devices: int, memory: float = 1e12) -> Cluster:
    """Devices that are so many times as fast as those of a profile, with so many usable bytes."""
    cluster = small_memory(load_profile("cpu"), memory)
    device = replace(
        cluster.device,
        name=name,
        memory_bandwidth=cluster.device.memory_bandwidth * speed,
        peak_flops=tuple((dtype, peak * speed) for dtype, peak in cluster.device.peak_flops),
        matmul_kernels=tuple((dtype, None) for dtype, _ in cluster.device.matmul_kernels),
    )
    return replace(cluster, name=name, device=device).with_devices(devices)


def machine_of(*groups: Cluster, bandwidth: float | None = 1e9) -> MixedCluster:
    return MixedCluster(groups=groups, bandwidth=bandwidth)


def cases(draw: random.Random, model: str) -> Iterator[Case]:
    """A model on two and on three kinds of devices, in some order, with meshes of one and of two devices."""
    for speeds, mesh in (((1.0, 3.0), (2,)), ((2.0, 1.0), ()), ((1.0, 2.0, 4.0), ())):
        devices = math.prod(mesh)
        groups = [kind(f"kind{at}", speed, devices) for at, speed in enumerate(speeds)]
        order = tuple(draw.sample(range(len(groups)), len(groups)))
        configuration = Configuration(pipeline=len(groups), mesh=mesh, micro_batches=MICRO_BATCHES, order=order)
        yield make_mixed(model, machine_of(*groups), configuration, BATCH)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama-4", "gpt-4-tied", "post-norm", "kinds-first"])
def test_tables_and_prediction_agree_and_bounds_hold(model: str) -> None:
    """For random choices, each rank in ways of its own: their sums are those of the prediction, and no bound is above
    what fits, whatever each kind of devices can hold."""
    draw = random.Random(model)
    for case in cases(draw, model):
        found = []
        for _ in range(12):
            state = random_state(case, draw)
            ranks = random_ranks(case, draw, state)
            found.append(
                (seconds_of(case, state, ranks), [bytes_of(case, state, ranks, at)[0] for at in range(len(ranks))])
            )
        bound = bind(plan_of(case, ranks), traced(case.model), 2)
        judged = predict(bound, case.cluster)
        covered = -dict(judged.time).get(REDUCED_AHEAD, 0.0)  # by the last backward pass, which sums may hope for
        assert found[-1][0] - covered <= judged.objective_seconds * ALL
        assert judged.objective_seconds <= found[-1][0] * ALL
        for _, peaks in found[:4]:
            pipeline_of_kinds = replace(
                case.pipeline_of_kinds,
                capacities=tuple(peaks[case.pipeline_of_kinds.kinds.index(at)] for at in range(len(peaks))),
            )
            outcome = Evaluation(pipeline_of_kinds, case.setting).run()
            for seconds, needed in found:
                if all(bytes_ <= room for bytes_, room in zip(needed, peaks, strict=True)):
                    assert outcome.bound <= seconds * ALL
            if outcome.ranks:
                assert outcome.bound <= outcome.seconds * ALL


def every_filling(case: Case) -> Iterator[tuple[RankFilling, ...]]:
    """Every division of the blocks, and for every block whether it is recomputed; one device has no other choices."""
    blocks, ranks = case.inner_blocks, case.setting.ranks
    for ends in itertools.combinations(range(1, blocks), ranks - 1):
        counts = [stop - start for start, stop in itertools.pairwise((0, *ends, blocks))]
        for lean in itertools.product((False, True), repeat=blocks):
            yield filling_of(case, counts, lean)


def filling_of(case: Case, counts: Sequence[int], lean: Sequence[bool]) -> tuple[RankFilling, ...]:
    done, found = 0, []
    for rank, count in enumerate(counts):
        chain = case.pipeline_of_kinds.chain_of(rank)
        inner: list[Column] = []
        for again in lean[done : done + count]:
            piece = next(piece for piece in chain.inner if piece.recompute == again)
            inner.append(piece.chosen(dict.fromkeys(piece.keys, 0), ()))
        done += count
        head, tail = (pieces[0].chosen(dict.fromkeys(pieces[0].keys, 0), ()) for pieces in (chain.head, chain.tail))
        found.append(
            RankFilling(
                head=head if rank == 0 else None,
                inner=tuple(inner),
                tail=tail if rank == len(counts) - 1 else None,
                peak=0.0,
                beside=0.0,
            )
        )
    return tuple(found)


def by_brute_force(case: Case) -> tuple[float, tuple[RankFilling, ...]]:
    """The least objective of what fits by the words of the pieces, and what that is, as the prediction confirms;
    infinite where nothing does."""
    state = (0,) * len(case.chain.shape)
    rooms = [case.pipeline_of_kinds.capacities[kind] for kind in case.pipeline_of_kinds.kinds]
    best, found = math.inf, tuple[RankFilling, ...]()
    for ranks in every_filling(case):
        if all(bytes_of(case, state, ranks, rank)[0] <= room * ALL for rank, room in enumerate(rooms)):
            seconds = seconds_of(case, state, ranks)
            best, found = min((best, found), (seconds, ranks), key=lambda one: one[0])
    if found:
        prediction = judged(case, found)
        assert prediction.peak_bytes <= prediction.capacity_bytes * ALL
        assert prediction.objective_seconds == pytest.approx(best, rel=1e-9)
    return best, found


def judged(case: Case, ranks: tuple[RankFilling, ...]) -> Prediction:
    return predict(bind(plan_of(case, ranks), traced(case.model), 2), case.cluster)


def searched(model: str, machine: MixedCluster, micro_batches: int, schedule: str | None = None) -> SearchResult:
    pinned = Pinned(
        pipeline=machine.devices, mesh=(), micro_batches=micro_batches, never_kept=OP_CLASSES, schedule=schedule
    )
    return search(request_of(model, machine, BATCH, pinned=pinned))


def fullest(model: str, machine: MixedCluster, micro_batches: int) -> float:
    """Bytes with which a device of any kind has room for what is fastest."""
    free = searched(model, machine, micro_batches, schedule="1f1b").plan.prediction
    return max(one.peak_bytes for one in free.stages)


@pytest.mark.slow
@pytest.mark.cases(0, 0)
@pytest.mark.parametrize("model", ["llama-4", "gpt-4-tied"])
def test_search_finds_what_brute_force_finds(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On two kinds of devices, one of each and two of the faster, with less and less memory on either kind: in every
    order the best division and recomputation, and of them what its schedule runs fastest. What
    is received ahead, which the sums do not count, is left out of the prediction, too."""
    monkeypatch.setattr("planner.plan.prediction.predict.receive_buffers", lambda bound: [0.0] * bound.plan.pipeline)
    for slow, fast in ((1, 1), (1, 2)):
        most = fullest(model, machine_of(kind("slow", 1.0, slow), kind("fast", 2.5, fast)), MICRO_BATCHES)
        told, infeasible = set[float](), 0
        for shares in (
            (1.0, 1.0),
            (0.9, 1.0),
            (0.85, 0.9),
            (0.75, 0.85),
            (1.0, 0.5),
            (0.7, 0.7),
            (0.6, 0.65),
            (0.55, 0.57),
            (0.5, 0.45),
            (0.1, 0.1),
        ):
            machine = machine_of(kind("slow", 1.0, slow, shares[0] * most), kind("fast", 2.5, fast, shares[1] * most))
            best, quickest = math.inf, math.inf
            for order in orders(machine):
                configuration = Configuration(
                    pipeline=machine.devices, mesh=(), micro_batches=MICRO_BATCHES, order=order
                )
                case = make_mixed(model, machine, configuration, BATCH, never_kept=OP_CLASSES)
                least, ranks = by_brute_force(case)
                outcome = Evaluation(case.pipeline_of_kinds, case.setting).run()
                assert outcome.seconds == pytest.approx(least, rel=1e-9), (shares, slow, fast, order)
                assert outcome.bound <= least * ALL, (shares, slow, fast, order)
                best = min(best, least)
                quickest = min(quickest, judged(case, ranks).step_seconds if ranks else math.inf)
            if best == math.inf:
                infeasible += 1
                with pytest.raises(InfeasibleError):
                    searched(model, machine, MICRO_BATCHES)
                continue
            found = searched(model, machine, MICRO_BATCHES)
            told.add(best)
            assert found.bound_seconds <= best * ALL, (shares, slow, fast)
            assert best <= found.plans[0].objective * ALL <= best * (1 + NEAR), (shares, slow, fast)
            if found.plans[0].objective > best * ALL:
                assert found.plans[0].seconds <= quickest * ALL, (shares, slow, fast)
        assert len(told) > 2, "memory must matter"
        assert infeasible, "and rule out everything once"
