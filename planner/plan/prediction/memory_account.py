"""Memory as it is held and let go, without any: an account of bytes, and what moving a tensor makes on the way."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hardware_profiles import Bytes
from planner.sharding.mesh import Mesh
from planner.sharding.redistribute import Step


@dataclass(slots=True, eq=False)
class Storage:
    """A piece of memory and how many hold it. What the account does not count is `standing`, what it does not count at
    the moment `lent`."""

    nbytes: Bytes
    of: str
    holders: int = 1
    standing: bool = False
    lent: bool = False


@dataclass(kw_only=True)
class MemoryAccount:
    """Bytes alive in classes, and those at the moment when most were. What is followed once and held several times at
    the same moment, as by micro-batches in turn, counts so many `times`, by class."""

    now: dict[str, Bytes]
    times: dict[str, int] = field(default_factory=dict)
    peak: Bytes = 0.0
    at_peak: dict[str, Bytes] = field(default_factory=dict)
    _total: Bytes = 0.0

    def __post_init__(self) -> None:
        self._total = sum(nbytes * self.times.get(of, 1) for of, nbytes in self.now.items())
        self.peak = self._total
        self.at_peak = {of: nbytes * self.times.get(of, 1) for of, nbytes in self.now.items()}

    def once(self) -> None:
        """From now on everything counts once."""
        self.times = {}
        self._total = sum(self.now.values())

    def new(self, nbytes: Bytes, of: str) -> Storage:
        """Memory that the caller holds."""
        self._change(nbytes, of)
        self._look()
        return Storage(nbytes, of)

    def _change(self, nbytes: Bytes, of: str) -> None:
        self.now[of] += nbytes
        self._total += nbytes * self.times.get(of, 1)

    def _look(self) -> None:
        """Remember the moment where it is the fullest so far."""
        if self._total > self.peak:
            self.peak = self._total
            self.at_peak = {of: nbytes * self.times.get(of, 1) for of, nbytes in self.now.items()}

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
        """Let a storage, which is held, have no memory for some time."""
        assert not storage.lent, storage
        storage.lent = True
        self._change(-storage.nbytes, storage.of)

    def take_back(self, storage: Storage) -> None:
        """Let it have its memory again."""
        assert storage.lent, storage
        storage.lent = False
        self._change(storage.nbytes, storage.of)
        self._look()

    def brief(self, nbytes: Bytes, of: str) -> None:
        """Memory that is let go at once."""
        self.release(self.new(nbytes, of))


@dataclass(frozen=True, slots=True)
class Piece:
    """A local tensor: its memory, its shape, and whether it lies in it without gaps."""

    storage: Storage
    shape: tuple[int, ...]
    contiguous: bool = True


def moved(
    account: MemoryAccount, piece: Piece, steps: Sequence[Step], mesh: Mesh, coordinate: Sequence[int], element: int
) -> Piece:
    """A local tensor after the steps of a redistribution, as `runtime.comm.redistribute` makes it: the caller holds
    what comes out, which may be the memory that went in."""
    account.hold(piece.storage)
    for step in steps:
        if mesh.sizes[step.axis] > 1:
            after = _step(account, piece, step, mesh.sizes[step.axis], coordinate[step.axis], element)
            account.release(piece.storage)
            piece = after
    return piece


def _step(account: MemoryAccount, piece: Piece, step: Step, size: int, place: int, element: int) -> Piece:
    shape, of = list(piece.shape), piece.storage.of
    if step.kind == "slice" or (step.kind == "zero" and place == 0):
        if step.kind == "zero":
            return Piece(account.hold(piece.storage), tuple(shape))
        shape[step.dim] //= size
        return Piece(account.hold(piece.storage), tuple(shape), _first(shape, step.dim))
    held: list[Storage] = []

    def tensor(extents: Sequence[int]) -> Storage:
        held.append(account.new(float(element * math.prod(extents)), of))
        return held[-1]

    if step.kind in ("all_gather", "reduce_scatter"):
        if not (piece.contiguous and _first(shape, step.dim)):
            tensor(shape)  # the cut dim first
        shape[step.dim] = shape[step.dim] * size if step.kind == "all_gather" else shape[step.dim] // size
        made = tensor(shape)
        made = made if _first(shape, step.dim) else tensor(shape)
    elif step.kind == "all_to_all":
        tensor(shape)  # what goes out
        made = tensor(shape)
        shape[step.dim] *= size
        shape[step.to_dim] //= size
        made = made if _first(shape, step.dim) else tensor(shape)
    else:
        if step.kind == "pad":  # a sum names no dim
            shape[step.dim] *= size
        made = tensor(shape)
    for storage in held:
        if storage is not made:
            account.release(storage)
    return Piece(made, tuple(shape))


def _first(shape: Sequence[int], dim: int) -> bool:
    """Whether a dim is the outermost, but for dims of extent 1."""
    return all(extent == 1 for extent in shape[:dim])
