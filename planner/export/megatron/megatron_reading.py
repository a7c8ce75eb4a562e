"""Reads arguments of Megatron-LM as a description."""

import re
from dataclasses import replace

from hardware_profiles import Home, load_software
from hardware_profiles.foreign import ForeignTextError
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import (
    Description,
    ExportError,
    data_of,
    default_gradient_dtype,
    gradient_bytes,
    micro_batches_of,
    schedule_of,
)
from planner.export.files.arguments import Options, options_in
from planner.export.files.settings import size_of
from planner.export.files.yaml_files import parse_yaml
from planner.export.megatron.launchers import launched, with_dashes
from planner.export.megatron.megatron_refusals import GROUP, check_taken
from planner.export.megatron.megatron_stages import in_a_v, layers_of_stages
from planner.export.megatron.megatron_writing import (
    FP8_GATHERED,
    FP8_RECIPES,
    MODULES,
    OPTIMIZERS,
    SHARDING,
    WHOLE_SHARDED,
    model_options,
)
from planner.export.target import Facts, Reading
from planner.export.unmodelled import UNFUSED, unmodelled
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.layout.kept import Kept
from planner.sharding.update import BLOCK, MOMENT_DTYPES, PLAIN, Update

_GRADIENTS = {"hybrid": "e5m2", "e4m3": "e4m3"}
"""Dtype of fp8 gradients by --fp8-format."""

_LAUNCHER = ("nnodes", "nproc-per-node", "nproc_per_node", "node-rank", "node_rank", "master-addr", "master_addr",
             "master-port", "master_port")  # fmt: skip
_EACH = ("nproc-per-node", "nproc_per_node")
_RUN = ("mock-data", "train-iters", "lr", "eval-iters", "tokenizer-type", "vocab-size", "attention-dropout",
        "hidden-dropout", "make-vocab-size-divisible-by", "max-position-embeddings")  # fmt: skip
_TELLING = ("num-layers", "tensor-model-parallel-size", "micro-batch-size", "pipeline-model-parallel-size",
            "global-batch-size", "hidden-size", "encoder-num-layers", "pipeline-model-parallel-layout",
            "clip-grad")  # fmt: skip
_TRAINING = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size", "global-batch-size",
             "context-parallel-size", "expert-model-parallel-size", "use-distributed-optimizer", "lr", "train-iters",
             "bf16", "fp16", "recompute-granularity", "deepspeed", "pipeline-model-parallel-layout",
             "clip-grad")  # fmt: skip
_GENERATION = "it generates text and trains nothing; give a file that trains"
_PICTURES = "models with image or audio encoders cannot be planned"
_LINEAR = "models with linear attention (Gated DeltaNet) cannot be planned"
_DELTA_NETS = ("gated_delta_net", "gdn", "gdn2")
_STREAMS = "models with several residual streams (hyper-connections) cannot be planned"
_STRANGERS = {
    "encoder-num-layers": "models of an encoder and a decoder are not read; plan them with `plan --model t5-base`",
    "encoder-seq-length": "models of an encoder and a decoder are not read; plan them with `plan --model t5-base`",
    "hybrid-layer-pattern": "models with state-space layers (Mamba) cannot be planned",
    "hybrid-override-pattern": "models with state-space layers (Mamba) cannot be planned",
    "hybrid-attention-ratio": "models with state-space layers (Mamba) cannot be planned",
    "is-hybrid-model": "models with state-space layers (Mamba) cannot be planned",
    "linear-attention-freq": _LINEAR,
    "full-attention-interval": _LINEAR,
    "linear-key-head-dim": _LINEAR,
    "num-zero-experts": "models with experts that compute nothing cannot be planned",
    "enable-mhc": _STREAMS,
    "enable-mhc-connections": _STREAMS,
    "moe-latent-size": "models whose experts compute in a smaller latent space cannot be planned",
    "kv-compress": "models that attend to compressed keys cannot be planned",
    "block-lm": "GLM blocks, which fill gaps, cannot be planned",
    "retro-add-retriever": "models that read retrieved neighbours (RETRO) cannot be planned",
    "language-model-type": _PICTURES,
    "vision-model-type": _PICTURES,
    "img-h": _PICTURES,
    "mrope-section": _PICTURES,
    "model-provider": _PICTURES,
    "task": "evaluation and tuning for a task cannot be planned",
    "num-tokens-to-generate": _GENERATION,
    "out-seq-length": _GENERATION,
}
_OTHER_MODELS = re.compile(r"pretrain_(ict|realm|retro|t5|vision|vlm|mimo|multimodal)")
_NO_TRAINING = re.compile(
    r"checkpoint_|convert|evaluat|export|generat|hf_to_|_to_hf|hf2|2hf|inference|merge|preprocess|prune|ptq|quantiz|reshap"
    r"|server"
)
"""In the names of programs that train nothing."""

