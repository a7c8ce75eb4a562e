"""A headless Chromium of the system, driven by playwright; where there is none these tests are skipped."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.report.html import page as page_text
from tests.unit.report.reports import reported

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """The browser; it is found on PATH."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"no {' or '.join(NAMES)} on PATH; install chromium to test pages in a browser")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a pipeline on disk."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page_text(reported("several groups").report), encoding="utf-8")
    return path
