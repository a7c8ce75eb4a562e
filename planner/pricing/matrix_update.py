"""The price of Muon's updates beyond an element-wise update: matrices are made orthogonal, each on one device.

A state that is cut within its matrices is in pieces on N devices. Then N weights of one shape and layout go together:

    N updates, a piece of each --(all-to-all)--> one whole update --(Newton-Schulz)--> --(all-to-all)--> pieces

in the dtype of the iteration. So a weight takes the N-th part of that time, if there are enough of its kind; the
prediction knows how many devices wait if there are not (`planner.plan.layout.matrix_groups`). Devices with copies of a
state all make it orthogonal, unless whole parameters have owners (`Update.owned`). Matrices of one weight, such as
those of experts, stay where they are.

Source: Liu et al. 2025, arXiv 2502.16982, algorithm 1, gathers and computes everywhere; dividing the iterations among
devices is as in DeepSpeed (ZeRO 3 with Muon, pull request 7919).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from costmodels import (
    NEWTON_SCHULZ_KERNELS,
    orthogonalisation_bytes,
    orthogonalisation_flops,
    orthogonalisation_time,
)
from hardware_profiles import Bytes, Cluster, Flops, Seconds
from planner.graph.operator_graph import TensorType
from planner.pricing.message import Message
from planner.pricing.redistribution_price import PricedRoute, Pricers
from planner.sharding.layout import REPLICATE, Layout, PaddedShape, local_share, shard
from planner.sharding.stored import StoredParameter

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Updates of as many weights as there are devices with pieces of a matrix, stacked along the first dim: their type,
    the layout in which each device has a piece of every update, and the layout in which it has one whole update."""

    size: int
    tensor: TensorType
    pieces: Layout
    wholes: Layout

    @property
    def ways(self) -> tuple[Layout, Layout]:
        """From the pieces to whole matrices."""
        return self.pieces, self.wholes


def iterated(tensor: TensorType) -> TensorType:
    """A weight in the dtype of its iteration: bfloat16, for which the iteration was proposed, if the weight has that
    dtype, else at least float32."""
    return tensor if tensor.dtype in ("bfloat16", "float64") else replace(tensor, dtype="float32")


def stack_of(tensor: TensorType, state: Layout, sizes: Sequence[int]) -> Stack:
    """The stack in which weights of a type go together whose states have this layout."""
    matrix = len(tensor.shape) - 2
    cut = [placement.dim >= matrix for placement in state]
    size = math.prod(n for n, within in zip(sizes, cut, strict=True) if within)
    shape = (size, *tensor.shape)
    behind = [shard(placement.dim + 1) if placement.is_shard else REPLICATE for placement in state]
    return Stack(
        size=size,
        tensor=replace(iterated(tensor), shape=PaddedShape(shape) if isinstance(tensor.shape, PaddedShape) else shape),
        pieces=tuple(behind),
        wholes=tuple(shard(0) if within else own for own, within in zip(behind, cut, strict=True)),
    )


def matrix_seconds(
    tensor: TensorType, stored: Sequence[StoredParameter], shares: Array, pricers: Pricers, launched: Seconds
) -> Array:
    """Seconds beyond an element-wise update for a weight in each of its stored layouts, (K,), as one of a full stack.
    `shares`: of the weight that a device updates; `launched`: seconds to launch an operator."""
    known = {state: seconds_of_one(tensor, state, pricers, launched) for state in {one.state for one in stored}}
    taken: Array = shares * np.array([known[one.state] for one in stored])
    return taken


def seconds_of_one(tensor: TensorType, state: Layout, pricers: Pricers, launched: Seconds) -> Seconds:
    """Seconds for one weight of a stack: for the iteration and for both all-to-alls."""
    sizes = pricers.matrices.mesh.sizes
    stack = stack_of(tensor, state, sizes)
    own = orthogonalised_seconds(tensor, matrices_of_device(stack, sizes), pricers.matrices.cluster)
    sent = sum(route.seconds for route in _routes(stack, pricers))
    return (max(own, NEWTON_SCHULZ_KERNELS * launched) + sent) / stack.size


def stack_messages(stack: Stack, pricers: Pricers) -> tuple[Message, ...]:
    """The collectives that turn a stack into whole matrices, and back into pieces."""
    return tuple(message for route in _routes(stack, pricers) for message in route.messages)


def _routes(stack: Stack, pricers: Pricers) -> Iterator[PricedRoute]:
    for way in (stack.ways, stack.ways[::-1]):
        yield pricers.matrices.route(stack.tensor, *way)


def orthogonalised_seconds(tensor: TensorType, matrices: float, cluster: Cluster) -> Seconds:
    """Seconds in which a device makes this many matrices of a weight orthogonal, without launches."""
    dtype = "bf16" if tensor.dtype == "bfloat16" else "fp32"
    rows, columns = tensor.shape[-2:]
    return float(orthogonalisation_time(rows, columns, matrices, dtype, cluster.device))


def stack_bytes(stack: Stack, sizes: Sequence[int]) -> Bytes:
    """Bytes that a device needs in addition to gradients while its matrices of a stack are made orthogonal, in the
    dtype of the iteration: the matrices, their next iterates, and squares."""
    element, count = stack.tensor.element_bytes, matrices_of_device(stack, sizes)
    rows, columns = stack.tensor.shape[-2:]
    return count * rows * columns * element + orthogonalisation_bytes(rows, columns, count, element)


def most_bytes(stack: Stack, sizes: Sequence[int]) -> Bytes:
    """The most bytes needed in addition to gradients while a stack is updated. The all-to-alls need four times what a
    device sends, including the tensor that it sends from and the one that it assembles from what arrives."""
    here = stack_bytes(stack, sizes)
    if stack.size == 1:
        return here
    sent = local_share(stack.tensor.shape, stack.pieces, sizes) * stack.tensor.nbytes
    return max(here, 4 * sent)


def stack_flops(stack: Stack, sizes: Sequence[int]) -> Flops:
    """Floating point operations of a device that makes its part of a stack orthogonal."""
    rows, columns = stack.tensor.shape[-2:]
    return orthogonalisation_flops(rows, columns, matrices_of_device(stack, sizes))


def matrices_of_device(stack: Stack, sizes: Sequence[int]) -> float:
    """How many whole matrices of a stack a device has."""
    shape = stack.tensor.shape
    return local_share(shape, stack.wholes, sizes) * math.prod(shape[:-2])