_SHAPE = ("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
          "group-query-attention", "qk-layernorm", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "v-head-dim",
          "qk-pos-emb-head-dim", "multi-latent-attention", "num-experts", "moe-router-topk", "moe-ffn-hidden-size",
          "moe-shared-expert-intermediate-size", "moe-layer-freq", "first-k-dense-replace", "n-shared-experts",
          "moe-grouped-gemm", "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-token-dispatcher-type",
          "moe-router-pre-softmax", "moe-router-score-function", "moe-router-num-groups", "moe-router-group-topk",
          "swiglu", "normalization", "disable-bias-linear", "position-embedding-type", "rotary-base", "norm-epsilon",
          "untie-embeddings-and-output-weights", "padded-vocab-size", "add-qkv-bias", "overlap-param-gather",
          "tp-comm-overlap", "noop-layers", "rope-type", "moe-flex-dispatcher-backend", "moe-router-dtype")  # fmt: skip
_KEPT_MODULES = ("moe_act",)  # inside the operator of experts, which keeps what its backward pass needs
_TWO = 2  # sizes of a context of Ulysses and rings
_STAGES = (0, 1, 2, 3)  # of ZeRO


def read(text: str, facts: Facts) -> Reading:
    """A script, a list of arguments or a YAML file of them, as a reading."""
    options = options_of(text)
    check_trains(options)
    return reading_of(options, facts, "megatron")


def check_trains(options: Options) -> None:
    """Raise ExportError if arguments describe a model, but not its training."""
    if options.flag("num-layers") and not any(options.flag(name) for name in _TRAINING):
        raise ExportError(
            "it has the dimensions of a model, and neither degrees nor batches nor a precision; give the file that"
            " starts the training"
        )


def options_of(text: str) -> Options:
    """The arguments in a script, or in the YAML of a Megatron-LM test case.

    Raises ExportError if no plan can be made of them.
    """
    options = launched(text)
    if options is None:
        options = _yaml_options(text) if re.search(r"^MODEL_ARGS:", text, re.MULTILINE) else options_in(text)
    if not any(options.flag(name) for name in _TELLING):
        options = with_dashes(options)
    if not any(options.flag(name) for name in _TELLING):
        raise ExportError(
            f"it has no argument of Megatron-LM (--{', --'.join(_TELLING[:3])} and the like); give the file that does"
        )
    for name in _STRANGERS:
        if options.flag(name):
            raise ExportError(f"--{name}: {_STRANGERS[name]}")
    variant = options.word("experimental-attention-variant")
    if variant in _DELTA_NETS:
        raise ExportError(f"--experimental-attention-variant {variant}: {_LINEAR}")
    if options.programs and all(_NO_TRAINING.search(program) for program in options.programs):
        raise ExportError(f"{options.programs[-1]:.80} trains nothing; give a file that starts a training")
    other = next((program for program in options.programs if _OTHER_MODELS.match(program)), None)
    if other is not None:
        raise ExportError(f"{other:.80}: what it trains is no decoder of text, as plans for Megatron-LM have it")
    return options


