"""`plan validate`: compares predictions with measured training runs."""

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.errors import reporting
from planner.cli.output import write_json
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.report.console import PlainConsole
    from planner.validation.results.evaluated import Evaluated
    from planner.validation.results.summary import Errors, Mistakes, Part, Summary

SCHEMA_VERSION = 1  # of the object that `plan validate --json` prints


def validate(
    file: Annotated[Path, typer.Argument(help="Measured runs, one in each row of a CSV file.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, with the errors of every row.")
    ] = False,
    where: Annotated[
        list[str] | None, typer.Option(help="Only rows with this value in a column, as in profile=h100-80gb.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="At most N rows per source, drawn at random with a fixed seed."),
    ] = None,
    processes: Annotated[int | None, typer.Option(min=1, help="Number of processes (default: one per core).")] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at the first row that cannot be read, also if --where leaves it out.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Write the errors of each profile into this table, in place of older ones.",
        ),
    ] = None,
) -> None:
    """Predict step time and peak memory of measured training runs, and report the errors.

    Every row is evaluated as it was run: all degrees, ZeRO, micro-batch and recomputation are fixed. Notes say what was
    assumed for a row, or why it cannot be evaluated or read. docs/validate.md lists the columns.

        plan validate runs.csv --where profile=h100-80gb
    """
    with reporting(as_json):
        from planner.validation import evaluate_rows, read_rows, sampled, summarise

        started, conditions = time.perf_counter(), _conditions(where or [])
        if record is not None:
            _check_record(record, conditions, limit)
        rows = read_rows(file, conditions, limit, strict=strict)
        rows = rows if sample is None else sampled(rows, sample)
        with _progress(len(rows), as_json) as advance:
            results = evaluate_rows(rows, processes or len(os.sched_getaffinity(0)), advance)
        summary, seconds = summarise(results), time.perf_counter() - started
        if not as_json:  # before writing the record, which may fail
            _show(results, summary, seconds)
        if record is not None:
            _record(results, file.name if sample is None else f"{file.name} (at most {sample} of a source)", record)
        if as_json:
            write_json("plan validate", content(results, summary, seconds))


def _check_record(table: Path, conditions: dict[str, str], limit: int | None) -> None:
    """Check options that would make a misleading table, or fail only at the end."""
    from hardware_profiles import RunError, recorded
    from planner.plan.writing import check_place

    if limit is not None or set(conditions) - {"profile"}:
        raise RequestError("--record is for all rows of a profile: leave out --limit and any --where but profile=NAME")
    check_place(table)
    if table.exists():
        recorded(RunError, table)


def _record(results: "Sequence[Evaluated]", runs: str, table: Path) -> None:
    from hardware_profiles import RunError, dump_records, recorded, with_records
    from planner.plan.writing import write_atomically
    from planner.validation import run_errors

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    known = recorded(RunError, table) if table.exists() else ()
    write_atomically(table, dump_records(RunError, with_records(known, run_errors(results, runs, today))))


