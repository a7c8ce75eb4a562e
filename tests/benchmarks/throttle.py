"""A slower link between local processes: every collective takes as long as its bytes would at some bandwidth.

Who waits sleeps, as one does who waits for a network, and leaves its core to others. Only what the executor sends
inside a micro-batch is slowed down, blocking or under way.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runtime.comm import async_collectives as flight
from runtime.comm import collectives
from runtime.comm.collectives import Collective

SHARES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "reduce": 1.0}
"""How often the whole tensor passes a process, but for its own part."""


class _Later:
    """A collective that is not there before a moment."""

    def __init__(self, work: Any, moment: float) -> None:
        self._work, self._moment = work, moment

    def wait(self) -> None:
        self._work.wait()
        _sleep_until(self._moment)


def throttle(bandwidth: float) -> None:
    """Slow this process's collectives down to so many bytes a second."""
    for name in SHARES.keys() & vars(collectives).keys():  # what is blocking, too
        setattr(collectives, name, _blocking(getattr(collectives, name), name, bandwidth))
    flight._COALESCED = {name: _coalesced(make, name, bandwidth) for name, make in flight._COALESCED.items()}


def _blocking(original: Callable[..., torch.Tensor], name: str, bandwidth: float) -> Callable[..., torch.Tensor]:
    def slower(piece: torch.Tensor, *settings: Any) -> torch.Tensor:
        moment = time.perf_counter()
        result = original(piece, *settings)
        (group,) = (one for one in settings if isinstance(one, dist.ProcessGroup))
        _sleep_until(moment + _seconds(name, [piece], group.size(), bandwidth))
        return result

    return slower


def _coalesced(original: Callable[..., Collective], name: str, bandwidth: float) -> Callable[..., Collective]:
    def slower(pieces: list[torch.Tensor], steps: Any, group: Any) -> Collective:
        seconds, made = _seconds(name, pieces, group.size(), bandwidth), original(pieces, steps, group)

        def call(**options: Any) -> Any:
            moment = time.perf_counter() + seconds
            return _Later(made.call(**options), moment)

        return made._replace(call=call)

    return slower


def _seconds(name: str, pieces: list[torch.Tensor], processes: int, bandwidth: float) -> float:
    held = sum(piece.nbytes for piece in pieces) * (processes if name == "all_gather" else 1)
    return SHARES[name] * held * (processes - 1) / processes / bandwidth


def _sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