def _yaml_options(text: str) -> Options:
    try:
        content = parse_yaml(text)
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    found = content.get("MODEL_ARGS") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        raise ExportError("MODEL_ARGS: write the arguments below it, one to a line, as --name: value")
    given: dict[str, tuple[str, ...]] = {}
    for name, value in found.items():
        if value is not False and value is not None:
            given[str(name).removeprefix("--")] = () if value is True else tuple(str(value).strip("[]").split())
    return Options(given)


def reading_of(options: Options, facts: Facts, stack: str) -> Reading:
    """Arguments as a reading, with everything that was not understood."""
    description, notes = read_options(options, facts)
    if description.states_at != "device":
        notes = [*notes, common.UPDATED_ON_HOSTS]
    if description.update.moment_dtype != PLAIN.moment_dtype and description.precision == "bf16":
        notes = [*notes, _REMAINDERS]
    notes = [*notes, *_dispatch_notes(options, facts, stack)]
    if facts.has_experts and not {*_KEPT_MODULES}.isdisjoint(_modules_in(options)):
        notes = [*notes, _ACTIVATIONS]
    if options.flag("use-megatron-fsdp") and default_gradient_dtype(description) == description.update.gradient_dtype:
        notes += [] if options.word(_FSDP_GRADIENTS) or stack != "megatron" else [_LATER_GRADIENTS]
    if options.flag("use-megatron-fsdp") and not options.word(_STRATEGY):
        notes = [*notes, _LATER_STRATEGY]
    read_run(options)
    return Reading(
        description=description,
        unmodelled=said_of(options, facts),
        notes=(*options.notes, *notes),
        unread=tuple(f"--{name}" for name in options.unread),
        stack=stack,
    )


def _dispatch_notes(options: Options, facts: Facts, stack: str) -> list[str]:
    """A note where tokens reach experts in another way than the stack prices."""
    word, once = options.word("moe-token-dispatcher-type"), load_software(stack).dispatcher == "once"
    if not facts.has_experts or word not in ("alltoall", "flex") or once == (word == "flex"):
        return []
    priced, less = ("one row for each device or node", "more") if once else ("one row for each expert", "less")
    return [f"--moe-token-dispatcher-type {word}: a token is priced as {priced}, so a step takes {less} than this"]


_ACTIVATIONS = "--recompute-modules moe_act: priced with activations of experts kept, so memory is less than this"
_FSDP_GRADIENTS = "megatron-fsdp-main-grads-dtype"
_STRATEGY = "data-parallel-sharding-strategy"
_LATER_STRATEGY = (
    f"--{_STRATEGY} is not said: read as {SHARDING[WHOLE_SHARDED]}, the default from core 0.18 on; up to 0.17 nothing"
    " is sharded"
)
_LATER_GRADIENTS = (
    "gradients of Megatron-FSDP are priced in fp32, as core 0.16 keeps them; from 0.17 on they are in 16 bits, unless"
    f" --{_FSDP_GRADIENTS} is fp32"
)
_REMAINDERS = (
    "fp32 masters are kept as the 16 bits that bf16 weights lack (store_param_remainders of OptimizerConfig), and"
    " priced whole: memory is up to 2 bytes a parameter less than this"
)


def said_of(options: Options, facts: Facts) -> tuple[str, ...]:
    """Arguments that matter but are in no price, as messages."""
    known = {"mtp-num-layers"} if "predicted_tokens" in facts.model else set[str]()
    if _read_offload(options) != "device":
        known |= {"optimizer-cpu-offload", "use-precision-aware-optimizer"}
        options.flag("use-precision-aware-optimizer")
    if _read_fp8(options, [], experts=False):
        known.add("fp8-format")
    if _moment_dtype(options) != PLAIN.moment_dtype:
        known |= {"use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"}
    if options.flag("grad-reduce-in-bf16"):
        known.add("main-grads-dtype")
    known.add(_FSDP_GRADIENTS)
    given = [
        (f"--{name}", True if values == () else " ".join(values)) for name, values in options.all if name not in known
    ]
    several = [f"--{name} {word}" for name, words in _UNFUSED.items() if (word := options.word(name)) in words]
    return (*unmodelled(given), *(f"{said}: {UNFUSED}" for said in several))


