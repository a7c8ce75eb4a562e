"""What is known of tensors, until they are changed in place."""

from typing import Any, Generic, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Fact = TypeVar("Fact")

_NEW = frozenset({"__invert__", "__index__", "__int__"})
"""Methods whose names begin as those that write, and that do not."""


def changes_first(func: Any) -> bool:
    """Whether a function writes to its first operand, by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = str(getattr(func, "__name__", ""))
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and name not in _NEW)


class KnownTensors(Generic[Fact]):
    """A fact of a tensor, for as long as neither the tensor nor another that the fact speaks of is changed in place."""

    def __init__(self) -> None:
        self._known = WeakTensorKeyDictionary()  # the fact, the other tensors, and how often all were changed then

    def say(self, tensor: torch.Tensor, fact: Fact, *others: torch.Tensor) -> None:
        """From now on this is known of a tensor and of `others`."""
        self._known[tensor] = fact, others, _versions(tensor, *others)

    def said(self, tensor: torch.Tensor) -> Fact | None:
        """What is known of a tensor; None where nothing was said, or something was changed since."""
        fact, others, versions = self._known.get(tensor, (None, (), None))  # type: ignore[no-untyped-call]
        return fact if versions == _versions(tensor, *others) else None


def _versions(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)
