"""What may fail on one rank, so that all ranks say the same."""

from collections.abc import Callable

import torch.distributed as dist

from planner.errors import CheckpointError
from runtime.agreement import Finding, first_of_all
from runtime.exchange import told_by_first


def together(work: Callable[[], None]) -> None:
    """Do a rank's work; where it fails on some, raise the CheckpointError of the first of them on all. Collective."""
    own = []
    try:
        work()
    except CheckpointError as error:
        own = [Finding(moment=(rank_number(),), message=str(error))]
    found = first_of_all(own)
    if found is not None:
        raise CheckpointError(found.message)


def said_by_first(make: Callable[[], str]) -> str:
    """What rank 0 makes, on every rank; where that fails, all raise its CheckpointError. Collective."""
    said: list[str] = [""]

    def first() -> None:
        said[0] = make() if rank_number() == 0 else ""

    together(first)
    return told_by_first(said[0], str) if world() > 1 else said[0]


def rank_number() -> int:
    """The number of this process among all of them."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1
