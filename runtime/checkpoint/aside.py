"""Marks the checkpoints that a run has left aside, because it went back to an earlier one in the same folder.

    step-000020/                         plan run PLAN --resume runs/a/step-000020 --save runs/a
    step-000025/                         the newest: saved after that
    step-000030/.plan-left-aside         "20": left aside when the run went back to step 20

Without the mark, the highest number would count as the newest checkpoint, and a restart would continue the abandoned
branch. Nothing is deleted: a checkpoint that was left aside is still loaded by its path, and is replaced when the run
saves the same step. The mark is in the checkpoint, so it goes when the checkpoint goes.
"""

from pathlib import Path

from planner.errors import CheckpointError
from runtime.run_folder.private import replace_text

ASIDE = ".plan-left-aside"
"""The file that marks a checkpoint as left aside."""

NOWHERE = -1
"""The step to which a run went back whose start is not in the folder."""


def is_aside(path: Path) -> bool:
    """Whether a checkpoint was left aside."""
    return (path / ASIDE).exists()


def left_at(path: Path) -> int | None:
    """The step to which the run went back when it left a checkpoint aside; None where it did not."""
    try:
        return int((path / ASIDE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return NOWHERE  # by hand: nothing is known about its line


def leave_aside(path: Path, back_to: int) -> None:
    """Mark a checkpoint as left aside. Raises CheckpointError where that cannot be written."""
    try:
        replace_text(path / ASIDE, f"{back_to}\n")
    except OSError as error:
        raise _fault(path, error) from error


def take_back(path: Path) -> None:
    """Remove the mark. Raises CheckpointError where that fails."""
    try:
        (path / ASIDE).unlink(missing_ok=True)
    except OSError as error:
        raise _fault(path, error) from error


def _fault(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path / ASIDE}: cannot be written: {error.strerror}; save into another folder with --save, or repair it"
    )
