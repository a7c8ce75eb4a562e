"""Kinds of command line options, and the panels in which `--help` lists them."""

from collections.abc import Callable, Iterable
from typing import Any

import typer

from planner.cli.completion import completing

JOB = "Training job"
HAND = "Parallelism"
BLOCKS = "Sequence parallelism, recomputation, offload"
OPERATORS = "Operators"
GRADIENTS = "Gradients"
SEARCH = "Search"
OUTPUT = "Output"


def number(panel: str, text: str, default: str = "", least: int = 1, most: int | None = None) -> Any:
    return typer.Option(
        metavar="N", help=text, min=least, max=most, show_default=default or False, rich_help_panel=panel
    )


def word(
    panel: str,
    metavar: str,
    text: str,
    default: str = "",
    *names: str,
    known: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """`known` are the words that shells complete."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        show_default=default or False,
        rich_help_panel=panel,
        autocompletion=None if known is None else completing(known),
    )


def switch(panel: str, names: str, text: str) -> Any:
    return typer.Option(*names.split(), help=text, show_default=False, rich_help_panel=panel)
