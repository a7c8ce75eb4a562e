"""Checks that all ranks were given the same global batch.

A step takes its pieces from a batch that every rank has. If each rank has a batch of its own (as for DDP), or a dataset
draws a different one on every rank, training would silently be wrong. So before the first step the ranks compare a
digest of their batches; a rank that has read only its pieces has nothing to compare.
"""

import hashlib
from collections.abc import Iterable

import torch
import torch.distributed as dist

from planner.errors import RequestError

_NOTHING = -(2**62)


def check_same_batch(given: Iterable[torch.Tensor] | None, device: torch.device) -> None:
    """Compare the tensors of a whole batch over all ranks, None where this rank has only pieces. Collective over the
    default group. Raises RequestError on every rank where two differ."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = [_NOTHING, _NOTHING] if given is None else [digest := _digest(given), -digest]
    extremes = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, None)
    largest, smallest = extremes.tolist()
    if largest != _NOTHING and largest != -smallest:
        raise RequestError(
            "the ranks were given different batches; every rank takes the whole global batch and keeps its pieces,"
            " so give the same one to all, or read it with runtime.loader"
        )


def _digest(given: Iterable[torch.Tensor]) -> int:
    """60 bits of a digest of values, shapes and dtypes."""
    found = hashlib.sha256()
    for tensor in given:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int(found.hexdigest()[:15], 16)
