"""A run that cannot be evaluated."""

from planner.errors import RequestError


class UnsupportedError(RequestError):
    """A run that the planner cannot express; the message is the reason."""
