"""Megatron-LM: arguments of `pretrain_gpt.py`, as its parser in core 0.16 has them.

    tensor, pipeline, context     --tensor-model-parallel-size, --pipeline-..., --context-parallel-size
    data                          what the launcher's devices leave
    ring, heads, both             --cp-comm-type p2p, a2a, a2a+p2p with --hierarchical-context-parallel-sizes HEADS RING
    ZeRO 1                        --use-distributed-optimizer: states are cut; gradients are kept whole, and scattered
    ZeRO 2, 3                     --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads, optim_grads_params
    HSDP                          --num-distributed-optimizer-instances copies of everything that is shared out
    uneven stages                 --pipeline-model-parallel-layout, which says what every stage holds: Ett|ttt|ttL
    recomputation                 --recompute-granularity full by block: the first N layers of each (virtual) stage;
                                  selective: modules, of which core_attn is attention and layernorm the norms

A ring's order is always zigzag there. Gradients are clipped to 1.0 unless it is told otherwise.
Source: NVIDIA/Megatron-LM, branch core_r0.16.0, megatron/training/arguments.py and megatron/core.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from planner.export import common
from planner.export.architecture import Architecture
from planner.export.arguments import Option, Options, option, options_in
from planner.export.description import (
    Description,
    ExportError,
    Kept,
    data_of,
    micro_batches_of,
    schedule_of,
    stages_of,
)
from planner.export.settings import size_of
from planner.export.shell import torchrun_script
from planner.export.target import Facts, Giving, Job, Loss, Reading, Target
from planner.sharding.update import NO_BUCKETS, Update

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
_SHARDING = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
_MODULES = {"attention": "core_attn", "normalisation": "layernorm"}
_PADDING = 128  # --make-vocab-size-divisible-by, at most
_LAUNCHER = ("nnodes", "nproc-per-node", "nproc_per_node", "node-rank", "node_rank", "master-addr", "master_addr",
             "master-port", "master_port")  # fmt: skip
_RUN = ("mock-data", "train-iters", "lr", "eval-iters", "tokenizer-type", "vocab-size", "attention-dropout",
        "hidden-dropout", "make-vocab-size-divisible-by", "max-position-embeddings")  # fmt: skip

_TWO = 2  # sizes of a context that is split in two ways
_LAYOUT = 4096  # characters of a layout that is written out


def nearest(description: Description) -> tuple[Loss, ...]:
    """What Megatron-LM cannot be told."""
    common.refuse_other_training(description, "Megatron-LM", tuple(OPTIMIZERS))
    giving = Giving(description)
    common.give_up_schedules(giving, ("1f1b", "interleaved_1f1b"))
    common.give_up_copies(giving)
    _give_up_layouts(giving)
    _give_up_recomputation(giving)
    narrow = () if description.precision == "fp32" else ("parameter",)
    dtypes = (_wide(description), *narrow)
    common.give_up_updates(giving, buckets=True, gradient_dtypes=dtypes)
    return tuple(giving.losses)


def _wide(d: Description) -> str:
    """What gradients are in unless it is told otherwise: fp32, also where they are reduced with every micro-batch."""
    return "fp32" if d.zero > 1 and d.precision != "fp32" else "mixed"


def _give_up_layouts(giving: Giving) -> None:
    d = giving.description
    if d.ring > 1 and not d.zigzag:
        giving.up("order of the ring", "contiguous", "zigzag", zigzag=True)
    common.give_up_cut_hidden(giving)
    if d.expert is not None and d.tensor > 1 and not d.sequence_parallel:
        giving.up("norms of a model with experts", "whole", "along the sequence", sequence_parallel=True)


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and not _says_modules(d):
        common.give_up_selective(giving, "whole blocks")
    if not any(giving.description.selective):
        common.give_up_uneven_recomputation(giving, "equally many")


def _says_modules(d: Description) -> bool:
    return d.selective == d.layers and bool(d.kept.but) and set(d.kept.but) <= _MODULES.keys()


def write(job: Job) -> Mapping[str, str]:
    """`launch.sh`, with every argument."""
    d = job.description
    fsdp = d.zero > 1
    exports = () if fsdp or d.tensor * d.context == 1 else ("CUDA_DEVICE_MAX_CONNECTIONS=1",)
    title = f"{job.model} with Megatron-LM core 0.16; MEGATRON is the folder of its pretrain_gpt.py."
    options = [*_model(job), *degree_options(d), *_context(d), *stage_options(d), *zero_options(d)]
    options += [*recompute_options(d), *training_options(d), *run_options(job)]
    script = torchrun_script(job, title, '"${MEGATRON:-.}/pretrain_gpt.py"', options, exports=exports)
    return {"launch.sh": script}


def _model(job: Job) -> list[Option]:
    a = job.architecture
    return [] if a is None else model_options(a, job.description)


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
    if a.kv_heads != a.heads:
        found += [option("group-query-attention"), option("num-query-groups", a.kv_heads)]
    if not a.usual_heads:
        found.append(option("kv-channels", a.head_size))
    if not a.tied:
        found.append(option("untie-embeddings-and-output-weights"))
    if a.family == "llama":
        found += [option("swiglu"), option("normalization", "RMSNorm"), option("disable-bias-linear")]
        found += [option("position-embedding-type", "rope"), option("rotary-base", round(a.rope_theta))]
    if a.qk_norm:
        found.append(option("qk-layernorm"))
    return [*found, *_words(a, d.tensor), *_experts(a)]


def _words(a: Architecture, tensor: int) -> list[Option]:
    """The vocabulary, padded as little as tensor parallelism asks for. The tokenizer that has none adds one word."""
    padding = math.gcd(a.vocabulary // tensor, _PADDING) if a.vocabulary % tensor == 0 else _PADDING
    return [
        option("tokenizer-type", "NullTokenizer"),
        option("vocab-size", a.vocabulary - 1),
        option("make-vocab-size-divisible-by", padding),
    ]


def _experts(a: Architecture) -> list[Option]:
    experts = a.experts
    if experts is None:
        return []
    found = [
        option("num-experts", experts.count),
        option("moe-router-topk", experts.chosen),
        option("moe-ffn-hidden-size", experts.width),
        option("moe-token-dispatcher-type", "alltoall"),
        option("moe-grouped-gemm"),
        option("moe-router-load-balancing-type", "aux_loss" if a.balance_loss else "none"),
    ]
    if a.balance_loss:
        found.append(option("moe-aux-loss-coeff", a.balance_loss))
    if experts.shared_width:
        found.append(option("moe-shared-expert-intermediate-size", experts.shared_width))
    if experts.dense_layers:
        sparse = a.layers - experts.dense_layers
        found.append(option("moe-layer-freq", f"([0]*{experts.dense_layers}+[1]*{sparse})"))
    if not a.normalised:
        found.append(option("moe-router-pre-softmax"))
    return found


def degree_options(d: Description) -> list[Option]:
    """Degrees, of experts too, and whether norms are cut."""
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


def stage_options(d: Description) -> list[Option]:
    """Layers of each stage, where they are not one equal part for each rank."""
    if not d.even:
        return [option("pipeline-model-parallel-layout", _layout(d.layers))]
    if d.virtual_stages > 1:
        return [option("num-layers-per-virtual-pipeline-stage", d.layers[0])]
    return []


def _layout(layers: tuple[int, ...]) -> str:
    """`Et*2|t*3|t*2,L`: the embedding, layers and the loss."""
    stages = [f"t*{count}" if count else "" for count in layers]
    stages[0] = f"E{stages[0]}"
    stages[-1] = f"{stages[-1]}L"
    return "|".join(stages)


def zero_options(d: Description) -> list[Option]:
    """What data parallel devices share out."""
    if d.zero == 0:
        return []
    copies = [option("num-distributed-optimizer-instances", d.replicas)] if d.replicas > 1 else []
    if d.zero == 1:
        return [option("use-distributed-optimizer"), *copies]
    return [
        *copies,
        option("use-megatron-fsdp"),
        option("use-distributed-optimizer"),
        option("data-parallel-sharding-strategy", _SHARDING[d.zero]),
        option("ckpt-format", "fsdp_dtensor"),
        option("no-gradient-accumulation-fusion"),
    ]


def recompute_options(d: Description) -> list[Option]:
    """What is computed again."""
    if any(d.selective):
        modules = [_MODULES[name] for name in d.kept.but]
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
    """Batches, precision, and what becomes of gradients."""
    found = [option("micro-batch-size", d.micro_batch), option("global-batch-size", d.global_batch)]
    found += [] if d.precision == "fp32" else [option(d.precision)]
    found.append(option("optimizer", OPTIMIZERS[d.optimizer]))
    found.append(option("clip-grad", 0 if d.update.clip_norm is None else d.update.clip_norm))
    narrow = d.update.gradient_dtype == "parameter"
    if narrow and d.precision == "bf16":
        found.append(option("grad-reduce-in-bf16"))
    elif not narrow and d.precision == "fp16":
        found.append(option("accumulate-allreduce-grads-in-fp32"))
    if d.update.bucket_size:
        elements = d.update.bucket_size // gradient_bytes(d)
        found += [option("overlap-grad-reduce"), option("ddp-bucket-size", elements)]
    return found


def gradient_bytes(d: Description) -> int:
    """Of an element of a gradient that is reduced."""
    return 2 if d.update.gradient_dtype == "parameter" and d.precision != "fp32" else 4


def run_options(job: Job) -> list[Option]:
    """What makes a first run possible without data; what is given to the script later replaces it."""
    if job.architecture is None:
        return []
    return [option("mock-data"), option("train-iters", 100), option("lr", 1e-4), option("eval-iters", 0)]


def read(text: str, facts: Facts) -> Reading:
    """A script, or a list of arguments, as a description."""
    options = options_in(text)
    description, notes = read_options(options, facts)
    read_run(options)
    return Reading(description=description, notes=(*notes, *unread(options)))


def read_run(options: Options) -> None:
    """Options that say how it is started, and on which data."""
    for name in (*_LAUNCHER, *_RUN):
        options.words(name)


def unread(options: Options) -> tuple[str, ...]:
    """A note on arguments that were not understood, or are no part of a plan."""
    names = options.unread
    return (f"not read: {', '.join('--' + name for name in names)}",) if names else ()


def read_options(options: Options, facts: Facts) -> tuple[Description, list[str]]:
    """The description in arguments, and what is to be known of it."""
    tensor, pipeline, context = (
        options.degree(f"{name}-parallel-size") for name in ("tensor-model", "pipeline-model", "context")
    )
    devices = facts.devices or _devices(options)
    if devices is None:
        raise ExportError("the arguments do not say how many devices there are; give --devices")
    data = data_of(devices, tensor=tensor, pipeline=pipeline, context=context)
    micro_batch = options.degree("micro-batch-size")
    global_batch = options.degree("global-batch-size", micro_batch * data)
    layers, virtual = _layers(options, facts.layers, pipeline)
    ring, heads, notes = _read_context(options, context)
    full, selective, kept = _read_recomputation(options, layers)
    check_model(options, facts.architecture)
    precision = "bf16" if options.flag("bf16") else "fp16" if options.flag("fp16") else "fp32"
    whole = options.degree("expert-tensor-parallel-size", tensor) == 1 and tensor > 1
    expert = options.degree("expert-model-parallel-size")
    if facts.architecture is None:  # a model that the arguments do not describe
        experts = options.flag("expert-model-parallel-size")
    else:
        experts = bool(options.integer("num-experts") or facts.architecture.experts)
    description = Description(
        layers=layers,
        virtual_stages=virtual,
        schedule=schedule_of(pipeline, virtual),
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
        optimizer=_read_optimizer(options),
        sequence_length=options.size("seq-length"),
    )
    description = common.normalised(description)
    return replace(description, update=_read_update(options, description)), notes


def _devices(options: Options) -> int | None:
    """What the launcher in the script starts."""
    per_node = options.size("nproc-per-node") or options.size("nproc_per_node")
    return None if per_node is None else per_node * options.degree("nnodes")


def _layers(options: Options, layers: int, pipeline: int) -> tuple[tuple[int, ...], int]:
    """Layers of every stage, and stages on each rank."""
    layout = options.word("pipeline-model-parallel-layout")
    if layout:
        stages = _read_layout(layout)
        if sum(stages) != layers or len(stages) % pipeline:
            raise ExportError(
                f"--pipeline-model-parallel-layout {layout}: {sum(stages)} layers in {len(stages)} stages; the model"
                f" has {layers}, and there are {pipeline} pipeline ranks"
            )
        return stages, len(stages) // pipeline
    first, last = (options.size(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last"))
    virtual = options.degree("num-virtual-stages-per-pipeline-rank")
    each = options.size("num-layers-per-virtual-pipeline-stage")
    if each:
        per_rank = stages_of(layers, pipeline)[0]
        if per_rank % each:
            raise ExportError(
                f"--num-layers-per-virtual-pipeline-stage {each} does not divide the {per_rank} layers of a rank"
            )
        virtual = per_rank // each
    if first is None and last is None:
        return stages_of(layers, pipeline, virtual), virtual
    if virtual > 1:
        raise ExportError(
            "--decoder-first-pipeline-num-layers and its like with virtual stages are not read; write"
            " --pipeline-model-parallel-layout"
        )
    return _with_ends(layers, pipeline, first, last), 1


def _with_ends(layers: int, pipeline: int, first: int | None, last: int | None) -> tuple[int, ...]:
    """Layers of every rank where those of the first or the last one are said; the others share out the rest."""
    before, after = (() if count is None else (count,) for count in (first, last))
    rest, ranks = layers - sum((*before, *after)), pipeline - len(before) - len(after)
    if ranks < 0 or (rest if ranks == 0 else rest < ranks):
        said = " and ".join(
            f"--decoder-{end}-pipeline-num-layers {count}"
            for end, count in (("first", first), ("last", last))
            if count is not None
        )
        raise ExportError(
            f"{said} leave {rest} of the model's {layers} layers for {ranks} other pipeline ranks; write numbers that"
            " come out even"
        )
    return (*before, *(stages_of(rest, ranks) if ranks else ()), *after)


def _read_layout(layout: str) -> tuple[int, ...]:
    """Decoder layers of every stage of a layout such as `Et*2|(tt|)*3tL`."""
    text = layout.replace(",", "")
    _check_layout(layout, len(text))
    while match := re.search(r"(\([^()]*\)|[A-Za-z|])\*(\d+)", text):
        part, times = match[1].strip("()"), match[2]
        _check_layout(layout, len(text) + len(part) * int(times[:6]))
        text = text[: match.start()] + part * int(times[:6]) + text[match.end() :]
    strange = set(text) - set("EtL|")
    if strange:
        raise ExportError(
            f"--pipeline-model-parallel-layout {layout:.80}: {', '.join(sorted(strange))} is neither E, t, L nor |"
        )
    return tuple(stage.count("t") for stage in text.split("|"))


def _check_layout(layout: str, size: int) -> None:
    if size > _LAYOUT:
        raise ExportError(
            f"--pipeline-model-parallel-layout {layout:.80}: it has more than {_LAYOUT} layers and stages"
        )


def _read_context(options: Options, context: int) -> tuple[int, int, list[str]]:
    """Devices in a ring, and by heads."""
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


def _read_zero(options: Options) -> int:
    distributed = options.flag("use-distributed-optimizer")
    strategy = options.word("data-parallel-sharding-strategy", "no_shard")
    options.word("ckpt-format")
    options.flag("no-gradient-accumulation-fusion")
    if options.flag("use-torch-fsdp2"):
        return 3
    if options.flag("use-megatron-fsdp"):
        known = {word: stage for stage, word in _SHARDING.items()}
        if strategy not in known:
            raise ExportError(f"--data-parallel-sharding-strategy {strategy}: known are {', '.join(known)}")
        return known[strategy]
    return int(distributed)


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
    modules = options.words("recompute-modules") or ("core_attn",)
    method, count = options.word("recompute-method"), options.degree("recompute-num-layers")
    if options.flag("recompute-activations") or granularity == "selective":
        known = {module: name for name, module in _MODULES.items()}
        strange = [module for module in modules if module not in known]
        if strange:
            raise ExportError(f"--recompute-modules {', '.join(strange)}: read are {', '.join(known)}")
        return none, layers, Kept(but=tuple(sorted(known[module] for module in modules)))
    if granularity != "full":
        return none, none, Kept()
    if method == "block":
        return tuple(min(count, have) for have in layers), none, Kept()
    return layers, none, Kept()


def _read_optimizer(options: Options) -> str:
    word = options.word("optimizer", "adam")
    known = {theirs: ours for ours, theirs in OPTIMIZERS.items()}
    if word not in known:
        raise ExportError(f"--optimizer {word}: plans have {', '.join(known)}")
    return known[word]


def _read_update(options: Options, d: Description) -> Update:
    narrow = options.flag("grad-reduce-in-bf16")
    wide = options.flag("accumulate-allreduce-grads-in-fp32")
    clip = options.number("clip-grad", 1.0)
    in_16_bits = d.precision != "fp32" and (narrow or (d.precision == "fp16" and not wide))
    update = Update(
        buckets=NO_BUCKETS, gradient_dtype="parameter" if in_16_bits else _wide(d), clip_norm=clip if clip > 0 else None
    )
    elements = options.size("ddp-bucket-size")
    overlapped = options.flag("overlap-grad-reduce")
    if not elements or not overlapped:
        return update
    return replace(update, buckets=elements * gradient_bytes(replace(d, update=update)))


def check_model(options: Options, a: Architecture | None) -> None:
    """Raise ExportError where arguments describe another model than the one that was named."""
    if a is None:
        return
    known: dict[str, int] = {
        "num-layers": a.layers,
        "hidden-size": a.hidden,
        "ffn-hidden-size": a.ffn,
        "num-attention-heads": a.heads,
        "num-query-groups": a.kv_heads,
        "kv-channels": a.head_size,
    }
    if a.experts is not None:
        known |= {"num-experts": a.experts.count, "moe-router-topk": a.experts.chosen}
        known |= {"moe-ffn-hidden-size": a.experts.width}
    for name, wanted in known.items():
        found = options.integer(name)
        if found is not None and found != wanted:
            raise ExportError(f"--{name} {found}: the model that --model names has {wanted}; name the right one")
    for said in model_options(a, Description(layers=(a.layers,), full=(0,), selective=(0,))):
        options.words(said[0].removeprefix("--"))


MEGATRON = Target(
    name="megatron",
    about="Megatron-LM core 0.16: arguments of pretrain_gpt.py in launch.sh",
    main="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
)
