"""Unexpected errors as a part of one line."""

from planner.errors import PlannerError

_LONGEST = 400


def described(error: Exception) -> str:
    """The message of an error, with its class where it was not written for users."""
    said = " ".join(str(error).split())[:_LONGEST]
    if said and isinstance(error, PlannerError | ValueError):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
