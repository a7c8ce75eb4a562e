"""What may fail on one rank, so that all ranks say the same."""

from collections.abc import Callable
from typing import Any, TypeVar

from planner.errors import CheckpointError
from runtime.comm.agreement import Finding, first_of_all
from runtime.comm.exchange import rank_number, told_by_first, world

_T = TypeVar("_T")


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


def said_by_first(make: Callable[[], _T], kind: Any) -> _T:
    """What rank 0 makes, of a type that `runtime.comm.exchange` can tell, on every rank; where that fails, all raise
    its CheckpointError. Collective."""
    said: list[_T] = []

    def first() -> None:
        if rank_number() == 0:
            said.append(make())

    together(first)
    return told_by_first(said[0] if said else None, kind) if world() > 1 else said[0]
