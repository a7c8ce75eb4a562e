"""Makes the pictures of the documents anew, from what the commands really print: `make pictures`.

    plan-llama70b.svg       the report of the main job as a terminal shows it
    report-llama70b.png, report-llama70b-dark.png    the top of the page of `plan report` for a pipelined plan of it
    ui-light.png, ui-dark.png                        `plan ui` with two plans of Llama 8B side by side
    report-llama70b-narrow*.png, ui-narrow-*.png     the same on a telephone

All but the first need Chromium on PATH; `make pictures ONLY=ui` makes some of them (terminal, report, ui).
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from planner.ui import Server

Scheme = Literal["light", "dark"]

HERE = Path(__file__).resolve().parent
JOB = ("--model", "llama70b", "--devices", "64")
WIDTH = 100  # columns
WIDE, NARROW = 1400, 420
"""Pixels that the pages are wide."""
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (22, 27, 34),
        (248, 113, 113),
        (74, 222, 128),
        (250, 204, 21),
        (96, 165, 250),
        (192, 132, 252),
        (45, 212, 191),
        (209, 213, 219),
    ],
)
SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: "Fira Code", ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: system-ui, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""A frame for rich without its web fonts: a picture in a document loads nothing."""


def plan(*arguments: str, folder: Path) -> str:
    """What a command prints on a terminal with colours."""
    command = [sys.executable, "-m", "planner.cli.main", *arguments]
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def terminal(folder: Path) -> None:
    """The main job, with the command above."""
    printed = plan(*JOB, folder=folder)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(f"$ plan {' '.join(JOB)}\n{printed}".rstrip()))
    text = console.export_svg(title=f"plan {' '.join(JOB)}", theme=THEME, code_format=SVG, unique_id="plan")
    (HERE / "plan-llama70b.svg").write_text(text, encoding="utf-8")


def browsers() -> str:
    """The path of Chromium."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("no chromium on PATH: docs/*.png are left as they are")
    return found


@contextlib.contextmanager
def opened(address: str, height: int) -> Iterator[Page]:
    """A page in a browser, wide and light."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browsers(), args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": WIDE, "height": height}, color_scheme="light")
        view.set_default_timeout(600_000)
        view.goto(address)
        yield view
        browser.close()


def pictures(view: Page, names: dict[tuple[int, Scheme], str], height: int) -> None:
    """The top of a page at each width, light and dark."""
    for (width, scheme), name in names.items():
        view.set_viewport_size({"width": width, "height": height if width == WIDE else 2 * width})
        view.emulate_media(color_scheme=scheme)
        view.wait_for_timeout(1000)
        view.evaluate("window.scrollTo(0, 0)")
        view.screenshot(path=HERE / name)


def report(folder: Path) -> None:
    """A pipeline, whose timeline is worth a look."""
    plan(*JOB, "--software", "nemo", "-o", "plan.json", folder=folder)
    plan("report", "plan.json", "-o", "page.html", "--tokens", "15T", "--price", "2.5", folder=folder)
    names: dict[tuple[int, Scheme], str] = {
        (WIDE, "light"): "report-llama70b.png",
        (WIDE, "dark"): "report-llama70b-dark.png",
        (NARROW, "light"): "report-llama70b-narrow.png",
        (NARROW, "dark"): "report-llama70b-narrow-dark.png",
    }
    with opened((folder / "page.html").as_uri(), 1000) as view:
        view.wait_for_function("document.documentElement.dataset.figures === 'drawn'")
        pictures(view, names, 1000)


def ui(folder: Path) -> None:
    """The page of `plan ui`, with a plan and one that was kept beside it."""
    server = Server()
    server.start()
    with opened(server.address, 1250) as view:
        view.locator("html[data-ready=yes]").wait_for(state="attached")
        view.locator("[name=devices]").fill("8")
        view.get_by_role("button", name="Search", exact=True).click()
        view.locator("html[data-search=done]").wait_for(state="attached")
        view.get_by_role("button", name="Keep beside").click()
        view.locator("[data-degree=tensor]").select_option("2")
        view.locator("html[data-search=done]").wait_for(state="attached")
        names: dict[tuple[int, Scheme], str] = {
            (WIDE, "light"): "ui-light.png",
            (WIDE, "dark"): "ui-dark.png",
            (NARROW, "light"): "ui-narrow-light.png",
            (NARROW, "dark"): "ui-narrow-dark.png",
        }
        pictures(view, names, 1250)
    server.close()


MADE = {"terminal": terminal, "report": report, "ui": ui}


def main() -> None:
    chosen = sys.argv[1:] or list(MADE)
    for name in chosen:
        if name not in MADE:
            sys.exit(f"{name}: there are {', '.join(MADE)}")
        with tempfile.TemporaryDirectory() as folder:
            MADE[name](Path(folder))


if __name__ == "__main__":
    main()
