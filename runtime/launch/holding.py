"""What `plan run` holds on this machine while it runs: the lock of the checkpoint folder, and the state replicas in
memory, which are not needed after its end."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from runtime.processes.progress import NoticeReport, Report
from runtime.run_settings import RunSettings
from runtime.stopping import stopped_by_signals


@contextlib.contextmanager
def holding_folder(settings: RunSettings, tell: Callable[[Report], None]) -> Iterator[RunSettings]:
    """Lock the checkpoint folder of a run, and give its ranks the token. At the end, also on SIGTERM and SIGHUP,
    release the lock and delete the state replicas of the run. `tell` receives notices about what was found there.
    Replicas that other runs left on this host are deleted.

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
