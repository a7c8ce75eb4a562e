"""Which part of a rank's shard is in the model, and which part is zero padding of the weight
(`planner.sharding.padding`) or of its shards (`planner.sharding.layout.PaddedShape`).

model 5 rows, padded to 8, cut in 4      0 1 | 2 3 | 4 . | . .
"""

from collections.abc import Iterator, Sequence

import torch

from planner.sharding.layout import Layout, whole_shape
from runtime.comm.device_mesh import RankMesh


def padded(weight: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A weight zero-padded to this shape; itself where it already has the shape."""
    if tuple(weight.shape) == tuple(shape):
        return weight
    larger = weight.new_zeros(tuple(shape))
    larger[tuple(slice(extent) for extent in weight.shape)] = weight
    return larger


def in_model(
    shard: torch.Tensor, shape: Sequence[int], own: Sequence[int], layout: Layout, place: RankMesh
) -> torch.Tensor:
    """The part of a shard that is in the model, a view; for a tensor of this `shape`, which has the shape `own` in the
    model."""
    for dim, kept in _kept(shard, shape, own, layout, place):
        shard = shard.narrow(dim, 0, kept)
    return shard


def clear(shard: torch.Tensor, shape: Sequence[int], own: Sequence[int], layout: Layout, place: RankMesh) -> None:
    """Set the padding of a shard to zero."""
    for dim, kept in _kept(shard, shape, own, layout, place):
        shard.narrow(dim, kept, shard.shape[dim] - kept).zero_()


def _kept(
    shard: torch.Tensor, shape: Sequence[int], own: Sequence[int], layout: Layout, place: RankMesh
) -> Iterator[tuple[int, int]]:
    """Padded dims, and how many elements of the shard in each are in the model."""
    sizes = place.mesh.sizes
    if tuple(shape) == tuple(own) == whole_shape(shape, layout, sizes):
        return
    for dim, (extent, mine) in enumerate(zip(whole_shape(shape, layout, sizes), own, strict=True)):
        if extent == mine:
            continue
        number, count = 0, 1
        for placement, size, at in zip(layout, sizes, place.coordinate, strict=True):
            if placement.is_shard and placement.dim == dim:
                number, count = number * size + at, count * size
        yield dim, min(max(mine - number * (extent // count), 0), shard.shape[dim])
