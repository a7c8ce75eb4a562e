"""Kinds of command line options, and the panels in which `--help` lists them."""

from collections.abc import Callable, Iterable
from typing import Any

import typer

from planner.cli.completion import completing
from planner.cli.spoken import parse_counted

JOB = "Training job"
HAND = "Parallelism"
OUTPUT = "Output"
SEARCH = "Search and memory"
OVERLAP = "Overlap"
CONTEXT = "Context parallelism, all-to-all, experts"
GRADIENTS = "Gradients and optimizer states"
OPERATORS = "Operators and parameters"
FP8 = "fp8"
LORA = "Low-rank adapters (LoRA)"


def number(panel: str, text: str, default: str = "", least: int = 1, most: int | None = None) -> Any:
    return typer.Option(
        metavar="N", help=text, min=least, max=most, show_default=default or False, rich_help_panel=panel
    )


def count(panel: str | None, option: str, text: str, most: int) -> Any:
    """A number that may have a unit, such as 32k; without a panel it is listed among the options of the command."""
    return typer.Option(
        metavar="N",
        help=text,
        parser=lambda given: parse_counted(option, given, most=most),
        show_default=False,
        rich_help_panel=panel,
    )


def word(
    panel: str,
    metavar: str,
    text: str,
    default: str = "",
    *names: str,
    known: Callable[[], Iterable[str]] | None = None,
    meant: Callable[[str | None], str | None] | None = None,
) -> Any:
    """A word; `known` are the words that shells complete, `meant` resolves an alias."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        show_default=default or False,
        rich_help_panel=panel,
        callback=meant,
        autocompletion=None if known is None else completing(known),
    )


def switch(panel: str, names: str, text: str) -> Any:
    return typer.Option(*names.split(), help=text, show_default=False, rich_help_panel=panel)
