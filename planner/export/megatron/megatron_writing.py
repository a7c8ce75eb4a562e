"""Writes a description as arguments of Megatron-LM, with the script that starts it."""

import math
from collections.abc import Mapping

from planner.export.architecture import Architecture, Latent, Routing, predicted_by
from planner.export.description import Description, gradient_bytes
from planner.export.files.arguments import Option, lines_of, option
from planner.export.shell import torchrun_script
from planner.export.target import Asked, Job
from planner.plan.layout.parts import PARTS
from planner.sharding.update import PLAIN

FP8_RECIPES = {"tensorwise": ("hybrid", "tensorwise"), "delayed": ("hybrid", "delayed"), "mxfp8": ("e4m3", "mxfp8")}
"""Arguments of --fp8-format and --fp8-recipe: e4m3 forward and e5m2 for gradients with per-tensor scales, and e4m3 for
all with scales of blocks of 32."""
OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
FP8_GATHERED = ("tensorwise", "delayed")
"""Recipes under which Megatron-FSDP gathers the weights of a layer in fp8 (--fp8-param-gather), as a plan does."""

SHARDING = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
MODULES = {"attention": "core_attn", "normalisation": "layernorm", **{name: name for name in PARTS}}
WHOLE_SHARDED = 3  # the ZeRO stage that shards weights
_PADDING = 128  # --make-vocab-size-divisible-by, at most


def write(job: Job) -> Mapping[str, str]:
    """`launch.sh`, with every argument. Raises ExportError, as `degree_options` does."""
    d = job.description
    fsdp = d.zero > 1
    exports = () if fsdp or d.tensor * d.context == 1 else (f"CUDA_DEVICE_MAX_CONNECTIONS={_connections(job)}",)
    title = f"{job.model} with Megatron-LM core 0.16; MEGATRON is the folder of its pretrain_gpt.py."
    options = [
        *_model(job),
        *degree_options(d),
        *_context(d),
        *stage_options(d, predicted_by(job.model)),
        *zero_options(d),
    ]
    options += [*recompute_options(d), *training_options(d), *overlap_options(job), *run_options(job)]
    gradients = fsdp_options(d)
    later, also = (_OF_LATER_VERSIONS, ('"${later[@]}"',)) if gradients else ("", ())
    before = later.format(name=gradients[0][0], line=lines_of(gradients)[0]) if gradients else ""
    script = torchrun_script(
        job, title, '"${MEGATRON:-.}/pretrain_gpt.py"', options, exports=exports, also=also, before=before
    )
    return {"launch.sh": script}


_OF_LATER_VERSIONS = """later=()
if grep -qs -e {name} "${{MEGATRON:-.}}/megatron/training/arguments.py"; then
  later=({line})  # of core 0.17 and later, whose gradients are in 16 bits without it
fi
"""


def _model(job: Job) -> list[Option]:
    a, dispatch = job.architecture, dispatch_options(job)
    if a is None:
        return dispatch
    return [*model_options(a, job.description), *dispatch, *_odd_words(a, job.description.tensor)]


def dispatch_options(job: Job) -> list[Option]:
    """How tokens reach experts, and how these compute, as plans are priced; by default Megatron-LM gathers all tokens
    everywhere.

    DeepEP and HybridEP take the weights of routers in fp32 alone (megatron/core/transformer/moe/token_dispatcher.py).
    """
    if job.description.expert is None:
        return []
    if not sends_once(job):
        return [option("moe-token-dispatcher-type", "alltoall"), option("moe-grouped-gemm")]
    return [
        option("moe-token-dispatcher-type", "flex"),
        option("moe-flex-dispatcher-backend", job.dispatcher),
        option("moe-router-dtype", "fp32"),
        option("moe-grouped-gemm"),
    ]


def sends_once(job: Job) -> bool:
    """Whether a token is sent once to each node, as priced; there must be several devices to send it to
    (MoEFlexTokenDispatcher)."""
    d = job.description
    cut = 1 if d.whole_experts else d.tensor
    return bool(job.dispatcher) and d.expert is not None and d.expert * cut > 1


