"""`plan run`: execute a plan with real processes."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.errors import reporting
from planner.cli.showing import ExecutedModel

if TYPE_CHECKING:
    from runtime.progress import Report


def run(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the synthetic data and the order.")] = 0,
    check: Annotated[bool, typer.Option(help="Also run the unsharded model and compare the losses.")] = True,
    model: ExecutedModel = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="[bold]package.module:factory[/bold] of a dataset whose items are what the model takes, one sample"
            " each; synthetic data where not given."
        ),
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Shuffle the samples of --data.")] = False,
    full_batch: Annotated[
        bool,
        typer.Option(
            "--full-batch/--own-samples",
            help="Every rank reads the whole batch of --data, or only the samples of its pieces.",
        ),
    ] = True,
    workers: Annotated[int, typer.Option(help="Processes that read --data, per rank.", min=0)] = 0,
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of checkpoints: any plan can go on from them.")
    ] = None,
    save_every: Annotated[
        int, typer.Option(help="Steps from one checkpoint, or copy to roll back to, to the next.", min=1)
    ] = 100,
    keep: Annotated[int, typer.Option(help="How many of the last checkpoints stay.", min=1)] = 3,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Go on from a checkpoint, or the newest of a folder; --steps counts on."),
    ] = None,
    go_on: Annotated[
        bool, typer.Option("--continue", help="Go on from the newest checkpoint in --save, where there is one.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Start from the model of a checkpoint, or of files of Hugging Face."),
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Start again from the last checkpoint where a process breaks down, N times in a row without a step.",
            min=0,
        ),
    ] = None,
    elastic: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Go on with fewer devices, or more again, on a plan that is searched for them; DIR/devices says how"
            " many there are.",
        ),
    ] = None,
    copies: Annotated[
        bool, typer.Option("--copies", help="Keep copies of the state in memory, so that at most one step is lost.")
    ] = False,
    cast: Annotated[
        bool, typer.Option("--cast", help="Convert what --weights loads to the precision of the plan.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress of any rank after which the run is ended.")
    ] = 600.0,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="INTERFACE",
            help="Network interface on which processes listen: its name, an address of it, or a network such as"
            " [bold]10.0.0.0/24[/bold]. Loopback where all of them are on this machine.",
        ),
    ] = None,
    on_nonfinite: Annotated[
        str,
        typer.Option(
            help="What becomes of a step whose loss is not finite: stop, skip or rollback (gradients count too)."
        ),
    ] = "stop",
    on_spike: Annotated[
        str, typer.Option(help="What becomes of a step whose loss leaps: ignore, stop, skip or rollback.")
    ] = "ignore",
    spike_factor: Annotated[float, typer.Option(help="A loss leaps above so many times the median...")] = 2.0,
    spike_window: Annotated[int, typer.Option(help="...of the last so many steps.")] = 32,
    rollbacks: Annotated[
        int, typer.Option(help="Rollbacks that are borne without a step beyond the furthest one.", min=1)
    ] = 3,
    servers: Annotated[
        int, typer.Option(help="Parameter servers to start, where the plan has tables on servers.", min=1)
    ] = 2,
    server_folder: Annotated[
        Path | None,
        typer.Option(help="Where those keep their files; under torchrun, where running ones are found."),
    ] = None,
    general: Annotated[
        bool,
        typer.Option("--general", help="Run operators one by one, by the general executor: the reference, and slower."),
    ] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Fuse chains of elementwise operators by torch.compile.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per step and a summary on stdout.")] = False,
) -> None:
    """Execute a plan with real processes and compare the losses with those of the unsharded model.

    One process per device, or one rank of them where torchrun, mpirun or srun has started this one.

    [bold]plan run tiny.json --steps 5[/bold]

    [bold]plan run tiny.json --steps 100 --data package.module:dataset --shuffle --no-check[/bold]

    [bold]plan run tiny.json --steps 1000 --save runs/tiny --save-every 50 --continue --no-check[/bold]

    [bold]plan run tiny.json --steps 1000 --save runs/tiny --elastic 2:4 --copies --no-check[/bold]
    """
    from runtime.launch import launch
    from runtime.run_settings import RunSettings

    settings = RunSettings(
        steps=steps, seed=seed, check=check, model=model, data=data, shuffle=shuffle, full_batch=full_batch,
        workers=workers, timeout=timeout, listen=listen, on_nonfinite=on_nonfinite, on_spike=on_spike,
        spike_factor=spike_factor, spike_window=spike_window, rollbacks=rollbacks,
        save=_text(save), save_every=save_every, keep=keep,
        resume=_text(resume), go_on=go_on, weights=_text(weights), cast=cast, servers=servers,
        server_folder=_text(server_folder), restarts=restarts, elastic=elastic, copies=copies, lowered=not general,
        compiled=compile_,
    )  # fmt: skip
    with reporting(as_json), _shown(as_json, steps) as (on_report, on_line):
        code = launch(plan_file, settings, on_report, on_line)
    raise typer.Exit(code)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


OnReport = Callable[["Report"], None]
OnLine = Callable[[str], None]


@contextlib.contextmanager
def _shown(as_json: bool, steps: int) -> Iterator[tuple[OnReport, OnLine]]:
    """How reports and all other lines of the ranks are shown: JSON on a clean stdout, a bar on a terminal, else plain
    lines."""
    from runtime.launch import write_json, write_text
    from runtime.launchers import launched_by

    if as_json:
        yield write_json, lambda line: typer.echo(line, err=True)
    elif sys.stdout.isatty() and launched_by(os.environ) is None:
        with _bar(steps) as shown:
            yield shown
    else:
        yield write_text, typer.echo


@contextlib.contextmanager
def _bar(steps: int) -> Iterator[tuple[OnReport, OnLine]]:
    """A bar with the last step beside it; the summary below."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from runtime.progress import RunSummary, StepReport

    console = Console(highlight=False)
    columns = (
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(20),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
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
                    console.print(line, markup=False, soft_wrap=True)

        yield on_report, lambda line: console.print(line, markup=False, soft_wrap=True)
