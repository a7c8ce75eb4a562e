"""What `plan run` holds on this machine as long as it runs: the lock of the folder of checkpoints, and the state
replicas in memory, which nobody needs after its end."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from runtime.processes.progress import NoticeReport, Report
from runtime.run_settings import RunSettings
from runtime.stopping import stopped_by_signals


@contextlib.contextmanager
def holding_folder(settings: RunSettings, tell: Callable[[Report], None]) -> Iterator[RunSettings]:
    """Lock the folder of the checkpoints of a run, and give its ranks the token; at the end, also by SIGTERM and
    SIGHUP, release it and delete the state replicas of the run. `tell` gets what was found there. Replicas that other
    runs left on this host are deleted.

    Raises CheckpointError where the folder cannot be written, another run writes there, or it is a copy.
    """
    if settings.save is None:
        yield settings
        return
    from runtime.checkpoint.opening import open_run
    from runtime.recovery.replica_folder import holding, sweep

    with stopped_by_signals(), contextlib.closing(open_run(Path(settings.save))) as opened:
        origin = opened.folder.record.origin
        for note in (*opened.notes, *sweep(origin)):
            tell(NoticeReport(text=note))
        with holding(origin, wanted=settings.state_replicas):
            yield replace(settings, lock=opened.token)
