"""Operators that drop elements, by counters: the mask of a piece is the same part of the whole mask."""

import torch

from runtime.ops.randomness import Region, drop, keep_mask
from runtime.ops.shard import Shard


def dropout(shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return drop(tensor, keep_mask(key, shard.region, p, tensor.device), p)


def native_dropout(
    shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool | None = True
) -> tuple[torch.Tensor, torch.Tensor]:
    keep = keep_mask(key, shard.region, p, tensor.device)
    return drop(tensor, keep, p), keep


def feature_dropout(shard: Shard, key: int, tensor: torch.Tensor, p: float, train: bool = True) -> torch.Tensor:
    return drop(tensor, keep_mask(key, features_of(shard.region), p, tensor.device), p)


def features_of(region: Region) -> Region:
    """The samples and channels of a region, with extent 1 in all other dims: feature dropout drops each as a whole."""
    ones = len(region.shape) - 2
    runs = tuple((dim, found) for dim, found in region.runs if dim < 2)
    return Region(start=(*region.start[:2], *(0,) * ones), shape=(*region.shape[:2], *(1,) * ones), runs=runs)
