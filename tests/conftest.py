"""Settings that all tests share.

Property tests draw the same examples on every run, so that a red build is red for everybody. To look for new
counterexamples: `pytest tests/property --hypothesis-profile=explore`.

Where tests run in several processes (`-n 2` of pytest-xdist, as in the Makefile), those of one file stay together, as
they share what was traced for them. So do all tests in `distributed/`, which start processes of their own: each of them
asks for all cores of a small machine, and for ports.
"""

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("repeatable")


class ByFile(LoadScopeScheduling):
    """Gives whole files to processes, and the whole folder `distributed/` to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return "tests/distributed" if path.startswith("tests/distributed/") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """The scheduler of every parallel run (`--dist loadgroup` does nothing under pytest 9.2: pytest-xdist #1386)."""
    return ByFile(config, log)
