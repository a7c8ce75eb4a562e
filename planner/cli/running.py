"""`plan run`: execute a plan with real processes."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.errors import reporting


def run(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the synthetic data.")] = 0,
    check: Annotated[bool, typer.Option(help="Also run the unsharded model and compare the losses.")] = True,
) -> None:
    """Execute a plan with real processes and compare the losses with those of the unsharded model.

    One process per device (torchrun underneath), synthetic data.

    [bold]plan run tiny.json --steps 5[/bold]
    """
    from runtime.launch import launch

    with reporting():
        raise typer.Exit(launch(plan_file, steps=steps, seed=seed, check=check))
