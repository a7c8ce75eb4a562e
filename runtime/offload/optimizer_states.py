"""The update of parameters with offloaded optimizer states, one parameter after the other.

    offload storage   [ master | moments ] of every parameter: one row of bytes each, on the host or a disk
    places            two buffers on the device, as long as the longest row: one is updated, the other copied in or out

    fetch 0, fetch 1;  for each i:  wait for i ─ update ─ publish the weight ─ store i ─ fetch i + 2 into its place

`costmodels.offload` prices this sequence. Between steps the tensors of an offloaded state have no memory on the device.
The update itself is that of `runtime.optimizers.optimizers`, one parameter at a time; only the location of the state
differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from costmodels import PLACES
from runtime.offload.copy_streams import Lane, Mark, here
from runtime.offload.storage import Outside
from runtime.optimizers.narrow import kept_dtype
from runtime.optimizers.optimizers import Optimizer, start_moments

MASTER = "master"


@dataclass(kw_only=True)
class OffloadedState:
    """The state of one parameter.

    `weight` is the tensor that the optimizer updates. If it is the state's `own`, not a view of the kept weight, it is
    offloaded too. `row` has the offloaded bytes, the widest dtype first, so that each kind is aligned for its dtype.
    """

    name: str
    weight: torch.Tensor
    own: bool
    optimizer: Optimizer
    row: torch.Tensor
    shape: torch.Size
    moments: tuple[str, ...]
    moment_dtype: str

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """The offloaded kinds, in order, with the dtype of each."""
        return _kinds(self.weight, self.moments, self.moment_dtype, own=self.own)

    def part(self, row: torch.Tensor, kind: str) -> torch.Tensor:
        """One kind of a row, as a tensor of the shape of the weight."""
        kinds, count, start = self.kinds, self.shape.numel(), 0
        for before in takewhile(lambda one: one != kind, kinds):
            start += count * kinds[before].itemsize
        dtype = kinds[kind]
        return row[start : start + count * dtype.itemsize].view(dtype).view(self.shape)

    def arrive(self, place: torch.Tensor) -> None:
        """Point the tensors of the state into a buffer into which the row has been fetched."""
        for kind, tensor in self._tensors().items():
            tensor.data = self.part(place, kind)

    def leave(self, place: torch.Tensor) -> None:
        """Make sure that the whole state is in its buffer, and release it."""
        for kind, tensor in self._tensors().items():
            if not _inside(tensor, place):  # moments that the first update has made
                self.part(place, kind).copy_(tensor)
        self.release()

    def release(self) -> None:
        """Drop the memory on the device."""
        for tensor in self._tensors().values():
            tensor.data = tensor.new_empty(0)

    def _tensors(self) -> dict[str, torch.Tensor]:
        states: list[Mapping[str, torch.Tensor | None]] = list(self.optimizer.state.values())
        made = {kind: tensor for state in states for kind in self.moments if (tensor := state.get(kind)) is not None}
        return {**made, **({MASTER: self.weight} if self.own else {})}


def _kinds(weight: torch.Tensor, moments: Sequence[str], moment_dtype: str, *, own: bool) -> dict[str, torch.dtype]:
    """The offloaded kinds of a state with their dtypes, the widest first."""
    found = {MASTER: weight.dtype} if own else {}
    found.update(dict.fromkeys(moments, kept_dtype(moment_dtype, weight.dtype)))
    return dict(sorted(found.items(), key=lambda one: -one[1].itemsize))


def _inside(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    held, row = tensor.untyped_storage(), place.untyped_storage()
    return bool(held._cdata == row._cdata)


class OffloadedStates:
    """All offloaded states of a rank."""

    def __init__(
        self, moments: tuple[str, ...], device: torch.device, outside: Outside, moment_dtype: str = "fp32"
    ) -> None:
        self._moments, self._device, self._outside, self._moment_dtype = moments, device, outside, moment_dtype
        self._members: dict[str, OffloadedState] = {}
        self._left: list[Mark] = []  # marks of the last step's copies
        lanes = [Lane(device, pretended=outside.pretended) for _ in range(2)]
        self._inward, self._outward = lanes

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def __bool__(self) -> bool:
        return bool(self._members)

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The offloaded bytes."""
        return tuple(member.row for member in self._members.values())

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        return tuple(member.optimizer for member in self._members.values())

    def offload(self, name: str, weight: torch.Tensor, optimizer: Optimizer, home: str, *, own: bool) -> None:
        """Take over a state before its first update; its `weight` is offloaded at once."""
        each = sum(one.itemsize for one in _kinds(weight, self._moments, self._moment_dtype, own=own).values())
        member = OffloadedState(
            name=name,
            weight=weight,
            own=own,
            optimizer=optimizer,
            row=self._outside.room(home, each * weight.numel(), self._device),
            shape=weight.shape,
            moments=self._moments,
            moment_dtype=self._moment_dtype,
        )
        if own:
            member.part(member.row, MASTER).copy_(weight)
        member.release()
        self._members[name] = member

    def parts(self, name: str) -> dict[str, torch.Tensor]:
        """The offloaded tensors of one parameter, by kind: their own memory in the offload storage, for the host to
        read and write."""
        while self._left:
            self._left.pop().finish()
        member = self._members[name]
        return {kind: member.part(member.row, kind) for kind in member.kinds}

    def start(self, updates: int) -> None:
        """Prepare for states after `updates` updates, which are written to their rows."""
        for member in self._members.values():
            start_moments(member.optimizer, [member.weight], [self._moments], updates, self._moment_dtype)
            member.release()

    @torch.no_grad()
    def step(
        self,
        names: Sequence[str],
        gradients: Mapping[str, Callable[[], torch.Tensor]],
        updated: Callable[[str], None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Update the parameters in this order. `updated` is called for each while its weight is on the device;
        `meanwhile` runs while the first states are fetched."""
        members = [self._members[name] for name in names]
        longest = max((member.row.numel() for member in members), default=0)
        places = [torch.empty(longest, dtype=torch.uint8, device=self._device) for _ in members[:PLACES]]
        arrivals = [self._fetch(member, place) for member, place in zip(members, places, strict=False)]
        meanwhile()
        left = self._left = []
        for at, member in enumerate(members):
            place = places[at % PLACES][: member.row.numel()]
            arrivals[at].wait()
            member.arrive(place)
            member.weight.grad = gradients[member.name]()
            member.optimizer.step()
            member.weight.grad = None
            updated(member.name)
            member.leave(place)
            left.append(self._store(member, place))
            if at + PLACES < len(members):
                arrivals.append(self._fetch(members[at + PLACES], places[at % PLACES], left[at]))
        for mark in left:
            mark.wait()

    def _fetch(self, member: OffloadedState, place: torch.Tensor, *after: Mark) -> Mark:
        row, into = member.row, place[: member.row.numel()]
        return self._inward.run(lambda: _copy(into, row), after=(here(self._device), *after))

    def _store(self, member: OffloadedState, place: torch.Tensor) -> Mark:
        row = member.row
        return self._outward.run(lambda: _copy(row, place), after=(here(self._device),))


def _copy(into: torch.Tensor, source: torch.Tensor) -> None:
    into.copy_(source, non_blocking=True)
