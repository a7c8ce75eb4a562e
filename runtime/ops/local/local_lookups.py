"""Local forms of operators that look up rows in a sharded table: embedding bags, and the loss of a class.

Each is called with a `Shard` and with the operator's own arguments, tensors being local (see
`runtime.ops.local.local_ops`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from planner.graph.torch_operators import resolve
from runtime.comm.collectives import all_reduce
from runtime.ops.index_check import expect_within

if TYPE_CHECKING:
    from runtime.ops.shard import Shard

_SUM, _AVERAGE = 0, 1  # torch's numbers for the modes of a bag
_MEAN = 1  # torch's number for the mean of a loss


def embedding_bag(
    shard: "Shard",
    weight_VH: torch.Tensor,
    indices: torch.Tensor,
    offsets_B: torch.Tensor | None = None,
    *,
    mode: int = _SUM,
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    per_sample_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums or averages of the rows that this rank has: terms of a sum over the axes that split the table. Indices are B
    K, or all bags end to end, K."""
    padding = None if padding_idx is None or padding_idx < 0 else padding_idx
    if not shard.axes("v"):
        return F.embedding_bag(
            indices,
            weight_VH,
            offsets_B,
            mode=("sum", "mean", "max")[mode],
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding,
        )
    expect_within(indices, shard.extent("v"), f"indices of {shard.bound.operator.name}")
    counted = torch.ones_like(indices, dtype=torch.bool) if padding is None else indices != padding
    row = indices - shard.offset("v")
    here = (row >= 0) & (row < weight_VH.shape[0]) & counted
    found = F.embedding(row.masked_fill(~here, 0), weight_VH).masked_fill(~here.unsqueeze(-1), 0.0)
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    add = _rows_of(indices, offsets_B, include_last_offset)
    bags_BH = add(found)
    return bags_BH / add(counted.to(found.dtype).unsqueeze(-1)).clamp(min=1) if mode == _AVERAGE else bags_BH


def _rows_of(
    indices: torch.Tensor, offsets_B: torch.Tensor | None, include_last_offset: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sum values, one for every index, into bags."""
    if offsets_B is None:
        return lambda each_BKH: each_BKH.sum(dim=1)
    starts_B = offsets_B[:-1] if include_last_offset else offsets_B
    places_K = torch.arange(len(indices), device=indices.device)
    bag_K = torch.searchsorted(starts_B.to(places_K.dtype), places_K, right=True) - 1
    return lambda each_KH: each_KH.new_zeros(len(starts_B), each_KH.shape[1]).index_add(0, bag_K, each_KH)


def nll_loss(
    shard: "Shard",
    chances_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weight: None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
) -> torch.Tensor:
    """The loss of the targets whose class this rank has: a term of a sum. A mean is over all targets that are not
    ignored, on any rank."""
    classes, samples = shard.axes("v"), shard.axes("n")
    if not classes and not samples:
        return _whole_nll_loss(shard, chances_NV, targets_N, weight, reduction, ignore_index)
    expect_within(targets_N, shard.extent("v"), f"targets of {shard.bound.operator.name}", ignore_index)
    column_N = targets_N - shard.offset("v")
    counted_N = targets_N != ignore_index
    here_N = (column_N >= 0) & (column_N < chances_NV.shape[1]) & counted_N
    chosen_N = chances_NV.gather(1, column_N.masked_fill(~here_N, 0)[:, None])[:, 0]
    loss = -chosen_N.masked_fill(~here_N, 0.0).sum()
    if reduction != _MEAN:
        return loss
    count = counted_N.sum().to(torch.float32)
    for axis in samples:
        count = all_reduce(count, shard.place.group(axis))
    return loss / count.to(loss.dtype)


def _whole_nll_loss(shard: "Shard", *arguments: Any) -> torch.Tensor:
    made: torch.Tensor = resolve(shard.bound.operator.op)(*arguments)
    return made
