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
            assert row.out_of_memory or run["peak_mem_GB"]
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
    assert len(names) == len(set(names)) == 1442
    assert not set(names) & {row["id"] for row in published}
    assert not {run["source"] for run in bench.unseen()} & {row["source"] for row in published}


def test_the_page_says_what_was_predicted_first(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "validate.md").read_text(encoding="utf-8")
    runs = bench.unseen()
    for name, some in bench.groups(runs).items():
        errors = bench.first_errors(some)
        if not errors.runs:
            assert f"| {name} | 0 | refused |" in page
            continue
        assert f"| {name} | {errors.runs} | {errors.mean:.1%} | {errors.bias:+.1%} | {errors.inside:.0%} |" in page
    assert f"{len(runs):,} runs of {len({run['source'] for run in runs})} sources" in page


def test_the_page_has_every_known_source() -> None:
    """Runs of the sources in the table of known ones are as many as its last line says."""
    page = (ROOT / "docs" / "validate.md").read_text(encoding="utf-8")
    table = page[page.index("## By source") : page.index("### Unknown sources")]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]
    sources = [cells for cells in rows if not cells[0].startswith("| mean")]
    assert [cells[1] for cells in rows if cells not in sources] == [f"{sum(int(cells[1]) for cells in sources):,}"]
    assert f"| mean over the {len(sources)} sources |" in table


@pytest.mark.parametrize(
    "commit",
    [
        "58abd655",
        "58abd655 and the mends",
        "1d7505fd",
        "ac10c236",
        "b58526e8",
        "5d90f479",
        "5d90f479 and the mends",
        "508bcae1",
        "40dd650e",
        "bbb5914c",
        "0e763c41",
        "d4eb8bed",
        "0f369329",
        "0f369329 and the mends",
        "b9b19e0d",
        "b9b19e0d and the mends",
        "be24aa7d",
        "1b5f5e01",
        "1b5f5e01 and the mends",
        "b65df403",
        "f7e15403",
        "10ea39a8",
        "41045f45",
        "c8b480d6",
    ],
)
def test_the_page_of_findings_says_how_each_draw_was_predicted(bench: ModuleType, commit: str) -> None:
    page = (ROOT / "docs" / "validate-findings.md").read_text(encoding="utf-8")
    drawn = [run for run in bench.unseen() if run["first_commit"] == commit]
    errors, peaks = bench.first_errors(drawn), bench.peak_errors(drawn)
    by_source = [one.mean for some in bench.groups(drawn).values() if (one := bench.first_errors(some)).runs]
    counted = f"{len(peaks)}: {sum(map(abs, peaks)) / len(peaks):.1%}" if peaks else ""
    figures = f"{errors.mean:.1%} | {sum(by_source) / len(by_source):.1%} | {errors.inside:.0%} |"
    assert f"| {commit} | {errors.runs} | {figures} {counted}".rstrip() in page


def test_the_page_of_findings_says_which_runs_were_said_not_to_fit(bench: ModuleType) -> None:
    page = (ROOT / "docs" / "validate-findings.md").read_text(encoding="utf-8")
    no, ended = bench.out_of_memory([run for run in bench.unseen() if run["first_commit"] == "58abd655"])
    assert f"Of the {ended} runs of the first draw that ran out of memory {no} were said not to fit" in " ".join(
        page.split()
    )
