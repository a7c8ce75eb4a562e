"""Several ranks may each have something to say; all of them then say what happened first."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from runtime.comm.exchange import gather

Moment = tuple[int | str, ...]
"""When something happened, in an order that all ranks share: numbers, or names, of one length."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """Something that a rank has found, and when in the order of execution that was."""

    moment: Moment
    message: str


def first_of_all(found: Iterable[Finding]) -> Finding | None:
    """The first finding of any rank, the same on every rank; None where nobody has one. Collective."""
    own = min(found, default=None)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    every = [own] if alone else gather(own, Finding | None)
    return min((finding for finding in every if finding is not None), default=None)
