"""The loss of a stack, and what of the logits is in memory while it is computed.

one kernel of Triton or CUDA, Liger                    its gradient replaces the logits
the kernel of llm.c                                    the same, and logits and gradient are in 16 bits
fused linear cross entropy (Liger), a loss in chunks   a piece of the logits at a time
eager cross entropy in a compiled stack                all logits in fp32
loss in 16 bits                                        no copy of the logits in fp32
logits held, use_cache                                 logits in fp32 through the backward pass
tensor parallelism of PyTorch without loss_parallel    logits of all words on every device
PyTorch's cross entropy of whole logits                copies in fp32 beside those that every loss has
"""

from dataclasses import replace

from hardware_profiles import PYTORCH, Software
from planner.validation.frameworks.aleph_alpha import is_aleph_alpha
from planner.validation.frameworks.traits import HUGGING_FACE, OWN_VOCABULARY, Trait, flags_of, sharding_flags, told_of
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.flagged import liger_kernels
from planner.validation.stack.stack_names import stack_of

_FUSED_LOSS = r"\bfused[- ]cross[- ]entropy|cross[- ]entropy in triton"
"""Words for a loss in one kernel of Triton or CUDA, under FSDP (unsloth's, FlashAttention's). Models of transformers
pass it an fp32 copy of the logits without those of the last token, beside the logits in fp32 (modeling_llama.py until
4.45: `logits.float()`, `shift_logits.contiguous()`)."""

_PLAIN_LOSS = Trait(
    # not compiled, where layers are (prime-rl's sft/train.py: CrossEntropyLoss, all logits)
    words=r"\beager (?:loss|cross[- ]entropy)",
    stacks=("fsdp-compiled",),
    changes={"loss": "whole"},
    note="the loss is not compiled, and has all logits",
)

_NARROW_LOSS = r"\bloss in (?:bf16|16 bits)"
"""Words for PyTorch's cross entropy of logits that nothing casts to fp32: a model in bf16 without autocast, whose
loop passes its result to `torch.nn.functional.cross_entropy`. Its kernels sum in fp32, and write 16 bits."""

_NARROW_LOGIT = 6.0
"""Bytes of a logit that `loss` counts and such a loss has not: a copy in fp32, and half of what autograd keeps."""

_HELD_LOGITS = r"\blogits (?:are )?held\b"
"""Words for fp32 logits that a variable still holds while gradients are computed, although PyTorch's cross entropy no
longer needs them (prime-rl's sft/train.py deletes `logits`, but not the `out` that holds them)."""

_CACHE = r"\buse[-_ ]cache\b"

_CHUNKED_LOSS = (
    r"(?<!\b1 )(?<!\bone )chunk(?:s|ed)?[-_ ](?:of the |of )?(?:loss|cross[-_ ]entropy|ce\b)"
    r"|(?:loss|cross[-_ ]entropy|\bce)[-_ ](?:in )?(?!(?:num[-_ ])?chunks?\s*[=: ]\s*1\b)chunk"
)
"""Words for logits and their loss in chunks of the tokens, the projection included (torchtitan's ChunkedCELoss)."""

_CHUNKED_PROJECTION = "2026-04-27"
"""Date from which torchtitan's chunked loss includes the projection (786e26f8e). Before, it cut whole logits, and kept
the logarithms of each chunk in fp32 for the backward pass (components/loss.py at e23bb707d)."""

_OWN_LOSS = ("megatron", "megatron-2021")
"""Stacks that compute the loss kernel by kernel unless told otherwise (`_VocabParallelCrossEntropy`, in Megatron-LM
since 2020). `passes` of deepspeed was fitted to runs with this loss, and includes it."""

_MEGATRON_LOSS = r"\bnanotron\b"
"""Words for frameworks that have Megatron's loss even if everything else is eager (nanotron's `_ShardedCrossEntropy`,
tensor_parallel/functional.py)."""

_OTHER_LOSS = rf"cross[-_]entropy[-_](?:loss[-_]fusion|fusion[-_]impl)|\beager\b|{_FUSED_LOSS}"
"""Words for a loss in one kernel, or for PyTorch's loss in another framework."""

_CLASSIFIER = r"\bllm\.[cq]\b"
"""Words for llm.c and LLM.Q, whose one kernel reads logits in 16 bits and writes their gradient over them
(fused_classifier of both)."""

_CAST_LOGIT = 4.0
"""Bytes of a logit in fp32, which they do not make."""

_FSDP = r"\bfsdp2?\b|\bdtensor\b|parallelize_module"
"""Words for PyTorch's own parallelism in a row with tensor parallelism."""


def logits_of(row: Row) -> float:
    """Number of logits of a micro-batch on a device."""
    tokens = (row.integer("micro_batch") or 1) * (row.integer("seq_len") or 0) / (row.integer("cp") or 1)
    tensor = 1 if gathers_logits(row) else row.integer("tp") or 1
    return tokens * (row.integer("vocab") or 0) / tensor


