"""What lives while the backward pass of a call runs, beside what it is given and what it makes: counted as autograd
calls its operators, on a small call.

    bytes │        ┌──┐ temporaries          Where most bytes live, those that are neither of a gradient that is made
          │    ┌───┘  └─┐  ┌── gradients     nor were let go of meanwhile, of what autograd had kept: `scratch`.
          └────┴────────┴──┴──> operators

What a kernel has inside is not seen, as it is not in an audit. An operator that goes back in another way where it is
small, as `cdist` of up to 25 points, is counted as it does in the trial.
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
"""Shape and dtype of what is made: so far as one can tell whose loops count it."""


class _Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, what operators make is counted for as long as it lives; `most` is what did when most bytes were."""

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
        """From now on what lives counts beside what does now."""
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
    """Tensors, on "meta", of which so many live beside all else when most lives, while a case runs backward for these
    operands; less than none of those that are made only later, or let go of before."""
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
