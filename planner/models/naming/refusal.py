"""What is said where no class of transformers computes what a model does."""

from typing import NoReturn

from planner.errors import ModelError


def refuse(what: str) -> NoReturn:
    """Raise ModelError that says what differs."""
    raise ModelError(f"no class of transformers computes the same as this model, so that it has no names there: {what}")
