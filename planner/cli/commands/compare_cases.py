"""`plan compare --model` and `plan capacity`: time and cost of training on several hardware, and the number of devices
that it needs."""

import csv
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.errors import reporting
from planner.cli.graph_folder import cache_folder
from planner.cli.option_kinds import JOB, word
from planner.cli.options import GlobalBatch, Levels, Options, Precision, SeqLen
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.spoken import model_of, parse_counted, parse_tokens
from planner.cli.stopping import SAID, stoppable
from planner.cli.texts import say
from planner.cli.waiting import waiting
from planner.errors import RequestError

if TYPE_CHECKING:
    from planner.api.comparing import Capacity, Case, CaseComparison, Interval, Outcome
    from planner.strategy_search.result import Progress

SCHEMA_VERSION = 1  # of the objects that `plan compare --model --json` and `plan capacity --json` print

MONEY = "Cost"

Tokens = Annotated[str | None, typer.Option(metavar="N", help="Tokens of the whole training, as in 15T or 300B.")]
Price = Annotated[
    str | None,
    typer.Option(
        metavar="PRICES", help="Price per device-hour: 2.5, or h100=2.5,b200=5. In any currency.",
        rich_help_panel=MONEY,
    ),
]  # fmt: skip
Failures = Annotated[
    float,
    typer.Option(
        metavar="X", help="Failures per device-day. Llama 3 405B had 419 in 54 days on 16,384 H100: 5e-4.", min=0,
        rich_help_panel=MONEY,
    ),
]  # fmt: skip
CheckpointTime = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time that the run stops for a checkpoint.", min=0, rich_help_panel=MONEY),
]
RestartTime = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time from a failure until training continues.", min=0, rich_help_panel=MONEY),
]
PerReplica = Annotated[
    list[str] | None,
    word(
        JOB,
        "PATTERN",
        "Operators that each replica computes alone, as for plan search.",
        "",
        "--per-replica",
        "--cross-batch",
    ),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")]


def compared(
    models: str,
    hardware: str,
    devices: str | None,
    software: str | None,
    tokens: str | None,
    price: str | None,
    failures: float,
    checkpoint_time: float,
    restart_time: float,
    job: Options,
    *,
    as_csv: bool,
) -> None:
    """What `plan compare --model` does; `job` is what all cases share."""
    from planner.api.comparing import compare

    if devices is None:
        raise RequestError("missing --devices N, or several, as in --devices 32,64,128")
    _one_form(job.as_json, as_csv)
    with _told() as told, stoppable(told.stopping, told.searching) as stopped:
        found = compare(
            [model_of(name) or name for name in _parts(models)],
            _machines(hardware),
            devices=[parse_counted("--devices", one, most=2**20) for one in _parts(devices)],
            software=_parts(software or "pytorch"),
            tokens=None if tokens is None else parse_tokens("--tokens", tokens),
            price=None if price is None else parse_prices(price),
            failures=failures,
            checkpoint_seconds=checkpoint_time,
            restart_seconds=restart_time,
            on_case=told.begun,
            on_progress=told.searched,
            cancelled=stopped,
            cluster=job.cluster,
            seq_len=job.seq_len,
            global_batch=job.global_batch,
            precision=job.precision,
            per_replica=job.per_replica or (),
            graph_cache=cache_folder(None),
        )
    if not found.outcomes:
        raise KeyboardInterrupt("interrupted before there was a plan")
    if job.as_json:
        write_json("plan compare --model", comparison_content(found))
    elif as_csv:
        _write_csv(found.to_rows())
    else:
        _print_cases(found.outcomes, found.fastest, found.cheapest)
        _remark(found, failures)
    if not any(one.plan for one in found.outcomes):
        raise typer.Exit(3)


def capacity(
    model: Annotated[str, typer.Option(metavar="NAME", help="The model.", callback=model_of, rich_help_panel=JOB)],
    days: Annotated[float, typer.Option(metavar="X", help="Days available for training.", rich_help_panel=JOB)],
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens of the whole training, as in 15T or 300B.", rich_help_panel=JOB)
    ],
    hardware: Annotated[
        str, typer.Option(metavar="PROFILE", help="A profile, as for plan search.", rich_help_panel=JOB)
    ] = "h100-80gb",
    price: Price = None,
    failures: Failures = 0.0,
    checkpoint_time: CheckpointTime = 0.0,
    restart_time: RestartTime = 0.0,
    seq_len: SeqLen = None,
    global_batch: GlobalBatch = None,
    cluster: Levels = None,
    precision: Precision = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    as_csv: AsCsv = False,
) -> None:
    """Say how many devices train a model on N tokens in X days, searching a plan for each number of devices.

    Tries 2^k and 3 x 2^k whole nodes, by bisection. Exit code 3 if none is enough.

        plan capacity --model llama8b --hardware h100 --days 30 --tokens 1T
        plan capacity --model llama70b --hardware b200 --days 60 --tokens 15T --price 5 --failures 5e-4
    """
    with reporting(as_json):
        from planner.api.comparing import capacity as asked

        _one_form(as_json, as_csv)
        with _told() as told, stoppable(told.stopping, told.searching) as stopped:
            found = asked(
                model,
                hardware,
                days=days,
                tokens=parse_tokens("--tokens", tokens),
                price=None if price is None else parse_prices(price),
                failures=failures,
                checkpoint_seconds=checkpoint_time,
                restart_seconds=restart_time,
                on_case=told.begun,
                on_progress=told.searched,
                cancelled=stopped,
                cluster=cluster,
                seq_len=seq_len,
                global_batch=global_batch,
                precision=precision,
                graph_cache=cache_folder(None),
            )
        if not found.looked_at:
            raise KeyboardInterrupt("interrupted before there was a plan")
        if as_json:
            write_json("plan capacity", capacity_content(found))
        elif as_csv:
            _write_csv(found.to_rows())
        else:
            _print_capacity(found)
        if found.answer is None:
            raise typer.Exit(3)


