"""The dtype in which a stack keeps and reduces gradients and optimizer states, where these are, and their buckets.

optimizer offload                                   gradients and states on the host
flags, or recipes of NVIDIA                         gradients in bf16; with recipes also narrower states
ZeRO 3 of DeepSpeed                                 gradients in the dtype of weights, unless grad_accum_dtype
                                                    is wider
DeepSpeed in bf16                                   gradients are copied to fp32 in buckets of 500 million
ZeRO 1 and 2 of DeepSpeed since November 2023       gradients are all-reduced
reduce_bucket_size auto, or less than a matrix      gradients of DeepSpeed are divided, but not copied into buckets
NeMo before September 2024                          buckets of a layer or of a virtual stage
gradient accumulation fusion denied                 a pass of its own accumulates gradients
torchtitan with a pipeline                          the same, in the dtype in which they are reduced
"""

import math
import re
from dataclasses import replace

from hardware_profiles import Software
from planner.validation.frameworks.recipes import BRIDGE, of_bridge
from planner.validation.frameworks.traits import Trait, flags_of, sharding_flags, uses_torchtitan
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.flagged import narrow_gradients

NARROW_RECIPES = rf"{BRIDGE}|dgxc|nemo[- ](?:\d[\d.]* perf|framework)"
"""Sources whose recipes reduce and keep gradients in bf16: Megatron Bridge (perf_recipes: grad_reduce_in_fp32 = False),
NeMo (scripts/performance: the same), and its launcher before (dgxc-benchmarking v24.11.1: grad_sync_dtype: bf16)."""

_NAMED_RECIPES = r"dgxc|\bperf(?:ormance)?[-_ ]recipes?\b|\bframework recipes?\b"
"""Words for the same recipes in flags. The name of the framework is none: its own default keeps gradients and masters
in fp32 (`bf16_mixed` of NeMo 2 and of Megatron Bridge: grad_reduce_in_fp32 = True)."""

_RECIPES = "the recipes of NVIDIA for benchmarks have it"

_ON_THE_HOST = Trait(
    words=r"offload\S* (?:of )?(?:adam|optim)|optimizer[-_ ]offload|offload[-_]optimizer",
    changes={"offloaded": True},
    note="the optimizer's state is on the host",
)

_UNFUSED_SUMS = Trait(
    words=r"gradient[-_ ]accumulation[-_ ]fusion",
    denied=True,
    changes={"accumulates": True},
)

_WIDE_SUMS = r"grad_accum_dtype\W+(?:fp|float)32"

_BUCKET = 5e8
"""Elements of gradients that DeepSpeed reduces at once (runtime/pipe/engine.py: MEMORY_OPT_ALLREDUCE_SIZE)."""

_BUCKET_SIZE = r"reduce_bucket_size[\"']?\s*[:= ]\s*[\"']?(auto|\d+(?:\.\d+)?(?:e\d+)?)"

_ALL_REDUCED = "2023-11-21"
"""Date of DeepSpeed's 2afa1c7f2 (0.12.4): `use_multi_rank_bucket_allreduce`, on by default. Before, it called
`dist.reduce` for the part of each device, which sends as much as a reduce-scatter."""

_NEMO_2 = "2024-09"
"""Month in which NeMo 2 got its buckets of 128 Mi parameters (1d5de59460)."""

_NEMO_1 = "mlperf training v4.1"
"""A source that used NeMo 1 later than that (optim@model.optim=distributed_fused_adam in run_and_time.sh of GPT-3)."""


