"""Facts about tensors, which hold until the tensors are changed in place.

While a model is traced, tensors that share their memory share a storage, and every call is seen before and after it
runs. The name of a function says what it writes to (`add_`, `__ixor__`, `out=`). For Python functions (`F.relu(x,
inplace=True)`) PyTorch's own count of changes says it; `mask ^= x` does not raise that count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

Fact = TypeVar("Fact")

_NEW = frozenset({"__invert__", "__index__", "__int__"})
"""Methods whose names begin like those of writing methods, and that do not write."""
_FUNCTIONAL = torch.nn.functional.__name__
_KEEPS_STATISTICS = frozenset({torch.nn.functional.batch_norm, torch.nn.functional.instance_norm, torch.batch_norm})


def changes_first(func: Any) -> bool:
    """Whether a function writes to its first operand, by its name: `add_`, `__iadd__`, `__setitem__`."""
    name = str(getattr(func, "__name__", ""))
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and name not in _NEW)


def written(func: Any, args: Any, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to, as far as that is known before the call."""
    found = [given.get("out"), *(args[:1] if changes_first(func) else ())]
    if func in _KEEPS_STATISTICS:
        found += [*args[1:3], *(given.get(name) for name in ("running_mean", "running_var"))]
    return [each for each in found if isinstance(each, torch.Tensor)]


class Writes:
    """Counts how often the memory of tensors was written to, through any tensor that shares it."""

    def __init__(self) -> None:
        self._times = Counter[int]()  # a later storage at the same address begins with its count

    def times(self, *tensors: torch.Tensor) -> tuple[int, ...]:
        """The count of each tensor until now."""
        return tuple(self._times[_storage(tensor)] for tensor in tensors)

    def note(self, *tensors: torch.Tensor) -> None:
        """Count a write to each of these tensors."""
        self._times.update(map(_storage, tensors))

    def call(self, func: Any, args: Any, given: Mapping[str, Any]) -> Any:
        """Call a function, and note what it writes to."""
        if getattr(func, "__module__", None) != _FUNCTIONAL:
            made = func(*args, **given)
        else:
            operands = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
            before = _versions(operands)
            made = func(*args, **given)
            changed = zip(operands, before, _versions(operands), strict=True)
            self.note(*(each for each, one, other in changed if one != other))
        if found := written(func, args, given):
            self.note(*found)
        return made


class KnownTensors(Generic[Fact]):
    """A fact about a tensor, kept as long as neither the tensor nor another one in the fact is written to."""

    def __init__(self, writes: Writes) -> None:
        self._writes = writes
        self._known = WeakTensorKeyDictionary()  # the fact, the other tensors, and the counts of writes at that time

    def say(self, tensor: torch.Tensor, fact: Fact, *others: torch.Tensor) -> None:
        """Keep a fact about a tensor and `others`."""
        self._known[tensor] = fact, others, self._writes.times(tensor, *others)

    def said(self, tensor: torch.Tensor) -> Fact | None:
        """The fact about a tensor; None where there is none, or something was written to since."""
        fact, others, times = self._known.get(tensor, (None, (), None))  # type: ignore[no-untyped-call]
        return fact if times is not None and times == self._writes.times(tensor, *others) else None


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    with torch._C.DisableTorchFunction():  # else all modes would see this question
        return [tensor._version for tensor in tensors]


def _storage(tensor: torch.Tensor) -> int:
    functorch = torch._C._functorch
    with torch._C.DisableTorchFunction():
        while functorch.is_functorch_wrapped_tensor(tensor):  # within torch.vmap, where masks are made
            tensor = functorch.get_unwrapped(tensor)
        return int(tensor.untyped_storage()._cdata)
