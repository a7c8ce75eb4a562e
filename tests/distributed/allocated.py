"""How much memory the operators of a process have allocated, at most at one time."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """Looks on at all operators. `most` is the most bytes of storages that they have made and that were alive at once;
    what was there before, and what kernels and libraries need while they run, is not seen, nor are views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self.now = 0, 0
        self._made = dict[int, tuple[StorageWeakRef, int]]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in _tensors((args, kwargs))}
        for one in _tensors(result):
            storage = one.untyped_storage()
            known = self._made.get(storage._cdata)
            gone = known is None or known[0].expired()
            if gone and storage._cdata in given:
                continue  # no operator has made it
            if gone or known is None or known[1] != storage.nbytes():
                self.now += storage.nbytes() - (known[1] if known is not None else 0)
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        if self.now > self.most:
            self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
            self.now = sum(nbytes for _, nbytes in self._made.values())
            self.most = max(self.most, self.now)
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
