"""Parameters that are updated in chunks: those with a weight or optimizer state that is narrower than fp32.

The update is computed in fp32 (`runtime.optimizers.narrow`). AdamW and SGD convert weight, state and gradient to fp32
chunk by chunk; LAMB and Muon need the whole gradient in fp32, because they make their update in its place.
"""

from costmodels import MOMENT_BYTES
from planner.plan.binding.bind import BoundPlan
from planner.sharding.matrices import optimizer_of

FP32 = 4  # bytes
_BY_ELEMENT = ("adamw", "sgd")


def narrow_moments(bound: BoundPlan) -> bool:
    """Whether optimizer states are converted to fp32 for an update."""
    return MOMENT_BYTES[bound.plan.training.update.moment_dtype] < FP32


def narrow_weight(bound: BoundPlan, name: str) -> bool:
    """Whether a 16-bit parameter has no master weight, and is converted to fp32 for an update."""
    return not bound.plan.training.update.master_weights and bound.graph.types[name].element_bytes < FP32


def updated_in_chunks(bound: BoundPlan, name: str) -> bool:
    """Whether the update of a parameter takes its gradient in the dtype in which it was reduced."""
    by_element = optimizer_of(bound.graph, bound.plan.training.optimizer, name) in _BY_ELEMENT
    return by_element and (narrow_moments(bound) or narrow_weight(bound, name))
