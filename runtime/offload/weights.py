"""Weights of blocks that are offloaded while their block does not run.

    forward   [fetch 0] block 0 | block 1 | block 2     a block's weights are fetched while the previous block computes,
                        [fetch 1] [fetch 2]             and their memory is freed when the block is done
    backward  [fetch 2] block 2 | block 1 | block 0     the same in reverse order, started by the first gradient of a
                        [fetch 1] [fetch 0]             result of the block

The weight tensor stays with autograd, a leaf with its views; only the memory behind it is freed and allocated again
(`UntypedStorage.resize_`), as FSDP does it (Zhao et al. 2023, "PyTorch FSDP"). Its content is in a row of the offload
storage. That changes once per step, so nothing is copied out after a pass. A new weight is written to its row while the
next one is updated; a later fetch waits for the write.

Autograd runs the nodes of a pass in reverse order of their creation. So when the first gradient reaches a result of a
block, the backward passes of all later blocks are done.
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
    """One weight: the piece whose memory is freed and allocated again, and its bytes in the offload storage."""

    piece: torch.Tensor
    nbytes: int
    row: torch.Tensor
    written: Mark = field(default_factory=lambda: Mark(None))
    arrived: Mark = field(default_factory=lambda: Mark(None))

    @property
    def content(self) -> torch.Tensor:
        """The weight in the offload storage, with the shape of the piece, for the host to read and write."""
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
        """The offloaded bytes."""
        return tuple(weight.row for weight in self._weights.values())

    @property
    def there(self) -> tuple[str, ...]:
        """Names of the weights that are on the device, or being fetched."""
        return tuple(self._there)

    def offload(self, name: str, piece: torch.Tensor, home: Home) -> OffloadedWeight:
        """Take over a weight; its memory on the device is freed at once."""
        row = self._outside.room(home, piece.nbytes, self._device)
        weight = self._weights[name] = OffloadedWeight(piece=piece, nbytes=piece.nbytes, row=row)
        weight.content.copy_(piece.detach())
        piece.untyped_storage().resize_(0)
        return weight

    def hold(self, now: Iterable[str], ahead: Iterable[str], told: Told) -> None:
        """Keep exactly these weights on the device: `now` before any further work, `ahead` as a prefetch; free all
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
        """Start to copy a new weight, which nothing else writes to, to its row; first wait for the previous copy."""
        self.let_go()
        into = weight.row.view(new.dtype).view(new.shape)
        weight.written = self._outward.run(partial(_copy, into, new), after=(here(self._device),))
        self._leaving = (new, weight.written)

    def let_go(self) -> None:
        """Wait for the copy in flight, and release its source."""
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
        weight.arrived.wait()  # it may have been fetched without being used
        storage = weight.piece.untyped_storage()
        storage.resize_(0)
        told(storage)

    def _memory(self, storage: torch.UntypedStorage, nbytes: int) -> torch.Tensor:
        """A whole storage, as bytes."""
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        return whole if self._outside.pretended else whole.set_(storage, 0, (nbytes,))  # type: ignore[call-overload]


class Visits:
    """One pass through a stage: for each of its runs of operators, the weights to fetch."""

    def __init__(self, weights: OffloadedWeights, runs: Sequence[Sequence[str]], told: Told) -> None:
        self._weights, self._runs, self._told = weights, runs, told
        self._differentiating: int | None = None

    def enter(self, number: int) -> None:
        """A run of operators begins its forward pass."""
        self._weights.hold(self._runs[number], self._ahead(number, number + 1), self._told)

    def leave(self, number: int, made: Iterable[torch.Tensor]) -> None:
        """The run has made these results, which others read: its backward pass begins with the first of their
        gradients."""
        self._weights.hold((), self._ahead(number, number + 1), self._told)
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._back(number))  # type: ignore[no-untyped-call]

    def _back(self, number: int) -> None:
        if self._differentiating != number:
            self._differentiating = number
            self._weights.hold(self._runs[number], self._ahead(number, number - 1), self._told)

    def _ahead(self, number: int, neighbour: int) -> Sequence[str]:
        """The weights that a run prefetches for its neighbour: none where it has no offloaded weights itself
        (`planner.plan.layout.weight_offload`)."""
        return self._runs[neighbour] if self._runs[number] and 0 <= neighbour < len(self._runs) else ()


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)