def parse_prices(text: str) -> float | dict[str, float]:
    """Money per device-hour: 2.5, or h100=2.5,b200=5. Raises RequestError."""
    parts = [part.rpartition("=") for part in _parts(text)]
    try:
        values = {name.strip(): float(value) for name, _, value in parts}
    except ValueError:
        values = {}
    if not values or len(values) < len(parts) or (len(values) > 1 and "" in values):
        raise RequestError(f"--price {text}: write a number, or one for each hardware, as in h100=2.5,b200=5")
    for value in values.values():
        if not 0 <= value < math.inf:
            raise RequestError(f"--price {text}: {value:g} is no price; give money per device-hour, 0 or more")
    one = values.get("")
    return values if one is None else one


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _machines(text: str) -> list[str]:
    """Profiles separated by commas; groups of a heterogeneous pipeline, PROFILE:N, are one machine."""
    return [text] if ":" in text else _parts(text)


def _one_form(as_json: bool, as_csv: bool) -> None:
    if as_json and as_csv:
        raise RequestError("--json and --csv: give one of them")


def _phase(case: "Case") -> str:
    return f"{case.model} on {case.devices} x {case.hardware}"


class _told:  # noqa: N801  # a context manager, as `waiting` is
    """A progress line; notes on operators are printed once at the end."""

    def __enter__(self) -> "_told":
        self._warned = warnings.catch_warnings(record=True)
        self._notes = self._warned.__enter__() or []
        self._wait = waiting()
        self._line = self._wait.__enter__()
        self._searching = False
        return self

    def begun(self, case: "Case") -> None:
        """The model of a case may be traced next."""
        self._searching = False
        self._line.phase(_phase(case))

    def searched(self, progress: "Progress") -> None:
        self._searching = True
        self._line.searched(progress)

    def searching(self) -> bool:
        """Whether a search has begun, which can be asked to stop."""
        return self._searching

    def stopping(self) -> None:
        self._line.phase("stopping")

    def __exit__(self, *error: Any) -> None:
        self._wait.__exit__(*error)
        self._warned.__exit__(*error)
        for note in dict.fromkeys(str(one.message) for one in self._notes if one.category is UserWarning):
            say(f"note: {note}", err=True)


def comparison_content(found: "CaseComparison") -> dict[str, Any]:
    """What `--json` prints; `fastest` and `cheapest` count the rows from 0."""
    places = {id(one): at for at, one in enumerate(found.outcomes)}
    return {
        "schema_version": SCHEMA_VERSION,
        "rows": found.to_rows(),
        "fastest": None if found.fastest is None else places[id(found.fastest)],
        "cheapest": None if found.cheapest is None else places[id(found.cheapest)],
        "stopped": found.stopped,
    }


def capacity_content(found: "Capacity") -> dict[str, Any]:
    """What `--json` prints; `devices` is None if no searched number is enough."""
    answer = found.answer
    return {
        "schema_version": SCHEMA_VERSION,
        "days": found.days,
        "devices": None if answer is None else answer.case.devices,
        "rows": found.to_rows(),
        "stopped": found.stopped,
    }


