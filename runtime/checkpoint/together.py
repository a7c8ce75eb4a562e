"""Runs work that may fail on one rank, so that all ranks raise the same error."""

from collections.abc import Callable
from typing import Any, TypeVar

from planner.errors import CheckpointError
from runtime.comm.agreement import Finding, first_of_all
from runtime.comm.exchange import rank_number, told_by_first, world

_T = TypeVar("_T")


def together(work: Callable[[], None]) -> None:
    """Do a rank's work; where it fails on some ranks, all raise the CheckpointError of the first of them.
    Collective."""
    own = []
    try:
        work()
    except CheckpointError as error:
        own = [Finding(moment=(rank_number(),), message=str(error))]
    found = first_of_all(own)
    if found is not None:
        raise CheckpointError(found.message)


def said_by_first(make: Callable[[], _T], kind: Any) -> _T:
    """The value that rank 0 makes, on every rank; its type must be one that `runtime.comm.exchange` can send. Where
    `make` fails, all ranks raise its CheckpointError. Collective."""
    said: list[_T] = []

    def first() -> None:
        if rank_number() == 0:
            said.append(make())

    together(first)
    return told_by_first(said[0] if said else None, kind) if world() > 1 else said[0]