def with_gradients(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with what a row says about gradients, or else with what its recipe or engine does."""
    words = sharding_flags(row)
    stack = _ON_THE_HOST.given(words, stack, notes)
    recipes = mentions(row.text("source").lower(), NARROW_RECIPES) or mentions(words, _NAMED_RECIPES)
    told = narrow_gradients(words)
    if told or (recipes and told is None):
        notes.append(f"gradients are kept in bf16, as {'flags say' if told else _RECIPES}")
        states = _narrow_states(row) if recipes else {}
        stack = replace(stack, stored=replace(stack.stored, bf16=2.0, **states))
    if stack.name == "deepspeed-zero3" and not mentions(words, _WIDE_SUMS):
        notes.append(
            "gradients are kept and reduced in the dtype of weights, unless data_types.grad_accum_dtype says more"
        )
        stack = replace(stack, stored=replace(stack.stored, bf16=2.0))
    if stack.name == "deepspeed" and row.precision() == "bf16":
        notes.append("gradients are reduced in fp32, in buckets of 500 million")
        stack = replace(stack, buffers=stack.buffers + _flat_gradients(row))
    return stack


def with_whole_reductions(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with gradients that ZeRO 1 and 2 of DeepSpeed all-reduce, to copy the part of each device out of them
    (runtime/zero/stage_1_and_2.py: `allreduce_and_copy_with_multiple_ranks`).

    In bf16 without ZeRO 2 it stays as it is: DeepSpeed all-reduces 16 bits there (engine.py:
    `communication_data_type`), which takes as long as the reduce-scatter of 32 that is priced.
    """
    date = row.date()
    early = bool(date) and date < _ALL_REDUCED[: len(date)]
    if stack.name != "deepspeed" or early or (row.precision() == "bf16" and row.zero_stage() != 2):
        return stack
    return replace(stack, reduces_whole=True)


def with_large_gradients(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with gradients that DeepSpeed only divides, where its buckets are too small for a matrix of the MLP.

    Such a gradient is reduced where it is, alone (runtime/zero/stage3.py: `__add_grad_to_ipg_bucket`). "auto" is
    hidden^2 with transformers and accelerate (integrations/deepspeed.py: `trainer_config_finalize`).
    """
    hidden, wide = (row.integer(name) or 0 for name in ("hidden", "ffn_hidden"))
    said = re.search(_BUCKET_SIZE, sharding_flags(row))
    if not stack.copies_gradients or said is None:
        return stack
    elements = hidden**2 if said[1] == "auto" else float(said[1])
    if elements >= hidden * (wide or 4 * hidden):
        return stack
    notes.append("gradients of large matrices do not fit into buckets, and are divided where they are")
    return replace(stack, copies_gradients=1)


def with_sums(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with a pass of its own that accumulates gradients, if flags deny the fused one, or FSDP2 has it.

    torchtitan's pipelines reduce gradients once a step (`set_requires_gradient_sync` in
    torch/distributed/pipelining/stage.py). Until then FSDP2 adds each micro-batch's to a whole one in the dtype of the
    reduction (`accumulate_unsharded_grad_if_needed` in torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
    """
    if stack.name.startswith("fsdp") and (row.integer("pp") or 1) > 1 and uses_torchtitan(row):
        notes.append("gradients of micro-batches are accumulated by a pass of its own (FSDP2 in a pipeline)")
        return replace(stack, accumulates=True, sums_narrow=stack.stored.bf16 < stack.stored.weight)
    return _UNFUSED_SUMS.given(flags_of(row), stack, notes)


def with_buckets_of_nemo_1(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the buckets of NeMo 1, if a row is that old."""
    date = row.date()[:7]
    first = (date and date < _NEMO_2) or _NEMO_1 in row.text("source").lower()
    if stack.name == "nemo" and first and (parameters := _nemo_1_bucket(row)):
        return replace(stack, bucket_parameters=parameters)
    return stack


def share_of_blocks(row: Row) -> float:
    """Share of the parameters that are in blocks, not in embedding and head."""
    tables = 2 * (row.integer("vocab") or 0) * (row.integer("hidden") or 0)
    return 1.0 if row.parameters is None else max(0.0, 1 - tables / row.parameters)


def _nemo_1_bucket(row: Row) -> int:
    """Parameters in a bucket of NeMo 1: those of a layer on a device, or of a virtual stage if there are any.

    Source: v1.23.0, megatron_gpt_model.py: `distributed_adam_buckets`. 0 if the row does not state the sizes, or has
    experts, whose gradients are reduced among fewer devices.
    """
    layers, stages = row.integer("n_layers"), row.integer("vpp") or 1
    if not layers or row.parameters is None or row.text("arch").lower() == "moe":
        return 0
    together = layers / ((row.integer("pp") or 1) * stages) if stages > 1 else 1.0
    return round(row.parameters * share_of_blocks(row) / layers / (row.integer("tp") or 1) * together)


def _flat_gradients(row: Row) -> float:
    """Bytes by which the buffers of Megatron-DeepSpeed are larger in bf16 than in fp16.

    Its fp16 buckets are part of what devices reserve, as fitted to such runs. In bf16, fp32 gradients are copied into a
    flat tensor of `_BUCKET` elements for their reduction (deepspeed/runtime/engine.py: allreduce_bucket). No block that
    activations have left is large enough, so the allocator takes new memory for it.
    """
    shards = (row.integer("tp") or 1) * (row.integer("pp") or 1)
    parameters = (row.parameters or math.inf) / shards
    flat, cast, narrow = 4, 2, 2  # bytes of an element: in fp32, cast for the all-reduce, and in the bucket of fp16
    return (flat + cast - narrow) * min(_BUCKET, parameters)


def _narrow_states(row: Row) -> dict[str, float]:
    """Bytes of states that NVIDIA's recipes keep in less than fp32, by fields of `Stored`.

    In bf16, the lower half of a master weight beside the weight itself: NeMo 1 (megatron_base_model.py:
    store_param_remainders) and Megatron Bridge (use_precision_aware_optimizer), but not under FSDP. And DeepSeek's
    moments in Megatron Bridge (deepseek_v3.py: exp_avg_dtype, exp_avg_sq_dtype).
    """
    narrow = {}
    bridge = of_bridge(row)
    if row.precision() == "bf16" and row.zero_stage() != 3 and (bridge or row.date() < "2025"):
        narrow["master"] = 2.0
    if bridge and row.zero_stage() != 3 and re.search(r"deepseek|kimi", row.text("model").lower()):
        narrow["moment"] = 2.0
    return narrow