_UNFUSED = {"attention-backend": ("unfused", "local"), "transformer-impl": ("local",)}


def read_run(options: Options) -> None:
    """Mark options as read that say how to start, on which data, and what overlaps; the training stack has the
    overlaps."""
    for name in (*_LAUNCHER, *_RUN):
        options.words(name)


def read_options(options: Options, facts: Facts) -> tuple[Description, list[str]]:
    """The description in arguments, and notes on it."""
    tensor, pipeline, context = (
        options.degree(f"{name}-parallel-size") for name in ("tensor-model", "pipeline-model", "context")
    )
    _refuse_weight_shards(options)
    devices = facts.devices or _devices(options)
    if devices is None:
        raise ExportError("the arguments do not say how many devices there are; give --devices")
    ulysses = options.degree("ds-sequence-parallel-size")  # of Megatron-DeepSpeed
    data = data_of(devices, tensor=tensor, pipeline=pipeline, context=context * ulysses)
    micro_batch = options.degree("micro-batch-size")
    steps = options.degree("gradient-accumulation-steps")  # of launchers; Megatron-LM has only the global batch
    global_batch = options.degree("global-batch-size", micro_batch * data * steps)
    layers, virtual = layers_of_stages(options, facts.layers, pipeline)
    ring, heads, notes = _read_context(options, context)
    heads *= ulysses
    full, selective, kept = _read_recomputation(options, layers)
    check_model(options, facts.architecture)
    notes += _otherwise(options, facts.architecture)
    precision = "bf16" if options.flag("bf16") else "fp16" if options.flag("fp16") else "fp32"
    whole = options.degree("expert-tensor-parallel-size", tensor) == 1 and tensor > 1
    expert = options.degree("expert-model-parallel-size")
    if facts.architecture is None:  # the arguments do not describe the model
        experts = options.degree("expert-model-parallel-size") > 1 or experts_of(options) > 0 or facts.experts
    else:
        experts = experts_of(options) > 0 or facts.architecture.experts is not None
    description = Description(
        layers=layers,
        virtual_stages=virtual,
        schedule="dualpipe_v" if in_a_v(options) and pipeline > 1 else schedule_of(pipeline, virtual),
        data=data,
        tensor=tensor,
        ring=ring,
        heads=heads,
        zigzag=ring > 1,
        expert=expert if experts else None,
        whole_experts=whole,
        zero=_read_zero(options),
        replicas=_read_replicas(options, data),
        sequence_parallel=options.flag("sequence-parallel"),
        micro_batch=micro_batch,
        micro_batches=micro_batches_of(global_batch, micro_batch, data),
        full=full,
        selective=selective,
        kept=kept,
        precision=precision,
        fp8=_read_fp8(options, notes, experts=experts),
        optimizer=_read_optimizer(options),
        states_at=_read_offload(options),
        sequence_length=options.size("seq-length") or facts.sequence_length,
    )
    check_taken(options, description)
    notes += _group_notes(options, description)
    description = common.normalised(description)
    return replace(description, update=_read_update(options, description)), notes


def _group_notes(options: Options, d: Description) -> list[str]:
    """A note on larger groups of micro-batches that virtual stages take in turn."""
    group = options.degree(GROUP, d.pipeline)
    if d.virtual_stages == 1 or d.pipeline == 1 or group == d.pipeline:
        return []
    return [f"--{GROUP} {group}: priced with groups of {d.pipeline}, so memory is more than this"]


def _refuse_weight_shards(options: Options) -> None:
    """Raise ExportError for weights in more pieces than tensor-parallel devices, which are an axis of devices beside
    the others (megatron/core/model_parallel_config.py: resolve_tensor_parallel_weight_shards, main of August 2026)."""
    tensor = options.degree("tensor-model-parallel-size")
    degrees = {"tensor": tensor, "expert-tensor": options.degree("expert-tensor-parallel-size", tensor)}
    for name, degree in degrees.items():
        said = f"{name}-parallel-num-weight-shards"
        shards = options.degree(said, degree)
        if shards != degree:
            raise ExportError(f"--{said} {shards} with {degree} {name} parallel devices is not read; write {degree}")


