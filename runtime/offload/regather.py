"""Regathers weights: a gathered weight is freed after its use, and gathered again where the backward pass needs it.

    forward   piece ──all_gather──> weight ──> operator        autograd would keep the whole weight until backward
    backward  piece ──all_gather──> weight ──> gradient        instead it keeps the piece, which is stored anyway

Autograd may save the weight itself or a view of it (a linear layer saves the transpose). For a saved tensor that shares
its memory with a gathered weight, only its geometry is kept; unpacking runs the same steps, which give the same memory
again. Where an operator saves a weight several times, as a recurrent layer does in each of its steps, the weight is
gathered once for all of them. A weight that is saved once and used twice is gathered twice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import Transfer, apply_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """The origin of a gathered weight: this rank's piece, and the steps."""

    piece: torch.Tensor
    steps: Transfer
    place: RankMesh


@dataclass(slots=True, kw_only=True)
class _Again:
    """A weight that an operator saved several times: gathered when the first of them is needed, freed after the
    last."""

    source: Gathered
    uses: int = 0
    left: int = 0
    weight: torch.Tensor | None = None

    def taken(self) -> torch.Tensor:
        if self.weight is None:
            steps, place = self.source.steps.forward, self.source.place
            self.weight, self.left = apply_steps(self.source.piece.detach(), steps, place), self.uses
        weight, self.left = self.weight, self.left - 1
        if not self.left:
            self.weight = None
        return weight


@dataclass(frozen=True, slots=True, kw_only=True)
class _View:
    """A view of a gathered weight, without its memory."""

    source: _Again
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def gather_again(
    gathered: Mapping[int, Gathered], saved: Callable[[torch.Tensor], None] = lambda tensor: None
) -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which autograd saves no view of a gathered weight. Weights are identified by their storage
    (`memory_of`) and must stay alive while the context is entered. `saved` is called with all other saved tensors."""
    again = {name: _Again(source=source) for name, source in gathered.items()}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _View:
        source = again.get(memory_of(tensor))
        if source is None:
            saved(tensor)
            return tensor
        source.uses += 1
        return _View(
            source=source, shape=tuple(tensor.shape), stride=tuple(tensor.stride()), offset=int(tensor.storage_offset())
        )

    def unpack(saved: torch.Tensor | _View) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with torch.no_grad():
            return saved.source.taken().as_strided(saved.shape, saved.stride, saved.offset)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def memory_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage object, equal for all its views; fake tensors have one too, unlike a data
    pointer."""
    return int(tensor.untyped_storage()._cdata)
