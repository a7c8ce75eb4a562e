"""torchtitan: the TOML file of 0.2, the last version that reads one.

    ZeRO 0                data_parallel_replicate_degree: DDP, which it runs without any other parallelism
    HSDP                  data_parallel_replicate_degree copies of data_parallel_shard_degree shards
    ZeRO 2                data_parallel_shard_degree, fsdp_reshard_after_forward = "never": weights are gathered once a
                          step; gradients are scattered, in fp32, with every micro-batch
    ZeRO 3                the same with "always"; there is no ZeRO 1
    tensor                with sequence parallel norms, the embedding and the loss along the vocabulary, always
    context               a ring (rotate method "alltoall") in zigzag order ("headtail")
    stages                module_fqns_per_model_part, which names the layers of every one
    recomputation         mode "full"; "selective" by the number: every nth layer of a rank; by "op": products and
                          attention are kept, but for every second product
    micro-batches         with a pipeline pipeline_parallel_microbatch_size of local_batch_size, else accumulation

Mixed precision is FSDP's: with tensor or pipeline parallelism alone everything is in bf16, without fp32 copies.
Source: torchtitan 0.2.2, torchtitan/config/job_config.py, models/llama3/infra/parallelize.py,
distributed/{parallel_dims,pipeline_parallel,activation_checkpoint}.py.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from hardware_profiles import engine_words
from hardware_profiles.foreign import SETTINGS, ForeignTextError, parse_toml
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import Description, ExportError, Kept, data_of, micro_batches_of, stages_for, stages_of
from planner.export.quoting import one_line
from planner.export.settings import Settings, size_of
from planner.export.shell import torchrun_script
from planner.export.target import Facts, Giving, Job, Loss, Reading, Target
from planner.export.toml import toml_text
from planner.sharding.update import NO_BUCKETS, Update

_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
_DTYPES = engine_words("torchtitan")
_FLAVORS = {"llama8b": ("llama3", "8B"), "llama70b": ("llama3", "70B"), "llama405b": ("llama3", "405B"),
            "qwen3-30b-a3b": ("qwen3", "30B-A3B"), "qwen3-235b-a22b": ("qwen3", "235B-A22B")}  # fmt: skip
_OPERATORS = ("copy", "elementwise", "normalisation")  # what "op" computes again, beside every second product

Sections = dict[str, dict[str, object]]

_LIMITS = replace(SETTINGS, finite=False)  # a norm of infinity clips nothing


def nearest(description: Description) -> tuple[Loss, ...]:
    """What torchtitan cannot be told."""
    common.refuse_other_training(description, "torchtitan", ("adamw",))
    if description.precision not in _DTYPES:
        raise ExportError("torchtitan trains in bf16 or fp32, not in fp16; plan again with --precision bf16")
    giving = Giving(description)
    common.give_up_schedules(giving, tuple(_SCHEDULES))
    common.give_up_few_micro_batches(giving)
    common.give_up_copies(giving)
    _give_up_splits(giving)
    _give_up_zero(giving)
    _give_up_recomputation(giving)
    plain = _plainly_bf16(giving.description)
    common.give_up_updates(
        giving, master_weights=(not plain,), gradient_dtypes=(_gradient_dtype(giving.description, plain),)
    )
    return tuple(giving.losses)


def _give_up_splits(giving: Giving) -> None:
    common.give_up_other_rings(giving)
    d = giving.description
    if d.tensor > 1 and not d.sequence_parallel:
        giving.up("norms", "whole", "along the sequence", sequence_parallel=True)
    common.give_up_cut_hidden(giving)


def _give_up_zero(giving: Giving) -> None:
    d = giving.description
    alone = d.tensor == d.pipeline == d.context == 1 and (d.expert or 1) == 1
    if d.data * d.context > 1 and (d.zero == 1 or (d.zero == 0 and not alone)):
        giving.up("ZeRO", d.zero, "2: without any it runs data parallelism alone, and it has no 1", zero=2)


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and not (d.selective == d.layers and set(d.kept.but) == set(_OPERATORS)):
        common.give_up_selective(giving, "whole blocks")
    d = giving.description
    if any(d.full) and d.full != d.layers and _every(d) is None:
        step = next((n for n in range(max(d.layers), 0, -1) if _covers(_recomputed(d, n), d.full)), 1)
        full = _recomputed(d, step)
        there = "all" if step == 1 else f"every {step}. layer of a rank"
        giving.up("recomputed blocks", ", ".join(map(str, d.full)), there, full=full)


def _covers(full: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return all(have >= want for have, want in zip(full, wanted, strict=True))


def _every(d: Description) -> int | None:
    """The n for which every nth layer is recomputed; None where there is none."""
    return next((n for n in range(1, max(d.layers) + 1) if _recomputed(d, n) == d.full), None)


def _recomputed(d: Description, every: int) -> tuple[int, ...]:
    """Layers of every stage that are recomputed, where each rank counts the layers of its stages through."""
    full = [0] * len(d.layers)
    for rank in range(d.pipeline):
        before = 0
        for stage in range(rank, len(d.layers), d.pipeline):
            full[stage] = (before + d.layers[stage]) // every - before // every
            before += d.layers[stage]
    return tuple(full)


def _plainly_bf16(d: Description) -> bool:
    """Whether there is nothing that computes in bf16 on weights in fp32: neither FSDP nor DDP alone."""
    return d.precision == "bf16" and d.data * d.context == 1 and d.tensor * d.pipeline > 1


def _gradient_dtype(d: Description, plain: bool) -> str:
    if plain:
        return "parameter"
    return "fp32" if d.zero > 1 and d.precision == "bf16" else "mixed"


def write(job: Job) -> Mapping[str, str]:
    """`train.toml`, and the script that starts torchtitan with it."""
    sections = _sections(job)
    title = f"{job.model} with torchtitan 0.2; the tokenizer is in HF_ASSETS."
    files: tuple[str, ...] = (
        '--job.config_file "$(dirname "$0")/train.toml"',
        '--model.hf_assets_path "${HF_ASSETS:?}"',
    )
    if "name" not in sections["model"]:
        title += " It has no flavor of this model: say which one of yours it is in MODEL and FLAVOR."
        files += ('--model.name "${MODEL:?}"', '--model.flavor "${FLAVOR:?}"')
    script = torchrun_script(job, title, "-m torchtitan.train", (), also=files)
    return {"train.toml": toml_text(sections), "launch.sh": script}


def _sections(job: Job) -> Sections:
    d, a = job.description, job.architecture
    flavor = _FLAVORS.get(job.model) if a is not None else None
    if flavor is not None and flavor[0] == "qwen3" and d.pipeline > 1:
        raise ExportError(
            f"torchtitan 0.2 has no pipeline for {job.model}; plan again with --pipeline 1, or take another engine"
        )
    model: dict[str, object] = {} if flavor is None else {"name": flavor[0], "flavor": flavor[1]}
    return {
        "job": {"description": f"{one_line(job.model)} on {d.devices} devices"},
        "model": model,
        "optimizer": {"name": "AdamW"},
        "training": _training(d),
        "parallelism": _parallelism(d),
        "activation_checkpoint": _checkpoint(d),
    }


def _training(d: Description) -> dict[str, object]:
    local = d.micro_batch * (d.micro_batches if d.pipeline > 1 else 1)
    found: dict[str, object] = {"local_batch_size": local, "global_batch_size": d.global_batch}
    if d.sequence_length is not None:
        found["seq_len"] = d.sequence_length
    found["max_norm"] = math.inf if d.update.clip_norm is None else d.update.clip_norm
    found["dtype"] = "bfloat16" if _plainly_bf16(d) else "float32"
    found["mixed_precision_param"] = _DTYPES[d.precision]
    found["mixed_precision_reduce"] = "float32"
    return found


def _parallelism(d: Description) -> dict[str, object]:
    replicated = d.zero == 0 and d.context == 1
    found: dict[str, object] = {
        "data_parallel_replicate_degree": d.data if replicated else d.replicas,
        "data_parallel_shard_degree": 1 if replicated else d.data // d.replicas,
    }
    if d.zero > 1:
        found["fsdp_reshard_after_forward"] = "always" if d.zero == 3 else "never"
    found["tensor_parallel_degree"] = d.tensor
    found["pipeline_parallel_degree"] = d.pipeline
    if d.pipeline > 1:
        found["pipeline_parallel_schedule"] = _SCHEDULES[d.schedule]
        found["pipeline_parallel_microbatch_size"] = d.micro_batch
        found["module_fqns_per_model_part"] = _parts(d.layers)
    found["context_parallel_degree"] = d.context
    if d.context > 1:
        found |= {"context_parallel_rotate_method": "alltoall", "context_parallel_load_balancer": "headtail"}
    if d.expert is not None:
        found["expert_parallel_degree"] = d.expert
        found["expert_tensor_parallel_degree"] = 1 if d.whole_experts else d.tensor
    return found


def _parts(layers: tuple[int, ...]) -> list[list[str]]:
    """Names of the modules of every stage."""
    parts, first = [], 0
    for count in layers:
        parts.append([f"layers.{at}" for at in range(first, first + count)])
        first += count
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", "output"]
    return parts


def _checkpoint(d: Description) -> dict[str, object]:
    if any(d.selective):
        return {"mode": "selective", "selective_ac_option": "op"}
    if not any(d.full):
        return {"mode": "none"}
    if d.full == d.layers:
        return {"mode": "full"}
    return {"mode": "selective", "selective_ac_option": str(_every(d))}


def read(text: str, facts: Facts) -> Reading:
    """A TOML file as a description."""
    try:
        settings = Settings(parse_toml(text, _LIMITS), "TOML")
    except ForeignTextError as error:
        raise ExportError(str(error)) from error
    description, notes = _read(settings, facts)
    for path in ("training.dtype", "training.mixed_precision_reduce", "training.dataset", "training.steps"):
        settings.value(path)
    unread = settings.unread("parallelism", "activation_checkpoint", "training")
    return Reading(description=common.normalised(description), notes=(*notes, *unread))


def _read(settings: Settings, facts: Facts) -> tuple[Description, list[str]]:
    _check_model(settings, facts.architecture)
    tensor, pipeline, context = (
        settings.degree(f"parallelism.{name}_parallel_degree") for name in ("tensor", "pipeline", "context")
    )
    data, replicas = _read_data(settings, facts, tensor * pipeline * context)
    replicated, notes = data == replicas and context == 1, list[str]()
    layers, virtual, schedule = _read_stages(settings, facts.layers, pipeline)
    local = settings.degree("training.local_batch_size", 8)
    micro_batch = settings.degree("parallelism.pipeline_parallel_microbatch_size") if pipeline > 1 else local
    left_open = settings.integer("training.global_batch_size", -1) == -1
    global_batch = local * data if left_open else settings.degree("training.global_batch_size")
    if pipeline > 1 and global_batch != local * data:
        notes.append("batches accumulated around the pipeline are read as more micro-batches in it")
    expert = settings.degree("parallelism.expert_parallel_degree")
    has_experts = expert > 1 or (facts.architecture is not None and facts.architecture.experts is not None)
    precision = _read_precision(settings)
    reshard = settings.word("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    after = (pipeline == 1) if reshard == "default" else reshard == "always"
    description = Description(
        layers=layers,
        virtual_stages=virtual,
        schedule=schedule,
        data=data,
        tensor=tensor,
        ring=context,
        zigzag=context > 1 and settings.word("parallelism.context_parallel_load_balancer", "headtail") == "headtail",
        expert=expert if has_experts else None,
        whole_experts=settings.degree("parallelism.expert_tensor_parallel_degree") == 1 and tensor > 1,
        zero=0 if replicated else 3 if after else 2,
        replicas=replicas,
        sequence_parallel=tensor > 1,
        micro_batch=micro_batch,
        micro_batches=micro_batches_of(global_batch, micro_batch, data),
        full=(0,) * len(layers),
        selective=(0,) * len(layers),
        precision=precision,
        sequence_length=settings.degree("training.seq_len", 2048),
    )
    settings.value("parallelism.context_parallel_rotate_method")
    description = _with_recomputation(settings, common.normalised(description), notes)
    return replace(description, update=_read_update(settings, description)), notes


def _check_model(settings: Settings, a: Architecture | None) -> None:
    """Raise ExportError where the file is for another size of a model than the one that was named."""
    name, flavor = settings.word("model.name", ""), settings.word("model.flavor", "")
    known = {pair: model for model, pair in _FLAVORS.items()}.get((name, flavor))
    if known is not None and a is not None:
        from planner.export.architecture import architecture_of

        wanted = architecture_of(known, a.sequence)
        if wanted != a:
            raise ExportError(f"model.flavor: the file is for {name} {flavor}; give --model {known}")


def _read_data(settings: Settings, facts: Facts, rest: int) -> tuple[int, int]:
    """Data parallel devices, and groups of them of which each has all weights."""
    replicate = settings.degree("parallelism.data_parallel_replicate_degree")
    shard = settings.integer("parallelism.data_parallel_shard_degree", -1)
    if shard == -1:
        if facts.devices is None:
            raise ExportError(
                "parallelism.data_parallel_shard_degree: the file leaves it to the devices; give --devices"
            )
        shard = data_of(facts.devices, replicate=replicate, others=rest)
    else:
        shard = settings.degree("parallelism.data_parallel_shard_degree")
    if facts.devices is not None and replicate * shard * rest != facts.devices:
        raise ExportError(
            f"the degrees of the file make {replicate * shard * rest} devices, --devices says {facts.devices}"
        )
    return replicate * shard, replicate


def _read_stages(settings: Settings, layers: int, pipeline: int) -> tuple[tuple[int, ...], int, str]:
    known = {theirs.lower(): ours for ours, theirs in _SCHEDULES.items()}
    word = settings.word("parallelism.pipeline_parallel_schedule", "1F1B")
    parts = settings.value("parallelism.module_fqns_per_model_part")
    if pipeline == 1:
        return (layers,), 1, "1f1b"
    if word.lower() not in known:
        raise ExportError(
            f"parallelism.pipeline_parallel_schedule: {word}; plans have {', '.join(_SCHEDULES.values())}"
        )
    schedule = known[word.lower()]
    virtual = 1
    if parts is not None:
        stages = _layers_of_parts(parts)
        if sum(stages) != layers or len(stages) % pipeline:
            raise ExportError(
                f"parallelism.module_fqns_per_model_part: {sum(stages)} layers in {len(stages)} parts; the model has"
                f" {layers}, and there are {pipeline} pipeline ranks"
            )
        return stages, len(stages) // pipeline, schedule
    ends = [_fewer(settings, f"parallelism.pipeline_parallel_{end}_stage_less_layers") for end in ("first", "last")]
    where = "parallelism.pipeline_parallel_layers_per_stage"
    if settings.has(where):
        each = settings.degree(where)
        stages_there = -(-(layers + sum(ends)) // each)
        virtual, rest = divmod(stages_there, pipeline)
        if rest or not virtual:
            raise ExportError(
                f"{where}: {each} makes {stages_there} stages, which do not divide over {pipeline} pipeline ranks;"
                " write another number"
            )
    elif schedule == "interleaved_1f1b":
        virtual = 2
    return _shared_out(layers, stages_for(layers, pipeline, virtual), ends), virtual, schedule


def _layers_of_parts(parts: object) -> tuple[int, ...]:
    """Layers of every stage, of which each is a list of names of modules."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise ExportError("parallelism.module_fqns_per_model_part: write a list of names for each stage")
    if not all(isinstance(name, str) for part in parts for name in part):
        raise ExportError("parallelism.module_fqns_per_model_part: write names of modules, such as layers.0")
    return tuple(sum(name.startswith("layers.") for name in part) for part in parts)


