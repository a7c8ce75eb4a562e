"""Which tensors are alive, by their storages, and which were at peak memory."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from planner.plan.prediction.memory.chunks import GRADIENTS, OTHER, STATES, WEIGHTS

CLASSES = (WEIGHTS, GRADIENTS, STATES, OTHER)


@dataclass(slots=True)
class _Held:
    nbytes: int
    of: str
    alive: "weakref.ref[torch.UntypedStorage]"


class LiveTensors:
    """The memory of live tensors, in classes; a storage counts once, however many views it has."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.peak = 0
        self.at_peak: dict[str, int] = dict.fromkeys(CLASSES, 0)
        self._held: dict[int, _Held] = {}
        self._left_out: dict[int, torch.UntypedStorage] = {}
        self._total = 0
        self._instead: int | None = None  # the storage whose memory the newest tensor may have taken over

    def leave_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count this memory. It is kept alive from now on, so that no other tensor gets its address."""
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
        """Count a new tensor in the place of an old one, if the old one is freed before anything else is created."""
        self._settle()
        storage = tensor.untyped_storage()
        self._hold(storage._cdata, storage, of)
        self._instead = old.untyped_storage()._cdata

    def _settle(self) -> None:
        """Decide whether the newest tensor has taken over the memory of an old one; by now it is known."""
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
        """Update the size of a storage that was resized."""
        held = self._held.get(storage._cdata)
        if held is None:
            return
        more, held.nbytes = storage.nbytes() - held.nbytes, storage.nbytes()
        self.now[held.of] += more
        self._total += more
        self._look()

    def claim(self, tensor: torch.Tensor, of: str) -> None:
        """Move the memory of a tensor into this class."""
        held = self._held.get(tensor.untyped_storage()._cdata)
        if held is None:
            self.add(tensor, of)
        elif held.of != of:
            self.now[held.of] -= held.nbytes
            self.now[of] += held.nbytes
            held.of = of

    def forget_peak(self) -> None:
        """Restart the search for the peak from the memory that is alive now."""
        self.peak, self.at_peak = self._total, {name: self.now[name] for name in CLASSES}

    def _drop(self, key: int) -> None:
        held = self._held.pop(key)
        self.now[held.of] -= held.nbytes
        self._total -= held.nbytes
