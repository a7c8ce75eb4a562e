"""What a run of a publisher who is new takes beyond all that is priced."""

from pathlib import Path

import pytest

from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.pricing.unpriced import NAME, SHARE
from planner.validation.results.evaluated import Evaluated
from tests.benchmarks.bench_unseen import beyond
from tests.unit.validation.runs import one


def evaluated(folder: Path, **cells: str) -> Evaluated:
    (found,) = evaluate_rows([one(folder, **cells)])
    assert found.predicted_seconds is not None
    return found


@pytest.mark.slow
def test_runs_of_sources_that_are_not_known_take_longer_than_their_terms(tmp_path: Path) -> None:
    """The terms are those of a known source, and the share is a line of its own, with a note. The interval of unknown
    sources is of first predictions, which did not have it: it is one of the terms, too."""
    known, new = (evaluated(tmp_path, source=source) for source in ("FlagPerf", "a page"))
    assert known.predicted_seconds is not None
    assert new.predicted_seconds == pytest.approx((1 + SHARE) * known.predicted_seconds)
    assert dict(new.time) == {**dict(known.time), NAME: pytest.approx(SHARE * known.predicted_seconds)}
    assert sum(dict(new.time).values()) == pytest.approx(new.predicted_seconds)
    assert [note for note in new.notes if note not in known.notes] == ["source unknown: 4% beyond what is priced"]
    assert new.predicted_peak_bytes == known.predicted_peak_bytes


def test_this_runtime_was_measured(tmp_path: Path) -> None:
    found = evaluated(tmp_path, source="a page", stack="pytorch")
    assert NAME not in dict(found.time)


def test_the_share_is_chosen_by_other_sources() -> None:
    """Each source is one vote, and is judged with what the others choose."""
    found = beyond({"many": [1 / 1.1] * 10, "few": [1 / 1.1] * 2, "right": [1.0]})
    assert found.priced == pytest.approx(((12 * (1 - 1 / 1.1)) / 13, 2 * (1 - 1 / 1.1) / 3))
    assert found.most == pytest.approx(0.1)
    assert 0 <= found.least <= found.most
    assert beyond({name: [1 / 1.05] * 3 for name in "abc"}).left_out == pytest.approx((0.0, 0.0))
