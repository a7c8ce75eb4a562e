"""Offloads the inputs of recomputed blocks, and the saved tensors of other blocks, between their two passes.

    forward     block 0 ─┐ block 1 ─┐ block 2       a block's tensors are copied out while the next block computes, and
                  copied out   copied out           their memory is freed when that one is done
    backward    block 2 <─ block 1 <─ block 0       memory is allocated and filled while the block behind computes

No tensor is replaced: autograd, the pipeline and the checkpoint keep theirs, and only the memory behind them is freed
and allocated again (`UntypedStorage.resize_`). So other code may hold such a tensor as long as it does not read it
meanwhile; the plan guarantees that (`planner.plan.layout.activation_offload`, `offloaded_saved`). Memory that a tensor
shares with others, or with a result of the block, stays.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hardware_profiles import Home
from runtime.observer import Told
from runtime.offload.copy_streams import Lane, Mark, here
from runtime.offload.storage import Outside


@dataclass(eq=False, kw_only=True)
class _Offloaded:
    """One tensor's memory, `nbytes` long, and the row off the device with its content."""

    storage: torch.UntypedStorage
    nbytes: int
    row: torch.Tensor
    home: Home
    told: Told
    left: Mark
    back: Mark | None = None


@dataclass(kw_only=True)
class OffloadedActivations:
    """The copy streams and rows of one rank; `nbytes` is the size of all rows, as many as were ever used at a time."""

    device: torch.device
    outside: Outside
    nbytes: int = 0
    _rows: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    _leaving: list[_Offloaded] = field(default_factory=list)

    def __post_init__(self) -> None:
        lanes = [Lane(self.device, pretended=self.outside.pretended) for _ in range(2)]
        self._inward, self._outward = lanes

    def send(self, storages: Sequence[torch.UntypedStorage], home: Home, told: Told) -> list[_Offloaded]:
        """Start to copy these out; first wait for the copies already in flight and free their memory."""
        self.let_go()
        sent = [self._send(storage, home, told) for storage in storages]
        self._leaving = sent
        return list(sent)

    def let_go(self) -> None:
        """Wait for the copies in flight, and free the memory that they have copied."""
        for one in self._leaving:
            one.left.wait()
            one.storage.resize_(0)
            one.told(one.storage)
        self._leaving = []

    def fetch(self, offloaded: Sequence[_Offloaded]) -> None:
        """Start to copy these back, unless that has been started."""
        self._leaving = [one for one in self._leaving if one not in offloaded]  # not freed yet: no copy back
        for one in offloaded:
            if one.back is None:
                if one.storage.nbytes() == 0:
                    one.storage.resize_(one.nbytes)
                    one.told(one.storage)
                    work = partial(_copy, self._memory(one), one.row)
                    one.back = self._inward.run(work, after=(here(self.device), one.left))
                else:
                    one.back = one.left

    def arrive(self, offloaded: Sequence[_Offloaded]) -> None:
        """Wait until these are back; their rows are free again."""
        self.fetch(offloaded)
        for one in offloaded:
            assert one.back is not None
            one.back.wait()
            self._rows.setdefault((one.home, one.nbytes), []).append(one.row)

    def _send(self, storage: torch.UntypedStorage, home: Home, told: Told) -> _Offloaded:
        nbytes = storage.nbytes()
        row = self._row(home, nbytes)
        one = _Offloaded(storage=storage, nbytes=nbytes, row=row, home=home, told=told, left=Mark(None))
        one.left = self._outward.run(partial(_copy, row, self._memory(one)), after=(here(self.device),))
        return one

    def _row(self, home: Home, nbytes: int) -> torch.Tensor:
        free = self._rows.get((home, nbytes))
        if free:
            return free.pop()
        self.nbytes += nbytes
        return self.outside.room(home, 0 if self.outside.pretended else nbytes, self.device)

    def _memory(self, one: _Offloaded) -> torch.Tensor:
        """A whole storage, as bytes."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.device)
        return whole if self.outside.pretended else whole.set_(one.storage, 0, (one.nbytes,))  # type: ignore[call-overload]


class Trail:
    """What one pass of a micro-batch through a stage has offloaded, block by block, for its backward pass."""

    def __init__(self, reads: OffloadedActivations) -> None:
        self._reads = reads
        self._stops: dict[int, Sequence[_Offloaded]] = {}

    def offload(
        self, number: int, storages: Sequence[torch.UntypedStorage], home: Home, told: Told
    ) -> Callable[[], None]:
        """Offload this memory of section `number`. Returns the function that brings it back, and that also starts to
        fetch what the previous section has offloaded."""
        self._stops[number] = self._reads.send(storages, home, told)

        def back() -> None:
            if number in self._stops:
                self._reads.fetch(self._stops[number])
                self._reads.fetch(self._stops.get(number - 1, ()))
                self._reads.arrive(self._stops.pop(number))

        return back

    def let_go(self) -> None:
        """Wait until everything has been copied out: no later section will do so."""
        self._reads.let_go()


def alone(tensors: Sequence[torch.Tensor], made: Collection[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The memory that only these tensors use, and nothing that was made from them."""
    shared = {tensor.untyped_storage()._cdata for tensor in made}
    found = (tensor.untyped_storage() for tensor in tensors if tensor.untyped_storage().nbytes() == tensor.nbytes)
    return list({storage._cdata: storage for storage in found if storage._cdata not in shared}.values())


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)
