"""What Muon takes for a matrix beyond an update element by element: it is gathered, and made orthogonal.

    state layout --(gather, in the dtype of the iteration)--> whole matrices --(Newton-Schulz, cut)--> state layout

Devices that have copies of a state, or pieces of one matrix, all make it orthogonal; states that are shared out by
whole parameters (`Update.owned`) have one device that does. Matrices of one weight, as of experts, stay where they are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

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
from planner.pricing.redistribution_price import Pricers
from planner.sharding.layout import Layout, local_share
from planner.sharding.matrices import whole_matrices
from planner.sharding.stored import StoredParameter

Array = NDArray[np.float64]


def iterated(tensor: TensorType) -> TensorType:
    """A weight in the dtype in which its update is made orthogonal: bfloat16, in which the iteration was proposed,
    where the weight has that, else float32 at least."""
    return tensor if tensor.dtype in ("bfloat16", "float64") else replace(tensor, dtype="float32")


def matrix_seconds(
    tensor: TensorType, stored: Sequence[StoredParameter], shares: Array, pricers: Pricers, launched: Seconds
) -> Array:
    """Seconds beyond an update element by element for a weight in each of its stored layouts, (K,). A device makes this
    share of its matrices orthogonal, and launches an operator in so many seconds."""
    states = [one.state for one in stored]
    wholes = [whole_matrices(tensor.shape, state) for state in states]
    counts = np.array([matrices_of_device(tensor, whole, pricers.matrices.mesh.sizes) for whole in wholes])
    own = _iterations(tensor, counts, pricers.matrices.cluster)
    gathered = pricers.matrices.pairs(iterated(tensor), states, wholes).seconds
    seconds: Array = shares * (np.maximum(own, NEWTON_SCHULZ_KERNELS * launched) + gathered)
    return seconds


def orthogonalised_seconds(tensor: TensorType, matrices: float, cluster: Cluster) -> Seconds:
    """Seconds of a device that makes so many matrices of a weight orthogonal, without launches."""
    return float(_iterations(tensor, np.array([matrices]), cluster)[0])


def _iterations(tensor: TensorType, matrices: Array, cluster: Cluster) -> Array:
    dtype = "bf16" if tensor.dtype == "bfloat16" else "fp32"
    rows, columns = tensor.shape[-2:]
    return np.asarray(orthogonalisation_time(rows, columns, matrices, dtype, cluster.device))


def matrix_messages(tensor: TensorType, stored: StoredParameter, pricers: Pricers) -> tuple[Message, ...]:
    """The messages in which a device gathers its matrices once a step."""
    whole = whole_matrices(tensor.shape, stored.state)
    return pricers.matrices.route(iterated(tensor), stored.state, whole).messages


def matrix_bytes(tensor: TensorType, stored: StoredParameter, sizes: Sequence[int]) -> Bytes:
    """What lives on a device beside the gradient while the update of a weight is made orthogonal: its matrices in the
    dtype of the iteration, where that is not the gradient itself, the next ones, and squares."""
    whole = whole_matrices(tensor.shape, stored.state)
    element = iterated(tensor).element_bytes
    count, (rows, columns) = matrices_of_device(tensor, whole, sizes), tensor.shape[-2:]
    return count * rows * columns * element + orthogonalisation_bytes(rows, columns, count, element)


def matrix_flops(tensor: TensorType, stored: StoredParameter, sizes: Sequence[int]) -> Flops:
    """Floating point operations of a device that makes its matrices of a weight orthogonal."""
    count = matrices_of_device(tensor, whole_matrices(tensor.shape, stored.state), sizes)
    rows, columns = tensor.shape[-2:]
    return orthogonalisation_flops(rows, columns, count)


def matrices_of_device(tensor: TensorType, whole: Layout, sizes: Sequence[int]) -> float:
    """How many matrices of a weight a device has, where it has whole ones in this layout."""
    return local_share(tensor.shape, whole, sizes) * math.prod(tensor.shape[:-2])
