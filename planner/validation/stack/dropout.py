"""Dropout, of probabilities in attention and of branches that join the residual stream; and determinism, a backward
pass of attention that adds up in a fixed order."""

from dataclasses import replace

from hardware_profiles import Software, load_profile
from planner.validation.frameworks.traits import AMPERE, BLACKWELL, TRANSFORMER_ENGINE
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says

_DETERMINISTIC = r"deterministic[-_]mode|nvte[-_]allow[-_]nondeterministic[-_]algo\s*[=: ]\s*0\b"
_HIDDEN_DROPOUT = r"(?:hidden[-_]|(?<![-_a-z]))dropout"
_SHARE = r"\s*[=: ]\s*0?\.\d*[1-9]"
_DROPS_PROBABILITIES = rf"attention[-_]dropout{_SHARE}|(?<![-_a-z])dropout{_SHARE}"
_DROPS_BRANCHES = rf"hidden[-_]dropout{_SHARE}|(?<![-_a-z])dropout{_SHARE}"
"""Words for a backward pass of attention that adds up in a fixed order, for dropout in attention, and for dropout of
branches that join the residual stream; "dropout 0.1" means both kinds of dropout."""

_FUSED_DROPOUT = r"bias[-_]dropout[-_](?:add[-_])?fusion"


def with_dropout(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the dropout that the flags of a row name.

    Megatron-LM of 2021 has its default, 0.1, unless flags say 0, as `scores` of its stack say of attention. `passes` of
    `deepspeed` was fitted to runs with dropout, and includes that of branches where rows do not name it.
    """
    flags = row.text("other_flags").lower()
    if mentions(flags, _DROPS_PROBABILITIES):
        stack = _with_dropped_probabilities(row, stack, notes)
    early = stack.name == "megatron-2021"
    if mentions(flags, _DROPS_BRANCHES) or (early and says(flags, _HIDDEN_DROPOUT) is not False):
        apart = not (early or stack.name in TRANSFORMER_ENGINE) or says(flags, _FUSED_DROPOUT) is False
        kernel = "a kernel of its own" if apart else "the kernel that adds a branch"
        notes.append(f"dropout of hidden states by {kernel}, whose mask is kept")
        stack = replace(stack, hidden_dropout="apart" if apart else "fused")
    return stack


def _with_dropped_probabilities(row: Row, stack: Software, notes: list[str]) -> Software:
    if stack.attention == "unfused":
        return replace(stack, scores=max(2.0, stack.scores))
    longer = load_profile(row.text("profile")).device.dropout_slowdown(stack.attention)
    if longer is None:
        notes.append("dropout in attention is not priced: no figure of these kernels is known")
        return stack
    notes.append(f"dropout: attention takes {longer[0]:g} times as long forward, {longer[1]:g} backward")
    return replace(stack, drops_probabilities=True)


def in_one_order(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the fixed order in which, by flags, the backward pass of attention adds up.

    On A100 Transformer Engine then calls FlashAttention-2 and not cuDNN (get_attention_backend:
    device_compute_capability < (9, 0)).
    """
    if stack.attention == "unfused" or not mentions(row.words("other_flags", "flag"), _DETERMINISTIC):
        return stack
    if stack.attention == "flash2" or (stack.attention == "best" and row.text("profile").startswith(AMPERE)):
        notes.append("deterministic: FlashAttention-2 adds up gradients of queries in one order")
        return replace(stack, ordered=True)
    notes.append("deterministic: what attention takes longer is not priced, as no figure of these kernels is known")
    return stack


def lacks_cudnn(row: Row) -> bool:
    """Whether Transformer Engine has no kernel of cuDNN for what a row asks of attention: on Blackwell, dropout in a
    backward pass of one order. It takes FlashAttention-2 then ("determinism on Blackwell" in
    transformer_engine/common/fused_attn/fused_attn.cpp; nvcr.io/nvidia/pytorch has flash-attn)."""
    flags = row.words("other_flags", "flag")
    blackwell = row.text("profile").startswith(BLACKWELL)
    return blackwell and mentions(flags, _DETERMINISTIC) and mentions(flags, _DROPS_PROBABILITIES)
