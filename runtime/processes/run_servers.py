"""The parameter servers of a run on this machine."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from planner.errors import RunError
from planner.plan.plan import Plan
from runtime.run_settings import RunSettings


@contextlib.contextmanager
def servers_of(plan: Plan, settings: RunSettings) -> Iterator[str | None]:
    """The parameter servers of a run on this machine, if its plan needs any; gives the folder with their addresses.
    Raises RunError, with what a server said, where the run fails because that server cannot be started."""
    if not any(place == "servers" for _, place in plan.training.update.placed):
        yield None
        return
    from runtime.servers.fleet import Fleet

    with tempfile.TemporaryDirectory(prefix="plan-servers-") as temporary:
        folder = settings.server_folder or temporary
        with Fleet(Path(folder), settings.servers) as fleet:
            try:
                yield folder
            except RunError:
                fleet.check()  # the ranks only know that a server does not answer
                raise
