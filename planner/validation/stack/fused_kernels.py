"""Kernels that compute several elementwise operators at once, as flags name or deny them: gates, rotations of heads.
Norms and modules of Hugging Face are in `planner.validation.stack.flagged`."""

from dataclasses import replace

from hardware_profiles import Software
from planner.validation.frameworks.traits import HUGGING_FACE, Trait, flags_of, sharding_flags, told_of
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.flagged import liger_kernels

_KEPT_GATES = Trait(
    # gates of Megatron in one kernel; without it operators of PyTorch keep each what it reads
    # (transformer/mlp.py: glu)
    words=r"\bbias[-_](?:activation|swiglu)[-_]fusion",
    denied=True,
    changes={"fused": False},
    note="gates are kept, as flags do without their fusion",
)

_COMPLEX_ROTATIONS = r"torchtitan|kempnerforge"
"""Words for models that rotate heads in complex numbers, for which inductor generates no code (torchtitan issue 15;
kempnerforge/model/position.py). `passes` of fsdp-compiled was fitted to runs of such models, with gates counted
separately."""

_REAL_ROTATIONS = r"(?<![a-z])qwen[-_ ]?3(?!\d|b(?![a-z0-9]))|gpt[-_ ]?oss"
"""Models of torchtitan that rotate real numbers instead: Qwen3 since its first day (7f1fa4815 of August 18, 2025:
`rotate_half`; CosSinRoPE of models/common/rope.py later), GPT-OSS since its first day (de335b321 of October 2025).
Llama, DeepSeek and Kimi use complex numbers in all versions up to b5bcd76c6 (August 2026)."""


_GPT_2 = r"(?<![a-z])gpt[-_ ]?2(?![\d.])"
_WRITTEN_OUT = r"gelu[-_ ]new|\bgelu of single operators"
"""Names of GPT-2, and words for a GELU that is no kernel of its own."""


def with_gates_of_liger(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with Liger's gated activations, if flags name them."""
    if "gates" not in liger_kernels(sharding_flags(row)):
        return stack
    notes.append("gated activations are made again, in place (Liger)")
    return replace(stack, fused=True, gates_in_place=True)


def with_kept_gates(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with gates that are not fused, if flags deny Megatron's kernel."""
    return _KEPT_GATES.given(sharding_flags(row), stack, notes)


def with_complex_rotations(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with rotations that are chains of operators, where a model rotates complex numbers."""
    if not mentions(told_of(row), _COMPLEX_ROTATIONS) or mentions(row.text("model").lower(), _REAL_ROTATIONS):
        return stack
    return replace(stack, fuses_chains=False)


def with_composed_gelu(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with a GELU that is a chain of operators: that of GPT-2 in transformers (`gelu_new`, the
    activation_function of configuration_gpt2.py), and of models that write it out.

    Where `passes` were fitted to eager modules (DeepSpeed with ZeRO 3), they include it.
    """
    flags = flags_of(row)
    own = mentions(flags, HUGGING_FACE) and mentions(row.text("model").lower(), _GPT_2) and stack.passes <= 1
    if stack.name == "fsdp-compiled" or not (own or mentions(flags, _WRITTEN_OUT)):
        return stack
    notes.append("GELU is a chain of operators")
    return replace(stack, composed_gelu=True)
