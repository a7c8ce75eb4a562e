"""Weights that are cast to 8 bits where they are stored, and gathered in 8 bits (`Rule.narrow`).

Once a step, a device reads its piece to find the largest elements. For each gather it reads the piece again and writes
it in 8 bits: e + 1 bytes for an element of e bytes. Otherwise every device would cast the whole gathered weight for
each of its products.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels import operator_time
from hardware_profiles import Cluster, Seconds
from planner.fp8_recipes import FORWARD
from planner.graph.operator_graph import TensorType
from planner.sharding.layout import Layout, local_share

DTYPE = FORWARD


def in_8_bits(tensor: TensorType) -> TensorType:
    """A weight as it is sent."""
    return replace(tensor, dtype=DTYPE)


def cast_seconds(
    tensor: TensorType, layouts: Sequence[Layout], sizes: Sequence[int], cluster: Cluster
) -> NDArray[np.float64]:
    """Seconds in which a device casts its piece of a weight, for each of some stored layouts, (K,)."""
    return _passes(tensor, layouts, sizes, cluster, tensor.element_bytes + 1)


def maxima_seconds(tensor: TensorType, layout: Layout, sizes: Sequence[int], cluster: Cluster) -> Seconds:
    """Seconds in which a device finds the largest elements of its piece of a weight."""
    (seconds,) = _passes(tensor, [layout], sizes, cluster, tensor.element_bytes).tolist()
    return float(seconds)


def _passes(
    tensor: TensorType, layouts: Sequence[Layout], sizes: Sequence[int], cluster: Cluster, moved: float
) -> NDArray[np.float64]:
    """Seconds in which a device moves this many bytes for each element of its piece."""
    pieces = np.array([local_share(tensor.shape, layout, sizes) for layout in layouts]) * tensor.numel
    time = operator_time(
        op_class="elementwise",
        flops=np.zeros(len(pieces)),
        bytes_moved=cluster.software.casts * moved * pieces,
        dtype="fp32",
        device=cluster.device,
    )
    return np.asarray(time)
