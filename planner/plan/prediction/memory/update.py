"""Temporaries of weight updates, as in `runtime.optimizers`.

A single kernel that updates weights, gradients and moments in fp32 needs none. A chain of kernels needs `_CHAIN` times
the piece, in addition to the last temporary of the previous piece (torch/optim/adam.py, _single_tensor_adam: `denom`).
Narrower tensors (weights without a master, and moments) have fp32 copies in the meantime: AdamW and SGD widen chunks of
`UPDATE_CHUNK` elements, made of several small pieces or of a part of a large one. LAMB widens whole pieces: two moments
beside the root of one, or, when these are gone, the weight beside that root and its own squares.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from costmodels import MOMENTS_KEPT, UPDATE_CHUNK
from hardware_profiles import Bytes
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.narrow_updates import FP32, narrow_moments, narrow_weight, updated_in_chunks
from planner.pricing.parameter_price import summed
from planner.sharding.matrices import optimizer_of

_CHAIN = 2  # temporaries of a chain of kernels, relative to the updated piece


def update_temporaries(
    bound: BoundPlan, pieces: Mapping[str, float], in_strips: Collection[str], *, fused: bool
) -> Bytes:
    """The most bytes while one optimizer updates pieces of parameters with these numbers of elements. One kernel does
    that if it is `fused` and the piece is not `in_strips`."""
    if not pieces:
        return 0.0
    optimizer = optimizer_of(bound.graph, bound.plan.training.optimizer, next(iter(pieces)))
    chained = [count for name, count in pieces.items() if not fused or name in in_strips]
    kinds = {name: _widened(bound, name, MOMENTS_KEPT[optimizer]) for name in pieces}
    element = max(FP32, *(bound.graph.types[name].element_bytes for name in pieces))
    if optimizer == "lamb":
        wide = {name: narrow_moments(bound) or narrow_weight(bound, name) for name in pieces}
        return element * max((_CHAIN + wide[name]) * count for name, count in pieces.items())
    if not any(kinds.values()):
        return element * _chain(chained, optimizer)
    chain = _chain([min(UPDATE_CHUNK, count) for count in chained], optimizer)
    return element * (max(kinds.values()) * _largest_chunk(pieces.values()) + chain)


def _chain(counts: Sequence[float], optimizer: str) -> float:
    """Elements of temporaries of a chain of kernels that updates pieces one after the other. SGD has one, the gradient
    with the decay of the weight, which is freed before the next piece (torch/optim/sgd.py, _single_tensor_sgd)."""
    if optimizer == "sgd":
        return max(counts, default=0.0)
    most = before = 0.0
    for count in counts:
        most, before = max(most, before + _CHAIN * count), count
    return most


def _widened(bound: BoundPlan, name: str, moments: int) -> int:
    """The number of fp32 copies that the update of a parameter makes of its tensors and its gradient."""
    gradient = summed(bound.graph.types[name], bound.plan.training.update).element_bytes < FP32
    return (updated_in_chunks(bound, name) and gradient) + narrow_weight(bound, name) + moments * narrow_moments(bound)


def _largest_chunk(counts: Iterable[float]) -> float:
    """Elements of the fullest chunk, if pieces are put into chunks one after the other."""
    most = held = 0.0
    for count in counts:
        whole, rest = divmod(count, UPDATE_CHUNK)
        if whole:
            return UPDATE_CHUNK
        held = rest if held + rest > UPDATE_CHUNK else held + rest
        most = max(most, held)
    return most
