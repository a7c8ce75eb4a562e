"""Memory that is taken and freed, without real memory: an account of bytes, and the memory of redistributions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from costmodels import Then, turns_of
from hardware_profiles import Bytes
from planner.plan.layout.strides import Strides, in_order, lies_in_order
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import COLLECTIVES, Step


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory, and how many hold it. `standing` memory is never counted by the account, `lent` memory is not
    counted at the moment."""

    nbytes: Bytes
    of: str
    holders: int = 1
    standing: bool = False
    lent: bool = False


@dataclass(slots=True, kw_only=True)
class MemoryTurn:
    """Bytes that are taken and freed, by class, until other work continues. `on` says how this work continues
    (`costmodels.Then`); at a "border" it waits until all others are there. Within a backward pass it may go
    `forward`."""

    on: Then | Literal["border"] = "border"
    forward: bool = False
    changes: list[tuple[Bytes, str]] = field(default_factory=list)


@dataclass(kw_only=True)
class MemoryAccount:
    """Bytes alive by class, and those at the fullest moment. Work that alternates with other work is `recorded`, and
    counts when it is `replayed` together with that."""

    now: dict[str, Bytes]
    peak: Bytes = 0.0
    at_peak: dict[str, Bytes] = field(default_factory=dict)
    _total: Bytes = 0.0
    _turns: list[MemoryTurn] | None = None

    def __post_init__(self) -> None:
        self._total = sum(self.now.values())
        self.peak = self._total
        self.at_peak = dict(self.now)

    @property
    def records(self) -> bool:
        """Whether the current work alternates with other work."""
        return self._turns is not None

    def recorded(self, work: Callable[[], None]) -> list[MemoryTurn]:
        """What some work takes and frees, from one `pause` to the next, without counting it."""
        assert self._turns is None, "one is recorded at a time"
        self._turns = [MemoryTurn()]
        work()
        found, self._turns = self._turns, None
        return found

    def pause(self, on: Then | Literal["border"], *, forward: bool | None = None) -> None:
        """Other work that alternates with the recorded work continues here; `on` says how this work continues later.
        `forward` says whether it then goes forward within a backward pass; by default that does not change."""
        if self._turns is not None:
            forward = self._turns[-1].forward if forward is None else forward
            self._turns.append(MemoryTurn(on=on, forward=forward))

    def replayed(self, works: Sequence[Sequence[MemoryTurn]], *, backward: bool) -> None:
        """Count several works that alternate, of a forward or `backward` pass."""
        assert len({len(work) for work in works}) == 1, "all take the same turns"
        starts = [at for at, turn in enumerate(works[0]) if turn.on == "border"]
        for first, end in pairwise((*starts, len(works[0]))):
            left = [iter(work[first:end]) for work in works]
            thens = [turn.on for turn in works[0][first + 1 : end] if turn.on != "border"]
            for number in turns_of(thens, len(works), backward=backward and not works[0][first].forward):
                for nbytes, of in next(left[number]).changes:
                    self._change(nbytes, of)
                    self._look()

    def new(self, nbytes: Bytes, of: str) -> Storage:
        """Memory that the caller holds."""
        self._change(nbytes, of)
        self._look()
        return Storage(nbytes, of)

    def _change(self, nbytes: Bytes, of: str) -> None:
        if self._turns is not None:
            self._turns[-1].changes.append((nbytes, of))
            return
        self.now[of] += nbytes
        self._total += nbytes

    def _look(self) -> None:
        """Record the current moment if it is the fullest so far."""
        if self._total > self.peak:
            self.peak = self._total
            self.at_peak = dict(self.now)

    def hold(self, storage: Storage) -> Storage:
        storage.holders += 1
        return storage

    def release(self, storage: Storage) -> None:
        storage.holders -= 1
        assert storage.holders >= 0, storage
        if storage.holders == 0 and not storage.standing and not storage.lent:
            self._change(-storage.nbytes, storage.of)

    def claim(self, storage: Storage, of: str) -> Storage:
        """Count a storage in another class from now on."""
        self._change(-storage.nbytes, storage.of)
        self._change(storage.nbytes, of)
        storage.of = of
        return storage

    def lend(self, storage: Storage) -> None:
        """Give up the memory of a storage for some time, while it is held."""
        assert not storage.lent, storage
        storage.lent = True
        self._change(-storage.nbytes, storage.of)

    def take_back(self, storage: Storage) -> None:
        """Give the storage its memory again."""
        assert storage.lent, storage
        storage.lent = False
        self._change(storage.nbytes, storage.of)
        self._look()

    def brief(self, nbytes: Bytes, of: str) -> None:
        """Memory that is freed at once."""
        self.release(self.new(nbytes, of))


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor: its memory, its shape, and its strides; None if it is contiguous."""

    storage: Storage
    shape: tuple[int, ...]
    strides: Strides | None = None

    @property
    def contiguous(self) -> bool:
        return self.strides is None or lies_in_order(self.shape, self.strides)

    @property
    def lies(self) -> Strides:
        return in_order(self.shape) if self.strides is None else self.strides


def moved(
    account: MemoryAccount,
    piece: Piece,
    steps: Sequence[Step],
    mesh: Mesh,
    coordinate: Sequence[int],
    element: int,
    *,
    then: Then | None = None,
    gives: bool = False,
) -> Piece:
    """A local tensor after the steps of a redistribution, as `runtime.comm.redistribute` makes it.

    The caller holds the result, which may be the memory of the input. It also still holds the input, unless it `gives`
    that away, when all steps are done. Alternating work lets others run during its first collective, then continues as
    `then` says, without the input; None if it continues at once."""
    then = then if account.records else None
    first, lasts = piece.storage, not gives or then is None
    if lasts:
        account.hold(first)
    for step in steps:
        if mesh.sizes[step.axis] > 1:
            pause = then if step.kind in COLLECTIVES else None
            piece = _step(account, piece, step, mesh.sizes[step.axis], coordinate[step.axis], element, pause)
            then = None if pause is not None else then
    if then is not None:
        account.pause(then)
    if gives and lasts:
        account.release(first)
    return piece


def _step(
    account: MemoryAccount, piece: Piece, step: Step, size: int, place: int, element: int, pause: Then | None
) -> Piece:
    """The piece after a step; the input is freed when the step no longer needs it."""
    shape, of = list(piece.shape), piece.storage.of
    if step.kind == "zero" and place == 0:
        return Piece(piece.storage, tuple(shape))
    before, held = [piece.storage], list[Storage]()

    def tensor(extents: Sequence[int]) -> Storage:
        held.append(account.new(float(element * math.prod(extents)), of))
        return held[-1]

    def under_way(extents: Sequence[int]) -> Storage:
        made = tensor(extents)
        if pause is not None:
            if made is not held[0] or step.kind == "all_reduce":  # a copy is sent
                account.release(before.pop())
            account.pause(pause)
        return made

    into = step.to_dim if step.kind == "all_to_all" else step.dim
    if step.kind in ("reduce_scatter", "all_to_all") and into in step.zigzag:
        before.append(tensor(shape))  # in the order of devices, without gaps
        piece = Piece(held.pop(), tuple(shape))
    if step.kind == "slice":
        whole = shape[step.dim]
        shape[step.dim] = (whole + step.padding) // size
        if (place + 1) * shape[step.dim] <= whole and not step.zigzag:
            return Piece(piece.storage, tuple(shape), piece.lies)
        made = tensor(shape)
    elif step.kind == "all_gather":
        if not (piece.contiguous and _first(shape, step.dim)):
            tensor(shape)  # the cut dim first
        shape[step.dim] *= size
        made = under_way(shape)
        shape[step.dim] = step.extent if step.extent >= 0 else shape[step.dim]
        made = made if _first(shape, step.dim) else tensor(shape)
    elif step.kind == "reduce_scatter":
        shape[step.dim] += step.padding
        if step.padding or not (piece.contiguous and _first(shape, step.dim)):
            tensor(shape)  # the cut dim first
        shape[step.dim] //= size
        made = under_way(shape)
        made = made if _first(shape, step.dim) else tensor(shape)
    elif step.kind == "all_to_all":
        shape[step.to_dim] += step.padding
        if step.padding:
            tensor(shape)
        tensor(shape)  # the output buffer
        made = under_way(shape)
        shape[step.dim] *= size
        shape[step.to_dim] //= size
        made = made if _first(shape, step.dim) else tensor(shape)
        shape[step.dim] = step.extent if step.extent >= 0 else shape[step.dim]
    else:
        if step.kind == "pad":  # a sum has no dim
            shape[step.dim] *= size
        made = under_way(shape)
        if step.extent >= 0:
            shape[step.dim] = step.extent
    if step.kind in ("all_gather", "all_to_all") and step.dim in step.zigzag:
        made = tensor(shape)  # in natural order
    for storage in (*before, *held):
        if storage is not made:
            account.release(storage)
    return Piece(made, tuple(shape))


def _first(shape: Sequence[int], dim: int) -> bool:
    """Whether a dim is the outermost one, ignoring dims of extent 1."""
    return all(extent == 1 for extent in shape[:dim])
