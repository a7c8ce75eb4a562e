"""How far off predictions were of runs that nobody had looked at when they were made.

    python tests/benchmarks/bench_unseen.py [runs.json]

`data/unseen_runs.csv.gz` has runs of sources that `published_runs.csv.gz` lacks, each with what was predicted for it
before its error was known (`first_predicted_s`, its ends, `first_peak_GB`, and whether it fits), by the code at
`first_commit`. Runs without were refused then. What was learned from them came after: `told_later` says what rows say
since then of how they were run. With `runs.json`, which `plan validate --json` has printed of the same file, the errors
of today stand beside, and what runs take beyond all that is priced (`planner/validation/pricing/unpriced.py`), fitted
without the source that is judged.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNS = Path(__file__).resolve().parent / "data" / "unseen_runs.csv.gz"

Run = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of so many predicted runs the mean error of the step, its bias, and the share that lies in its interval."""

    runs: int
    mean: float
    bias: float
    inside: float


def unseen() -> list[Run]:
    """All rows of the file."""
    return list(csv.DictReader(io.StringIO(gzip.decompress(RUNS.read_bytes()).decode())))


def groups(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Timed runs by source, and by the commit that predicted them first where a source has several."""
    found: dict[str, list[Run]] = defaultdict(list)
    commits: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        known = commits[run["source"]]
        if run["first_commit"] not in known:
            known.append(run["first_commit"])
        if seconds(run) is not None:
            again = known.index(run["first_commit"])
            found[run["source"] + (", drawn afterwards" if again else "")].append(run)
    return found


def seconds(run: Run) -> float | None:
    """The measured step of a run; None of one that ran out of memory."""
    if run["iter_time_s"]:
        return float(run["iter_time_s"])
    if not run["tokens_per_s_per_device"]:
        return None
    tokens = float(run["global_batch"]) * float(run["seq_len"])
    return tokens / float(run["n_devices"]) / float(run["tokens_per_s_per_device"])


def first_errors(runs: Sequence[Run]) -> Errors:
    """Errors of what was predicted first."""
    judged = [
        (float(run["first_predicted_s"]), float(run["first_low_s"]), float(run["first_high_s"]), measured)
        for run in runs
        if (measured := seconds(run)) is not None and run["first_predicted_s"]
    ]
    return _errors(judged)


def peak_errors(runs: Sequence[Run]) -> list[float]:
    """First predicted over measured peaks, less one, of the runs that have both."""
    return [float(run["first_peak_GB"]) / float(run["peak_mem_GB"]) - 1 for run in runs if run["first_peak_GB"]]


def errors_now(runs: Sequence[Run], now: Mapping[str, Mapping[str, Any]]) -> Errors:
    """Errors of what is predicted now."""
    judged = [
        (one["predicted_seconds"], one["low_seconds"], one["high_seconds"], one["measured_seconds"])
        for one in (now[run["id"]] for run in runs)
        if one["predicted_seconds"] is not None
    ]
    return _errors(judged)


def _errors(judged: Sequence[tuple[float, float, float, float]]) -> Errors:
    if not judged:
        return Errors(runs=0, mean=math.nan, bias=math.nan, inside=math.nan)
    relative = [predicted / measured - 1 for predicted, _, _, measured in judged]
    return Errors(
        runs=len(judged),
        mean=statistics.fmean(map(abs, relative)),
        bias=statistics.fmean(relative),
        inside=statistics.fmean(low <= measured <= high for _, low, high, measured in judged),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What runs take beyond the sum of their terms, as a share of it: the least and the most that all sources but one
    choose, and mean errors by run and by source as priced, and of each source with what the others choose."""

    least: float
    most: float
    priced: tuple[float, float]
    left_out: tuple[float, float]


def beyond(ratios: Mapping[str, Sequence[float]]) -> Beyond:
    """Fitted to sums of terms over measured steps, by source, each source one vote."""
    shares = [at / 200 for at in range(-20, 61)]

    def mean(some: Sequence[float], share: float) -> float:
        return statistics.fmean(abs((1 + share) * ratio - 1) for ratio in some)

    chosen = {
        name: min(shares, key=lambda share: sum(mean(ratios[one], share) for one in ratios if one != name))
        for name in ratios
    }
    runs = sum(map(len, ratios.values()))
    found = []
    for at in (dict.fromkeys(ratios, 0.0), chosen):
        means = {name: mean(some, at[name]) for name, some in ratios.items()}
        by_run = sum(means[name] * len(some) for name, some in ratios.items()) / runs
        found.append((by_run, statistics.fmean(means.values())))
    return Beyond(least=min(chosen.values()), most=max(chosen.values()), priced=found[0], left_out=found[1])


def priced(runs: Sequence[Run], now: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
    """Sums of terms over measured steps, by source."""
    found: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        one = now[run["id"]]
        if seconds(run) is not None and one["predicted_seconds"] is not None:
            terms = one["predicted_seconds"] - one["time_seconds"].get("not priced", 0.0)
            found[run["source"]].append(terms / one["measured_seconds"])
    return found


def out_of_memory(runs: Sequence[Run]) -> tuple[int, int]:
    """Of the runs that ran out of memory how many were first predicted not to fit, and how many there are."""
    ended = [run["first_fits"] == "False" for run in runs if run["tier"] == "OOM"]
    return sum(ended), len(ended)


def summary(runs: Sequence[Run]) -> str:
    """Errors of what was predicted first, in words."""
    first, (ended, of) = first_errors(runs), out_of_memory(runs)
    by_source = statistics.fmean(one.mean for some in groups(runs).values() if (one := first_errors(some)).runs)
    peaks = peak_errors(runs)
    return (
        f"{first.runs} runs {first.mean:.1%}, by source {by_source:.1%}, inside {first.inside:.0%}; of {of} that ran"
        f" out of memory {ended} were said not to fit"
        + (f"; {len(peaks)} peaks {statistics.fmean(map(abs, peaks)):.1%}" if peaks else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", type=Path, nargs="?", help="what plan validate --json printed of the same file")
    asked = parser.parse_args()
    runs, now = unseen(), None
    if asked.runs is not None:
        now = {one["id"]: one for one in json.loads(asked.runs.read_text(encoding="utf-8"))["rows"]}
    print(f"{'source':64s} runs  first    bias  inside" + ("     now    bias  inside" if now else ""))
    for name, some in groups(runs).items():
        first = first_errors(some)
        line = f"{name[:64]:64s} {first.runs:4d}  {first.mean:5.1%}  {first.bias:+6.1%}  {first.inside:6.0%}"
        if now is not None:
            today = errors_now(some, now)
            line += f"  {today.mean:6.1%}  {today.bias:+6.1%}  {today.inside:6.0%}"
            line += f" (of {today.runs})" if today.runs != first.runs else ""
        print(line)
    for commit in dict.fromkeys(run["first_commit"] for run in runs):
        print(f"predicted by {commit}: {summary([run for run in runs if run['first_commit'] == commit])}")
    print(f"all first predictions: {summary(runs)}")
    if now is not None:
        found = beyond(priced(runs, now))
        print(
            f"beyond what is priced: {found.least:.1%} to {found.most:.1%} of it; as priced {found.priced[0]:.1%} by"
            f" run, {found.priced[1]:.1%} by source, with what other sources choose {found.left_out[0]:.1%} and"
            f" {found.left_out[1]:.1%}"
        )


if __name__ == "__main__":
    main()
