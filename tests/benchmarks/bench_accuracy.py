"""How far off predicted step times are on machines and models that were left out of the fit.

    rows     published runs, all of the dense decoders and mixtures that can be evaluated
    e_r      log(predicted / measured) of a row with the numbers of profiles and stacks as they are
    J_rp     d e_r / d log p, for each fitted number p, by predicting the row once more with p up by a fifth

    seed     groups of rows, all of one model on one machine, are halved at random; on one half
                 min over d   sum_r |e_r + J_r d|,   |d| <= log 1.5           (reweighted least squares)
             on the other half errors are those of e_r + J_r d: to first order what a fit without these rows gives

and both halves in turn, for five seeds. The interval of a row is its prediction times the quantiles of the errors of
the fitted half (`hardware_profiles.intervals`); how often it holds is counted on the other.

Predicting every row once for each number takes long, so that a sample is: at most 10 rows of a source, the same ones
every time (`planner.validation.sampled`), rows of one model after each other, all numbers on one trace of it.
`--extent=full` does it and `--write` keeps what comes out beside this file; otherwise that is read. What is fitted
stands in NUMBERS; none of it belongs to a row, a model or a source. `bench_sources.py` makes the intervals.
"""

import argparse
import csv
import gzip
import math
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from hardware_profiles import Cluster
from hardware_profiles.intervals import spread_of, spreads_of
from planner.graph.operator_graph import OperatorGraph
from planner.models.dimensions import Dimensions
from planner.validation import read_rows, sampled
from planner.validation.pricing.evaluate import chunks_of, evaluate_chunk, machine_of
from planner.validation.reading.rows import Row
from planner.validation.request.configuration import run_of
from planner.validation.results.evaluated import Evaluated
from planner.validation.results.summary import kendall_tau

HERE = Path(__file__).resolve().parent
RUNS = HERE / "data" / "published_runs.csv.gz"
KEPT = HERE / "data" / "accuracy.csv"
SEEDS = range(5)
UP = 1.2
LIMIT = math.log(1.5)
SAMPLE = 10
"""Rows of a source at most: those of the largest, 900, differ little."""
BLOCKING = ("", "old", "cluster-from-script", "hw-flops")
"""Flags of rows that are complete and consistent."""


def _stack(cluster: Cluster, *, stacks: tuple[str, ...], **factors: float) -> Cluster:
    software = cluster.software
    if software.name not in stacks:
        return cluster
    changed = {name: getattr(software, name) * factor for name, factor in factors.items()}
    return cluster.with_software(replace(software, **changed))


def _hidden(cluster: Cluster, *, factor: float) -> Cluster:
    hidden = cluster.software.hidden
    less = replace(
        hidden,
        tensor=min(1.0, hidden.tensor * factor),
        gathers=min(1.0, hidden.gathers * factor),
        reductions=min(1.0, hidden.reductions * factor),
    )
    return cluster.with_software(replace(cluster.software, hidden=less))


def _class(cluster: Cluster, *, profiles: str, classes: tuple[str, ...], side: str, factor: float) -> Cluster:
    if not cluster.name.startswith(profiles):
        return cluster
    device = cluster.device
    changed = tuple(
        (name, replace(one, **{side: min(1.0, getattr(one, side) * factor)}) if name in classes else one)
        for name, one in device.efficiencies
    )
    return replace(cluster, device=replace(device, efficiencies=changed))


def _network(cluster: Cluster, *, factor: float) -> Cluster:
    levels = list(cluster.levels)
    if cluster.devices > (cluster.devices_per_node or 0):
        levels[-1] = replace(levels[-1], bandwidth=levels[-1].bandwidth * factor)
    return replace(cluster, levels=tuple(levels))


