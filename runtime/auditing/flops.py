"""Floating point operations of the kernels that multiply: counted by the shapes on which PyTorch runs them.

    m k by k n           2 m k n, for every matrix of a batch
    grouped products     2 rows * columns * depth, over all groups
    convolution          2 elements of the result * weights that each element meets; backward once per gradient.
                         For a transposed convolution: elements of its input
    attention            2 b h q k (d + e); half of it where it is causal; backward 2 b h q k (3 d + 2 e), because the
                         scores are recomputed (Dao 2023, arXiv 2307.08691, section 3.1)

All other kernels are memory-bound and count 0. PyTorch's own counter has no formula for attention on CPUs and silently
counts 0 for it (2.13).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardware_profiles import Flops
from planner.graph.tracing.scans import CHUNK

Arguments = Sequence[Any]
Formula = Callable[[Arguments, Any], Flops]
"""Computes the count from the arguments of a kernel and its results."""

_CHUNK_AT = 6  # position of the chunk size among the arguments of the gated delta rule, where it is not the default
_TRANSPOSED = 6  # position of the flag "transposed" among a convolution's arguments; one further in its backward pass


def _product(first: torch.Tensor, second: torch.Tensor) -> Flops:
    return 2.0 * math.prod(first.shape) * second.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Flops:
    return _scores(query, key, causal) * (query.shape[-1] + value.shape[-1])


def _attention_again(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Flops:
    """Backward: the scores once more, and two products for the gradients of each of both forward products."""
    return _scores(query, key, causal) * (3 * query.shape[-1] + 2 * value.shape[-1])


def _scores(query: torch.Tensor, key: torch.Tensor, causal: bool) -> Flops:
    """Of all scores, for each element of a head."""
    whole = 2.0 * math.prod(query.shape[:3]) * key.shape[2]
    return whole / 2 if causal else whole


def _attention_forward(given: Arguments, _: Any) -> Flops:
    return _attention(given[0], given[1], given[2], len(given) > 4 and bool(given[4]))


def _attention_backward(given: Arguments, _: Any) -> Flops:
    return _attention_again(given[1], given[2], given[3], bool(given[7]))


def _convolution(given: Arguments, made: torch.Tensor) -> Flops:
    source, weight, transposed = given[0], given[1], given[_TRANSPOSED]
    return _slid(source if transposed else made, weight)


def _slid(elements: torch.Tensor, weight: torch.Tensor) -> Flops:
    """Every element meets all weights of its channel."""
    return 2.0 * elements.numel() * math.prod(weight.shape[1:])


def _convolution_backward(given: Arguments, made: Sequence[torch.Tensor | None]) -> Flops:
    wanted = float(sum(gradient is not None for gradient in made[:2]))
    gradient, source, weight, transposed = given[0], given[1], given[2], given[_TRANSPOSED + 1]
    return wanted * _slid(source if transposed else gradient, weight)


def _biased_forward(given: Arguments, _: Any) -> Flops:
    return _attention(given[0], given[1], given[2], causal=False)


def _biased_backward(given: Arguments, _: Any) -> Flops:
    return _attention_again(given[1], given[2], given[3], causal=False)


def _delta_rule(query: torch.Tensor, value: torch.Tensor, chunk: int) -> Flops:
    """Per step and head: two rows of products with the keys of its chunk, a triangular solve for keys and values, and
    the reads of the results; two reads from the state and one write to it."""
    batch, steps, heads, wide = value.shape
    keys, chunk = query.shape[-1], min(chunk, steps)
    return float(batch * steps * heads * (5 * chunk * keys + 3 * chunk * wide + 6 * keys * wide))


def _delta_rule_forward(given: Arguments, _: Any) -> Flops:
    return _delta_rule(given[0], given[2], given[6] if len(given) > _CHUNK_AT else CHUNK)


def _delta_rule_backward(given: Arguments, _: Any) -> Flops:
    return 3.0 * _delta_rule(given[1], given[3], given[7])


def _state_space(x: torch.Tensor, b: torch.Tensor, chunk: int) -> Flops:
    """Per step and head: products with the steps of its chunk (pairs once per group), a read from the state, a write to
    it."""
    batch, steps, heads, width = x.shape
    groups, state = b.shape[2:]
    chunk = min(chunk, steps)
    return 2.0 * batch * steps * (chunk * (groups * state + heads * width) + 2 * heads * width * state)


def _selective(x: torch.Tensor, a: torch.Tensor) -> Flops:
    """Counted as the authors of the kernel do (Gu and Dao 2023)."""
    return 9.0 * x.numel() * a.shape[1]


def _index_scores(query: torch.Tensor, key: torch.Tensor) -> Flops:
    """Every query of every head with every key."""
    return 2.0 * query.numel() * key.shape[1]


def _grouped(given: Arguments, _: Any) -> Flops:
    """Every row is multiplied by one matrix."""
    rows: torch.Tensor = given[0]
    return 2.0 * math.prod(rows.shape) * float(given[1].shape[-1])


def _fp8_grouped(given: Arguments, _: Any) -> Flops:
    """The same, for operands that come with their largest elements."""
    return _grouped((given[0], given[2]), _)


FLOPS: Mapping[str, Formula] = {
    "aten.mm.default": lambda given, _: _product(given[0], given[1]),
    "aten._scaled_mm.default": lambda given, _: _product(given[0], given[1]),
    "aten.bmm.default": lambda given, _: _product(given[0], given[1]),
    "aten.addmm.default": lambda given, _: _product(given[1], given[2]),
    "aten.addmm_.default": lambda given, _: _product(given[1], given[2]),
    "aten.baddbmm.default": lambda given, _: _product(given[1], given[2]),
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "planner.attention_piece.default": lambda given, _: _attention(given[0], given[1], given[2], bool(given[3])),
    "planner.attention_piece_backward.default": lambda given, _: _attention_again(
        given[1], given[2], given[3], bool(given[6])
    ),
    "planner.biased_attention.default": _biased_forward,
    "planner.composed_attention.default": lambda given, _: _attention(given[0], given[1], given[2], False),
    "planner.gated_delta_rule.default": _delta_rule_forward,
    "planner.gated_delta_rule_backward.default": _delta_rule_backward,
    "planner.state_space_scan.default": lambda given, _: _state_space(given[0], given[3], given[10]),
    "planner.state_space_scan_backward.default": lambda given, _: 3.0 * _state_space(given[1], given[4], given[11]),
    "planner.selective_scan.default": lambda given, _: _selective(given[0], given[2]),
    "planner.selective_scan_backward.default": lambda given, _: 3.0 * _selective(given[1], given[3]),
    "planner.index_scores.default": lambda given, _: _index_scores(given[0], given[1]),
    "planner.index_scores_backward.default": lambda given, _: 3.0 * _index_scores(given[1], given[2]),
    "planner.grouped_outer.default": _grouped,
    "planner.grouped_product.default": _grouped,
    "planner.fp8_blocks_product.default": lambda given, _: 2.0 * math.prod(given[0].shape) * given[2].shape[0],
    "planner.fp8_grouped_outer.default": _fp8_grouped,
    "planner.fp8_grouped_product.default": _fp8_grouped,
    "planner.biased_attention_backward.default": _biased_backward,
}
"""Formulas by kernel name."""
