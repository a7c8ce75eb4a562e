"""`plan run`: execute a plan with real processes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.errors import reporting
from planner.cli.taking import taking
from planner.cli.texts import say
from runtime.run_settings import RunSettings, Setting, asked_settings

if TYPE_CHECKING:
    from runtime.processes.progress import Report


def _option(setting: Setting) -> Any:
    """A setting as a typer option."""
    words, flag = setting.name, setting.flag
    if flag.off:
        words += f"/{flag.off}"
    given = typer.Option(words, help=flag.text, metavar=flag.metavar, min=flag.least)
    return Annotated[setting.kind | None if setting.default is None else setting.kind, given]


@taking("settings", RunSettings, {one.field: _option(one) for one in asked_settings()})
def run(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    settings: RunSettings,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per step and a summary on stdout.")] = False,
) -> None:
    """Execute a plan with real processes and compare the losses with those of the unsharded model.

    One process per device, or one rank of them where torchrun, mpirun or srun has started this one.

        plan run tiny.json --steps 5
        plan run tiny.json --steps 100 --dataset package.module:dataset --shuffle --no-check
        plan run tiny.json --steps 1000 --save runs/tiny --save-every 50 --continue --no-check
        plan run tiny.json --dataset package.module:training --evaluate package.module:validation
        plan run tiny.json --steps 0 --weights runs/tiny --evaluate package.module:validation
        plan run tiny.json --steps 1000 --save runs/tiny --elastic 2:4 --state-replicas --no-check
    """
    from runtime.launch.launch import launch

    with reporting(as_json), _shown(as_json, settings.steps) as (on_report, on_line):
        code = launch(plan_file, settings, on_report, on_line)
    raise typer.Exit(code)


OnReport = Callable[["Report"], None]
OnLine = Callable[[str], None]


@contextlib.contextmanager
def _shown(as_json: bool, steps: int) -> Iterator[tuple[OnReport, OnLine]]:
    """Where reports and other lines of the ranks go: JSON on stdout alone, a bar on a terminal, else plain lines."""
    from runtime.launch.launch import write_json, write_text
    from runtime.launchers import launched_by

    if as_json:
        yield write_json, lambda line: say(line, err=True)
    elif sys.stdout.isatty() and launched_by(os.environ) is None:
        with _bar(steps) as shown:
            yield shown
    else:
        yield write_text, say


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[tuple[OnReport, OnLine]]:
    """A bar with the last step beside it, and the summary below."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from planner.report.console import PlainConsole
    from runtime.processes.progress import RunSummary, StepReport

    console = PlainConsole()
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting the processes", total=steps)

        def on_report(report: "Report") -> None:
            if isinstance(report, StepReport):
                progress.update(task, completed=report.step, description=report.text().partition("   ")[2])
            else:
                if isinstance(report, RunSummary):
                    progress.stop()
                for line in report.lines():
                    console.print(line, soft_wrap=True)

        yield on_report, lambda line: console.print(line, soft_wrap=True)
