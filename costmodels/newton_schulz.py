"""Time of making matrices orthogonal by the Newton-Schulz iteration, as Muon does with every update.

    X <- M / |M|,  then S times:   A = X X^T      X <- a X + (b A + c A A) X          X has m rows, n columns, m <= n

    products of a step     m x n x m,  m x m x m,  m x m x n        4 m^2 n + 2 m^3 FLOP
    passes over memory     those of `_PASSED` over the matrix, before and after

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon, with S = 5. A matrix is whole on the device that iterates.
"""

from costmodels.compute import operator_time
from costmodels.matmul import element_bytes, matmul_time
from costmodels.units import Bytes
from hardware_profiles import Device, Flops, Seconds

NEWTON_SCHULZ_STEPS = 5

NEWTON_SCHULZ_KERNELS = 3 * NEWTON_SCHULZ_STEPS + 6
"""Operators that a framework launches: three products for each step; a cast, a norm, a clamp and a division before, a
decay and a sum behind."""

_PASSED = 6
"""Elements that pass through memory for each of a matrix, beside products: cast 2, norm 1, divided 2, added 1 (what it
is added to is traffic of the optimizer)."""


def orthogonalisation_time(rows: float, columns: float, matrices: float, dtype: str, device: Device) -> Seconds:
    """Seconds for so many matrices of one shape, as many products launched together."""
    m, n = min(rows, columns), max(rows, columns)
    each = sum(matmul_time(*extents, matrices, dtype, device) for extents in ((m, m, n), (m, m, m), (m, n, m)))
    passed = operator_time(
        op_class="elementwise",
        flops=0.0,
        bytes_moved=_PASSED * element_bytes(dtype) * matrices * rows * columns,
        dtype=dtype,
        device=device,
    )
    return NEWTON_SCHULZ_STEPS * each + passed


def orthogonalisation_flops(rows: float, columns: float, matrices: float) -> Flops:
    """Floating point operations for so many matrices of one shape."""
    m, n = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * m**2 * n + 2 * m**3) * matrices


def orthogonalisation_bytes(rows: float, columns: float, matrices: float, element: Bytes) -> Bytes:
    """What lives beside the matrices while they are made orthogonal: the next ones, and two squares of each."""
    return matrices * (rows * columns + 2 * min(rows, columns) ** 2) * element
