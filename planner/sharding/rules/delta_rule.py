"""The rule of the gated delta rule (`planner.graph.operators.delta_rule`).

    b s g d, b s g d, b s (g r) e, b s (g r), b s (g r) -> b s (g r) e

r heads of values share one of keys. Samples, heads and the columns of values are independent of each other; steps, and
the channels of keys, are whole on every device. In chunks of C steps, a step of a head takes 5 C d + 3 C e + 6 d e
operations: it makes two rows of products of keys with the steps of its chunk (4 C d), solves a triangle for d + e
columns (C d + C e) and reads what the chunk writes (2 C e); it reads from the state twice and writes to it (6 d e).
Only the operands are kept; the backward pass computes the forward pass again.
"""

from dataclasses import dataclass
from typing import final

from planner.graph.call import Call
from planner.graph.tracing.scans import CHUNK
from planner.sharding.rule import Rule
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.recomputed import Living, keeping_operands
from planner.sharding.rules.spec import RuleSpec

_ARGUMENT = (6, "chunk")
_LIVING = (13.0, 4.0, 8.0)
"""Tensors in float32 at least that live together in the backward pass: of keys, of values, of pairs of a chunk."""
_LIVING_EACH = (7.0, 3.0, 5.0)
"""The same with a decay for each channel, where chunks are computed one by one: the last are of one chunk's pairs, of
each channel."""
_OF_KERNELS = (7.0, 5.0, 1.0, 2.0)
"""Tensors in the dtype of the operands that live together where kernels of flash-linear-attention compute gradients:
of keys (queries and keys of length 1, w, gradients of the three, and of keys once more), of values (what is read, u,
what is written, two gradients of that), of pairs of a chunk (the triangle), of states before each chunk (and their
gradients)."""
_OF_KERNELS_EACH, _WIDE_EACH = (5.0, 5.0, 2.0, 2.0), (7.0, 2.0)
"""The same with a decay for each channel, and tensors of keys and of pairs in float32 beside them: sums of decays,
gradients of queries, keys and decays, twice each; gradients of pairs."""


@final
@dataclass(frozen=True, kw_only=True)
class DeltaRule(RuleSpec):
    """Queries, keys, values, decays of a head or of each channel of its keys, and strengths."""

    def build(self, call: Call) -> Rule:
        query, _, _, decay, _ = call.operands
        each = len(decay.shape) == len(query.shape)
        chunk = float(min(call.integer(*_ARGUMENT, CHUNK), query.shape[1]))
        width = float(max(WIDE, query.element_bytes))
        rule = Einsum(
            pattern=f"b s g d, b s g d, b s (g r) e, b s (g r){' d' if each else ''}, b s (g r) -> b s (g r) e",
            op_class="delta_rule",
            positions=(0, 1, 2, 3, 4),
            blocked="s d",
            work=((5 * chunk, "b s g r d"), (3 * chunk, "b s g r e"), (6.0, "b s g r d e")),
            roles=(("batch", "b"), ("steps", "s"), ("heads", "g r"), ("keys", "d"), ("values", "e")),
        ).build(call)
        keys, values, pairs = _LIVING_EACH if each else _LIVING
        living = (
            (keys * width, "b s g r d"),
            (values * width, "b s g r e"),
            (pairs * width * chunk**2, "b g r d") if each else (pairs * width * chunk, "b s g r"),
        )
        return keeping_operands(rule, living, _of_kernels(call, each=each, width=width, chunk=chunk))


def _of_kernels(call: Call, *, each: bool, width: float, chunk: float) -> Living:
    """Bytes that live where kernels compute it."""
    element = float(call.operands[0].element_bytes)
    keys, values, pairs, states = (count * element for count in (_OF_KERNELS_EACH if each else _OF_KERNELS))
    wide_keys, wide_pairs = (count * width for count in (_WIDE_EACH if each else (0.0, 0.0)))
    return (
        (keys + wide_keys, "b s g r d"),
        (values, "b s g r e"),
        ((pairs + wide_pairs) * chunk, "b s g r"),
        (states / chunk, "b s g r d e"),
    )
