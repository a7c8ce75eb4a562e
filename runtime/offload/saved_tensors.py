"""Records what autograd saves of a block that is not recomputed, while the block runs, so that it can be offloaded.

    operator ──saves──> tensor ──pack──> the same memory, recorded      no tensor is replaced: only the memory behind it
                                                                        is offloaded, and fetched back

Memory that the block has not made itself, or that others read, stays (`planner.plan.layout.saved_tensor_offload`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from runtime.offload.regather import memory_of


@dataclass(kw_only=True)
class SavedMemory:
    """The memory of all tensors saved since `watching`, by storage (`memory_of`)."""

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def watching(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which saved tensors are recorded."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def note(self, tensor: torch.Tensor) -> None:
        """Record a saved tensor."""
        self.storages.setdefault(memory_of(tensor), tensor.untyped_storage())

    def take(self, staying: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
        """Return the recorded memory, without empty memory and the memory of `staying` tensors. Releases it here,
        because autograd holds the hooks as long as the saved tensors."""
        kept = {memory_of(tensor) for tensor in staying}
        found = [storage for at, storage in self.storages.items() if at not in kept and storage.nbytes()]
        self.storages.clear()
        return found

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.note(tensor)
        return tensor if tensor.is_leaf else tensor.detach()  # a node must not hold its own result


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
