"""Changes to a row's stack that its flags state.

    overlap-grad-reduce, overlap-param-gather, tp-comm-overlap, overlap-moe-expert-parallel-comm
                                                                 what overlaps
    --grad-reduce-in-bf16, grad_reduce_in_fp32=False, --main-grads-dtype bf16
                                                                 gradients have 16 bits
    --fp8-param-gather, fp8_params, "weights stored in fp8"      weights are stored and gathered in fp8
    OverlappedDistributedOptimizer                               Megatron-LLaMA overlaps both with computation
    fused RMSNorm with fused SwiGLU, Liger                       elementwise work passes memory as often as in Megatron
    Transformer Engine layers                                    the same under FSDP, launched as in Megatron
    Hugging Face, transformers, accelerate                       operators are launched as slowly as in Megatron, RMS
                                                                 norms are chains of operators, and under FSDP none
                                                                 passes memory but those of the graph
    autocast                                                     FSDP gathers weights in fp32 and rounds them for use
    eager                                                        operators are kernels of their own, RMS norms chains of
                                                                 them, and gradients have the dtype of weights, also
                                                                 while they are accumulated,
    accumulate_grad_in_fp32                                      unless flags say this
    RMSNorm kernel, fused RMSNorm                                RMS norms are one kernel nevertheless
    nanotron, until July 2024                                    values gathered by sequence parallelism are kept whole

A denied word ("no", "=False") does not count, or states the opposite.
"""

from collections.abc import Mapping
from dataclasses import replace

from hardware_profiles import PYTORCH, Hidden, Software, load_software
from planner.validation.frameworks.nanotron import NANOTRON
from planner.validation.frameworks.traits import HUGGING_FACE, MEGATRON_WORDS, OVERLAPPED_OPTIMIZER
from planner.validation.reading.words import mentions, said_of, says
from planner.validation.stack.states import PURE

OVERLAPPED: Mapping[str, float] = {"reductions": 0.8, "gathers": 0.8, "tensor": 0.5}
"""Shares of communication that named overlaps hide: those of the stack nemo, which overlaps the same."""

_OVERLAPS = {
    "reductions": rf"overlap[-_]grad[-_]reduce|{OVERLAPPED_OPTIMIZER}",
    "gathers": rf"overlap[-_]param[-_]gather|{OVERLAPPED_OPTIMIZER}",
    "tensor": "use[-_](?:ascend[-_])?mc2|tp[-_]comm[-_]overlap",
}
"""Words for overlapped communication. MC2 (ModelLink's --use-mc2) and --tp-comm-overlap (Megatron-LM on Transformer
Engine) overlap the products and collectives of tensor parallelism piece by piece."""

_OVERLAPPED_EXCHANGE = r"overlap[-_]moe[-_]expert[-_]parallel[-_]comm"
"""Words for rows that go to experts while another micro-batch computes (Megatron-Core)."""

_ASYNC_TENSOR = r"\basync[- ]tp\b"
"""Words for collectives of tensor parallelism in pieces under their products in torchtitan; its other overlaps stay."""

_GATHERS_FLOAT8 = r"enable_fsdp_float8_all_gather|\bfloat8\b"
"""Words for weights that torchtitan gathers in fp8; its recipes with float8 ask for it (train_configs/llama3_405b.toml
of December 2024)."""

_ENGINE_LAYERS = r"transformer engine(?:'s)? (?:transformer)?layers?\b"
"""Words for whole layers of Transformer Engine in another framework's loop."""

_COUNTED = 1.0
"""How often operators of Hugging Face's modules pass memory, and those of others in eager mode: each is a kernel, and
the graph has all of them, norms as chains (modeling_llama.py, model.py of nanoGPT, litgpt/model.py). `passes` of the
stack fsdp stands for what modules have besides."""

