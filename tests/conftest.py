"""Settings that all tests share.

Property tests draw the same examples on every run, so that a red build is red for everybody. To look for new
counterexamples: `pytest tests/property --hypothesis-profile=explore`.

Where tests run in several processes (`-n 2 --dist loadfile` of pytest-xdist, as in the Makefile), those of one file
stay together, as they share what was traced for them. Marks of groups would not be heeded: `--dist loadgroup` does
nothing under pytest 9.2 (pytest-xdist #1386).
"""

import pytest
from hypothesis import settings

from tests import suite_times

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="append what each phase of each test took, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    suite_times.register(config)