def _fewer(settings: Settings, where: str) -> int:
    """Layers that the first or the last stage has less than others."""
    found = settings.integer(where, 1)
    if found < 0:
        raise ExportError(f"{where}: {found}; write 0 or more")
    return found


def _shared_out(layers: int, stages: int, less: list[int]) -> tuple[int, ...]:
    """Layers of every stage where the ends have less of them: equal parts of all, those of the ends less; the first
    ones take what is left."""
    if not any(less):
        return stages_of(layers, stages) if layers % stages == 0 else _spread(layers, stages)
    counts = list(_spread(layers + sum(less), stages))
    counts[0] -= less[0]
    counts[-1] -= less[1]
    if min(counts) < 1:
        raise ExportError(f"{layers} layers are too few for {stages} stages whose ends have {less} less")
    return tuple(counts)


def _spread(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers // stages + (at < layers % stages) for at in range(stages))


def _with_recomputation(settings: Settings, d: Description, notes: list[str]) -> Description:
    mode = settings.word("activation_checkpoint.mode", "selective")
    option = settings.word("activation_checkpoint.selective_ac_option", "2")
    if mode == "full":
        return replace(d, full=d.layers)
    if mode == "none":
        return d
    if mode != "selective":
        raise ExportError(f"activation_checkpoint.mode: {mode}; plans have none, full and selective")
    if option == "op":
        notes.append("selective by operators: every second product, which is computed again too, is priced as kept")
        return replace(d, selective=d.layers, kept=Kept(but=_OPERATORS))
    every = size_of(option)
    if every is None:
        raise ExportError(f"activation_checkpoint.selective_ac_option: {option:.80}; it is op or a number from 1 on")
    return replace(d, full=_recomputed(d, every))


def _read_precision(settings: Settings) -> str:
    known = {theirs: ours for ours, theirs in _DTYPES.items()}
    computed = known[settings.word("training.mixed_precision_param", "bfloat16", known)]
    return "bf16" if settings.word("training.dtype", "float32", known) == "bfloat16" else computed


def _read_update(settings: Settings, d: Description) -> Update:
    clip = settings.number("training.max_norm", 1.0)
    plain = _plainly_bf16(d)
    return Update(
        buckets=NO_BUCKETS,
        clip_norm=None if math.isinf(clip) or clip <= 0 else clip,
        master_weights=not plain,
        gradient_dtype=_gradient_dtype(d, plain),
    )


TORCHTITAN = Target(
    name="torchtitan",
    about="torchtitan 0.2: train.toml",
    main="train.toml",
    nearest=nearest,
    write=write,
    read=read,
)
