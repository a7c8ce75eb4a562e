"""Rules of the scans of state-space models (`planner.graph.operators.state_space_scan`,
`planner.graph.operators.selective_scan`).

    b s (g r) p, b s (g r), (g r), b s g n, b s g n, (g r), (g r) -> b s (g r) p       one decay for each head
    b d s, b d s, d n, b n s, b n s, d, b d s, d -> b d s                              one for each channel and element

r heads share a group. Samples, heads with their groups, and the columns p of a head are independent of each other; so
are samples and channels d. Steps s, and the elements n of a state, are whole on every device. Only the operands are
kept; the backward pass computes the forward pass again.

In chunks of C steps, a step of a head with one decay takes 2 C p + 4 n p operations, and a step of a group 2 C n: it
meets the steps of its chunk (2 C n for the pairs of the group, 2 C p), reads from the state and writes to it. With a
decay for each element a step takes 9 n operations of each channel, as the authors of the kernel count.

Sources: Dao and Gu 2024, arXiv 2405.21060, section 6; Gu and Dao 2023, arXiv 2312.00752, section 3.3.
"""

from dataclasses import dataclass, replace
from typing import final

from planner.graph.call import Call
from planner.sharding.rule import Rule
from planner.sharding.rules.einsum import WIDE, Einsum
from planner.sharding.rules.recomputed import keeping_operands
from planner.sharding.rules.spec import RuleSpec

_CHUNK = 10
"""Where the steps of a chunk stand among the arguments of the first."""
_GROUPED = "b s (g r) p, b s (g r), (g r), b s g n, b s g n, (g r), (g r) -> b s (g r) p"
_EACH = "b d s, b d s, d n, b n s, b n s, d, b d s, d -> b d s"
_TOGETHER = 32
"""Steps of the second that are computed at a time (`planner.graph.operators.selective_scan`)."""


@final
@dataclass(frozen=True, kw_only=True)
class StateSpaceScan(RuleSpec):
    """Inputs, step sizes, decays of heads, the tensors b and c that write and read the state, and two numbers of a
    head, or None."""

    def build(self, call: Call) -> Rule:
        chunk = min(call.integer(_CHUNK, "chunk", 0), call.operands[0].shape[1])
        rule = Einsum(
            pattern=_GROUPED,
            op_class="state_space",
            positions=tuple(range(7)),
            blocked="s n",
            work=((2.0 * chunk, "b s g n"), (2.0 * chunk, "b s g r p"), (4.0, "b s g r n p")),
            roles=(("batch", "b"), ("steps", "s"), ("heads", "g r"), ("groups", "g"), ("width", "p"), ("state", "n")),
        ).build(call)
        width = float(max(WIDE, call.operands[0].element_bytes))
        living = (
            (3.5 * width * chunk**2, "b g r"),  # pairs of one chunk
            (width / chunk, "b s g r n p"),  # states before each chunk
            (float(call.operands[0].element_bytes), "b s g r p"),  # gradients of the pieces of an operand
        )
        return replace(keeping_operands(rule, living), chunk=chunk)


@final
@dataclass(frozen=True, kw_only=True)
class SelectiveScan(RuleSpec):
    """Inputs, step sizes, decays, the tensors b and c that write and read the state, a number of each channel, gates
    and another number."""

    def build(self, call: Call) -> Rule:
        steps = float(min(_TOGETHER, call.operands[0].shape[2]))
        rule = Einsum(
            pattern=_EACH,
            op_class="selective_scan",
            positions=tuple(range(8)),
            blocked="s n",
            work=((9.0, "b d s n"),),
            roles=(("batch", "b"), ("channels", "d"), ("steps", "s"), ("state", "n")),
        ).build(call)
        width = float(max(WIDE, call.operands[0].element_bytes))
        living = (
            (14.6 * width * steps, "b d n"),  # states of the steps of one chunk, round by round
            (width / steps, "b d s n"),
            (float(call.operands[0].element_bytes), "b d s"),
        )
        return keeping_operands(rule, living)
