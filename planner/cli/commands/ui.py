"""`plan ui`: the search in a browser."""

import atexit
import html
import os
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.cli.errors import reporting
from planner.cli.spoken import model_of
from planner.cli.texts import say

if TYPE_CHECKING:
    from collections.abc import Callable


def ui(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A model of your own that the page may choose. It is package.module:factory or a config.json; without"
            " it the page plans models of the zoo.",
            callback=model_of,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="N", help="Port to listen on; 0 takes a free one.", min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Search in a browser: choose, see the best plan as it is found, pin, compare, download.

    The page is served to this machine alone (127.0.0.1), at an address with a token. Ctrl-C ends it.

        plan ui
        plan ui --model package.module:factory --no-browser
    """
    with reporting():
        from planner.cli.graph_folder import cache_folder
        from planner.ui import serve

        folder = cache_folder(None)
        serve(port, model, None if folder is None else str(folder), _opened(browser))


def _opened(browser: bool) -> "Callable[[str], None]":
    def opened(address: str) -> None:
        say(f"plan ui is at {address}\nCtrl-C ends it")
        if browser:
            webbrowser.open(_leading_to(address))

    return opened


def _leading_to(address: str) -> str:
    """The address of a file that redirects to the page and that only the owner can read: everybody on the machine could
    read the token in a browser's arguments. It is deleted when the command ends."""
    handle, path = tempfile.mkstemp(prefix="plan-ui-", suffix=".html")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(address)}">')
    atexit.register(Path(path).unlink, missing_ok=True)
    return Path(path).as_uri()
