"""The runs that were predicted before anybody looked at them: what the file promises, and what the page says of it."""

import csv
import gzip
import importlib.util
import io
from pathlib import Path
from types import ModuleType

import pytest

from planner.validation import read_rows

ROOT = Path(__file__).parents[3]
DATA = ROOT / "tests" / "benchmarks" / "data"


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_unseen", ROOT / "tests" / "benchmarks" / "bench_unseen.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return benchmark()


def test_every_run_can_be_read_and_names_its_place(bench: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(gzip.decompress(bench.RUNS.read_bytes()))
    rows = read_rows(path)
    assert [row.fault for row in rows if row.fault] == []
    for row, run in zip(rows, bench.unseen(), strict=True):
        assert row.text("source_locator")
        measured = bench.seconds(run)
        if measured is None:
            assert row.out_of_memory
            assert row.measured_seconds is None
        else:
            assert row.measured_seconds == pytest.approx(measured, rel=2e-3)
        if not run["first_predicted_s"]:
            assert not run["first_low_s"]  # refused at first
            continue
        assert float(run["first_low_s"]) <= float(run["first_predicted_s"]) <= float(run["first_high_s"])


def test_none_of_them_is_among_the_published_runs(bench: ModuleType) -> None:
    text = gzip.decompress((DATA / "published_runs.csv.gz").read_bytes()).decode()
    published = list(csv.DictReader(io.StringIO(text)))
    names = [run["id"] for run in bench.unseen()]
    assert len(names) == len(set(names)) == 403
    assert not set(names) & {row["id"] for row in published}
    assert not {run["source"] for run in bench.unseen()} & {row["source"] for row in published}


def test_the_page_says_what_was_predicted_first(bench: ModuleType) -> None:
    """By source, and over all that were predicted before anything was mended."""
    page = (ROOT / "docs" / "validate-findings.md").read_text(encoding="utf-8")
    runs = bench.unseen()
    for name, some in bench.groups(runs).items():
        errors = bench.first_errors(some)
        assert f"| {name} | {errors.runs} | {errors.mean:.1%} | {errors.bias:+.1%} | {errors.inside:.0%} |" in page
    before = [run for run in runs if run["first_commit"] == "58abd655"]
    errors, (no, ended) = bench.first_errors(before), bench.out_of_memory(before)
    assert f"The {errors.runs} runs of the first eleven lines: {errors.mean:.1%} by run" in page
    assert f"{errors.inside:.0%} inside" in page
    assert f"Of {ended} runs that ran out of\nmemory {no} were said not to fit" in page


def test_the_page_says_how_the_third_draw_was_predicted(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "validate-findings.md").read_text(encoding="utf-8")
    drawn = [run for run in bench.unseen() if run["first_commit"] == "1d7505fd"]
    errors, peaks = bench.first_errors(drawn), bench.peak_errors(drawn)
    by_source = [one.mean for some in bench.groups(drawn).values() if (one := bench.first_errors(some)).runs]
    assert f"{len(drawn)} runs of {len(by_source)} publishers".replace("12", "twelve") in page
    assert f"The {errors.runs} that were predicted: {errors.mean:.1%} by run" in page
    assert f"{sum(by_source) / len(by_source):.1%} by source" in page
    assert f"{errors.inside:.0%} inside; {len(peaks)} peaks {sum(map(abs, peaks)) / len(peaks):.1%}" in page


def test_the_page_says_how_the_fourth_draw_was_predicted(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "validate-findings.md").read_text(encoding="utf-8")
    drawn = [run for run in bench.unseen() if run["first_commit"] == "b58526e8"]
    errors, peaks = bench.first_errors(drawn), bench.peak_errors(drawn)
    by_source = [bench.first_errors(some).mean for some in bench.groups(drawn).values()]
    assert f"{len(drawn)} runs of eight publications" in page
    assert len(by_source) == 8
    assert (
        f"All {errors.runs}: {errors.mean:.1%} by run, {sum(by_source) / 8:.1%} by source, {errors.inside:.0%} inside"
        in page
    )
    assert f"{len(peaks)} peaks {sum(map(abs, peaks)) / len(peaks):.1%}" in page
