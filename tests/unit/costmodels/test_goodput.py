"""Failures: Daly's formula against a simulation, its limits, and that its interval is the best."""

import math
import random

import pytest

from costmodels.goodput import DAY, Goodput, checkpoint_interval, expected_time


def test_without_failures_it_is_the_training_alone() -> None:
    none = Goodput(failures_per_device_day=0.0, checkpoint=60.0, restart=600.0)
    assert none.slowdown(16384) == 1.0
    assert Goodput(failures_per_device_day=1e9, checkpoint=60.0, restart=600.0).slowdown(10**6) == math.inf
    for checkpoint in (0.0, 60.0):
        assert Goodput(failures_per_device_day=1e308, checkpoint=checkpoint, restart=600.0).slowdown(64) == math.inf


@pytest.mark.parametrize(
    ("interval", "checkpoint", "mean", "expected"),
    [
        (100.0, 10.0, math.inf, 5.5),
        (math.inf, 10.0, math.inf, 5.0),
        (0.0, 0.0, math.inf, 5.0),
        (0.0, 0.0, 10.0, 5.0 * math.e),
        (0.0, 10.0, 1e4, math.inf),
        (0.0, 10.0, math.inf, math.inf),
        (math.inf, 10.0, 1e4, math.inf),
    ],
)
def test_at_its_ends_the_formula_has_its_limits(
    interval: float, checkpoint: float, mean: float, expected: float
) -> None:
    assert expected_time(5.0, interval, checkpoint, 10.0, mean) == pytest.approx(expected)
    if 0 < interval < math.inf:
        assert expected_time(5.0, interval, checkpoint, 10.0, 1e12) == pytest.approx(expected)


@pytest.mark.parametrize(("checkpoint", "mean"), [(5.0, 1e6), (60.0, 1e4), (600.0, 5e3)])
def test_the_interval_is_close_to_the_best_and_to_youngs(checkpoint: float, mean: float) -> None:
    best = checkpoint_interval(checkpoint, mean)
    least = min(expected_time(1.0, best * share, checkpoint, 300.0, mean) for share in (0.5, 0.8, 0.9, 1.1, 1.25, 2))
    assert expected_time(1.0, best, checkpoint, 300.0, mean) <= least
    if checkpoint < mean / 1000:
        assert best == pytest.approx(math.sqrt(2 * checkpoint * mean), rel=0.01)


def test_it_is_what_a_simulation_finds() -> None:
    """Failures by a Poisson process, also during checkpoints and restarts; each loses what was not saved."""
    random.seed(1)
    mean, checkpoint, restart, interval = 3000.0, 60.0, 200.0, 700.0
    pieces, clock = 20000, 0.0
    for _ in range(pieces):
        while (alive := random.expovariate(1 / mean)) < interval + checkpoint:
            clock += alive
            while (early := random.expovariate(1 / mean)) < restart:
                clock += early
            clock += restart
        clock += interval + checkpoint
    expected = expected_time(pieces * interval, interval, checkpoint, restart, mean)
    assert clock == pytest.approx(expected, rel=0.02)


def test_more_devices_fail_more_often() -> None:
    llama = Goodput(failures_per_device_day=419 / 54 / 16384, checkpoint=30.0, restart=600.0)
    assert llama.between_failures(16384) == pytest.approx(DAY * 54 / 419)
    assert 1 < llama.slowdown(1024) < llama.slowdown(16384) < 1.3
