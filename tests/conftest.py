"""Settings that all tests share.

Property tests draw the same twenty examples on every run, so that a red build is red for everybody, and soon: what
fails is not made smaller, which takes minutes. To look for new counterexamples, and small ones:
`pytest tests/property --hypothesis-profile=explore`.

Where tests run in several processes (`-n 2 --dist loadfile` of pytest-xdist, as in the Makefile), those of one file
stay together, as they share what was traced for them. Marks of groups would not be heeded: `--dist loadgroup` does
nothing under pytest 9.2 (pytest-xdist #1386).
"""

import gc
import os
import sys
from collections.abc import Iterator
from functools import cache

import pytest
import typer.testing
from hypothesis import Phase, settings

from tests import suite_times
from tests.long_lists import mark_long_lists
from tests.traced_once import traced_once

# Test runs make many objects that live long; looking through all of them again and again takes 7% of the time.
gc.set_threshold(100_000, 50, 1000)

# Compiled tests are kept, also where Python is told not to: every process would rewrite their assertions for seven
# seconds. The Makefile says so to Python itself, for the processes that tests start, too.
sys.dont_write_bytecode = False

# Traced graphs of earlier runs are not what is tested; who tests them says where they are.
os.environ["PLAN_GRAPH_CACHE"] = "none"

# The tree of commands is made once for all commands that run in this process, not for each.
typer.testing._get_command = cache(typer.testing._get_command)

settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=20, phases=(Phase.explicit, Phase.generate)
)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-times", metavar="FILE", help="append what each phase of each test took, as lines of JSON")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give this case an id; processes must collect the same names")
    mark_long_lists(items)


@pytest.fixture(scope="session", autouse=True)
def zoo_traced_once() -> Iterator[None]:
    """Models of the zoo are traced once for all files."""
    with traced_once():
        yield


def pytest_collection_finish() -> None:
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    suite_times.register(config)
