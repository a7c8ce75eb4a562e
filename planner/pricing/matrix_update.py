"""What Muon takes for matrices beyond an update element by element: they are made orthogonal, each by one device.

A state that is cut within its matrices is in pieces on N devices. As many weights of one shape and layout go together:

    N updates, a piece of each --(all-to-all)--> one whole update --(Newton-Schulz)--> --(all-to-all)--> pieces

in the dtype of the iteration. So a weight takes the N-th part of that, where there are enough of its kind; how many
devices wait when there are not, the judge knows (`planner.plan.layout.matrix_groups`). Devices that have copies of a
state all make it orthogonal, unless whole parameters have owners (`Update.owned`). Matrices of one weight, as those of
experts, stay where they are.

Source: Liu et al. 2025, arXiv 2502.16982, algorithm 1, gathers and computes everywhere; that devices share the
iterations out is as in DeepSpeed (ZeRO 3 with Muon, pull request 7919).
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
    """Updates of as many weights as there are devices with pieces of a matrix, one after the other in the first dim:
    their type, the layout in which each device has a piece of every one, and that in which it has one whole."""

    size: int
    tensor: TensorType
    pieces: Layout
    wholes: Layout

    @property
    def ways(self) -> tuple[Layout, Layout]:
        """From the pieces to whole matrices."""
        return self.pieces, self.wholes


def iterated(tensor: TensorType) -> TensorType:
    """A weight in the dtype in which its update is made orthogonal: bfloat16, in which the iteration was proposed,
    where the weight has that, else float32 at least."""
    return tensor if tensor.dtype in ("bfloat16", "float64") else replace(tensor, dtype="float32")


def stack_of(tensor: TensorType, state: Layout, sizes: Sequence[int]) -> Stack:
    """The stack in which weights of a type whose states lie so go together."""
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
    """Seconds beyond an update element by element for a weight in each of its stored layouts, (K,), as one of a full
    stack. A device updates this share of the weight, and launches an operator in so many seconds."""
    known = {state: seconds_of_one(tensor, state, pricers, launched) for state in {one.state for one in stored}}
    taken: Array = shares * np.array([known[one.state] for one in stored])
    return taken


def seconds_of_one(tensor: TensorType, state: Layout, pricers: Pricers, launched: Seconds) -> Seconds:
    """What one place of a stack takes: of an iteration, and of both messages."""
    sizes = pricers.matrices.mesh.sizes
    stack = stack_of(tensor, state, sizes)
    own = orthogonalised_seconds(tensor, matrices_of_device(stack, sizes), pricers.matrices.cluster)
    sent = sum(route.seconds for route in _routes(stack, pricers))
    return (max(own, NEWTON_SCHULZ_KERNELS * launched) + sent) / stack.size


def stack_messages(stack: Stack, pricers: Pricers) -> tuple[Message, ...]:
    """The messages in which a stack becomes whole matrices, and pieces again."""
    return tuple(message for route in _routes(stack, pricers) for message in route.messages)


def _routes(stack: Stack, pricers: Pricers) -> Iterator[PricedRoute]:
    for way in (stack.ways, stack.ways[::-1]):
        yield pricers.matrices.route(stack.tensor, *way)


def orthogonalised_seconds(tensor: TensorType, matrices: float, cluster: Cluster) -> Seconds:
    """Seconds of a device that makes so many matrices of a weight orthogonal, without launches."""
    dtype = "bf16" if tensor.dtype == "bfloat16" else "fp32"
    rows, columns = tensor.shape[-2:]
    return float(orthogonalisation_time(rows, columns, matrices, dtype, cluster.device))


def stack_bytes(stack: Stack, sizes: Sequence[int]) -> Bytes:
    """What lives on a device beside gradients while its matrices of a stack are made orthogonal, in the dtype of the
    iteration: these, the next ones, and squares."""
    element, count = stack.tensor.element_bytes, matrices_of_device(stack, sizes)
    rows, columns = stack.tensor.shape[-2:]
    return count * rows * columns * element + orthogonalisation_bytes(rows, columns, count, element)


def most_bytes(stack: Stack, sizes: Sequence[int]) -> Bytes:
    """The most that lives beside gradients while a stack is updated: also four times what a device sends of it, with
    what it sends from, and what it puts together of what arrives."""
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
    """How many matrices of a stack a device has whole."""
    shape = stack.tensor.shape
    return local_share(shape, stack.wholes, sizes) * math.prod(shape[:-2])