_VECTOR = ("elementwise", "normalisation", "cross_entropy")
NUMBERS: Mapping[str, Callable[[Cluster], Cluster]] = {
    "passes of eager kernels": partial(_stack, stacks=("fsdp", "deepspeed"), passes=UP),
    "host, Megatron-DeepSpeed": partial(_stack, stacks=("deepspeed",), host=UP),
    "hidden communication": partial(_hidden, factor=UP),
    "network between nodes": partial(_network, factor=UP),
    "Ascend attention": partial(_class, profiles="ascend", classes=("attention",), side="compute", factor=UP),
    "Ascend vector kernels": partial(_class, profiles="ascend", classes=_VECTOR, side="bandwidth", factor=UP),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is kept of a row: its error, its derivatives, shares of its time."""

    id: str
    error: float
    slopes: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extent", choices=("quick", "usual", "full"), default="usual")
    parser.add_argument("--write", action="store_true", help="keep what was predicted")
    asked = parser.parse_args()
    rows = sampled([row for row in published() if row.measured_seconds is not None], SAMPLE)
    known = predicted(rows) if asked.extent == "full" or not KEPT.exists() else kept()
    if asked.write:
        write(known)
    cross_validated({row.id: row for row in rows}, known)


def published() -> list[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runs.csv"
        path.write_bytes(gzip.decompress(RUNS.read_bytes()))
        return list(read_rows(path))


def predicted(rows: Sequence[Row]) -> list[Known]:
    """Errors as things are and with each number up."""
    found: list[Known] = []
    for chunk in chunks_of(rows):
        graphs: dict[Dimensions, OperatorGraph] = {}
        base = _errors(evaluate_chunk(chunk, graphs=graphs))
        able = [row for row in chunk if row.id in base]
        slopes: dict[str, list[float]] = defaultdict(list)
        for change in NUMBERS.values():
            touched = [row for row in able if _touches(change, row)]
            other = _errors(evaluate_chunk(touched, change, graphs))
            for row in able:
                slopes[row.id].append((other.get(row.id, base[row.id]) - base[row.id]) / math.log(UP))
        found += [Known(id=row.id, error=base[row.id], slopes=tuple(slopes[row.id])) for row in able]
        print(f"{len(found)} of {len(rows)} rows evaluated", flush=True)
    return found


def _touches(change: Callable[[Cluster], Cluster], row: Row) -> bool:
    """Whether the machine of a row has the number."""
    cluster, _ = machine_of(row, run_of(row))
    return change(cluster) != cluster


def _errors(results: Sequence[Evaluated]) -> dict[str, float]:
    return {
        one.row.id: math.log(one.predicted_seconds / measured)
        for one in results
        if one.predicted_seconds is not None and (measured := one.row.measured_seconds) is not None
    }


def kind_of(row: Row) -> tuple[str, bool]:
    """The class that its interval is of: profile, and whether there are experts."""
    return row.text("profile"), row.text("arch") == "moe"


def kept() -> list[Known]:
    """What a full run wrote."""
    with KEPT.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    if lines[0] != ["id", "error", *NUMBERS]:
        raise SystemExit(f"{KEPT} is of other numbers: run with --extent=full --write")
    return [Known(id=line[0], error=float(line[1]), slopes=tuple(map(float, line[2:]))) for line in lines[1:]]


def write(known: Sequence[Known]) -> None:
    """Keep it."""
    with KEPT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["id", "error", *NUMBERS])
        for one in known:
            writer.writerow([one.id, f"{one.error:.5g}", *(f"{slope:.4g}" for slope in one.slopes)])


def fit(errors: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """d of the docstring, by reweighted least squares with a little ridge."""
    found = np.zeros(slopes.shape[1])
    for _ in range(30):
        left = errors + slopes @ found
        weight = 1 / np.maximum(np.abs(left), 0.02)
        normal = slopes.T @ (slopes * weight[:, None]) + 0.5 * np.eye(len(found))
        found = np.clip(-np.linalg.solve(normal, slopes.T @ (weight * errors)), -LIMIT, LIMIT)
    return found


def cross_validated(rows: Mapping[str, Row], known: Sequence[Known]) -> None:
    """Fits on halves, errors on the others."""
    groups = defaultdict(list)
    for one in known:
        groups[rows[one.id].text("model"), rows[one.id].text("device")].append(one)
    left_out: dict[str, list[float]] = defaultdict(list)
    inside: list[bool] = []
    found = []
    for seed in SEEDS:
        names = sorted(groups)
        random.Random(seed).shuffle(names)
        halves = names[: len(names) // 2], names[len(names) // 2 :]
        for mine, others in (halves, halves[::-1]):
            train = [one for name in mine for one in groups[name]]
            errors, slopes = np.array([one.error for one in train]), np.array([one.slopes for one in train])
            change = fit(errors, slopes)
            found.append(np.exp(change))
            fitted = errors + slopes @ change
            spreads = spreads_of(
                (*kind_of(rows[one.id]), -error, rows[one.id].text("source"))
                for one, error in zip(train, fitted, strict=True)
            )
            for one in (one for name in others for one in groups[name]):
                error = one.error + float(np.dot(one.slopes, change))
                left_out[one.id].append(error)
                spread = spread_of(*kind_of(rows[one.id]), spreads, known=True)
                inside.append(spread.low <= math.exp(-error) <= spread.high)
    print("\nfitted numbers, times what profiles and stacks say: median (range) over 10 halves")
    for name, values in zip(NUMBERS, np.array(found).T, strict=True):
        print(f"  {name:26s} {np.median(values):.2f}  ({values.min():.2f} to {values.max():.2f})")
    report(rows, left_out)
    print(f"80% intervals hold {100 * statistics.fmean(inside):.0f} of 100 times")


def report(rows: Mapping[str, Row], left_out: Mapping[str, Sequence[float]]) -> None:
    """Errors of rows that were not fitted."""
    errors = {name: [math.exp(value) - 1 for value in values] for name, values in left_out.items()}

    def line(title: str, chosen: Callable[[Row], bool]) -> None:
        values = [value for name, found in errors.items() if chosen(rows[name]) for value in found]
        if values:
            absolute = [abs(value) for value in values]
            print(
                f"  {title:44s} {len(values) // len(SEEDS):5d}  {100 * statistics.fmean(absolute):5.1f}%"
                f"  {100 * statistics.median(absolute):5.1f}%  {100 * statistics.fmean(values):+6.1f}%"
            )

    print("\nstep time of rows left out of the fit\n  what" + " " * 45 + "rows   mean  median    bias")
    line("tier A, no blocking flag", lambda row: row.text("tier") == "A" and row.text("flag") in BLOCKING)
    line("tier A", lambda row: row.text("tier") == "A")
    line("tier B", lambda row: row.text("tier") == "B")
    line("Ascend, tier A", lambda row: row.text("tier") == "A" and row.text("profile").startswith("ascend"))
    for source in sorted({rows[name].text("source") for name in errors}):
        line(source[:44], lambda row, source=source: row.text("source") == source)  # type: ignore[misc]
    taus = []
    ranked = defaultdict(list)
    for name in errors:
        if rows[name].text("rank_group"):
            ranked[rows[name].text("rank_group")].append(name)
    for members in ranked.values():
        if len(members) >= 4:
            measured = [rows[name].measured_seconds or 0.0 for name in members]
            said = [statistics.fmean(errors[name]) * m + m for name, m in zip(members, measured, strict=True)]
            tau = kendall_tau(said, measured)
            taus += [] if tau is None else [tau]
    if taus:
        print(f"Kendall's tau inside {len(taus)} rank groups of four and more: median {statistics.median(taus):.2f}")


if __name__ == "__main__":
    main()
