"""Statistics of errors, by hand; Kendall's tau against pairs counted by hand."""

import math

import pytest

from planner.validation.reading.rows import Row
from planner.validation.results.evaluated import Evaluated
from planner.validation.results.summary import errors_of, kendall_tau, summarise


def result(name: str, measured: float | None, predicted: float | None, group: str = "", source: str = "a") -> Evaluated:
    cells = {
        "id": name,
        "rank_group": group,
        "source": source,
        "iter_time_s": "" if measured is None else str(measured),
    }
    error = None if predicted is not None else "no model"
    return Evaluated(row=Row(line=1, values=cells), predicted_seconds=predicted, error=error)


def test_errors() -> None:
    found = errors_of((0.1, None, -0.3))
    assert found.count == 2
    assert found.mean_absolute == pytest.approx(0.2)
    assert found.max_absolute == pytest.approx(0.3)
    assert found.bias == pytest.approx(-0.1)
    assert errors_of((None,)).mean_absolute is None


@pytest.mark.parametrize(
    ("first", "second", "tau"),
    [
        ((1, 2, 3), (10, 20, 30), 1.0),
        ((1, 2, 3), (3, 2, 1), -1.0),
        ((1, 2, 3, 4), (1, 3, 2, 4), 4 / 6),
        ((1, 1, 2), (1, 2, 3), 2 / math.sqrt(2 * 3)),  # one tie of three pairs
        ((1, 1, 2, 3), (1, 2, 2, 3), 4 / 5),
        ((1, 1), (1, 2), None),
        ((1,), (1,), None),
        ((), (), None),
    ],
)
def test_kendall_tau(first: tuple[float, ...], second: tuple[float, ...], tau: float | None) -> None:
    assert kendall_tau(first, second) == (None if tau is None else pytest.approx(tau))
    assert kendall_tau(second, first) == kendall_tau(first, second)


def test_parts_and_taus() -> None:
    summary = summarise(
        (
            result("1", 1.0, 1.1, "g"),
            result("2", 2.0, 1.0, "g"),
            result("3", 3.0, None, "g", "b"),
            result("4", None, 1.0, "h", "b"),
        )
    )
    assert [(part.name, part.rows, part.evaluated) for part in summary.sources] == [("a", 2, 2), ("b", 2, 1)]
    assert summary.whole.seconds.count == 2
    assert summary.whole.seconds.bias == pytest.approx((0.1 - 0.5) / 2)
    assert [(part.name, part.tau) for part in summary.rank_groups] == [("g", -1.0), ("h", None)]
    assert summary.median_tau == -1.0
    assert summary.profiles == ()


def test_both_kinds_of_mistakes_about_memory() -> None:
    def one(measured: str, predicted: float, needed: float, tier: str = "A", recompute: str = "full") -> Evaluated:
        cells = {"id": "x", "source": "a", "peak_mem_GB": measured, "iter_time_s": "1", "tier": tier}
        cells["recompute"] = recompute
        return Evaluated(
            row=Row(line=1, values=cells), predicted_peak_bytes=predicted, needed_bytes=needed, capacity_bytes=80e9,
            low_peak_bytes=0.9 * predicted, high_peak_bytes=1.1 * predicted,
        )  # fmt: skip

    whole = summarise(
        (
            one("70", 69e9, 79e9),  # right
            one("", 90e9, 100e9),  # ran, and we say that it lacks 25%
            one("70", 90e9, 88e9),  # ran, and lacks 10%
            one("75", 60e9, 65e9),  # 25% above
            one("", 60e9, 65e9, "OOM"),  # did not fit, and we say that it does
            one("", 90e9, 100e9, "OOM"),  # did not fit, as we say
            one("", 90e9, 100e9, recompute=""),  # ran, and may have computed more again than nothing
            one("", 60e9, 65e9, recompute=""),
        )
    ).whole
    assert (whole.ran.judged, whole.ran.count) == (4, 2)
    assert (whole.untold.judged, whole.untold.count) == (2, 1)
    assert (whole.ran.mean, whole.ran.worst) == (pytest.approx(0.175), pytest.approx(0.25))
    assert (whole.above.judged, whole.above.count) == (3, 2)
    assert (whole.above.mean, whole.above.worst) == (pytest.approx(0.125), pytest.approx(0.25))
    assert whole.peak_inside == pytest.approx(1 / 3)
