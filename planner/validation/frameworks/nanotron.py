"""Differences of nanotron from Megatron-LM (its repository, from 2024 to 2025).

vocabulary   padded to a multiple of the tensor-parallel degree only (`make_vocab_size_divisible_by` is 1,
             `_vocab_size_with_padding` of helpers.py), so rows of odd length stay odd
stages       layers, and the head after them, are assigned by weight: a stage takes them until the sum so far exceeds
             its share, the one that exceeds it included (`build_model` of models/base.py). A layer
             counts 4 heads d_head h + 3 f h, the head v h (`get_block_compute_costs` of models/llama.py)
"""

from fractions import Fraction
from itertools import accumulate

from planner.models.dimensions import Dimensions
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions

NANOTRON = r"\bnanotron\b"


def is_nanotron(row: Row) -> bool:
    """Whether a row says that nanotron trained it."""
    return mentions(row.words("stack", "source", "other_flags"), NANOTRON)


def nanotron_vocabulary(size: int, tensor: int) -> int:
    """The vocabulary padded for `tensor` tensor-parallel devices."""
    return -(-size // tensor) * tensor


def nanotron_stages(model: Dimensions, pipeline: int) -> tuple[int, ...]:
    """Layers of each stage; the last stage may have only the head."""
    head = model.head_size or model.hidden // model.heads
    layer = 4 * model.heads * head * model.hidden + 3 * model.ffn * model.hidden
    sums = [*accumulate([layer] * model.layers), layer * model.layers + model.vocabulary * model.hidden]
    stages, at = [0] * pipeline, 0
    for number, until in enumerate(sums):
        if number < model.layers:
            stages[at] += 1
        if until > sums[-1] * Fraction(at + 1, pipeline):
            at += 1
    return tuple(stages)
