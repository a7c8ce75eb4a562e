"""Weights that are cast to 8 bits where they are stored, and travel so (`Rule.narrow`).

Each time that one is gathered, a device reads its piece for the largest element and for the cast, and writes it in 8
bits: 2 e + 1 bytes for an element of e bytes, where the gathered weight would be cast whole, on every device, for each
of its products.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from costmodels import operator_time
from hardware_profiles import Cluster
from planner.fp8_recipes import RECIPES
from planner.graph.operator_graph import TensorType
from planner.sharding.layout import Layout, local_fraction

DTYPE = RECIPES["delayed"].forward


def in_8_bits(tensor: TensorType) -> TensorType:
    """A weight as it travels."""
    return replace(tensor, dtype=DTYPE)


def cast_seconds(
    tensor: TensorType, layouts: Sequence[Layout], sizes: Sequence[int], cluster: Cluster
) -> NDArray[np.float64]:
    """Seconds in which a device casts its piece of a weight in each of some stored layouts, (K,)."""
    pieces = np.array([local_fraction(layout, sizes) for layout in layouts]) * tensor.numel
    time = operator_time(
        op_class="elementwise",
        flops=np.zeros(len(pieces)),
        bytes_moved=cluster.software.casts * (2 * tensor.element_bytes + 1) * pieces,
        dtype="fp32",
        device=cluster.device,
    )
    return np.asarray(time)
