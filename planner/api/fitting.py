"""`planner.fit`: a hardware profile, corrected by measured runs of plans."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.corrections import corrected_profile
from hardware_profiles.run_record import load_run_record
from planner.api.checks import file_path, names, public, word
from planner.api.kinds import kind_of
from planner.errors import RequestError
from planner.plan.compare.corrections import Factor, check_profile, corrections_of, factors_of
from planner.plan.compare.measured import Clock
from planner.plan.writing import check_place, write_atomically


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A corrected profile.

    Attributes:
        path: its file, which `hardware` of other functions takes.
        corrected: name or file of the profile that was corrected.
        factors: by how much each kind of its numbers was multiplied, and how many runs stand behind that.
    """

    path: Path
    corrected: str
    factors: tuple[Factor, ...]

    def __repr__(self) -> str:
        said = ", ".join(f"{one.name} {one.value:.3g}" for one in self.factors if one.value is not None)
        return f"Fitted({str(self.path)!r}, {self.corrected!r} times {said})"


@public
def fit(
    runs: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
    *,
    hardware: str | None = None,
    clock: Clock = "wall",
) -> Fitted:
    """Correct a profile by measured runs of plans, and write it.

    Args:
        runs: the records that `plan run --measure` wrote, all of one profile and one machine.
        path: where to write the corrected profile, a TOML file.
        hardware: the file of the profile, where the runs were predicted by one in a file.
        clock: "wall", or "cpu" for processes that share cores.

    Raises RequestError for runs of several profiles or machines, a run given twice, and runs too noisy to say anything;
    PlanFileError where the profile cannot be written.
    """
    if not isinstance(runs, list | tuple) or not runs:
        given = "empty" if isinstance(runs, list | tuple) else kind_of(runs)
        raise RequestError(f"runs is {given}: give a list of the records that plan run --measure wrote")
    files = [file_path("runs", one) for one in runs]
    names(hardware=hardware)
    word("clock", clock, ("wall", "cpu"))
    written = file_path("path", path)
    if written.suffix != ".toml":
        raise RequestError(f"path = {written}: the name of a profile must end in .toml, or no search can find it")
    if written.resolve() in (one.resolve() for one in files):
        raise RequestError(f"path = {written}: the profile would overwrite a record")
    check_place(written, (hardware,))
    records = [load_run_record(one) for one in files]
    factors = factors_of(records, clock)
    profile = hardware or records[0].plan.profile
    check_profile(records, profile)
    corrections = corrections_of(records, factors, clock)
    comment = f"{profile}, corrected by {corrections.source}."
    write_atomically(written, corrected_profile(profile, corrections, written.stem, comment))
    return Fitted(path=written, corrected=profile, factors=factors)
