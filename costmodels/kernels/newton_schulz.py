"""Time of the Newton-Schulz iteration, with which Muon makes every update orthogonal.

    X <- M / |M|,  then S times:   A = X X^T      X <- a X + (b A + c A A) X          X has m rows, n columns, m <= n

    products of a step     m x n x m,  m x m x m,  m x m x n        4 m^2 n + 2 m^3 FLOP
    passes over memory     those of `_PASSED` over the matrix, before and after

Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon, with S = 5. The device that iterates has the whole matrix.
"""

from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_time
from costmodels.units import Bytes
from hardware_profiles import Device, Flops, Seconds

NEWTON_SCHULZ_STEPS = 5

NEWTON_SCHULZ_KERNELS = 3 * NEWTON_SCHULZ_STEPS + 6
"""Operators that a framework launches: three products for each step; a cast, a norm, a clamp and a division before; a
decay and a sum after."""

_PASSED = 6
"""Elements that pass through memory per element of the matrix, products excluded: cast 2, norm 1, division 2, sum 1
(the other operand of the sum is traffic of the optimizer)."""


def orthogonalisation_time(rows: float, columns: float, matrices: float, dtype: str, device: Device) -> Seconds:
    """Seconds for `matrices` matrices of one shape, batched in one launch per product.

    Raises: as `costmodels.matmul_time`.
    """
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
    """FLOP for `matrices` matrices of one shape."""
    m, n = min(rows, columns), max(rows, columns)
    return NEWTON_SCHULZ_STEPS * (4 * m**2 * n + 2 * m**3) * matrices


def orthogonalisation_bytes(rows: float, columns: float, matrices: float, element: Bytes) -> Bytes:
    """Bytes besides the matrices while they are made orthogonal: the next iterate, and two m x m squares of each.

    `element` is the bytes of an element.
    """
    return matrices * (rows * columns + 2 * min(rows, columns) ** 2) * element
