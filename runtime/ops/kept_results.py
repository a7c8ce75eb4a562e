"""Results that are kept although their block is recomputed: the kernel runs once, only its operands are recomputed.

    forward    operands ──> kernel ──> results        autograd keeps nothing (a checkpoint), the results are kept here
    recompute  operands ──> [kept] ──> results        autograd saves operands and results as if the kernel had run

A call is observed below autograd, where it is one kernel or a few. All results of the kernel that made the call's
results are kept (for attention the log-sum-exp too); views of operands and intermediate tensors are recomputed. A call
of many kernels that declares it (`whole_call`) is kept and skipped as a whole, including its communication. If the call
is `composed`, no backward pass reads its intermediate tensors: the second time uninitialized memory of the same shape
stands for them. This keeps less than torch's selective checkpointing, which decides before a kernel runs, and so would
also keep the views, and with them the operands. Where a kernel writes into the results of another, nothing is kept and
everything is recomputed: slower, never wrong.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from runtime.offload.regather import memory_of

Tensors = tuple[torch.Tensor, ...]


def whole_call(compute: Callable[[], Tensors]) -> Tensors:
    """The results of `compute`. Where the call is observed they are kept as a whole, and `compute` is not run the
    second time."""
    mode = next((m for m in _get_current_dispatch_mode_stack() if isinstance(m, _Watch | _Again)), None)
    return compute() if mode is None else mode.whole(compute)


_Kernel = tuple[Any, int]  # an operator and the index of its call within the observed one, from 0


@dataclass(frozen=True, slots=True)
class _Blank:
    """A tensor of which only shape, strides and dtype are known."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def like(cls, tensor: torch.Tensor) -> "_Blank":
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class KeptResults:
    """The results of the kept operators of one block, from its forward pass until its backward pass has used them."""

    def __init__(self) -> None:
        self._made: dict[str, dict[_Kernel, Any]] = {}

    def run(
        self,
        name: str,
        call: Callable[[Sequence[torch.Tensor]], Sequence[Any]],
        operands: Sequence[torch.Tensor],
        *,
        composed: bool = False,
    ) -> Sequence[Any]:
        """The results of an operator: computed the first time, the kept ones the second time."""
        made = self._made.pop(name, None)
        if made is not None:
            with _Again(made):
                return call(operands)
        with _Watch() as watch:
            results = call(operands)
        self._made[name] = watch.made(results, composed=composed)
        return results


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Holds the results of every kernel of a call, until it is known which of them made the call's results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: Counter[Any] = Counter()
        self._kernels: dict[_Kernel, Any] = {}
        self._written: set[int] = set()  # memory that a kernel wrote into
        self._inside = False  # of a call that is kept as a whole

    def whole(self, compute: Callable[[], Tensors]) -> Tensors:
        self._inside = True
        made = compute()
        self._inside = False
        kernel = (whole_call, self._counts[whole_call])
        self._counts[whole_call] += 1
        self._kernels[kernel] = tuple(tensor.detach() for tensor in made)
        return made

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = function(*args, **(kwargs or {}))
        if self._inside:
            return results
        given = {memory_of(tensor) for tensor in _tensors((args, kwargs))}
        kernel = (function, self._counts[function])
        self._counts[function] += 1
        if function._schema.is_mutable:
            self._written |= {memory_of(tensor) for tensor in _tensors(results)}
        elif not any(memory_of(tensor) in given for tensor in _tensors(results)):
            self._kernels[kernel] = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, results)
        return results

    def made(self, results: Any, *, composed: bool) -> dict[_Kernel, Any]:
        """The kernel results that share memory with the call's results; for a `composed` call also the form of all
        others."""
        memory = {memory_of(tensor) for tensor in _tensors(results)} - self._written
        kept = {
            kernel: returned
            for kernel, returned in self._kernels.items()
            if any(memory_of(tensor) in memory for tensor in _tensors(returned))
        }
        if not composed or not kept:
            return kept
        return {
            kernel: kept.get(kernel, pytree.tree_map_only(torch.Tensor, _Blank.like, returned))
            for kernel, returned in self._kernels.items()
        }


class _Again(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns kept results instead of running the kernel."""

    def __init__(self, made: dict[_Kernel, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts: Counter[Any] = Counter()
        self._made = made

    def whole(self, compute: Callable[[], Tensors]) -> Tensors:
        kernel = (whole_call, self._counts[whole_call])
        self._counts[whole_call] += 1
        found: Tensors | None = self._made.pop(kernel, None)
        return compute() if found is None else found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = (function, self._counts[function])
        self._counts[function] += 1
        if kernel in self._made:
            return pytree.tree_map_only(_Blank, _Blank.made, self._made.pop(kernel))
        return function(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