def _read_fp8(options: Options, notes: list[str], *, experts: bool) -> Fp8:
    """Linear layers in fp8, and experts if there are any.

    Delayed scales from the last step only ("most_recent") are those of a history of one.
    """
    recipe, layout = options.word("fp8-recipe", "delayed"), options.word("fp8-format", "")
    ours = next((name for name, (_, theirs) in FP8_RECIPES.items() if theirs == recipe), None)
    if not layout or ours is None:
        return NO_FP8
    gathered = _gathers_in_fp8(options, ours, notes)
    usual = FP8_RECIPES[ours][0]
    if layout != usual:
        notes.append(f"--fp8-format {layout}: priced as {usual}, with gradients in {_GRADIENTS[usual]}")
    if not RECIPES[ours].delayed:
        return Fp8(recipe=ours, experts=experts, gathered=gathered)
    length, newest = options.degree("fp8-amax-history-len"), options.word("fp8-amax-compute-algo", "most_recent")
    history = 1 if newest == "most_recent" else length
    margin = options.integer("fp8-margin") or 0
    return Fp8(recipe=ours, experts=experts, gathered=gathered, history=history, margin=margin)


def _gathers_in_fp8(options: Options, recipe: str, notes: list[str]) -> bool:
    """Whether weights are gathered in fp8 layer by layer; differences from a plan are noted."""
    if not options.flag("fp8-param-gather"):
        return False
    gathered = _read_zero(options) == WHOLE_SHARDED and recipe in FP8_GATHERED
    notes.append(
        "--fp8-param-gather: pieces of weights are priced as cast from 16 bits for each gather; they are stored in fp8"
        if gathered
        else "--fp8-param-gather: weights are priced as stored, and gathered once a step, in 16 bits"
    )
    return gathered


def _devices(options: Options) -> int | None:
    """Devices of the launcher in the script; without one, one process per device of the Slurm job. None if left to the
    caller."""
    if any("$" in word for name in ("nnodes", *_EACH) for word in options.words(name)[:1]):
        return options.scheduled
    if (workers := options.size("worker_num")) is not None:  # of msrun
        return workers
    per_node = next((found for name in _EACH if (found := options.size(name)) is not None), None)
    return options.scheduled if per_node is None else per_node * options.degree("nnodes")


def experts_of(options: Options) -> int:
    """Experts of a block; 0 for an MLP, which Megatron-DeepSpeed calls one expert."""
    count = options.integer("num-experts") or 0
    return 0 if count == 1 and options.flag("deepspeed") else count


def _read_context(options: Options, context: int) -> tuple[int, int, list[str]]:
    """Degrees of ring attention and of Ulysses, and notes."""
    kind = (options.words("cp-comm-type") or ("p2p",))[0]
    sizes = options.words("hierarchical-context-parallel-sizes")
    if context == 1:
        return 1, 1, []
    if kind == "a2a":
        return 1, context, []
    if kind == "a2a+p2p":
        heads, ring = (size_of(size) for size in sizes) if len(sizes) == _TWO else (None, None)
        if heads is None or ring is None or heads * ring != context:
            raise ExportError(
                f"--cp-comm-type a2a+p2p takes --hierarchical-context-parallel-sizes HEADS RING, whose product is"
                f" --context-parallel-size {context}; found {' '.join(sizes) or 'none':.80}"
            )
        return ring, heads, []
    if kind == "p2p":
        return context, 1, []
    return context, 1, [f"--cp-comm-type {kind}: priced as a ring (p2p)"]