def gathers_logits(row: Row) -> bool:
    """Whether tensor-parallel devices hold the logits of all words.

    They do in Aleph Alpha's framework, and if a row names FSDP with PyTorch's own tensor parallelism (the head is
    ColwiseParallel(output_layouts=Replicate()), pytorch/tutorials intermediate_source/TP_tutorial.rst) without
    `loss_parallel`, which torchtitan has by default.
    """
    if is_aleph_alpha(row):
        return True
    if (row.integer("tp") or 1) == 1 or not stack_of(row, row.zero_stage() or 0).startswith("fsdp"):
        return False
    return mentions(told_of(row), _FSDP) and not mentions(told_of(row), r"torchtitan|loss[-_ ]parallel")


def with_loss(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the loss that flags name, and with logits that something holds beside it."""
    words = sharding_flags(row)
    liger = liger_kernels(words)
    if (mentions(words, _FUSED_LOSS) or "loss" in liger) and stack.name in OWN_VOCABULARY and stack.loss == "whole":
        notes.append("the loss is one kernel, which leaves its gradient where logits were")
        shifted = 4.0 * logits_of(row) if mentions(f"{row.text('stack')}; {words}".lower(), HUGGING_FACE) else 0.0
        stack = replace(stack, loss="in place", buffers=stack.buffers + shifted)
    stack = _PLAIN_LOSS.given(words, stack, notes)
    if mentions(words, _HELD_LOGITS):
        notes.append("logits in fp32 are held through the backward pass")
        stack = replace(stack, buffers=stack.buffers + 4.0 * logits_of(row))
    if mentions(words, _CACHE) and row.recomputation() == "full":
        notes.append("outputs hold keys and values of all layers, and logits in fp32 (use_cache)")
        stack = replace(stack, buffers=stack.buffers + _cached(row) + 4.0 * logits_of(row))
    if "linear loss" in liger:
        notes.append("the loss is computed a piece at a time (Liger)")
        stack = replace(stack, loss="pieces")
    return stack


def with_chunked_loss(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with a loss in chunks of the tokens, if flags name one."""
    if not mentions(sharding_flags(row), _CHUNKED_LOSS):
        return stack
    whole = "torchtitan" in told_of(row) and "" < row.date() < _CHUNKED_PROJECTION
    notes.append("the loss is computed a piece at a time" + (", of logits that are whole" if whole else ""))
    return replace(stack, loss="in place" if whole else "pieces")


def with_loss_of_pytorch(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with PyTorch's own cross entropy, kernel by kernel, if its loss has whole logits."""
    own = stack.name == PYTORCH.name or stack.name.startswith("fsdp")
    if own and stack.loss == "whole" and mentions(sharding_flags(row), _NARROW_LOSS):
        notes.append("logits stay in 16 bits in the loss")
        buffers = stack.buffers - _NARROW_LOGIT * logits_of(row)
        return replace(stack, buffers=buffers, composed_loss="pytorch-16")
    if stack.loss != "whole" or not (stack.name.startswith("fsdp") or gathers_logits(row)):
        return stack
    return replace(stack, buffers=stack.buffers + _further_copies(row), composed_loss="pytorch")


def with_loss_of_megatron(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with Megatron's loss, kernel by kernel, unless flags name another one; that of llm.c for its runs."""
    flags = flags_of(row)
    if stack.name in _OWN_LOSS and mentions(flags, _CLASSIFIER):
        notes.append("the loss is one kernel, which writes the gradient over logits in 16 bits (llm.c)")
        held = _CAST_LOGIT * logits_of(row) if stack.loss == "in place" else 0.0
        return replace(stack, composed_loss="llm.c", buffers=stack.buffers - held)
    own = mentions(flags, _MEGATRON_LOSS) or not mentions(flags, _OTHER_LOSS)
    return replace(stack, composed_loss="megatron") if stack.name in _OWN_LOSS and own else stack


def _further_copies(row: Row) -> float:
    """Bytes of fp32 logits beyond the two copies that `loss` counts.

    The backward pass of PyTorch's own cross entropy holds the softmax, the gradient of nll_loss_backward, and that of
    _log_softmax_backward_data, which is computed from both. If tensor-parallel devices shard the words, its
    loss_parallel adds the exponential of the softmax to such a gradient, and holds four at once
    (torch/distributed/tensor/parallel/loss.py: _nll_loss_and_log_softmax_backward).
    """
    shared = not gathers_logits(row) and (row.integer("tp") or 1) > 1
    return (2 if shared else 1) * 4.0 * logits_of(row)


def _cached(row: Row) -> float:
    """Bytes of keys and values of all layers in 16 bits, which models of transformers return unless `use_cache` is off.

    Their own gradient_checkpointing turns it off; torch's checkpoint_wrapper around layers does not. Layers that are
    not recomputed keep the same values for their backward pass.
    """
    heads = row.integer("n_kv_heads") or row.integer("n_heads") or 0
    size = row.integer("head_dim") or (row.integer("hidden") or 0) / (row.integer("n_heads") or 1)
    tokens = (row.integer("micro_batch") or 1) * (row.integer("seq_len") or 0)
    return 2 * 2.0 * (row.integer("n_layers") or 0) * tokens * heads * size