def _conditions(texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        column, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not column:
            raise RequestError(f"--where '{text}': write COLUMN=VALUE, as in profile=h100-80gb")
        if column in found:
            raise RequestError(f"--where '{text}': column {column} is given twice; a row has one value in it")
        found[column] = value
    return found


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while rows are evaluated, called with the number of newly finished rows; nothing without a
    terminal."""
    from rich.progress import Progress

    from planner.report.console import PlainConsole

    console = PlainConsole(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("rows", total=total)
        yield lambda count: bar.advance(task, count)


def content(results: "Sequence[Evaluated]", summary: "Summary", seconds: float) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": [_row_content(result) for result in results],
        "summary": {**asdict(summary), "elapsed_seconds": seconds},
    }


def _row_content(result: "Evaluated") -> dict[str, Any]:
    row = result.row
    return {
        "id": row.id,
        "line": row.line,
        **{name: row.text(name) or None for name in ("source", "profile", "rank_group", "tier", "flag")},
        "measured_seconds": row.measured_seconds,
        "predicted_seconds": result.predicted_seconds,
        "low_seconds": result.low_seconds,
        "high_seconds": result.high_seconds,
        "measured_peak_bytes": row.measured_peak_bytes,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "low_peak_bytes": result.low_peak_bytes,
        "high_peak_bytes": result.high_peak_bytes,
        "peak_kind": result.peak_kind,
        "needed_bytes": result.needed_bytes,
        "capacity_bytes": result.capacity_bytes,
        "time_seconds": dict(result.time) or None,
        "feasible": result.feasible,
        "notes": list(result.notes),
        "error": result.error,
    }


def _show(results: "Sequence[Evaluated]", summary: "Summary", seconds: float) -> None:
    from planner.report.console import PlainConsole

    console = PlainConsole(soft_wrap=True)
    _show_rows(console, results)
    whole = summary.whole
    ranked = tuple(part for part in summary.rank_groups if part.rows > 1)
    for title, parts in (
        ("source", (*summary.sources, whole)),
        ("profile", summary.profiles),
        ("device", summary.devices),
        ("rank group of two rows or more", ranked),
    ):
        _show_parts(console, title, parts)
    _show_mistakes(console, (*summary.sources, whole))
    tau = "" if summary.median_tau is None else f"; Kendall's tau in rank groups, median {summary.median_tau:.2f}"
    refused = sum(bool(result.row.fault) for result in results)
    unread = f", {refused} refused as they cannot be read" if refused else ""
    console.print(
        f"\n{whole.evaluated} of {whole.rows} rows evaluated in {seconds:.1f} s{unread};"
        f" {whole.feasible} fit by our model of memory{tau}"
    )


def _show_rows(console: "PlainConsole", results: "Sequence[Evaluated]") -> None:
    """One line per row; remarks on many rows are printed once, below."""
    from planner.report.units import bytes_text, seconds_text

    remarks: dict[str, int] = {}
    lines: list[tuple[str, ...]] = [("row", *_MEASURES, "fits", "remarks")]
    for result in results:
        row = result.row
        reason = "refused" if row.fault else "not evaluated"
        said = result.notes if result.error is None else (f"{reason}: {result.error}",)
        numbers = [remarks.setdefault(one, len(remarks) + 1) for one in said]
        lines.append(
            (
                row.id or f"line {row.line}",
                *(_known(value, seconds_text) for value in (row.measured_seconds, result.predicted_seconds)),
                _known(result.seconds_error, _percent),
                *(_known(value, bytes_text) for value in (row.measured_peak_bytes, result.predicted_peak_bytes)),
                _known(result.memory_error, _percent),
                "-" if result.feasible is None else "yes" if result.feasible else "no",
                " ".join(f"[{number}]" for number in numbers),
            )
        )
    _print_columns(console, lines)
    if remarks:
        console.print()
    for remark, number in remarks.items():
        console.print(f"[{number}] {remark}")


_MEASURES = ("measured", "predicted", "error", "measured", "predicted", "error")
_ERRORS = ("time: MAPE", "worst", "bias", "inside", "memory: MAPE", "worst", "bias")


def _show_parts(console: "PlainConsole", title: str, parts: "Sequence[Part]") -> None:
    if not parts:
        return
    lines: list[tuple[str, ...]] = [(title, "rows", "evaluated", *_ERRORS, "tau")]
    for part in parts:
        inside, tau = _known(part.inside, "{:.0%}".format), _known(part.tau, "{:.2f}".format)
        cells = (*_error_cells(part.seconds), inside, *_error_cells(part.memory), tau)
        lines.append((part.name, str(part.rows), str(part.evaluated), *cells))
    console.print()
    _print_columns(console, lines)


def _show_mistakes(console: "PlainConsole", parts: "Sequence[Part]") -> None:
    """Both kinds of mistakes about memory, for sources with runs to judge them by."""
    head = (
        "memory: source",
        "ran",
        "we say no",
        "lacking: mean",
        "worst",
        "recomputation unknown",
        "inferred",
        "we say no",
        "fit",
        "peak over 5% above",
        "mean",
        "worst",
    )
    lines: list[tuple[str, ...]] = [head]
    for part in parts:
        cells = [*_mistake_cells(part.ran), str(part.untold.judged)]
        cells += [str(part.inferred), str(part.untold.count)]
        cells += _mistake_cells(part.above)
        if part.ran.count or part.untold.count or part.inferred or part.above.judged:
            lines.append((part.name, *cells))
    if len(lines) > 1:
        console.print()
        _print_columns(console, lines)


def _mistake_cells(kind: "Mistakes") -> tuple[str, ...]:
    return str(kind.judged), str(kind.count), _known(kind.mean, _percent), _known(kind.worst, _percent)


def _print_columns(console: "PlainConsole", lines: Sequence[tuple[str, ...]]) -> None:
    """Lines of cells; first and last column are left-aligned, and lines are never wrapped."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [text.rjust(width) for text, width in zip(others[:-1], widths[1:], strict=False)]
        console.print("  ".join((first.ljust(widths[0]), *cells, others[-1])).rstrip())


def _error_cells(errors: "Errors") -> tuple[str, ...]:
    size = "{:.1%}".format
    return _known(errors.mean_absolute, size), _known(errors.max_absolute, size), _known(errors.bias, _percent)


def _percent(value: float) -> str:
    return f"{value:+.1%}"


def _known(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
