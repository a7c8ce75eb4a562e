"""A trait that a row's words give a training stack, the texts in which words are searched, words for frameworks, and
groups of stacks and devices."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles import Software
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says

TRANSFORMER_ENGINE = ("megatron", "nemo", "nemo-2606", "llm-foundry")
"""Stacks whose products in fp8 are those of Transformer Engine: they keep operands in fp8. Where weights are not stored
in fp8, they also keep two fp8 copies of each, as it is and transposed (transformer_engine/pytorch/module)."""

OWN_VOCABULARY = ("fsdp", "fsdp-compiled", "deepspeed-zero3", "llm-foundry")
"""Stacks whose models use the given vocabulary; engines derived from Megatron-LM pad it."""

HUGGING_FACE = (
    r"(?<!from )(?<!tokenizer of )(?<!weights of )(?<!checkpoint of )(?<!dataset of )"
    r"(?:hugging[- ]?face|\btransformers\b|\baccelerate\b)(?!['s]*\W?(?:data|checkpoint|weight|format|config))"
)
"""Words for modules of Hugging Face; its files and vocabularies also occur in many runs of other modules."""

MEGATRON_WORDS = r"megatron|transformer engine|\bte\b|\bapex\b"
"""Words for kernels that are used even if everything else is eager."""

OVERLAPPED_OPTIMIZER = r"overlapped[-_ ]?distributed[-_ ]?optimizer"
"""Words for Megatron-LLaMA's optimizer. Hooks of the backward pass reduce-scatter buckets of gradients of every
micro-batch, and hooks of the forward pass gather weights (megatron/optimizer/overlapped_dist_optimizer.py)."""

AMPERE = ("a100", "a800")
HOPPER = ("h100", "h200", "h800", "h20", "gh200")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
"""Beginnings of the names of profiles, by generation of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """Words, and what they change in a stack.

    Attributes:
        words: the pattern that a text must mention.
        changes: fields of `Software` and their values.
        note: a note for the reader; empty: none.
        stacks: names of the stacks that it applies to; empty: all.
        denied: whether the text must deny the words instead ("no-bias-swiglu-fusion").
    """

    words: str
    changes: Mapping[str, Any]
    note: str = ""
    stacks: tuple[str, ...] = ()
    denied: bool = False

    def given(self, text: str, stack: Software, notes: list[str]) -> Software:
        """The stack with this trait, if the text gives it."""
        wanted = not self.denied
        if (self.stacks and stack.name not in self.stacks) or says(text, self.words) is not wanted:
            return stack
        if self.note:
            notes.append(self.note)
        return replace(stack, **self.changes)


def flags_of(row: Row) -> str:
    """The flags of a row, with the name of its stack in front where that names Hugging Face."""
    named, flags = row.text("stack").lower(), row.text("other_flags").lower()
    return f"{named}; {flags}" if mentions(named, HUGGING_FACE) else flags


def sharding_flags(row: Row) -> str:
    """The flags of a row and what it says about its distributed optimizer."""
    return row.words("other_flags", "distributed_optimizer")


def told_of(row: Row) -> str:
    """Everything that a row says about its software: source, stack, flags and notes."""
    return row.words("source", "stack", "other_flags", "notes")


_JAX = r"\bjax\b|\bmaxtext\b|\bpax(?:ml)?\b|\blevanter\b|\baxlearn\b"
"""Words for JAX and frameworks on it. XLA fuses chains of elementwise operators and launches a step as one program, as
compilers of PyTorch do. How often its kernels pass memory and what its latency-hiding scheduler overlaps is taken equal
to theirs, because no run of it was fitted."""


def runs_on_jax(row: Row) -> bool:
    """Whether a row names JAX or a framework on it."""
    return mentions(row.words("model", "source", "stack", "other_flags"), _JAX)


def uses_maxtext(row: Row) -> bool:
    """Whether a row names MaxText."""
    return mentions(row.words("model", "source", "stack", "other_flags"), r"\bmaxtext\b")


def uses_torchtitan(row: Row) -> bool:
    """Whether a row names torchtitan, and no other framework as its stack."""
    return mentions(told_of(row), "torchtitan") and not mentions(row.words("stack"), r"megatron|nemo\b|deepspeed")
