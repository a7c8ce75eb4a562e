"""One run of ranks after the other, until the steps are done.

    a rank fails             restart on the same plan, from the last state replica or checkpoint
    other devices            the ranks end after a saved step; restart on a plan for that number (`--elastic`)
    an error on purpose      end: it would occur again

Failures count only if no step was made between them; a run that makes progress may be interrupted any number of times.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hardware_profiles.foreign import AbsentFileError, ForeignTextError, read_text
from planner.errors import PlannerError, RequestError, RunError
from planner.plan.plan import Plan
from runtime.processes.progress import NoticeReport, Report, RestartReport, StepReport
from runtime.recovery.replanning import Plans

DEVICES = "devices"
"""The file beside the checkpoints that contains the number of devices."""

_LARGEST = 2**10  # maximum bytes of that file


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The inputs of the next run of ranks: whether it is the first, the path of its plan (None for the user's), and the
    function that tells it to end."""

    first: bool
    plan: Plan
    path: Path | None
    leave: Callable[[], bool]


@dataclass(kw_only=True)
class Supervisor:
    """Keeps a run of `steps` steps going.

    `start` runs the ranks of an attempt until they end, and raises RunError where they fail; their reports go to the
    supervisor's `see`. `restarts` is the number of consecutive failures without a step that is tolerated. `plans` and
    `folder` are those of an elastic run. `tell` receives the reports of restarts.
    """

    start: Callable[[Attempt], int]
    plan: Plan
    steps: int
    restarts: int
    tell: Callable[[Report], None]
    plans: Plans | None = None
    folder: Path | None = None
    done: int = field(default=0, init=False)  # the last completed step
    _refused: str = field(default="", init=False)  # why the file of devices could not be read in the last check
    _told: str = field(default="", init=False)

    def see(self, report: Report) -> None:
        """Record the progress of the ranks."""
        if isinstance(report, StepReport) and report.trouble is None:
            self.done = max(self.done, report.step)

    def run(self) -> int:
        """Run to the end and return the exit code. Raises RunError after too many failures, and any error that the
        ranks raise on purpose."""
        failures, attempts = 0, 0
        attempt = self._attempt(attempts)
        while True:
            before = self.done
            try:
                code = self.start(attempt)
            except RunError as error:
                if error.exit_code != 1:
                    raise
                failures = 1 if self.done > before else failures + 1
                if failures > self.restarts:
                    raise RunError(
                        f"{error}; failed {_times(failures)} without completing a step (--restarts)"
                    ) from error
                why = str(error)
            else:
                if code or self.done >= self.steps:
                    return code
                failures, why = 0, "the number of devices changed"
            attempts += 1
            attempt = self._attempt(attempts)
            devices = attempt.plan.cluster.devices
            self.tell(RestartReport(restart=attempts, step=self.done, devices=devices, reason=why))

    def _attempt(self, number: int) -> Attempt:
        if self.plans is None or self.folder is None:
            return Attempt(first=not number, plan=self.plan, path=None, leave=lambda: False)
        plans, folder, first = self.plans, self.folder, self.plan.cluster.devices
        there = devices_of(folder, self.plans.allowed.most)
        plan = plans.most(there)
        used = plan.cluster.devices

        def leave() -> bool:
            try:
                now = devices_of(folder, plans.allowed.most)
            except RequestError as error:
                self._tell_once(str(error))
                return False
            self._refused = ""
            try:
                return now != there and plans.most(now).cluster.devices != used
            except PlannerError:
                return False  # no plan exists for so few devices: the ranks continue as long as they can

        return Attempt(first=not number, plan=plan, path=None if used == first else plans.path(used), leave=leave)

    def _tell_once(self, fault: str) -> None:
        """Report an error in the file of devices, unless it was only half written when it was read."""
        if fault == self._refused and fault != self._told:
            self.tell(NoticeReport(text=f"{fault}; until then the number of devices stays the same"))
            self._told = fault
        self._refused = fault


def devices_of(folder: Path, most: int) -> int:
    """The number of devices: from the file `devices` of a folder, or the accelerators of this machine, or `most` where
    neither is known. Raises RequestError for a file without a number."""
    path = folder / DEVICES
    try:
        text = read_text(path, _LARGEST).strip()
    except AbsentFileError:
        return _accelerators() or most
    except ForeignTextError as error:
        raise RequestError(f"{path}: {error}; write a number of devices, or delete the file") from error
    if not text.isdecimal() or len(text) > 9:
        raise RequestError(f"{path}: '{text[:20]}' is not a number of devices; write one, or delete the file")
    return int(text)


def _accelerators() -> int:
    import torch

    return int(torch.accelerator.device_count())


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times in a row"
