"""`plan fit RUN...`: a profile corrected by measured runs of plans."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from planner.cli.output import write_json
from planner.cli.texts import say

if TYPE_CHECKING:
    from planner.plan.compare.measured import Clock

SCHEMA_VERSION = 1  # of the object that `plan fit RUN... --json` prints

_NAMES = {"update": "optimizer", "messages": "communication"}
"""Factors that the terminal names as in the report of a plan."""


def is_run(path: Path) -> bool:
    """Whether a file is a measured run. False for a file that cannot be read: its reader raises the error."""
    from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
    from hardware_profiles.run_record import is_run_record

    try:
        return is_run_record(parse_json(read_text(path)))
    except ForeignTextError:
        return False


def fit_runs(files: list[Path], output: Path, hardware: str | None, clock: "Clock", as_json: bool) -> None:
    """Write the corrected profile of the runs, and print the factors and the number of runs behind each."""
    from planner.api.fitting import fit

    found = fit(files, output, hardware=hardware, clock=clock)
    if as_json:
        content = {
            "schema_version": SCHEMA_VERSION,
            "profile": output.stem,
            "profile_file": str(output),
            "corrected": found.corrected,
            "clock": clock,
            "factors": [asdict(one) for one in found.factors],
        }
        write_json("plan fit RUN", content)
        return
    say(f"{'part':<16}{'times as fast':>15}{'runs':>6}   range")
    for one in found.factors:
        value = "-" if one.value is None else f"{one.value:.3g}"
        ends = "" if one.runs < 2 else f"   {one.low:.3g} to {one.high:.3g}"
        say(f"{_NAMES.get(one.name, one.name):<16}{value:>15}{one.runs:>6}{ends}")
    say(f"profile: {output} ({found.corrected}, corrected)")
