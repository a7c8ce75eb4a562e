"""Several ranks may each have found something; all ranks then report the finding that came first."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist

from runtime.comm.exchange import gather

Moment = tuple[int | str, ...]
"""When something happened, in an order that all ranks share: numbers or names; all orders have the same length."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """A finding of a rank, and its time in the order of execution."""

    moment: Moment
    message: str


def first_of_all(found: Iterable[Finding]) -> Finding | None:
    """The first finding of any rank, the same on every rank; None where no rank has one. Collective."""
    own = min(found, default=None)
    alone = not dist.is_initialized() or dist.get_world_size() == 1
    every = [own] if alone else gather(own, Finding | None)
    return min((finding for finding in every if finding is not None), default=None)
