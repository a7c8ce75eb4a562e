"""A step that was left in the middle: nothing follows it, and the next call says what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch

from planner.errors import CheckpointError, NonFiniteError, RunError
from runtime import Checkpoints
from runtime.checkpoint import writing
from tests.refusals import refused
from tests.unit.runtime.test_finiteness import step_of

X = torch.ones(4, 8)
AFTER: dict[str, Any] = {
    "step": lambda step, folder: step(X),
    "window": lambda step, folder: step.window([X]),
    "accumulate": lambda step, folder: step.accumulate(X),
    "evaluate": lambda step, folder: step.evaluate(X),
    "save": lambda step, folder: Checkpoints(folder).save(step),
}


@pytest.mark.parametrize("aborted", ["step", "evaluate"])
def test_nothing_follows_a_step_that_was_aborted(aborted: str, tmp_path) -> None:
    step = step_of(lambda x, w: x * w)
    sound = step.rank.compute

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room")

    step.rank.compute = broken  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no room"):
        AFTER[aborted](step, tmp_path)
    step.rank.compute = sound  # type: ignore[method-assign]
    for follow in AFTER.values():
        with refused(RunError, "aborted", "MemoryError", "no room", "start the processes again", "--continue"):
            follow(step, tmp_path / "run")


def test_a_batch_that_is_refused_and_a_loss_that_is_not_finite_abort_nothing() -> None:
    step = step_of(lambda x, w: torch.log(x * w))
    with pytest.raises(Exception, match="shape"):
        step(torch.ones(4, 9))
    with pytest.raises(NonFiniteError):
        step(-X)
    assert step(X) == 0.0
    assert step.steps == 1


def test_whatever_fails_in_the_thread_that_saves_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    step = step_of(lambda x, w: x * w)
    step(X)

    def broken(*args: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(writing, "write_tensors", broken)
    saving = Checkpoints(tmp_path)
    saving.save(step)
    with refused(CheckpointError, "cannot be written", "MemoryError", "no room"):
        saving.wait()
    saving.close()
