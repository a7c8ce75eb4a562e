"""What autograd saves of a block that is not recomputed, seen while the block runs, so that it can be offloaded.

    operator ──saves──> tensor ──pack──> the same memory, noted down        nothing is replaced: only the memory behind
                                                                            what was saved leaves, and comes back

Memory that the block has not made itself, or that others read, stays (`planner.plan.layout.saved_tensor_offload`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from runtime.offload.regather import memory_of


@dataclass(kw_only=True)
class SavedMemory:
    """The memory of all that was saved since `watching`, by its name (`memory_of`)."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def watching(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which what is saved is noted down."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def note(self, tensor: torch.Tensor) -> None:
        """This was saved."""
        self.storages.setdefault(memory_of(tensor), tensor.untyped_storage())

    def take(self, staying: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Let go of it, as autograd holds the hooks as long as what is saved, and return all but empty memory and that
        of what stays."""
        kept = {memory_of(tensor) for tensor in staying}
        found = [storage for at, storage in self.storages.items() if at not in kept and storage.nbytes()]
        self.storages.clear()
        return found

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note(tensor)
        return tensor if tensor.is_leaf else tensor.detach()  # a node must not hold what it has made


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