def overlaps_exchange(job: Job) -> bool:
    """Whether tokens on their way to experts are overlapped with other work, as priced, where Megatron-LM takes that.

    It takes it with expert parallelism, in 16 bits, with virtual stages where there is a pipeline, without blocks or
    experts that are recomputed whole (megatron/core/transformer/transformer_config.py, core 0.16 to 0.20), and here
    without modules that predict further tokens.
    """
    d = job.description
    staged = d.pipeline == 1 or d.virtual_stages > 1
    recomputed = any(d.full) or (any(d.selective) and "moe" in d.kept.but)
    able = (d.expert or 1) > 1 and d.precision != "fp32" and staged and not recomputed and not predicted_by(job.model)
    return "exchange" in job.overlapped and able


def tells(job: Job) -> tuple[str, ...]:
    """What of the exchange of experts is switched on as it is priced."""
    return (*(["once"] if sends_once(job) else []), *(["exchange"] if overlaps_exchange(job) else []))


def _connections(job: Job) -> int:
    """CUDA_DEVICE_MAX_CONNECTIONS with tensor or context parallelism: 1, or more where the exchange of experts overlaps
    with other work (megatron/training/arguments.py: validate_args)."""
    return 32 if overlaps_exchange(job) else 1


def _odd_words(a: Architecture, tensor: int) -> list[Option]:
    """The size of a vocabulary that is not padded.

    The NullTokenizer adds a word up to core 0.17, and none from 0.18 on
    (core/tokenizers/text/libraries/null_tokenizer.py). Padding hides the difference, so only here a word would be
    missing.
    """
    return [option("padded-vocab-size", a.vocabulary)] if _padding(a, tensor) * tensor == 1 else []