_NARROW = (
    r"grad[-_]reduce[-_]in[-_]bf16|grad_sync_dtype\s*[=:]\s*bf16"
    r"|main[-_]grads[-_]dtype\W{1,3}b(?:float|f)16"
)
_WIDE = (
    r"grad[-_]reduce[-_]in[-_]fp32|accumulate[-_]allreduce[-_]grads[-_]in[-_]fp32|grad_sync_dtype\s*[=:]\s*\S*32\b"
    r"|accumulate[-_]grads?[-_]in[-_]fp32"
)
_FP8_WEIGHTS = (
    r"fp8[-_]param(?:s|eters)?(?:[-_]gather)?\b|fp8[-_]primary[-_]weights"
    r"|weights (?:are )?(?:stored|kept|gathered)\b[^;,]* in fp8"
)
OF_LIGER = r"(?<![a-z])liger(?![a-z])"
_LIGER_KERNELS: Mapping[str, str] = {
    "norms": r"norm(?![a-z]*\s*=\s*\w*layer)",
    "gates": r"glu(?![a-z])|silu|(?<![a-z])mlp(?![a-z])",
    "rotations": r"rope(?![a-z])|rotar",
    "loss": r"cross[-_ ]?entropy|(?<![a-z])ce(?![a-z])|flce",
    "linear loss": r"fused[-_ ]linear|linear[-_ ]cross|(?<![a-z])flce(?![a-z])|chunk",
}
"""Words for single kernels of Liger. It has two losses: one kernel for logits, and one fused with the projection, which
never holds all logits; the latter is assumed if no kernel is named."""

_FUSED_NORMS = r"fused[- ](?:layer|rms)[- ]?norm|\brms(?:norm)?[- ]kernel"
_FUSED_GATES = r"fused[- ](?:swiglu|silu|mlp)"
_FUSED_SOFTMAX = r"fused[- ]softmax"

_EAGER = ("fsdp", "deepspeed-zero3")
_EAGER_WORD = r"\beager\b"

_AUTOCAST = r"\bautocast\b"
_MIXED_BY_FSDP = (
    r"\b(?:bf)?16[-_ ]mixed\b|\bmixed[-_ ]?precision\b"
    r"|param_dtype\W+(?:torch\.)?(?:b?float16|bf16|fp16)"
)
"""Words for rounding by FSDP itself (MixedPrecision), and not by torch.autocast; Lightning's "bf16-mixed" has both."""

_GATHERED_AGAIN = "2024-07-17"
"""Date of nanotron's tp_recompute_allgather (commit 1e02a9ce), on by default. Before, a column-parallel layer under
sequence parallelism kept its gathered input for the weight gradient."""

_NO_HEADS = 2**31
"""The multiple of heads that a fused softmax needs, for a stack without one: no number of heads reaches it."""


def with_overlaps(stack: Software, flags: str) -> Software:
    """The stack with the overlaps that flags state, and without those that they deny.

    If flags state any overlap, all others are off, except in NeMo, whose recipes overlap everything they can.
    """
    named = {part: says(flags, word) for part, word in _OVERLAPS.items()}
    shares = {part: OVERLAPPED[part] if on else 0.0 for part, on in named.items() if on is not None}
    if stack.name.startswith("nemo") or not any(named.values()):
        stack = replace(stack, hidden=replace(stack.hidden, **shares))
    else:
        stack = replace(stack, hidden=Hidden(**{**dict.fromkeys(_OVERLAPS, 0.0), **shares}))
    if mentions(flags, _OVERLAPPED_EXCHANGE):
        share = load_software("nemo-2606").hidden.exchange  # its recipes ask for the same
        stack = replace(stack, hidden=replace(stack.hidden, exchange=share))
    if mentions(flags, _ASYNC_TENSOR):
        stack = replace(stack, hidden=replace(stack.hidden, tensor=OVERLAPPED["tensor"]), rearranges=False)
    return stack


