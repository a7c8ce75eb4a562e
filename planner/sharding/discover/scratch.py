"""Memory that the backward pass of a call needs beside its operands and its gradients: counted as autograd calls its
operators, on a small call.

    bytes │        ┌──┐ temporaries          `scratch`: the tensors that live at the peak, without the gradients that
          │    ┌───┘  └─┐  ┌── gradients     are made, and less the saved tensors that autograd has freed by then.
          └────┴────────┴──┴──> operators

Memory inside of a kernel is not seen, and not in an audit either. An operator that has another backward pass for small
inputs, as `cdist` of up to 25 points, is counted as it runs in the trial.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.sharding.discover.trial import Case, gradients_of, run

Lying = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor, which mostly tell whose loops count it."""


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, counts the living tensors that operators make; `most` are those that lived at the peak of bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = set[int]()
        self._bytes, self._most_bytes = 0, 0
        self._now = Counter[Lying]()
        self.most = Counter[Lying]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in pytree.tree_leaves((args, kwargs)) if _is_tensor(each)}
        for each in pytree.tree_leaves(made):
            if _is_tensor(each) and each.untyped_storage()._cdata not in given | self._known:
                self._begin(each)
        if self._bytes > self._most_bytes:
            self._most_bytes, self.most = self._bytes, self._now.copy()
        return made

    def start(self) -> None:
        """Count from now on, relative to what lives now."""
        self._bytes, self._most_bytes = 0, 0
        self._now, self.most = Counter(), Counter()

    def _begin(self, made: torch.Tensor) -> None:
        storage, what = made.untyped_storage(), (tuple(made.shape), made.dtype)
        self._known.add(storage._cdata)
        self._bytes += storage.nbytes()
        self._now[what] += 1
        weakref.finalize(storage, self._end, storage._cdata, storage.nbytes(), what)

    def _end(self, key: int, nbytes: int, what: Lying) -> None:
        self._known.discard(key)
        self._bytes -= nbytes
        self._now[what] -= 1


def scratch_of(case: Case, graded: Sequence[int]) -> list[tuple[torch.Tensor, int]]:
    """Tensors, on "meta", and how many of each live at the peak while a case runs backward for these operands. A count
    is negative for gradients that are made only after the peak, and for saved tensors that are freed before it."""
    leaves = [t.detach().clone().requires_grad_(i in graded) for i, t in enumerate(case.operands)]
    living = _Living()
    with living:
        made = run(case.call, leaves)
        living.start()
        gradients = gradients_of(leaves, made, case.gradients)
    found = living.most.copy()
    found.subtract((tuple(each.shape), each.dtype) for each in gradients if each is not None)
    return [(torch.empty(shape, dtype=dtype, device="meta"), count) for (shape, dtype), count in found.items()]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
