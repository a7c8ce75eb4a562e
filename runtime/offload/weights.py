"""Weights of blocks that are offloaded while their block does not run.

    forward   [fetch 0] block 0 | block 1 | block 2     the weights of a block come while the one before it computes,
                        [fetch 1] [fetch 2]             and their memory is given back when it is done
    backward  [fetch 2] block 2 | block 1 | block 0     the same from the other end, where the first gradient comes
                        [fetch 1] [fetch 0]             into a block from behind

A weight stays where autograd has it, a leaf with its views, and only the memory behind it is given back and taken again
(`UntypedStorage.resize_`), as FSDP does it (Zhao et al. 2023, "PyTorch FSDP"). Its content is in a row outside, which
changes once a step, so that nothing has to leave after a pass. A new weight is written to its row while the next one is
updated; what is read after it waits for that.

Autograd runs the nodes of a pass from the last that was made to the first: the first gradient that reaches what a block
has made says that all blocks behind it are through.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from hardware_profiles import Home
from runtime.observer import Told
from runtime.offload.copy_streams import Lane, Mark, here
from runtime.offload.storage import Outside


@dataclass(eq=False, kw_only=True)
class OffloadedWeight:
    """One weight: the piece whose memory comes and goes, and the bytes outside of the device."""

    piece: torch.Tensor
    nbytes: int
    row: torch.Tensor
    written: Mark = field(default_factory=lambda: Mark(None))
    arrived: Mark = field(default_factory=lambda: Mark(None))

    @property
    def content(self) -> torch.Tensor:
        """The weight in memory of its own outside of the device, of the shape of the piece, for the host to read and
        write."""
        self.written.finish()
        return self.row.view(self.piece.dtype).view(self.piece.shape)


class OffloadedWeights:
    """All offloaded weights of a rank, and which of them are on the device."""

    def __init__(self, device: torch.device, outside: Outside) -> None:
        self._device, self._outside = device, outside
        self._weights: dict[str, OffloadedWeight] = {}
        self._there: dict[str, OffloadedWeight] = {}
        self._leaving: tuple[torch.Tensor, Mark] | None = None
        lanes = [Lane(device, pretended=outside.pretended) for _ in range(2)]
        self._inward, self._outward = lanes

    def __bool__(self) -> bool:
        return bool(self._weights)

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The bytes outside of the device."""
        return tuple(weight.row for weight in self._weights.values())

    @property
    def there(self) -> tuple[str, ...]:
        """Names of those that are on the device, or under way to it."""
        return tuple(self._there)

    def offload(self, name: str, piece: torch.Tensor, home: Home) -> OffloadedWeight:
        """Take over a weight, whose memory on the device is given back at once."""
        row = self._outside.room(home, piece.nbytes, self._device)
        weight = self._weights[name] = OffloadedWeight(piece=piece, nbytes=piece.nbytes, row=row)
        weight.content.copy_(piece.detach())
        piece.untyped_storage().resize_(0)
        return weight

    def hold(self, now: Iterable[str], ahead: Iterable[str], told: Told) -> None:
        """Have these on the device, `now` before anything that is issued next, those `ahead` some time later, and no
        others."""
        now, ahead = tuple(now), tuple(ahead)
        for name in [name for name in self._there if name not in (*now, *ahead)]:
            self._release(self._there.pop(name), told)
        for name in (*now, *ahead):
            if name not in self._there:
                self._there[name] = self._fetch(self._weights[name], told)
        for name in now:
            self._there[name].arrived.wait()

    def write(self, weight: OffloadedWeight, new: torch.Tensor) -> None:
        """Bring a new weight, which nobody else writes to, out to its row. The one before has left by then."""
        self.let_go()
        into = weight.row.view(new.dtype).view(new.shape)
        weight.written = self._outward.run(partial(_copy, into, new), after=(here(self._device),))
        self._leaving = (new, weight.written)

    def let_go(self) -> None:
        """Wait for what is on its way out, and let go of it."""
        if self._leaving is not None:
            self._leaving[1].wait()
            self._leaving = None

    def _fetch(self, weight: OffloadedWeight, told: Told) -> OffloadedWeight:
        storage = weight.piece.untyped_storage()
        storage.resize_(weight.nbytes)
        told(storage)
        work = partial(_copy, self._memory(storage, weight.nbytes), weight.row)
        weight.arrived = self._inward.run(work, after=(here(self._device), weight.written))
        return weight

    def _release(self, weight: OffloadedWeight, told: Told) -> None:
        weight.arrived.wait()  # perhaps it came for nothing
        storage = weight.piece.untyped_storage()
        storage.resize_(0)
        told(storage)

    def _memory(self, storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
        """All of a storage, as bytes."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        return whole if self._outside.pretended else whole.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]


class Visits:
    """One pass of a turn through a stage: for each of its runs of operators the weights that come for it."""

    def __init__(self, weights: OffloadedWeights, runs: Sequence[Sequence[str]], told: Told) -> None:
        self._weights, self._runs, self._told = weights, runs, told
        self._differentiating: int | None = None

    def enter(self, number: int) -> None:
        """A run of operators begins forward."""
        self._weights.hold(self._runs[number], self._ahead(number, number + 1), self._told)

    def leave(self, number: int, made: Iterable[torch.Tensor]) -> None:
        """It has made these, which others read: their gradients come before its backward pass."""
        self._weights.hold((), self._ahead(number, number + 1), self._told)
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._back(number))  # type: ignore[no-untyped-call]

    def _back(self, number: int) -> None:
        if self._differentiating != number:
            self._differentiating = number
            self._weights.hold(self._runs[number], self._ahead(number, number - 1), self._told)

    def _ahead(self, number: int, neighbour: int) -> Sequence[str]:
        """What a run fetches for the next: nothing where it has no offloaded weights itself
        (`planner.plan.layout.weight_offload`)."""
        return self._runs[neighbour] if self._runs[number] and 0 <= neighbour < len(self._runs) else ()


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)