def _write_csv(rows: Sequence[Mapping[str, object]]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(["" if value is None else value for value in row.values()] for row in rows)


def _print_cases(
    outcomes: "Sequence[Outcome]",
    fastest: "Outcome | None" = None,
    cheapest: "Outcome | None" = None,
    available: float | None = None,
) -> None:
    """One table; columns that are empty, or equal in all cases, are left out. `available` days are enough, or not, in
    the digits that are shown."""
    from planner.report.search import stopped_text
    from planner.report.table import table_of

    cells = [_cells(one, fastest, cheapest) for one in outcomes]
    if available is not None:
        for row, one in zip(cells, outcomes, strict=True):
            row["days"] = _middle(one.days, partial(days_text, available=available))
    first = ("model", "software")
    names = [
        name
        for name in cells[0]
        if any(row[name] for row in cells) and not (name in first and len({row[name] for row in cells}) == 1)
    ]
    table = table_of("", *names, keys=names.index("devices") + 1)
    for name, column in zip(names, table.columns, strict=True):
        column.justify = "left" if name in (*first, "hardware", "") else "right"
    for row in cells:
        table.add_row(*(row[name] for name in names))
    console = console_of()
    console.print(table)
    for one in outcomes:
        if one.reason:
            console.print(f"{_phase(one.case)}: {one.reason}", soft_wrap=True)
        if one.stopped_by is not None:
            by = stopped_text(one.stopped_by)
            console.print(f"{_phase(one.case)}: {by}; its plan is the best so far", soft_wrap=True)


def _cells(one: "Outcome", fastest: "Outcome | None", cheapest: "Outcome | None") -> dict[str, str]:
    from planner.report.units import bytes_text, percent_text, seconds_text

    plan, left, speed, share = one.plan, one.memory_left, one.tokens_per_second, one.efficiency
    best = [word for word, which in (("fastest", fastest), ("cheapest", cheapest)) if which is one]
    return {
        "model": one.case.model,
        "hardware": one.case.hardware,
        "software": one.case.software,
        "devices": f"{one.case.devices:,}",
        "step time": _middle(one.step, seconds_text),
        "80% interval": _spread(one.step),
        "tokens/s": "" if speed is None else f"{speed:,.0f}",
        "MFU": "" if plan is None else percent_text(plan.prediction.model_flops_utilisation),
        "days": _middle(one.days, _number),
        "device-hours": _middle(one.device_hours, _number),
        "cost": _middle(one.cost, _number),
        "memory left": "" if left is None else bytes_text(left),
        "scaling": "" if share is None else percent_text(share),
        "": ", ".join(best) if plan is not None else "no plan",
    }


def _spread(interval: "Interval | None") -> str:
    """`-22% +24%`: the 80% interval relative to the prediction."""
    if interval is None or interval[1] == interval[2]:
        return ""
    middle, low, high = interval
    return f"{low / middle - 1:+.0%} {high / middle - 1:+.0%}"


def _middle(interval: "Interval | None", text: Any) -> str:
    return "" if interval is None else str(text(interval[0]))


def days_text(days: float, available: float) -> str:
    """Days, with more than three digits where the days `available` are a little too few: 30.01 of 30."""
    if days <= available or _number(days) != _number(available):
        return _number(days)
    return next(text for digits in range(4, 18) if float(text := f"{days:.{digits}g}") > available)


def _number(value: float) -> str:
    """Three digits, with thousands separated: 29.1, 9,999, 12.3k, 1.2M."""
    from planner.report.units import count_text, digits_text

    return digits_text(value) if value < 1e4 else count_text(value).replace("K", "k")


def _remark(found: "CaseComparison", failures: float) -> None:
    console = console_of()
    if any(one.days for one in found.outcomes):
        of = "include failures, with the best checkpoint interval (Daly 2006)" if failures else "assume no failures"
        console.print(
            f"Days {of}. The 80% interval is that of the step time; days, device-hours and cost scale with it.",
            soft_wrap=True,
        )
    timed = [one for one in found.outcomes if one.days]
    unpriced = sorted({one.case.hardware for one in timed if one.cost is None})
    if unpriced and any(one.cost is not None for one in timed):
        names = ", ".join(unpriced)
        console.print(f"Cheapest: the fewest device-hours, as there is no price of {names} (--price).", soft_wrap=True)
    if any(one.efficiency is not None for one in found.outcomes):
        console.print("Scaling: tokens/s per device, relative to the fewest devices.", soft_wrap=True)
    if found.stopped:
        console.print(f"{SAID}: cases that were not searched by then are missing.", soft_wrap=True)


def _print_capacity(found: "Capacity") -> None:
    _print_cases(found.looked_at, available=found.days)
    console, answer = console_of(), found.answer
    if found.stopped:
        console.print(f"{SAID}: {'more devices may be enough' if answer is None else 'fewer devices may be enough'}.")
    if answer is None:
        most = found.looked_at[-1].case.devices
        console.print(f"None of these is enough for {found.days:g} days; the largest tried is {most:,} devices.")
    else:
        assert answer.days is not None
        console.print(
            f"{answer.case.devices:,} x {answer.case.hardware} train it in {_number(answer.days[0])} days of"
            f" {found.days:g}; {_number(answer.days[2])} days at the slow end of the 80% interval.",
            soft_wrap=True,
        )
