"""Which tensors are alive, by the memory behind them, and what lived when most did."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from planner.plan.prediction.chunk_memory import GRADIENTS, OTHER, STATES, WEIGHTS

CLASSES = (WEIGHTS, GRADIENTS, STATES, OTHER)


@dataclass(slots=True)
class _Held:
    nbytes: int
    of: str
    alive: "weakref.ref[torch.UntypedStorage]"


class LiveTensors:
    """Memory of tensors that are alive, each counted once however many views it has, in classes."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._held: dict[int, _Held] = {}
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._total = 0
        self._instead: int | None = None  # of what the newest tensor may have the memory

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Memory that is not counted. It is held from now on, so that nothing else comes to lie where it was."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._left_out.update((storage._cdata, storage) for storage in storages)

    def add(self, tensor: torch.Tensor, of: str = OTHER) -> None:
        """Count the memory of a tensor if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._held or key in self._left_out:
            return
        self._settle()
        self._hold(key, storage, of)
        self._look()

    def add_instead(self, tensor: torch.Tensor, old: torch.Tensor, of: str = OTHER) -> None:
        """Count the memory of a new tensor as that of an old one, if the old one is let go before anything else is
        made."""
        self._settle()
        storage = tensor.untyped_storage()
        self._hold(storage._cdata, storage, of)
        self._instead = old.untyped_storage()._cdata

    def _settle(self) -> None:
        """By now it is known whether the newest tensor has the memory of an old one."""
        instead, self._instead = self._instead, None
        if instead in self._held or instead in self._left_out:
            self._look()

    def _hold(self, key: int, storage: torch.UntypedStorage, of: str) -> None:
        alive = weakref.ref(storage, lambda _: self._drop(key))
        self._held[key] = _Held(storage.nbytes(), of, alive)
        self.now[of] += storage.nbytes()
        self._total += storage.nbytes()

    def _look(self) -> None:
        if self._total > self.peak:
            self.peak, self.at_peak = self._total, {name: self.now[name] for name in CLASSES}

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count a storage as large as it is by now."""
        held = self._held.get(storage._cdata)
        if held is None:
            return
        more, held.nbytes = storage.nbytes() - held.nbytes, storage.nbytes()
        self.now[held.of] += more
        self._total += more
        self._look()

    def claim(self, tensor: torch.Tensor, of: str) -> None:
        """Count the memory of a tensor in this class, whichever it was in."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None:
            self.add(tensor, of)
        elif held.of != of:
            self.now[held.of] -= held.nbytes
            self.now[of] += held.nbytes
            held.of = of

    def forget_peak(self) -> None:
        """Begin to look for the peak from what is alive now."""
        self.peak, self.at_peak = self._total, {name: self.now[name] for name in CLASSES}

    def _drop(self, key: int) -> None:
        held = self._held.pop(key)
        self.now[held.of] -= held.nbytes
        self._total -= held.nbytes
