"""What to do with a step whose loss or gradients are not finite, or whose loss spikes.

    loss ─────────────┐
    reduced gradients ┴─> judge, the same on every rank ─┬─ fine      update
                                                         ├─ stop      an error, before the update
                                                         ├─ skip      no update: weights, states and buffers stay
                                                         └─ rollback  no update, and back to an earlier state

A loss *spikes* if it is more than `spike_factor` times the median of the losses of the last `spike_window` completed
steps. There are no spikes before that many steps, or if the median is not positive. If anything else than stopping is
requested, one message of four bytes per step makes all ranks agree, and gradients are read once more.

A skipped step does not count: the next one has its number, and so its learning rate and its random numbers. Its batch
is not used again. Gradients are checked after their reduction, so that an overflow in the sum is seen as well.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from planner.errors import LossSpikeError, NonFiniteError
from runtime.guard_settings import GuardSettings, GuardState
from runtime.waiting import waiting_for

_FINE, _SPIKE, _GRADIENT, _LOSS = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why a step was not made, the error to raise if the run ends, and what to do with the run: "skip" or
    "rollback"."""

    action: str
    message: str
    error: type[LossSpikeError] | type[NonFiniteError]


class LossGuard:
    """Judges the steps of one rank, with the same verdict on all ranks."""

    def __init__(self, settings: GuardSettings, device: torch.device) -> None:
        self.settings = settings
        self._device = device
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._in_a_row = 0

    def state(self) -> GuardState | None:
        """Its state, for a checkpoint; None where nothing is checked."""
        return GuardState(losses=tuple(self._losses), in_a_row=self._in_a_row) if self.settings.looks else None

    def load_state(self, state: GuardState | None) -> None:
        """Load a state of `state`, at most as many losses as the window has; None clears it."""
        known = GuardState(losses=(), in_a_row=0) if state is None else state
        self._losses = deque(known.losses, maxlen=self.settings.spike_window)
        self._in_a_row = known.in_a_row

    def judge(self, step: int, loss: float, gradients: Iterable[torch.Tensor]) -> Trouble | None:
        """Whether step number `step` (from 1) may be made: None, or why not. Collective, if the settings require
        checks.

        Raises LossSpikeError where a spike is to stop the run, and either error after too many bad steps in a row.
        """
        settings = self.settings
        if not settings.looks:
            return None
        verdict = self._agreed(self._verdict(loss, gradients))
        if verdict == _FINE:
            self._losses.append(loss)
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        why = self._why(verdict, loss)
        kind = LossSpikeError if verdict == _SPIKE else NonFiniteError
        action = settings.on_spike if verdict == _SPIKE else settings.on_nonfinite
        if action == "stop":
            raise kind(f"step {step}: {why}; this step has changed no weight")
        if self._in_a_row >= settings.in_a_row:
            raise kind(f"step {step}: {self._in_a_row} batches in a row made no update, the last because {why}")
        return Trouble(action=action, message=why, error=kind)

    def _verdict(self, loss: float, gradients: Iterable[torch.Tensor]) -> int:
        if not math.isfinite(loss):
            return _LOSS
        if self.settings.on_nonfinite != "stop":
            bad = torch.zeros((), dtype=torch.bool, device=self._device)
            for gradient in gradients:
                bad = bad | (~gradient.isfinite()).any().to(bad.device)
            if bad:
                return _GRADIENT
        return _SPIKE if self.settings.on_spike != "ignore" and self._leaps(loss) else _FINE

    def _leaps(self, loss: float) -> bool:
        if len(self._losses) < self.settings.spike_window:
            return False
        median = statistics.median(self._losses)
        return median > 0 and loss > self.settings.spike_factor * median

    def _agreed(self, verdict: int) -> int:
        """The worst verdict of all ranks."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return verdict
        worst = torch.tensor(verdict, dtype=torch.int32, device=self._device)
        waiting_for(dist.all_reduce, worst, dist.ReduceOp.MAX, dist.group.WORLD)
        return int(worst)

    def _why(self, verdict: int, loss: float) -> str:
        if verdict == _LOSS:
            return f"the loss is {loss}"
        if verdict == _GRADIENT:
            return f"the loss is {loss:g}, and a gradient is not finite"
        median, settings = statistics.median(self._losses), self.settings
        return (
            f"the loss is {loss:g}, more than {settings.spike_factor:g} times the median {median:g} of the last"
            f" {settings.spike_window} steps"
        )
