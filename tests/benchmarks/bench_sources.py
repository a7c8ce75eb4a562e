"""Errors by source, and how often intervals hold in a source that they have not seen.

    gunzip -k tests/benchmarks/data/published_runs.csv.gz
    plan validate tests/benchmarks/data/published_runs.csv --json > runs.json
    python tests/benchmarks/bench_sources.py runs.json [--before older.json] [--write]

    source      rows of one publication, which err together
    left out    intervals are made anew from the errors of all other sources, flagged or not, and counted in this one

`--before` sets errors of an older file beside, over the rows that both have. `--write` writes the intervals, of known
sources and of others (`hardware_profiles/intervals.csv`), and the names of those that are known. The last lines are of
sources that were not known: of each, how many of its runs, as they were predicted first, lie inside the interval that
the first predictions of all others of them make; and how many of the draws that no interval is made of (`HELD_BACK`)
lie inside the interval that is in use. Rows that do not reconcile, and those that are neither of tier A nor B, are left
out.
"""

import argparse
import csv
import gzip
import io
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hardware_profiles.intervals import NEW, dump_spreads, spread_of, spreads_of, table
from planner.validation.results.summary import kendall_tau
from tests.benchmarks.bench_unseen import seconds, unseen

RUNS = Path(__file__).resolve().parent / "data" / "published_runs.csv.gz"
SPREADS = Path(__file__).resolve().parents[2] / "hardware_profiles" / "intervals.csv"
SOURCES = SPREADS.with_name("known_sources.csv")
CLEAN = ("", "old", "cluster-from-script", "hw-flops")
"""Flags of rows that are complete and consistent."""

Row = Mapping[str, Any]
HELD_BACK = (
    "5d90f479",
    "508bcae1",
    "40dd650e",
    "bbb5914c",
    "0e763c41",
    "d4eb8bed",
    "0f369329",
    "b9b19e0d",
    "be24aa7d",
    "1b5f5e01",
    "b65df403",
    "f7e15403",
    "10ea39a8",
    "41045f45",
    "c8b480d6",
)
"""Commits that predicted the draws which test the interval of unknown sources, and are no part of it."""


def _with_experts() -> frozenset[str]:
    text = gzip.decompress(RUNS.read_bytes()).decode()
    return frozenset(row["id"] for row in csv.DictReader(io.StringIO(text)) if row["arch"] == "moe")


EXPERTS = _with_experts()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, help="what plan validate --json printed")
    parser.add_argument("--before", type=Path, help="an older one, to compare with")
    parser.add_argument("--write", action="store_true", help="write the intervals of all rows")
    asked = parser.parse_args()
    rows, every_row = timed(asked.runs), timed(asked.runs, flags=None)
    older = {row["id"]: row for row in timed(asked.before)} if asked.before else {}
    print(f"{'source':48s} rows  mean error    bias   inside  left out" + ("   before" if older else ""))
    by_source = sources(rows)
    means, held = [], []
    for name, some in sorted(by_source.items()):
        errors = [error_of(row) for row in some]
        inside = left_out(rows, every_row, name)
        held += inside
        means.append(statistics.fmean(map(abs, errors)))
        known = [abs(error_of(older[row["id"]])) for row in some if row["id"] in older]
        before = f"  {statistics.fmean(known):7.1%}" if known else ""
        shown = statistics.fmean(row["low_seconds"] <= row["measured_seconds"] <= row["high_seconds"] for row in some)
        print(
            f"{name[:48]:48s} {len(some):4d}  {means[-1]:9.1%}  {statistics.fmean(errors):+6.1%}"
            f"  {shown:6.0%}  {statistics.fmean(inside):8.0%}{before}"
        )
    every = [abs(error_of(row)) for row in rows]
    print(f"all rows {statistics.fmean(every):.1%}, mean over sources {statistics.fmean(means):.1%}")
    print(f"intervals of other sources hold {statistics.fmean(held):.0%} of rows; tau {tau(rows):.2f}")
    inside = {name: new_left_out(name) for name in sorted({source for *_, source in first_errors()})}
    shares = {name: statistics.fmean(some) for name, some in inside.items()}
    every_run = statistics.fmean(held for some in inside.values() for held in some)
    by_source = statistics.fmean(shares.values())
    print(f"intervals of other unknown sources hold {every_run:.0%} of rows, {by_source:.0%} by source")
    print("less than 60%: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share < 0.6))
    back = held_back()
    share = statistics.fmean(held for some in back.values() for held in some)
    by_source = statistics.fmean(map(statistics.fmean, back.values()))
    print(f"the interval holds {share:.0%} of the runs of the draws that are held back, {by_source:.0%} by source")
    if asked.write:
        SPREADS.write_text(dump_spreads(spreads_of(measured(every_row), first_errors())), encoding="utf-8")
        names = sorted({row["source"] for row in every_row})
        with SOURCES.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["source"], *([name] for name in names)])