def _otherwise(options: Options, a: Architecture | None) -> list[str]:
    """Notes on differences of a GPT from ours, which has learned positions, layer norms and biases."""
    if a is None or a.family != "gpt":
        return []
    positions = options.word("position-embedding-type")
    if options.flag("use-rotary-position-embeddings"):
        positions = "rope"
    found = []
    if positions not in ("", "learned_absolute", "absolute"):
        found.append(f"--position-embedding-type {positions}: priced with learned positions")
    if options.word("normalization", "LayerNorm") != "LayerNorm":
        found.append(f"--normalization {options.word('normalization')}: priced with layer norms")
    if options.word("attention-head-type", "multihead") != "multihead":
        found.append("--attention-head-type: priced with keys and values of every head")
    if options.flag("disable-bias-linear"):
        found.append("--disable-bias-linear: priced with biases")
    return found


def _read_offload(options: Options) -> Home:
    """Where the optimizer states are; a description cannot have a part of them on the host."""
    whole = options.number("optimizer-offload-fraction", 1.0) >= 1.0
    return "host" if options.flag("optimizer-cpu-offload") and whole else "device"


def _read_zero(options: Options) -> int:
    """The stage of ZeRO. Megatron-FSDP that is not told what to shard shards all from core 0.18 on, and nothing before
    (megatron/training/arguments.py: --data-parallel-sharding-strategy)."""
    if options.flag("deepspeed"):
        return _zero_of_deepspeed(options)
    distributed = options.flag("use-distributed-optimizer")
    strategy = options.word(_STRATEGY, SHARDING[WHOLE_SHARDED])
    options.word("ckpt-format")
    options.flag("no-gradient-accumulation-fusion")
    options.flag("init-model-with-meta-device")
    if options.flag("use-torch-fsdp2"):
        return 2 if options.flag("torch-fsdp2-no-reshard-after-forward") else WHOLE_SHARDED
    if options.flag("use-megatron-fsdp"):
        known = {word: stage for stage, word in SHARDING.items()}
        if strategy not in known:
            raise ExportError(f"--data-parallel-sharding-strategy {strategy}: known are {', '.join(known)}")
        return known[strategy]
    return int(distributed)


def _zero_of_deepspeed(options: Options) -> int:
    """The stage given to Megatron-DeepSpeed.

    Its configuration states it too, in a file that is not read. In bf16 its optimizer shards its states even at stage 0
    (DeepSpeed, runtime/bf16_optimizer.py).
    """
    for name in ("deepspeed_config", "deepspeed-config", "deepspeed-activation-checkpointing"):
        options.words(name)
    stage = options.integer("zero-stage")
    if stage not in _STAGES:
        said = "is not said" if stage is None else f"is {stage}"
        raise ExportError(f"--deepspeed: the stage of ZeRO {said}; write --zero-stage 0, 1, 2 or 3")
    return max(stage, int(options.flag("bf16")))


def _read_replicas(options: Options, data: int) -> int:
    copies = options.degree("num-distributed-optimizer-instances")
    if data % copies:
        raise ExportError(
            f"--num-distributed-optimizer-instances {copies} does not divide the {data} data parallel devices"
        )
    return copies


def _read_recomputation(options: Options, layers: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], Kept]:
    none = (0,) * len(layers)
    granularity = options.word("recompute-granularity")
    modules = _modules_in(options) or ("core_attn",)
    method, count = options.word("recompute-method"), options.integer("recompute-num-layers", 1) or 0
    if count < 0:
        raise ExportError(f"--recompute-num-layers {count}: write 0 or more")
    if granularity != "full" and options.flag("moe-layer-recompute"):  # adds to the others: TransformerConfig
        granularity, modules = "selective", (*modules, "moe")
    if options.flag("recompute-activations") or granularity == "selective":
        known = {module: name for name, module in MODULES.items()}
        strange = [module for module in modules if module not in (*known, *_KEPT_MODULES)]
        if strange:
            raise ExportError(
                f"--recompute-modules {', '.join(strange)}: read are {', '.join((*known, *_KEPT_MODULES))}"
            )
        but = tuple(sorted({known[module] for module in modules if module in known}))
        return (none, layers, Kept(but=but)) if but else (none, none, Kept())
    old = options.word("activations-checkpoint-method") or options.flag("checkpoint-activations")
    if granularity != "full" and not old:
        return none, none, Kept()
    method = method or options.word("activations-checkpoint-method")
    if method == "block":
        return tuple(min(count, have) for have in layers), none, Kept()
    return layers, none, Kept()


