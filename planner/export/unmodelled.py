"""Settings that no plan has but that change its time or memory; they are reported first."""

import re
from collections.abc import Iterable

_OFF = frozenset(
    {"0", "0.0", "none", "false", "null", "no", "off", "fp32", "torch.float32", "float32", "no_shard", "disable"}
)
_FEWER_BITS = "optimizer states in fewer bits: priced in fp32, so memory is less than this"
_ADAPTED = "an adapter is trained, not the model: priced as if all weights were, so memory is far less than this"
_PAGED = "optimizer states move to host memory where a device is full: priced as on the device"
_ACTIVATIONS = "activations in host memory: priced as on the device"
UNFUSED = "attention keeps its scores in memory: priced as one kernel, so memory is more than this"
_MATTERS: tuple[tuple[str, str], ...] = (
    (r"fp8|mixed-precision: fp8|fp8-format|fp4|fp4-format|fp8-config\..*backend",
     "products in 8 bits or less: priced in 16 bits, so a step takes less than this"),
    (r"load-in-4bit|load-in-8bit|quantization-(config|bit)|quant-(bits|method)|compression-training\..*",
     "weights in 8 bits or less: priced in full, so memory is less than this"),
    (r"adapter|peft|peft-scheme|lora-r|lora-rank|lora-target.*", _ADAPTED),
    (r"(zero-optimization\.)?offload-(optimizer|param)\.?(device|-device)?|.*offload-(optimizer|param)-device"
     r"|fsdp-offload-params|offload-params|enable-cpu-offload|optimizer-cpu-offload|swap-optimizer|optimizer\.swap",
     "states in host memory: priced as on the device, so memory is less than this and a step takes longer"),
    (r"use-kt",
     "experts are computed on the processors of the host: priced on the device, so memory is less than this"),
    (r"activation-offloading|activation-offload-layers|fine-grained-activation-offloading|cpu-offloading(-num-layers)?"
     r"|swap-attention|swap-layer-input|smart-swap|swap-config\.swap",
     _ACTIVATIONS),
    (r"layer-offloading",
     "weights of blocks in host memory: priced as on the device, so memory is less than this and a step takes longer"),
    (r"selective-checkpointing",
     "recomputed blocks keep the results of attention: priced as whole blocks, so memory is more than this"),
    (r"rl|reward-model|process-reward-model|perform-rl-step",
     "training on preferences or rewards, with further models or generated text: priced as training on tokens alone,"
     " so a step takes longer than this"),
    (r"lisa-n-layers|unfrozen-parameters",
     "some weights are trained: priced as if all were, so memory is less than this"),
    (r"mtp-num-layers", "modules of multi-token prediction: not in the model that is priced"),
    (r"step-batch-size-schedule|rampup-batch-size", "the batch grows while it trains: priced with the last one"),
    (r"zero-hpz-partition-size",
     "backward passes gather weights from a second copy in a group (ZeRO++): priced with one, so memory is more than"
     " this"),
    (r"zero-quantized-(nontrainable-)?(weights|gradients)|(zero-optimization\.)?zeropp-loco-param\..*",
     "weights or gradients are sent in fewer bits (ZeRO++): priced as they are, so a step takes less than this"),
    (r"(zero-optimization\.)?zenflow\..*",
     "most weights are updated later, on the host (ZenFlow): priced as all updated in each step"),
    (r"moe-zero-memory", "results of experts are recomputed: priced as kept, so memory is less than this"),
    (r"tp-2d", "tensor parallelism over two axes: priced over one"),
    (r"quant-states", _FEWER_BITS),
    (r"distribute-saved-activations",
     "inputs of recomputed blocks are sharded over tensor-parallel devices: priced whole, so memory is less than this"),
    (r"outer-dp-sharding-strategy|enable-full-sharding-in-hsdp",
     "replicas shard states, too: priced as whole in each of them, so memory is less than this"),
    (r"use-tp-pp-dp-mapping",
     "stages of a pipeline are nearer to each other than data-parallel devices: priced the other way round"),
    (r"first-last-layers-bf16", "the first and the last layers are not in fp8: priced like the others"),
    (r"moe-expert-capacity-factor|moe-expert-rank-capacity-factor|capacity-factor",
     "tokens beyond an expert's capacity are dropped: priced with all"),
    (r"enable-dsa-indexer|experimental-attention-variant|dsa-indexer-topk",
     "attention to the keys that an indexer picks: priced to all keys, without the indexer"),
    (r"window-size|sliding-window(-size)?|interleave-sliding-window|window-attn-skip-freq",
     "attention in a window: priced over the whole sequence"),
    (r"moe-fb-overlap|overlap-moe-expert-parallel-comm|moe-alltoall-overlap-comm|moe-shared-expert-overlap",
     "communication of experts overlaps with computation: priced as exposed"),
    (r"dtype: bfloat16|use-precision-aware-optimizer|main-grads-dtype|main-params-dtype|exp-avg(-sq)?-dtype"
     r"|reuse-fp32-param|megatron-fsdp-main-grads-dtype|(bf16|fp16)-master-weights-and-grad(s|ients)"
     r"|bf16-optimizer-states",
     _FEWER_BITS),
    (r"enable-cuda-graph|external-cuda-graph|cuda-graph-impl|cuda-graphs",
     "CUDA graphs: priced with launches one by one, so a step takes less than this"),
    (r"early-step-in-backward", "weights are updated in the backward pass: priced with all gradients until the step"),
    (r"enable-zbh1-pipeline", "a zero-bubble pipeline: priced as 1F1B, so a step takes less than this"),
    (r"ds-sequence-parallel-fpdt", "sequences go through blocks in chunks: priced whole, so memory is less than this"),
    (r"noop-layers", "layers that do nothing fill up the stages: priced without them"),
    (r"liger-fused-linear-cross-entropy|(use|enable)-liger(-kernel)?|cut-cross-entropy|fused-linear-cross-entropy",
     "the loss is taken piece by piece: priced whole, so memory is less than this"),
)  # fmt: skip


def unmodelled(settings: Iterable[tuple[str, object]]) -> tuple[str, ...]:
    """Those of these settings, by name or path, that matter but are in no price; each message once, with its
    settings."""
    found: dict[str, list[str]] = {}
    for name, value in settings:
        plain = name.removeprefix("--").replace("_", "-").lower()
        last = plain.rpartition(".")[2]
        if _is_off(value):
            continue
        if last in ("optimizer", "optim") and re.search(r"[48]bit", str(value)):
            found.setdefault(_FEWER_BITS, []).append(name)
        if last == "gradient-checkpointing" and str(value).startswith("offload"):
            found.setdefault(_ACTIVATIONS, []).append(name)
        if last in ("optimizer", "optim") and str(value).startswith("paged"):
            found.setdefault(_PAGED, []).append(name)
        for pattern, words in _MATTERS:
            if re.fullmatch(pattern, plain) or re.fullmatch(pattern, last):
                found.setdefault(words, []).append(name)
                break
    return tuple(f"{', '.join(names[:2])}: {words}" for words, names in found.items())


def besides_adapters(lines: Iterable[str]) -> tuple[str, ...]:
    """The messages without those on adapters, for a model that is priced with its adapters."""
    return tuple(line for line in lines if not line.endswith(_ADAPTED))


def _is_off(value: object) -> bool:
    return not value or str(value).strip().lower() in _OFF