def timed(path: Path, flags: Sequence[str] | None = CLEAN) -> list[Row]:
    """Rows of tiers A and B that have both times, of these flags; None means any."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [
        row
        for row in rows
        if row["predicted_seconds"]
        and row["measured_seconds"]
        and (flags is None or (row["flag"] or "") in flags)
        and row["tier"] in ("A", "B")
    ]


def sources(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by their source."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["source"]].append(row)
    return found


def error_of(row: Row) -> float:
    """Predicted over measured time, less one."""
    return float(row["predicted_seconds"] / row["measured_seconds"] - 1)


def measured(rows: Sequence[Row]) -> list[tuple[str, bool, float, str]]:
    """What intervals are made of: profile, experts, log of measured over predicted, source."""
    return [(row["profile"], row["id"] in EXPERTS, -math.log1p(error_of(row)), row["source"]) for row in rows]


def left_out(rows: Sequence[Row], every: Sequence[Row], source: str) -> list[bool]:
    """Whether intervals made of all other sources hold the rows of this one."""
    spreads = spreads_of(measured([row for row in every if row["source"] != source]))
    found = []
    for row in rows:
        if row["source"] == source:
            spread = spread_of(row["profile"], row["id"] in EXPERTS, spreads, known=True)
            found.append(spread.low <= row["measured_seconds"] / row["predicted_seconds"] <= spread.high)
    return found


def first_errors() -> list[tuple[str, bool, float, str]]:
    """Of every run of a source that nobody had looked at: profile, experts, log of measured over first predicted,
    source. Runs that were drawn afterwards of a source are none, nor are those that are held back."""
    runs = unseen()
    looked_at = {run["source"]: run["first_commit"] for run in reversed(runs)}
    return [one for run in runs if run["first_commit"] == looked_at[run["source"]] for one in _first(run, held=False)]


def held_back() -> dict[str, list[bool]]:
    """By sources of the draws that are held back: whether the interval in use holds each of their runs."""
    found: dict[str, list[bool]] = defaultdict(list)
    for run in unseen():
        for profile, experts, error, source in _first(run, held=True):
            spread = spread_of(profile, experts)
            found[source].append(spread.low <= math.exp(error) <= spread.high)
    return found


def _first(run: Mapping[str, str], *, held: bool) -> list[tuple[str, bool, float, str]]:
    """The error of the first prediction of a run that is held back or not; none where one of its times is missing."""
    measured, predicted = seconds(run), run["first_predicted_s"]
    if measured is None or not predicted or held != run["first_commit"].startswith(HELD_BACK):
        return []
    return [(run["profile"], run["arch"] == "moe", math.log(measured / float(predicted)), run["source"])]


def new_left_out(source: str) -> list[bool]:
    """Whether the interval of unknown sources, made of the other ones, holds the runs of this one."""
    errors = first_errors()
    others = spreads_of(errors, [one for one in errors if one[3] != source])
    spreads = {**table(), **{kind: spread for kind, spread in others.items() if kind[0] == NEW}}
    found = []
    for profile, experts, error, name in errors:
        if name == source:
            spread = spread_of(profile, experts, spreads)
            found.append(spread.low <= math.exp(error) <= spread.high)
    return found


def tau(rows: Sequence[Row]) -> float:
    """The median of Kendall's tau over the rank groups of four and more."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row["rank_group"]:
            groups[row["rank_group"]].append(row)
    taus = [
        kendall_tau([row["predicted_seconds"] for row in some], [row["measured_seconds"] for row in some])
        for some in groups.values()
        if len(some) >= 4
    ]
    known = [value for value in taus if value is not None]
    return statistics.median(known) if known else math.nan


if __name__ == "__main__":
    main()
