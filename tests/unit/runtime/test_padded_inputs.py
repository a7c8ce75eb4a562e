"""The weights of the samples of a padded batch."""

from types import SimpleNamespace
from typing import Any

import torch

from planner.graph.in_float64 import float64_by_default
from planner.graph.operator_graph import TensorType
from planner.sharding.padded_batch import SAMPLE_WEIGHTS
from runtime.step.inputs import InputPieces


def test_sample_weights_have_the_dtype_of_the_graph_in_a_proof_in_float64() -> None:
    """They had torch's default dtype, which is float64 there, and no padded plan in fp32 was proved."""
    training = SimpleNamespace(global_batch=3, update=SimpleNamespace(padding_samples=1))
    graph = SimpleNamespace(types={SAMPLE_WEIGHTS: TensorType(shape=(4,), dtype="float32")})
    bound: Any = SimpleNamespace(plan=SimpleNamespace(training=training), graph=graph)
    place: Any = None
    with float64_by_default():
        pieces = InputPieces(bound=bound, place=place, batched=frozenset(), reads=frozenset())
        weights = pieces._padded({})[SAMPLE_WEIGHTS]
    assert weights.dtype == torch.float32
    assert weights.count_nonzero() == 3