def _padding(a: Architecture, tensor: int) -> int:
    """The multiple to which the vocabulary of a device is padded, as small as tensor parallelism allows."""
    return math.gcd(a.vocabulary // tensor, _PADDING) if a.vocabulary % tensor == 0 else _PADDING


def model_options(a: Architecture, d: Description) -> list[Option]:
    """The arguments that describe a model."""
    found = [
        option("num-layers", a.layers),
        option("hidden-size", a.hidden),
        option("ffn-hidden-size", a.ffn),
        option("num-attention-heads", a.heads),
        option("seq-length", d.sequence_length or a.sequence),
        option("max-position-embeddings", d.sequence_length or a.sequence),
        option("norm-epsilon", a.epsilon),
        option("attention-dropout", 0),
        option("hidden-dropout", 0),
    ]
    if a.latent is not None:
        found += _latent(a.latent)
    if a.kv_heads != a.heads:
        found += [option("group-query-attention"), option("num-query-groups", a.kv_heads)]
    if not a.usual_heads:
        found.append(option("kv-channels", a.head_size))
    if not a.tied:
        found.append(option("untie-embeddings-and-output-weights"))
    if a.family != "gpt":
        found += [option("swiglu"), option("normalization", "RMSNorm"), option("disable-bias-linear")]
        found += [option("position-embedding-type", "rope"), option("rotary-base", round(a.rope_theta))]
    if a.qk_norm:
        found.append(option("qk-layernorm"))
    if a.predicted:
        found += [option("mtp-num-layers", a.predicted), option("mtp-loss-scaling-factor", a.predicted_weight)]
    return [*found, *_words(a, d.tensor), *_experts(a)]


def _latent(latent: Latent) -> list[Option]:
    """Latent attention, with positions for the length of a sample."""
    ranks = [option("q-lora-rank", latent.q_rank)] if latent.q_rank else []
    return [
        option("multi-latent-attention"),
        *ranks,
        option("kv-lora-rank", latent.kv_rank),
        option("qk-head-dim", latent.plain),
        option("qk-pos-emb-head-dim", latent.rotary),
        option("v-head-dim", latent.value),
        option("rope-type", "rope"),
        option("no-rope-fusion"),  # the fusion supports only YaRN there
    ]


def _routing(routing: Routing) -> list[Option]:
    found = [
        option("moe-router-score-function", "sigmoid" if routing.sigmoid else "softmax"),
        option("moe-router-topk-scaling-factor", routing.scale),
    ]
    if routing.groups > 1:
        found += [option("moe-router-num-groups", routing.groups), option("moe-router-group-topk", routing.chosen)]
    if routing.bias_speed:
        found += [
            option("moe-router-enable-expert-bias"),
            option("moe-router-bias-update-rate", routing.bias_speed),
        ]
    return found


def _words(a: Architecture, tensor: int) -> list[Option]:
    """The vocabulary, padded as little as tensor parallelism allows. The NullTokenizer adds one word."""
    return [
        option("tokenizer-type", "NullTokenizer"),
        option("vocab-size", a.vocabulary - 1),
        option("make-vocab-size-divisible-by", _padding(a, tensor)),
    ]


def _experts(a: Architecture) -> list[Option]:
    experts = a.experts
    if experts is None:
        return []
    balanced = "aux_loss" if a.routing is None else "seq_aux_loss"
    found = [
        option("num-experts", experts.count),
        option("moe-router-topk", experts.chosen),
        option("moe-ffn-hidden-size", experts.width),
        option("moe-router-load-balancing-type", balanced if a.balance_loss else "none"),
    ]
    if a.routing is not None:
        found += _routing(a.routing)
    if a.balance_loss:
        found.append(option("moe-aux-loss-coeff", a.balance_loss))
    if experts.shared_width:
        found.append(option("moe-shared-expert-intermediate-size", experts.shared_width))
    if experts.dense_layers:
        sparse = a.layers - experts.dense_layers
        found.append(option("moe-layer-freq", f"([0]*{experts.dense_layers}+[1]*{sparse})"))
    if not a.normalised or a.routing is not None or _chooses_one(a):
        found.append(option("moe-router-pre-softmax"))
    return found


def _chooses_one(a: Architecture) -> bool:
    """Whether each token takes one expert. A softmax over its score alone would be 1, with a gradient of 0, which
    Megatron-LM refuses (megatron/core/transformer/transformer_config.py: TransformerConfig.__post_init__)."""
    return a.experts is not None and a.experts.chosen == 1


def fill_in(job: Job) -> Asked:
    """What the arguments leave open."""
    left = "your data in the place of `--mock-data`, iterations and learning rate"
    if job.architecture is None:  # then there is no first run without data, either
        left = "the arguments that describe the model, tokenizer, data, iterations and learning rate"
    return ("MEGATRON", "the folder of Megatron-LM's `pretrain_gpt.py`"), ("", left)


def degree_options(d: Description) -> list[Option]:
    """Degrees, that of experts included, and sequence parallelism."""
    found = [
        option("tensor-model-parallel-size", d.tensor),
        option("pipeline-model-parallel-size", d.pipeline),
        option("context-parallel-size", d.context),
    ]
    if d.sequence_parallel:
        found.append(option("sequence-parallel"))
    if d.expert is not None:
        found.append(option("expert-model-parallel-size", d.expert))
        found.append(option("expert-tensor-parallel-size", 1 if d.whole_experts else d.tensor))
    return found


def _context(d: Description) -> list[Option]:
    if d.context == 1:
        return []
    if d.ring > 1 and d.heads > 1:
        sizes = option("hierarchical-context-parallel-sizes", d.heads, d.ring)
        return [option("cp-comm-type", "a2a+p2p"), sizes]
    return [option("cp-comm-type", "p2p" if d.ring > 1 else "a2a")]


def stage_options(d: Description, predicted: int) -> list[Option]:
    """Layers of each stage, unless all have the same number and each rank has one stage.

    `predicted` modules after the layers predict further tokens.
    """
    if not d.even:
        return [option("pipeline-model-parallel-layout", _layout(d.layers, predicted))]
    if d.virtual_stages > 1:
        return [option("num-layers-per-virtual-pipeline-stage", d.layers[0])]
    return []


def _layout(layers: tuple[int, ...], predicted: int) -> str:
    """`Et*2|t*3|t*2mL`: the embedding, layers, modules that predict further tokens, and the loss."""
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}{'m' * predicted}L"
    return "|".join(stages)


def zero_options(d: Description) -> list[Option]:
    """What data-parallel devices shard."""
    if d.zero == 0:
        return []
    copies = [option("num-distributed-optimizer-instances", d.replicas)] if d.replicas > 1 else []
    copies += offload_options(d)
    if d.zero == 1:
        return [option("use-distributed-optimizer"), *copies]
    return [
        *copies,
        option("use-megatron-fsdp"),
        option("use-distributed-optimizer"),
        option("data-parallel-sharding-strategy", SHARDING[d.zero]),
        option("ckpt-format", "fsdp_dtensor"),
        option("no-gradient-accumulation-fusion"),
        *([option("init-model-with-meta-device")] if d.zero == WHOLE_SHARDED else []),  # the whole model may not fit
    ]


