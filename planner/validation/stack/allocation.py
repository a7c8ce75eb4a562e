"""What is live at the peak of a stack on torch.optim, as opposed to what its allocator holds of the device."""

from dataclasses import replace

from hardware_profiles import Software
from planner.validation.frameworks.traits import told_of, uses_torchtitan
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.losses import logits_of

_TORCH_OPTIMIZER = ("fsdp", "fsdp-compiled", "llm-foundry")
"""Stacks whose gradients and updates are those of torch.optim."""

_ONE_KERNEL = (
    r"\bfused[-_ ](?:torch[-_ ])?adamw?\b|adamw?[-_ ](?:torch[-_ ])?fused\b|fused\s*[=:]\s*true|fused optimi[sz]er"
)
"""Words for an update in one kernel, which needs no memory of its own."""

_BUCKET_VIEWS = r"gradients?[-_ ]as[-_ ]bucket[-_ ]views?"
"""Words for gradients that are views of DistributedDataParallel's buckets."""

_FREED_LOGIT = 2.0
"""Bytes of a logit in 16 bits."""


def as_allocated(row: Row, stack: Software, zero: int, optimizer: str) -> Software:
    """The stack for the peak of live tensors, as torch.optim and PyTorch's cross entropy free them.

    torch.optim sets gradients to None. PyTorch's cross entropy no longer holds the 16-bit logits after their fp32 copy
    (`logits = logits.float()` of transformers, `del pred` of torchtitan). What an allocator takes of the device
    includes both: its blocks stay, and tensors of other sizes do not fit into them.

    DistributedDataParallel has buckets for all gradients, which always exist (torch/csrc/distributed/c10d/reducer.cpp),
    also if states are sharded (`zero` 1). They come on top of the gradients, or replace them
    (`gradient_as_bucket_view`). MosaicML's optimizer goes tensor by tensor (composer/optim/decoupled_weight_decay.py),
    and an `optimizer` other than AdamW takes no roots of all second moments.
    """
    if stack.name not in _TORCH_OPTIMIZER:
        return stack
    one_kernel = mentions(told_of(row), _ONE_KERNEL) or (uses_torchtitan(row) and not stack.foreach)
    buffers = stack.buffers
    copied = stack.loss != "pieces" and stack.composed_loss != "pytorch-16" and row.precision() != "fp32"
    if copied and (buffers or stack.composed_loss == "pytorch"):
        buffers -= _FREED_LOGIT * logits_of(row)
    buckets = _has_buckets(row, zero)
    views = buckets and mentions(told_of(row), _BUCKET_VIEWS)
    return replace(
        stack,
        frees_gradients=True,
        roots_moments=stack.name != "llm-foundry" and not one_kernel and optimizer == "adamw",
        buffers=buffers,
        keeps_buckets=buckets and not views,
        views_buckets=views,
    )


def _has_buckets(row: Row, zero: int) -> bool:
    """Whether DistributedDataParallel reduces gradients: several data-parallel devices that do not shard gradients."""
    pipeline = row.integer("pp") or 1
    data = (row.integer("n_devices") or 1) // ((row.integer("tp") or 1) * pipeline)
    return data > 1 and (zero == 0 or (zero == 1 and pipeline == 1))
