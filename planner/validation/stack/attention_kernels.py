"""The kernels that compute attention: those that a row names, else those of its stack at its date.

FlashAttention-2 came in July 2023, FlashAttention-3 and the kernels of cuDNN a year later; frameworks followed within
half a year. They do not exist in fp32.
"""

from hardware_profiles import AttentionKernels, Device, Software, UnknownKeyError
from planner.validation.frameworks.traits import BLACKWELL, flags_of, runs_on_jax, uses_maxtext, uses_torchtitan
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.dropout import lacks_cudnn

_SECOND, _THIRD = "2024", "2024-07"
"""Dates from which runs are assumed to use the second and the third generation of fused kernels."""

_VOLTA = "v100"
"""Profiles without FlashAttention, which needs Turing or newer (Ampere in its second version: README of
Dao-AILab/flash-attention); PyTorch's own attention has a kernel for them."""

_CUDNN_FIRST = "2026-04"
"""Month from which runs are assumed to use PyTorch 2.11, whose attention calls cuDNN on Hopper and Blackwell."""

_CUDNN_ON_BLACKWELL = "2025-05-14"
"""Date from which torchtitan prefers cuDNN's attention on Blackwell (3b85aa31f)."""


_PADDING = r"\bpadding[-_ ]mask"


def attention_of(row: Row, stack: Software, device: Device) -> AttentionKernels:
    """The kernels of a row on a device; the best ones if the device lacks them."""
    kernels = _asked(row, stack)
    try:
        if kernels != "unfused":
            device.attention_slowdown(kernels)
    except UnknownKeyError:
        return "best"
    return kernels


def _asked(row: Row, stack: Software) -> AttentionKernels:
    """The kernels by the words and the date of a row, whatever its device has."""
    named, date = row.attention(), row.date()
    if (named == "fused" and runs_on_jax(row)) or (named is None and uses_maxtext(row)):
        named = "latest"  # cuDNN's, by Transformer Engine: `cudnn_flash_te` in configs/gpu of MaxText
    own, by_torch = _own(stack), calls_torch(row, stack)
    if by_torch and row.latent:
        return "flash1"  # the memory-efficient kernel: others need values as wide as keys (sdp_utils.cpp of PyTorch)
    if by_torch and row.precision() != "fp32" and _calls_cudnn(row):
        return "cudnn"
    if by_torch and has_padding_mask(row):
        return (
            "flash1"  # the memory-efficient kernel: FlashAttention takes no mask (check_for_attn_mask, the same file)
        )
    if row.precision() == "fp32" and own != "sdpa":
        # FlashAttention takes only 16 bits (flash_attn_interface.py); PyTorch has other fused kernels
        return "unfused"
    if named == "unfused" or (named is None and own == "unfused"):
        return "unfused"
    if named is None and own != "sdpa" and row.text("profile").startswith(_VOLTA):
        return "unfused"
    if named == "latest":
        return "flash2" if lacks_cudnn(row) else "best"
    if named in ("flash1", "flash2"):
        return named
    if stack.name == "internevo":
        return "flash2"
    if not date or date >= _THIRD or row.text("profile").startswith("ascend"):
        return "best" if own == "unfused" else own
    return "flash2" if date >= _SECOND or stack.name == "nemo" else "flash1"


def calls_torch(row: Row, stack: Software) -> bool:
    """Whether a row has `scaled_dot_product_attention`; `stack` is its stack before its kernels are chosen."""
    told = row.text("flash_attention").lower() == "sdpa"
    return told or (_own(stack) == "sdpa" and row.attention() in (None, "fused"))


def has_padding_mask(row: Row) -> bool:
    """Whether flags say that attention gets a mask of padded tokens.

    transformers passes none where every token counts (modeling_attn_mask_utils.py at 4.49: `_ignore_causal_mask_sdpa`).
    """
    return mentions(flags_of(row), _PADDING)


def _own(stack: Software) -> AttentionKernels:
    return "sdpa" if stack.attention == "cudnn" else stack.attention


def _calls_cudnn(row: Row) -> bool:
    """Whether PyTorch's attention calls cuDNN at the date of a row."""
    date, blackwell = row.date(), row.text("profile").startswith(BLACKWELL)
    first = _CUDNN_ON_BLACKWELL if blackwell and uses_torchtitan(row) else _CUDNN_FIRST
    return date >= (first if len(date) > len("2025-05") else first[:7])