def with_kernels(stack: Software, flags: str, notes: list[str], date: str = "", precision: str = "") -> Software:
    """The stack with the kernels and modules that flags or words for its `precision` name; adds notes on them.

    Norms and gated activations of one kernel each (FlashAttention, Apex, xFormers) pass memory as Megatron's do.
    So do layers of Transformer Engine (LayerNormLinear, LayerNormMLP), which Python launches as in Megatron.
    Modules of Hugging Face launch their operators from Python, as Megatron's do. If no kernel computes attention whole,
    mask, scale and softmax are kernels of their own (modeling_gpt2.py: `_attn`), under DeepSpeed, too, which replaces
    no module in training. Eager stacks other than FSDP and ZeRO
    3 compute as InternEvo does: autograd accumulates gradients in the dtype of weights, and logits are whole. Changes
    over time go by the `date` of a row.
    """
    megatron = load_software("megatron")
    hugging_face = mentions(flags, HUGGING_FACE) and stack.name in (*_EAGER, "deepspeed")
    own = stack.name == megatron.name and not mentions(flags, MEGATRON_WORDS)
    eager = mentions(flags, _EAGER_WORD) and (own or stack.name in (*_EAGER, PYTORCH.name))
    if eager and own:
        wide = narrow_gradients(flags) is False
        summed = "32 bits, as flags say" if wide else "the dtype of weights"
        notes.append(f"operators are kernels of their own, gradients have {summed} (eager)")
        like = load_software("internevo")
        stored = stack.stored if wide else replace(stack.stored, bf16=stack.stored.weight, fp16=stack.stored.weight)
        stack = replace(stack, passes=like.passes, fused=like.fused, accumulates=like.accumulates, stored=stored)
        stack = replace(stack, sums_narrow=not wide)
        heads = load_software("deepspeed").softmax_heads if mentions(flags, _FUSED_SOFTMAX) else _NO_HEADS
        stack = replace(stack, loss="whole", softmax_heads=heads)
    if mentions(flags, NANOTRON) and own and date < _GATHERED_AGAIN:
        notes.append("what sequence parallelism gathers is kept whole (nanotron before tp_recompute_allgather)")
        stack = replace(stack, regathers=False)
    liger = liger_kernels(flags)
    norms = mentions(flags, _FUSED_NORMS) or "norms" in liger
    if (hugging_face or eager) and not norms:
        notes.append("RMS norms are chains of operators in fp32")
        stack = replace(stack, composed_norms=True)
    if eager and stack.name == "fsdp":
        notes.append("operators pass memory as often as the graph says (eager)")
        stack = replace(stack, passes=min(stack.passes, _COUNTED))
    if stack.name in _EAGER and norms and (mentions(flags, _FUSED_GATES) or "gates" in liger):
        notes.append("norms and gated activations are one kernel each")
        one_each = {"gates", "rotations"} <= liger  # liger_kernel/ops/swiglu.py and rope.py
        stack = replace(stack, passes=megatron.passes, fused=megatron.fused, fuses_chains=one_each)
    if stack.name in _EAGER and mentions(flags, _ENGINE_LAYERS):
        notes.append("norms and gated activations are Transformer Engine's")
        host = max(stack.host, megatron.host)
        stack = replace(stack, passes=megatron.passes, fused=megatron.fused, host=host)
    if hugging_face and (stack.name in _EAGER or not mentions(flags, MEGATRON_WORDS)):
        heads = stack.softmax_heads if mentions(flags, _FUSED_SOFTMAX) else _NO_HEADS
        stack = replace(stack, softmax_heads=heads, views_heads=True)
    if stack.name in _EAGER and hugging_face:
        notes.append("operators are launched from Python, as in Megatron")
        stack = replace(stack, host=max(stack.host, megatron.host))
        if stack.name == "fsdp":
            stack = replace(stack, passes=min(stack.passes, _COUNTED))
    said = f"{flags}; {precision}"
    narrow = mentions(said, _MIXED_BY_FSDP) or mentions(said, PURE) or precision.startswith("fp32")
    if stack.name.startswith("fsdp") and mentions(flags, _AUTOCAST) and not narrow:
        notes.append("weights are gathered in fp32, and blocks hand each other values in fp32 (autocast)")
        stack = replace(stack, autocasts=True)
    return stack


def narrow_gradients(words: str) -> bool | None:
    """Whether gradients have 16 bits; None if the words do not say."""
    narrow, wide = says(words, _NARROW), says(words, _WIDE)
    if narrow or wide is None:
        return narrow
    return not wide


def liger_kernels(words: str) -> frozenset[str]:
    """Kernels of Liger that words name (`_LIGER_KERNELS`).

    These are the kernels listed after its name. Without a list they are all kernels, except those that are denied
    there.
    """
    found: set[str] = set()
    for statement in said_of(words, OF_LIGER):
        named = {kernel: says(statement, word) for kernel, word in _LIGER_KERNELS.items()}
        listed = {kernel for kernel, on in named.items() if on}
        rest = {kernel for kernel, on in named.items() if on is None}
        found |= listed or (rest if named["loss"] is not False else rest - {"linear loss"})
    return frozenset(found - {"loss"} if "linear loss" in found else found)


def stores_fp8(words: str) -> bool:
    """Whether weights are stored and gathered in fp8."""
    return mentions(words, _FP8_WEIGHTS)


def gathers_float8(flags: str) -> bool:
    """Whether torchtitan gathers weights in fp8."""
    return mentions(flags, _GATHERS_FLOAT8)
