"""How far off predicted peaks of memory are, by training stack and by source, and how often their intervals hold.

    rows     published runs without a blocking flag that say what their peak counts, and fill a quarter of a device
    ends     of the rows of a stack, or of all where there are few (`hardware_profiles.memory_intervals`)
    held     of the rows of each source, by ends that the other sources make

`--write` keeps the ends as the packaged table. Evaluating the rows takes minutes.
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from bench_accuracy import BLOCKING, published

from hardware_profiles import load_software
from hardware_profiles.memory_intervals import OTHER, dump_peak_spreads, peak_spreads
from planner.validation import Evaluated, evaluate_rows

TABLE = Path(__file__).resolve().parents[2] / "hardware_profiles" / "memory_intervals.csv"
FILLED = 0.25
"""Share of a device below which a peak is not looked at."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--write", action="store_true", help="keep the ends")
    asked = parser.parse_args()
    rows = [row for row in published() if row.measured_peak_bytes is not None and row.text("flag") in BLOCKING]
    found = [
        (one.row.text("source"), stack_of(one), ratio)
        for one in evaluate_rows(rows, 2)
        if (ratio := ratio_of(one)) is not None
    ]
    report(found)
    if asked.write:
        TABLE.write_text(dump_peak_spreads(peak_spreads((stack, ratio) for _, stack, ratio in found)), encoding="utf-8")


def ratio_of(one: Evaluated) -> float | None:
    """Measured over predicted peak of a row that counts; None of others."""
    measured, predicted, capacity = one.row.measured_peak_bytes, one.predicted_peak_bytes, one.capacity_bytes
    if one.peak_kind is None or measured is None or predicted is None or capacity is None:
        return None
    return measured / predicted if measured >= FILLED * capacity else None


def stack_of(one: Evaluated) -> str:
    """The stack that a row was taken for, as its notes say."""
    note = next(note for note in one.notes if note.startswith("taken for "))
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
