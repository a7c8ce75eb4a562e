"""Time of a recurrent layer (LSTM, GRU, RNN) on one device, from its shape.

    x_1 ... x_s ──one product──> what inputs add to the gates of all steps        s b rows, g columns, i deep
    h_0 ─> step ─> h_1 ─> step ─> ... ─> h_s                                      each b rows, g columns, o deep

The inputs of all steps are multiplied at once. Then steps follow each other; each is a product of the previous state
with the other matrix and a pass over the gates:

    forward     P(s b, g, i) + s (P(b, g, o) + E(2 g + 3 h))
    backward    P(s b, i, g) + s (P(b, o, g) + E(3 g + 4 h)) + P(g, i, s b) + P(g, o, s b)

P is `matmul_time`. E is the time to read or write that many elements of each sample (gates, states and saved values),
with a launch. If o is not h, each step also projects its state: P(b, o, h) forward, twice that backward. Directions
follow each other. Steps launch one by one, which decides the time where b is small: a step is never faster than its
launch.

Monotone in every extent; c times the samples or the steps take at most c times as long. Not good for kernels that keep
the matrix of the steps in registers over all of them (cuDNN's persistent ones, of small layers), which need no launch
for a step. No GPU measurement supports this formula.

Source: Appleyard, Kocisky, Blunsom, "Optimizing performance of recurrent neural networks on GPUs", arXiv 1604.01946
(section 3.1: one product for the inputs of all steps, one for each step; pointwise operations in one kernel).
"""

from dataclasses import dataclass

from costmodels.kernels.compute import operator_time
from costmodels.kernels.matmul import element_bytes, matmul_time
from costmodels.units import Quantity
from hardware_profiles import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """Extents on one device: numbers, or arrays of one shape (K,).

    Attributes:
        batch: b, samples.
        steps: s, of a sample.
        inputs: i, elements of an input.
        outputs: o, elements that a step passes on: `hidden`, or fewer if they are projected.
        gates: g, elements of all gates.
        hidden: h, elements of a state.
        directions: 1, or 2 if bidirectional.
    """

    batch: Quantity
    steps: Quantity
    inputs: Quantity
    outputs: Quantity
    gates: Quantity
    hidden: Quantity
    directions: Quantity


def recurrent_time(shape: RecurrentShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the forward pass, element-wise.

    Raises: as `costmodels.matmul_time` and `costmodels.operator_time`.
    """
    inputs = matmul_time(shape.batch * shape.steps, shape.gates, shape.inputs, shape.directions, dtype, device)
    step = matmul_time(shape.batch, shape.gates, shape.outputs, _one(shape), dtype, device)
    passed = _passed(shape, 2 * shape.gates + 3 * shape.hidden, dtype, device)
    return inputs + shape.directions * shape.steps * (step + passed + _projected(shape, dtype, device))


def recurrent_backward_time(shape: RecurrentShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the backward pass, element-wise: libraries compute all gradients at once.

    Raises: as `recurrent_time`.
    """
    rows, directions = shape.batch * shape.steps, shape.directions
    inputs = matmul_time(rows, shape.inputs, shape.gates, directions, dtype, device)
    step = matmul_time(shape.batch, shape.outputs, shape.gates, _one(shape), dtype, device)
    passed = _passed(shape, 3 * shape.gates + 4 * shape.hidden, dtype, device)
    weights = matmul_time(shape.gates, shape.inputs, rows, directions, dtype, device) + matmul_time(
        shape.gates, shape.outputs, rows, directions, dtype, device
    )
    steps = directions * shape.steps * (step + passed + 2 * _projected(shape, dtype, device))
    return inputs + weights + steps


def _one(shape: RecurrentShape) -> Quantity:
    return 0 * shape.batch + 1


def _projected(shape: RecurrentShape, dtype: str, device: Device) -> Quantity:
    """Seconds of the projection of one step; 0 where states are not projected."""
    time = matmul_time(shape.batch, shape.outputs, shape.hidden, _one(shape), dtype, device)
    return time * (shape.outputs != shape.hidden)


def _passed(shape: RecurrentShape, elements: Quantity, dtype: str, device: Device) -> Quantity:
    return operator_time(
        op_class="elementwise",
        flops=0.0 * shape.batch,
        bytes_moved=shape.batch * elements * element_bytes(dtype),
        dtype=dtype,
        device=device,
    )
