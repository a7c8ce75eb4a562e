"""What attention sees: all keys, those in a window, keys with a bias for their distance (ALiBi), no padding,
learned sinks.

mistral-7b before v0.3                                 a window of 4,096 keys
sliding_window=4096, window size 4096                  a window of that size, in every layer
window_pattern SSSL                                    layers that differ: the window with the same work
alibi, BLOOM, Baichuan 13B                             a bias, which PyTorch's kernels read as a mask
padding mask                                           a mask that PyTorch's kernels read
attention of PyTorch's operators                       scores scaled and masked by kernels of their own
GPT-OSS                                                learned sinks
"""

import math
import re
from dataclasses import replace

from hardware_profiles import PYTORCH, AttentionKernels, Software, load_software
from planner.errors import RequestError
from planner.validation.frameworks.recipes import release_of
from planner.validation.frameworks.traits import HUGGING_FACE, flags_of, uses_torchtitan
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says
from planner.validation.stack.attention_kernels import calls_torch, has_padding_mask

MISTRAL_WINDOW = 4096
"""Keys that Mistral 7B attends to (Jiang et al. 2023, arXiv 2310.06825); from version 0.2 on there is no window."""

_PATTERN = r"\bwindow[-_ ]pattern\W+([sl]+)\b"
"""Words for a pattern of layers that attend to half of a sequence (S) or to all of it (L); the last layer always
attends to all (nanochat/gpt.py at 348fbb3: _compute_window_sizes)."""

_WINDOW = r"sliding[-_ ]window(?:[-_ ]size)?|\bwindow[-_ ]size\b|\bswa\b"

_ALIBI = r"\balibi\b"
_WITH_ALIBI = (
    r"(?<![a-z])baichuan[-_ ]?2?[-_ ]?13b(?![a-z0-9])|(?:^|/|(?:run|tune)_)bloomz?(?![a-z]|[-_ ](?:like|style))"
)
"""Words for ALiBi (slopes as positions), and full names of models that have it."""

_GROUPS = "2025-07"
"""Month of transformers 4.54, which passes `enable_gqa` to PyTorch's attention."""

_FAST_SINKS, _SLOW_SINKS = "26.06", "26.06.01"
"""Container from which attention with learned sinks is fast, and a later one whose notes report slow sinks again (issue
256 of cudnn-frontend)."""


def with_window(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the window of a row's model or flags. Raises RequestError for one that cannot be priced."""
    mistral = re.search(r"mistral-7b(?!.*v0\.[23])", row.text("model").lower())
    window = MISTRAL_WINDOW if mistral else window_of(row)
    if window is None:
        return stack
    notes.append(f"attention in a window of {window} keys")
    return replace(stack, window=window)


def window_of(row: Row) -> int | None:
    """Keys of the attention window that flags state; None if they state no window.

    Raises RequestError for a window of unknown length, or in some layers only.
    """
    flags = row.words("model", "other_flags")
    if mentions(flags, _PATTERN) and (pattern := re.search(_PATTERN, flags)) is not None:
        return _same_work(pattern[1], row.integer("n_layers") or 0, row.integer("seq_len") or 0)
    if not mentions(flags, _WINDOW):
        return None
    keys = re.search(rf"(?:{_WINDOW})(?: of)?\s*[=: ]\s*(\d{{2,9}})\b", flags)
    if keys is None or re.search(r"alternat|every \w+ layer|global layers|local[-/ ]global", flags):
        raise RequestError("attention has a window in flags: of all layers, and sliding_window=4096, are priced")
    return int(keys[1])


def _same_work(pattern: str, layers: int, sequence: int) -> int:
    """The window in keys that, in all layers, leaves attention as much work as the windows of a pattern.

    A window of a share x of the keys leaves 2 x - x^2 (`planner.pricing.kernels.attention`).
    """
    shares = [0.5 if pattern[at % len(pattern)] == "s" and at < layers - 1 else 1.0 for at in range(layers)]
    work = sum(2 * share - share**2 for share in shares) / max(1, layers)
    return round(sequence * (1 - math.sqrt(1 - work)))


def with_alibi(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with ALiBi as a mask in memory, if its fused kernels do not support slopes; and where scores are in
    memory, with slopes that the product of queries and keys adds."""
    if not _has_alibi(row):
        return stack
    if stack.attention == "unfused":
        notes.append("ALiBi: slopes are copied to where the product of queries and keys adds to them")
        return replace(stack, biased=True)
    if stack.name != "paddle" and not _by_torch(row, stack.attention):
        return stack
    notes.append("ALiBi is a mask that attention reads, and hides nothing from its kernels")
    return replace(stack, biased=True)


def _has_alibi(row: Row) -> bool:
    """Whether positions are ALiBi slopes, by the words of a row or by its model."""
    named = says(row.words("model", "other_flags", "notes"), _ALIBI)
    return mentions(row.text("model").lower(), _WITH_ALIBI) if named is None else named


def _by_torch(row: Row, attention: AttentionKernels) -> bool:
    """Whether attention is torch's scaled_dot_product_attention, which does not support ALiBi."""
    return row.text("flash_attention").lower() == "sdpa" or attention == "sdpa"


def with_masks_apart(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with scores that kernels of their own scale and mask, if its attention is of PyTorch's operators.

    A model that writes attention out divides the scores, fills in the mask and then calls softmax. Megatron's
    kernel does all three; torchtitan calls PyTorch's `scaled_dot_product_attention`, which scales queries and keys.
    """
    written_out = stack.name == PYTORCH.name or (stack.name == "fsdp" and not uses_torchtitan(row))
    if stack.attention != "unfused" or stack.softmax_heads > 1 or not written_out:
        return stack
    notes.append("scores of attention are scaled and masked by kernels of their own")
    return replace(stack, masks_apart=True)


def with_padding_mask(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with a mask of padding that PyTorch's attention reads; other kernels leave padded tokens out."""
    if stack.attention == "unfused" or not (has_padding_mask(row) and calls_torch(row, load_software(stack.name))):
        return stack
    notes.append("attention reads a mask of padding, which hides nothing from its kernels")
    return replace(stack, masked=True)


def with_repeated_keys(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with keys and values copied for every query head, where transformers calls PyTorch's attention.

    It does since 4.54 only beside a mask (integrations/sdpa_attention.py: `use_gqa_in_sdpa`), before always
    (`repeat_kv`).
    """
    if stack.attention == "unfused" or not mentions(flags_of(row), HUGGING_FACE):
        return stack
    early = stack.masked or ("" < row.date() < _GROUPS)
    return replace(stack, repeats_keys=True) if early and calls_torch(row, load_software(stack.name)) else stack


def has_sinks(row: Row) -> bool:
    """Whether attention has learned sinks, as in GPT-OSS."""
    return bool(re.search(r"gpt[-_ ]?oss", row.text("model").lower()))


def with_sinks(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with learned sinks, as slow as in its release."""
    if not has_sinks(row):
        return stack
    release = release_of(row)
    fast = release >= _FAST_SINKS and release != _SLOW_SINKS
    flexible = mentions(flags_of(row), r"flex[- ]?attention") or row.text("flash_attention").lower() == "flexattention"
    slow = 1.0 if fast or flexible else load_software("nemo").sinks
    notes.append(f"attention with learned sinks takes {slow:g} times as long")
    return replace(stack, has_sinks=True, sinks=slow)