def _modules_in(options: Options) -> tuple[str, ...]:
    return tuple(word for words in options.words("recompute-modules") for word in words.split(",") if word)


def _read_optimizer(options: Options) -> str:
    word = options.word("optimizer", "adam")
    known = {theirs: ours for ours, theirs in OPTIMIZERS.items()}
    if word not in known:
        raise ExportError(f"--optimizer {word}: plans have {', '.join(known)}")
    return known[word]


def _read_update(options: Options, d: Description) -> Update:
    of_fsdp = options.word(_FSDP_GRADIENTS, "fp32")
    narrow = options.flag("grad-reduce-in-bf16") or (d.zero > 1 and of_fsdp != "fp32")
    wide = options.flag("accumulate-allreduce-grads-in-fp32")
    clip = options.number("clip-grad", 1.0)
    in_16_bits = d.precision != "fp32" and (narrow or (d.precision == "fp16" and not wide))
    update = replace(
        PLAIN,
        gradient_dtype="parameter" if in_16_bits else default_gradient_dtype(d),
        moment_dtype=_moment_dtype(options),
        clip_norm=clip if clip > 0 else None,
        gathers=BLOCK if d.fp8.gathered else PLAIN.gathers,  # layer by layer, as weights in fp8 are gathered
    )
    options.word("main-grads-dtype")
    elements = options.size("ddp-bucket-size")
    overlapped = options.flag("overlap-grad-reduce")
    if not elements or not overlapped:
        return update
    return replace(update, buckets=elements * gradient_bytes(replace(d, update=update)))


def _moment_dtype(options: Options) -> str:
    """The dtype of both moments, which only the precision-aware optimizer is told.

    It is fp32 if plans cannot express what the optimizer keeps; that is then reported (`said_of`).
    """
    words = {options.word(name, "fp32") for name in ("exp-avg-dtype", "exp-avg-sq-dtype")}
    aware = options.flag("use-precision-aware-optimizer") and _read_offload(options) == "device"
    return words.pop() if aware and len(words) == 1 and words <= {*MOMENT_DTYPES} else PLAIN.moment_dtype


def check_model(options: Options, a: Architecture | None) -> None:
    """Raise ExportError if arguments describe another model than the named one."""
    for name in _SHAPE:
        options.words(name)
    if a is None:
        return
    idle = len([word for word in options.word("noop-layers").split(",") if word])
    known: dict[str, int] = {
        "num-layers": a.layers + idle,
        "hidden-size": a.hidden,
        "ffn-hidden-size": a.ffn,
        "num-attention-heads": a.heads,
        "num-query-groups": a.kv_heads,
        "num-key-value-heads": a.kv_heads,
        "kv-channels": a.head_size,
    }
    if a.latent is not None:  # heads have sizes of their own there
        del known["num-query-groups"], known["num-key-value-heads"], known["kv-channels"]
        known |= {"kv-lora-rank": a.latent.kv_rank, "qk-head-dim": a.latent.plain, "v-head-dim": a.latent.value}
    if a.experts is not None:
        known |= {"num-experts": a.experts.count, "moe-router-topk": a.experts.chosen}
        known |= {"moe-ffn-hidden-size": a.experts.width, "moe-intermediate-size": a.experts.width}
        if not a.experts.dense_layers:
            del known["ffn-hidden-size"]  # it is that of blocks without experts
    if a.predicted:
        known["mtp-num-layers"] = a.predicted
    for name, wanted in known.items():
        found = options.integer(name)
        if found is not None and found != wanted:
            raise ExportError(f"--{name} {found}: the model that --model names has {wanted}; name the right one")
    for said in model_options(a, Description(layers=(a.layers,), full=(0,), selective=(0,))):
        options.words(said[0].removeprefix("--"))
