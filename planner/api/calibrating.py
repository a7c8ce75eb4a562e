"""`planner.calibrate`: a hardware profile of this machine, from times measured on it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hardware_profiles import dump_profile, load_measurements
from planner.api.checks import file_path, number, public
from planner.errors import RequestError, RunError
from planner.plan.writing import check_place, write_atomically

if TYPE_CHECKING:
    from costmodels.fit_machine import Residual
    from hardware_profiles import Measurements


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """A profile that was fitted to measured times.

    Attributes:
        path: its file, which `hardware` of other functions takes.
        name: of the profile.
        measurements: the file of the measured times.
        processes: that were measured at the same time; the profile is of one of them.
        residuals: for each part its number of times, and how far its predictions are from them: the mean of
            |predicted / measured - 1|.
    """

    path: Path
    name: str
    measurements: Path
    processes: int
    residuals: "tuple[Residual, ...]"

    def __repr__(self) -> str:
        return f"Calibrated({str(self.path)!r}, {self.name!r} of {self.processes} processes)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas: part, rows and mean absolute error, as a share."""
        return [{"part": one.what, "rows": one.rows, "mean_absolute": one.error} for one in self.residuals]


@public
def calibrate(
    path: str | os.PathLike[str],
    *,
    times: str | os.PathLike[str] | None = None,
    nproc: int | None = None,
    measurements: str | os.PathLike[str] | None = None,
    quick: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Calibrated:
    """Measure this machine and fit a hardware profile to it, as `plan calibrate`; or fit one to measured times, as
    `plan fit TIMES`.

    Measuring takes minutes, in processes of their own, all at once. On a CPU they share the cores: the profile
    describes one rank of a run with as many processes.

    Args:
        path: where to write the profile, a TOML file.
        times: a file of measured times, so that nothing is measured.
        nproc: processes; one per accelerator, or per core, where not given.
        measurements: where to write the measured times; beside the profile where not given.
        quick: fewer sizes, one to two minutes.
        on_progress: called with "NUMBER OF LABEL" before each case that is measured.

    Raises:
        RequestError: for a path that is no name of a profile, more processes than devices, and times that cannot be
            read, lack a class of kernels, or fit no profile.
        RunError: where a process fails.
    """
    number("nproc", nproc)
    written = file_path("path", path)
    if written.suffix != ".toml":
        raise RequestError(f"path = {written}: the name of a profile must end in .toml, or no search can find it")
    if times is not None and (nproc is not None or measurements is not None or quick):
        raise RequestError("times: these are measured; leave out nproc, measurements and quick")
    at = Path(times or measurements or written.with_suffix(".measurements.json"))
    if written.resolve() == at.resolve():
        raise RequestError(f"path = {written}: the profile would overwrite the measured times")
    check_place(written)
    if times is None:
        check_place(at)
        _measure(at, nproc, quick=quick, on_line=on_progress or (lambda _: None))
    return fitted_to(load_measurements(at), at, written)


def _measure(at: Path, nproc: int | None, *, quick: bool, on_line: Callable[[str], None]) -> None:
    from runtime.profiling.measuring import default_processes, measure

    code = measure(at, nproc or default_processes(), effort="quick" if quick else "usual", on_line=on_line)
    if code:
        raise RunError(f"measuring failed with exit code {code}; its processes say why on stderr", exit_code=code)


def fitted_to(measured: "Measurements", at: Path, path: Path) -> Calibrated:
    """Fit a profile to times of a file, and write it."""
    from costmodels.fit_machine import fit_machine

    fitted = fit_machine(measured)
    comment = (
        f"Fitted to times measured on {measured.machine.name}, {measured.date}.\n"
        f"It describes one of {measured.machine.processes} processes that work at the same time."
    )
    write_atomically(path, dump_profile(fitted.cluster, fitted.origins, comment))
    return Calibrated(
        path=path,
        name=fitted.cluster.name,
        measurements=at,
        processes=measured.machine.processes,
        residuals=fitted.residuals,
    )
