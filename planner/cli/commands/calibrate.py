"""`plan calibrate` and `plan fit`: a hardware profile of this machine, from times measured on it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.commands.compare import ByClock, clock_of
from planner.cli.commands.fit_runs import fit_runs, is_run
from planner.cli.errors import reporting
from planner.cli.output import write_json
from planner.cli.texts import say
from planner.errors import RequestError
from planner.plan.writing import check_place

if TYPE_CHECKING:
    from hardware_profiles import Measurements
    from planner.api.calibrating import Calibrated

Output = Annotated[Path, typer.Option("--output", "-o", help="Where to write the profile, a file for --hardware.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PROFILE = Path("calibrated.toml")
SCHEMA_VERSION = 1  # of the objects that `plan calibrate --json` and `plan fit --json` print


def calibrate(
    output: Output = PROFILE,
    nproc: Annotated[
        int | None, typer.Option(help="Processes (default: one per accelerator, or per core).", min=1)
    ] = None,
    measurements: Annotated[
        Path | None, typer.Option(help="Where to write the measured times (default: beside the profile).")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, one to two minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and fit a hardware profile to it.

    Times kernels of every class and collectives of every kind, in one process per rank, all at once. On a CPU the
    processes share the cores: the profile describes one rank of a run with --nproc processes.

        plan calibrate --nproc 4 -o laptop.toml
        plan calibrate --quick
    """
    with reporting(as_json):
        from hardware_profiles import load_measurements
        from runtime.profiling.measuring import default_processes, measure

        _check_name(output)
        times = output.with_suffix(".measurements.json") if measurements is None else measurements
        _check(output, times)
        check_place(times)
        with _progress() as on_line:
            code = measure(times, nproc or default_processes(), effort="quick" if quick else "usual", on_line=on_line)
        if code:
            raise typer.Exit(code)
        if not as_json:
            say(f"measured: {times}")
        _fit(load_measurements(times), times, output, as_json)


def fit(
    files: Annotated[
        list[Path],
        typer.Argument(help="Measured times from plan calibrate, or records from plan run --measure."),
    ],
    output: Output = PROFILE,
    hardware: Annotated[
        str | None, typer.Option(metavar="PROFILE", help="With records of a profile in a file: that file.")
    ] = None,
    clock: ByClock = "wall",
    as_json: AsJson = False,
) -> None:
    """Fit a hardware profile to measured times, or correct a profile with measured runs of plans.

    plan fit laptop.measurements.json -o laptop.toml
    plan fit tiny.run.json other.run.json -o mine.toml
    """
    with reporting(as_json):
        from hardware_profiles import load_measurements

        _check_name(output)
        for file in files:
            _check(output, file)
        others = [file for file in files if not is_run(file)]
        if not others:
            fit_runs(files, output, hardware, clock_of(clock), as_json)
            return
        if len(files) > 1 or hardware is not None or clock != "wall":
            raise RequestError(
                f"{others[0]}: not a measured run; several files, --hardware and --clock are for records that plan run"
                " --measure writes"
            )
        _fit(load_measurements(files[0]), files[0], output, as_json)


def _check_name(output: Path) -> None:
    if output.suffix != ".toml":
        raise RequestError(f"--output {output}: the name of a profile must end in .toml, or --hardware cannot find it")


def _check(output: Path, times: Path) -> None:
    """Check what would otherwise fail only after a minute of measuring."""
    if output.resolve() == times.resolve():
        raise RequestError(f"--output {output}: the profile would overwrite the measured times")
    check_place(output)


def _fit(measurements: "Measurements", times: Path, output: Path, as_json: bool) -> None:
    from planner.api.calibrating import fitted_to

    fitted = fitted_to(measurements, times, output)
    if as_json:
        write_json("plan calibrate", _content(fitted))
        return
    _print_residuals(fitted)
    if not measurements.collectives:
        say("one process was measured, so no collective: the profile holds for 1 device only")
    say(f"profile: {output} ({fitted.name})")


def _content(fitted: "Calibrated") -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": fitted.name,
        "profile_file": str(fitted.path),
        "measurements_file": str(fitted.measurements),
        "residuals": fitted.to_rows(),
    }


def _print_residuals(fitted: "Calibrated") -> None:
    say(f"{'class':<20}{'times':>7}{'mean error':>12}")
    for one in fitted.residuals:
        say(f"{one.what:<20}{one.rows:>7}{one.error:>12.1%}")


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, fed with lines "NUMBER OF LABEL"; nothing elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from planner.report.console import PlainConsole

    console = PlainConsole(file=sys.stderr, quiet=not sys.stderr.isatty())
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting processes", total=None)

        def on_line(line: str) -> None:
            number, _, rest = line.partition(" ")
            count, _, label = rest.partition(" ")
            if number.isdigit() and count.isdigit():
                progress.update(task, completed=int(number), total=int(count), description=label)

        yield on_line