def fsdp_options(d: Description) -> list[Option]:
    """The dtype of Megatron-FSDP's gradients, where it is fp32.

    Up to core 0.16 it follows --accumulate-allreduce-grads-in-fp32, which is on in bf16. From 0.17 on it is that of the
    weights unless this argument says otherwise (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py:
    MixedPrecisionPolicy).
    """
    wide = d.zero > 1 and d.precision != "fp32" and d.update.gradient_dtype != "parameter"
    return [option("megatron-fsdp-main-grads-dtype", "fp32")] if wide else []


def offload_options(d: Description) -> list[Option]:
    """States on the host; in Megatron-LM this is a form of its precision-aware optimizer, here with fp32 states."""
    if d.states_at == "device":
        return []
    return [option("use-precision-aware-optimizer"), option("optimizer-cpu-offload")]


def recompute_options(d: Description) -> list[Option]:
    """What is recomputed."""
    if any(d.selective):
        modules = [MODULES[name] for name in d.kept.but]
        return [option("recompute-granularity", "selective"), option("recompute-modules", *modules)]
    if not any(d.full):
        return []
    by, count = ("uniform", 1) if d.full == d.layers else ("block", max(d.full))
    return [
        option("recompute-granularity", "full"),
        option("recompute-method", by),
        option("recompute-num-layers", count),
    ]


def training_options(d: Description) -> list[Option]:
    """Batches, precision, optimizer and gradients."""
    found = [option("micro-batch-size", d.micro_batch), option("global-batch-size", d.global_batch)]
    found += [] if d.precision == "fp32" else [option(d.precision)]
    if d.fp8:
        layout, recipe = FP8_RECIPES[d.fp8.recipe]
        found += [option("fp8-format", layout), option("fp8-recipe", recipe)]
        found += [option("fp8-param-gather")] if d.fp8.gathered else []
    if d.fp8.delayed:
        found += [option("fp8-amax-history-len", d.fp8.history), option("fp8-amax-compute-algo", "max")]
        found += [option("fp8-margin", d.fp8.margin)] if d.fp8.margin else []
    found.append(option("optimizer", OPTIMIZERS[d.optimizer]))
    found.append(option("clip-grad", 0 if d.update.clip_norm is None else d.update.clip_norm))
    narrow = d.update.gradient_dtype == "parameter"
    if narrow and d.precision == "bf16":
        found.append(option("grad-reduce-in-bf16"))
    elif not narrow and d.precision == "fp16":
        found.append(option("accumulate-allreduce-grads-in-fp32"))
    found += moment_options(d)
    if d.update.bucket_size:
        found += [option("overlap-grad-reduce"), option("ddp-bucket-size", bucket_elements(d))]
    return found


def bucket_elements(d: Description) -> int:
    """Gradients in a bucket, of which plans have the bytes."""
    return d.update.bucket_size // gradient_bytes(d)


def moment_options(d: Description) -> list[Option]:
    """The dtype of moments, for the precision-aware optimizer; it takes gradients that are reduced in bf16 as they
    are."""
    word = d.update.moment_dtype
    if word == PLAIN.moment_dtype:
        return []
    narrow = d.update.gradient_dtype == "parameter" and d.precision == "bf16"
    return [
        option("use-precision-aware-optimizer"),
        *([option("main-grads-dtype", "bf16")] if narrow else []),
        option("exp-avg-dtype", word),
        option("exp-avg-sq-dtype", word),
    ]


def overlap_options(job: Job) -> list[Option]:
    """Switches on what was priced as overlapped, except what the settings of gradients already say."""
    d, found = job.description, list[Option]()
    if "reductions" in job.overlapped and d.shards * d.replicas > 1:
        found += [] if d.update.bucket_size else [option("overlap-grad-reduce")]
        if "gathers" in job.overlapped and d.zero:
            found.append(option("overlap-param-gather"))
    if "tensor" in job.overlapped and d.tensor > 1 and d.sequence_parallel:
        found.append(option("tp-comm-overlap"))
    if overlaps_exchange(job):
        found.append(option("overlap-moe-expert-parallel-comm"))
    return found


def run_options(job: Job) -> list[Option]:
    """Options for a first run without data; arguments of the script replace them later."""
    if job.architecture is None:
        return []
    return [option("mock-data"), option("train-iters", 100), option("lr", 1e-4), option("eval-iters", 0)]
