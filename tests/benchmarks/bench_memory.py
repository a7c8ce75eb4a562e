"""How far off predicted peaks of memory are, by training stack and by source, and how often their intervals hold.

    rows     published runs without a blocking flag that say what their peak counts, and fill a quarter of a device;
             and those that ran out of memory though predicted to fit, with the capacity for their peak
    ends     of the rows of a stack, or of all where there are few (`hardware_profiles.memory_intervals`)
    held     of the rows of each source, by ends that the other sources make

`--write` keeps the ends as the packaged table. Evaluating the rows takes minutes, and is not done where `--runs` names
what `plan validate --json` has printed of them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_accuracy import BLOCKING, published

from hardware_profiles import load_software
from hardware_profiles.memory_intervals import OTHER, dump_peak_spreads, peak_spreads
from planner.cli.commands.validate import content
from planner.validation import evaluate_rows, summarise

TABLE = Path(__file__).resolve().parents[2] / "hardware_profiles" / "memory_intervals.csv"
FILLED = 0.25
"""Share of a device below which a peak is not looked at."""


OUT = "OOM"
"""Tier, and flag, of a row that ran out of memory."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--write", action="store_true", help="keep the ends")
    parser.add_argument("--runs", type=Path, help="what plan validate --json printed")
    asked = parser.parse_args()
    rows = evaluated() if asked.runs is None else json.loads(asked.runs.read_text(encoding="utf-8"))["rows"]
    found = [
        (row["source"], stack_of(row["notes"]), ratio)
        for row in rows
        if (row["flag"] or "") in (*BLOCKING, OUT) and (ratio := ratio_of(row)) is not None
    ]
    report(found)
    if asked.write:
        TABLE.write_text(dump_peak_spreads(peak_spreads((stack, ratio) for _, stack, ratio in found)), encoding="utf-8")


def evaluated() -> list[dict[str, Any]]:
    """Rows with a peak, or that ran out of memory, as `plan validate --json` prints them."""
    rows = [row for row in published() if row.measured_peak_bytes is not None or row.out_of_memory]
    results = evaluate_rows(rows, 2)
    return list(content(results, summarise(results), 0.0)["rows"])


def ratio_of(row: Mapping[str, Any]) -> float | None:
    """Measured over predicted peak of a row that counts; None of others. Of a row that ran out of memory the least that
    it can have been, where it was predicted to fit; where it was not, that says nothing."""
    measured, predicted, capacity = row["measured_peak_bytes"], row["predicted_peak_bytes"], row["capacity_bytes"]
    if row["tier"] == OUT:
        return None if predicted is None or predicted >= capacity else float(capacity / predicted)
    if row["peak_kind"] is None or measured is None or predicted is None or capacity is None:
        return None
    return float(measured / predicted) if measured >= FILLED * capacity else None


def stack_of(notes: Sequence[str]) -> str:
    """The stack that a row was taken for, as its notes say."""
    note = next(note for note in notes if note.startswith("taken for "))
    return load_software(note.removeprefix("taken for ").partition(",")[0]).name


def report(found: Sequence[tuple[str, str, float]]) -> None:
    """Ends by stack, and by source how often those of the other sources hold."""
    for stack, spread in sorted(peak_spreads((stack, ratio) for _, stack, ratio in found).items()):
        print(f"{stack:20s} {spread.runs:4d} runs  {spread.low:.3f} to {spread.high:.3f}")
    sources = defaultdict(list)
    for source, stack, ratio in found:
        sources[source].append((stack, ratio))
    print("\nby ends of the other sources: rows, inside, above the upper end")
    for source, mine in sources.items():
        others = peak_spreads((stack, ratio) for other, stack, ratio in found if other != source)
        ends = [(others.get(stack, others[OTHER]), ratio) for stack, ratio in mine] if others[OTHER].runs else []
        inside = sum(spread.low <= ratio <= spread.high for spread, ratio in ends)
        above = sum(ratio > spread.high for spread, ratio in ends)
        print(f"{source[:44]:44s} {len(mine):4d}  {inside:4d}  {above:4d}")


if __name__ == "__main__":
    main()
