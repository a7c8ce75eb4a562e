"""MindSpore Transformers (MindFormers): the YAML of `run_mindformer.py`.

    data, tensor, pipeline         parallel_config: data_parallel, model_parallel, pipeline_stage
    norms, vocabulary              use_seq_parallel; vocab_emb_dp, which leaves the vocabulary whole
    context                        context_parallel with context_parallel_algo ulysses_cp (heads), hybrid_cp with
                                   ulysses_degree_in_cp, or model_config.use_ring_attention, contiguous
    experts                        expert_parallel; moe_config.ep_extend_tp: over tensor parallel devices too
    ZeRO 1, 2, 3                   parallel.enable_parallel_optimizer; with gradient_accumulation_shard; and with
                                   parallel_optimizer_comm_recompute, which gathers again where blocks are recomputed
    HSDP                           parallel_optimizer_config.optimizer_weight_shard_size: devices that share out
    stages                         model_config.offset: layers more or less than an equal part, a row for each of
                                   pp_interleave_num; parallel.pipeline_config has the scheduler
    interleave                         model_config.fine_grain_interleave: parts of runner_config.batch_size samples
    slices                         parallel_config.seq_split_num with scheduler seqpipe
    micro-batches                  micro_batch_num, with one stage runner_config.gradient_accumulation_steps
    recomputation                  recompute_config.recompute: layers of each stage; select_recompute: those whose
                                   activation and product of it are computed again, select_comm_recompute: their norms

Gradients are reduced in fp32 (`gradient_fp32_sync`). Source: mindformers 2.1.0,
mindformers/modules/transformer/transformer.py (TransformerOpParallelConfig), tools/register/template.py,
core/config_args.py, parallel_core/training_graph/transformer/utils.py (LayerSetting), models/llama/llama_config.py;
MindSpore Transformers, "Distributed Parallelism Training".
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hardware_profiles import engine_words
from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import Description, ExportError, Kept, schedule_of, stages_for, stages_of
from planner.export.quoting import one_line
from planner.export.settings import Settings
from planner.export.target import Facts, Giving, Job, Loss, Reading, Target
from planner.export.yaml_files import settings_of, yaml_text
from planner.sharding.update import NO_BUCKETS, Update

_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "seqpipe")
_DTYPES = engine_words("mindformers")
_OPTIMIZERS = ("AdamW", "Adam", "FP32StateAdamWeightDecay", "FusedAdamWeightDecay", "PmaAdamW")
_SELECTED = {("elementwise",): False, ("elementwise", "normalisation"): True}  # with select_comm_recompute
_RING, _HEADS, _BOTH = "colossalai_cp", "ulysses_cp", "hybrid_cp"
_FUSION = 4  # gradient_aggregation_group, its default
_SECTIONS = ("parallel_config", "recompute_config", "parallel.pipeline_config", "parallel.parallel_optimizer_config")


def nearest(description: Description) -> tuple[Loss, ...]:
    """What MindFormers cannot be told."""
    common.refuse_other_training(description, "MindFormers", ("adamw",))
    giving = Giving(description)
    common.give_up_schedules(giving, _SCHEDULES)
    _give_up_splits(giving)
    _give_up_recomputation(giving)
    d = giving.description
    if d.zero == 3 and d.full != d.layers:
        giving.up("ZeRO", 3, "2: it gathers weights again only where blocks are recomputed", zero=2)
    common.give_up_updates(giving, gradient_dtypes=(_wide(giving.description),))
    return tuple(giving.losses)


def _wide(d: Description) -> str:
    return "fp32" if d.zero > 1 and d.precision != "fp32" else "mixed"


def _give_up_splits(giving: Giving) -> None:
    d = giving.description
    if d.ring > 1 and d.zigzag:
        giving.up("order of the ring", "zigzag", "contiguous", zigzag=False)
    if d.interleave > 1 and not (d.tensor > 1 and d.sequence_parallel):
        giving.up("interleaved micro-batches without sequence parallelism", d.interleave, 1, interleave=1)
    common.give_up_cut_hidden(giving)


def _give_up_recomputation(giving: Giving) -> None:
    d = giving.description
    if any(d.selective) and d.kept.but not in _SELECTED:
        common.give_up_selective(giving, "whole blocks")


def write(job: Job) -> Mapping[str, str]:
    """`train.yaml`, and the script that starts MindFormers with it."""
    d = job.description
    content = {
        "run_mode": "train",
        "use_parallel": True,
        "trainer": {"type": "CausalLanguageModelingTrainer"},
        "runner_config": _runner(d),
        "optimizer": {"type": "AdamW"},
        "runner_wrapper": _wrapper(d),
        "parallel_config": _parallel_config(d),
        "parallel": _parallel(d),
        "recompute_config": _recompute(d),
        **_moe(d, job.architecture),
        "model": _model(d, job.architecture),
    }
    return {"train.yaml": yaml_text(content), "launch.sh": _script(job)}


def _runner(d: Description) -> dict[str, object]:
    turns = d.micro_batches // d.interleave
    found: dict[str, object] = {"batch_size": d.micro_batch * d.interleave}
    return found if d.pipeline > 1 else {**found, "gradient_accumulation_steps": turns}


def _wrapper(d: Description) -> dict[str, object]:
    clip = d.update.clip_norm
    found: dict[str, object] = {"type": "MFTrainOneStepCell", "use_clip_grad": clip is not None}
    return found if clip is None else {**found, "max_grad_norm": clip}


def _parallel_config(d: Description) -> dict[str, object]:
    found: dict[str, object] = {
        "data_parallel": d.data,
        "model_parallel": d.tensor,
        "pipeline_stage": d.pipeline,
        "micro_batch_num": d.micro_batches // d.interleave if d.pipeline > 1 else 1,
        "use_seq_parallel": d.sequence_parallel,
        "vocab_emb_dp": d.tensor == 1 or not d.vocabulary_parallel,
        "gradient_aggregation_group": _FUSION,
        "context_parallel": d.context,
    }
    if d.heads > 1:
        found["context_parallel_algo"] = _BOTH if d.ring > 1 else _HEADS
    if d.heads > 1 and d.ring > 1:
        found["ulysses_degree_in_cp"] = d.heads
    if d.slices > 1:
        found["seq_split_num"] = d.slices
    if d.expert is not None:
        found["expert_parallel"] = d.expert
    return found


def _parallel(d: Description) -> dict[str, object]:
    found: dict[str, object] = {
        "parallel_mode": 1,
        "full_batch": True,
        "enable_alltoall": d.heads > 1 or (d.expert or 1) > 1,
        "enable_parallel_optimizer": d.zero > 0,
    }
    if d.zero > 0:
        size = {"optimizer_weight_shard_size": d.shards} if d.replicas > 1 else {}
        found["parallel_optimizer_config"] = {"gradient_accumulation_shard": d.zero > 1, **size}
    if d.schedule != "1f1b":
        scheduler = "1f1b" if d.virtual_stages > 1 else d.schedule
        found["pipeline_config"] = {"pipeline_interleave": True, "pipeline_scheduler": scheduler}
    return found


def _recompute(d: Description) -> dict[str, object]:
    whole = d.full == d.layers
    found: dict[str, object] = {"recompute": True if whole else _rows(d, d.full) if any(d.full) else False}
    if any(d.selective):
        counts = _rows(d, tuple(f + s for f, s in zip(d.full, d.selective, strict=True)))
        found["select_recompute"] = counts
        if _SELECTED[d.kept.but]:
            found["select_comm_recompute"] = counts
    found["parallel_optimizer_comm_recompute"] = d.zero == 3
    return found


def _rows(d: Description, counts: Sequence[int]) -> list[Any]:
    """A number for each stage, or a row of them for each of the stages on a rank."""
    rows = [list(counts[at : at + d.pipeline]) for at in range(0, len(counts), d.pipeline)]
    return rows if d.virtual_stages > 1 else rows[0]


def _moe(d: Description, a: Architecture | None) -> dict[str, object]:
    if d.expert is None:
        return {}
    found: dict[str, object] = {"ep_extend_tp": d.whole_experts}
    if a is not None and a.experts is not None:
        found |= {"expert_num": a.experts.count, "num_experts_chosen": a.experts.chosen}
        found |= {"moe_intermediate_size": a.experts.width, "norm_topk_prob": a.normalised}
    return {"moe_config": found}


def _model(d: Description, a: Architecture | None) -> dict[str, object]:
    found: dict[str, object] = {}
    if a is not None and a.family == "llama" and a.usual_heads and not a.qk_norm:
        found |= {
            "type": "LlamaConfig",
            "num_layers": a.layers,
            "hidden_size": a.hidden,
            "num_heads": a.heads,
            "n_kv_heads": a.kv_heads,
            "intermediate_size": a.ffn,
            "vocab_size": a.vocabulary,
            "rms_norm_eps": a.epsilon,
            "theta": a.rope_theta,
            "tie_word_embeddings": a.tied,
            "use_flash_attention": True,
        }
    if d.sequence_length is not None:
        found["seq_length"] = d.sequence_length
    found["compute_dtype"] = _DTYPES[d.precision]
    found["param_init_type"] = "float32"
    found["offset"] = _offset(d)
    found["pp_interleave_num"] = d.virtual_stages
    found["fine_grain_interleave"] = d.interleave
    if d.ring > 1 and d.heads == 1:
        found["use_ring_attention"] = True
    architecture = {"arch": {"type": "LlamaForCausalLM"}} if "type" in found else {}
    return {"model_config": found, **architecture}


def _offset(d: Description) -> Any:
    """Layers of each stage beyond an equal part; 0 where all have that."""
    each, rest = divmod(sum(d.layers), len(d.layers))
    return 0 if d.even and not rest else _rows(d, [count - each for count in d.layers])


def _script(job: Job) -> str:
    command = '"run_mindformer.py --config $HERE/train.yaml --use_parallel True --run_mode train $*"'
    if job.nodes > 1:
        devices = f"{job.description.devices} {job.processes}"
        rest = f' {devices} "${{MASTER_ADDR:?}}" "${{MASTER_PORT:-8118}}" "${{NODE_RANK:?}}" output/msrun_log False 300'
        how = f"Run it on each of {job.nodes} nodes: NODE_RANK=0..{job.nodes - 1} MASTER_ADDR=first-node bash launch.sh"
    else:
        rest, how = f" {job.processes}", f"Runs on one node with {job.processes} devices: bash launch.sh"
    return (
        "#!/usr/bin/env bash\n"
        f"# {one_line(job.model)} with MindSpore Transformers 2.1; MINDFORMERS is its folder.\n# {how}\n"
        'set -euo pipefail\n\nHERE=$(cd "$(dirname "$0")" && pwd)\ncd "${MINDFORMERS:?}"\n'
        f"bash scripts/msrun_launcher.sh {command}{rest}\n"
    )


def read(text: str, facts: Facts) -> Reading:
    """A YAML file as a description."""
    settings = settings_of(text)
    notes: list[str] = []
    description = common.normalised(_read(settings, facts, notes))
    description = replace(description, update=_read_update(settings, description))
    unread = settings.unread(*_SECTIONS)
    return Reading(description=description, notes=(*notes, *unread))


def _read(settings: Settings, facts: Facts, notes: list[str]) -> Description:
    of = "parallel_config"
    data, tensor, pipeline, context = (
        settings.degree(f"{of}.{name}")
        for name in ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel")
    )
    _check_model(settings, facts.architecture)
    schedule, virtual, slices = _read_schedule(settings, pipeline)
    layers = _read_layers(settings, facts.layers, pipeline, virtual)
    ring, heads = _read_context(settings, context, notes)
    full, selective, kept = _read_recomputation(settings, layers, pipeline, notes)
    micro_batch, micro_batches, interleave = _read_batches(settings, pipeline, notes)
    expert = settings.degree(f"{of}.expert_parallel")
    has_experts = expert > 1 or (facts.architecture is not None and facts.architecture.experts is not None)
    extended = settings.truth("moe_config.ep_extend_tp", True) and expert > 1 and expert % tensor == 0
    settings.value(f"{of}.gradient_aggregation_group")
    whole = settings.truth(f"{of}.vocab_emb_dp", True) and tensor > 1
    if whole:
        notes.append("vocab_emb_dp: the embedding is whole on every device there; priced as cut along its hidden dim")
    known = {theirs: ours for ours, theirs in _DTYPES.items()}
    where = "model.model_config.seq_length"
    length = settings.degree(where) if settings.has(where) else None
    return Description(
        layers=layers,
        virtual_stages=virtual,
        schedule=schedule,
        slices=slices,
        data=data,
        tensor=tensor,
        ring=ring,
        heads=heads,
        expert=expert if has_experts else None,
        whole_experts=extended,
        zero=_read_zero(settings),
        replicas=_read_replicas(settings, data, context),
        sequence_parallel=settings.truth(f"{of}.use_seq_parallel"),
        vocabulary_parallel=not whole,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        interleave=interleave,
        full=full,
        selective=selective,
        kept=kept,
        precision=known[settings.word("model.model_config.compute_dtype", "bfloat16", known)],
        optimizer=_read_optimizer(settings),
        sequence_length=length,
    )


def _check_model(settings: Settings, a: Architecture | None) -> None:
    """Raise ExportError where the file describes another model than the one that was named."""
    if a is None:
        return
    known = {
        "num_layers": a.layers, "num_hidden_layers": a.layers, "hidden_size": a.hidden, "num_heads": a.heads,
        "n_kv_heads": a.kv_heads, "intermediate_size": a.ffn,
    }  # fmt: skip
    for name, wanted in known.items():
        found = settings.value(f"model.model_config.{name}")
        if found is not None and found != wanted:
            raise ExportError(f"model.model_config.{name}: {found}, the model that --model names has {wanted}")


def _read_schedule(settings: Settings, pipeline: int) -> tuple[str, int, int]:
    """The schedule, stages on each rank, and slices of the sequence."""
    of = "parallel.pipeline_config"
    scheduler = settings.word(f"{of}.pipeline_scheduler", "1f1b")
    interleaves = settings.truth(f"{of}.pipeline_interleave")
    number, slices = (
        settings.degree("model.model_config.pp_interleave_num"),
        settings.degree("parallel_config.seq_split_num"),
    )
    if pipeline == 1 or not interleaves:
        return "1f1b", 1, 1
    if scheduler not in _SCHEDULES:
        raise ExportError(f"{of}.pipeline_scheduler: {scheduler}; plans have {', '.join(_SCHEDULES)}")
    if scheduler == "seqpipe" and slices > 1:
        if number > 1:
            raise ExportError(
                f"{of}: seqpipe with pp_interleave_num {number}; a plan takes slices with one stage a rank"
            )
        return "seqpipe", 1, slices
    if scheduler == "gpipe":
        return "gpipe", 1, 1
    return schedule_of(pipeline, number), number, 1


def _read_layers(settings: Settings, layers: int, pipeline: int, virtual: int) -> tuple[int, ...]:
    offset = settings.value("model.model_config.offset")
    stages = stages_for(layers, pipeline, virtual)
    if offset in (None, 0):
        return stages_of(layers, pipeline, virtual)
    rows = _counts(offset, pipeline, virtual, "model.model_config.offset")
    found = tuple(layers // stages + more for more in rows)
    if sum(found) != layers or min(found) < 1:
        raise ExportError(
            f"model.model_config.offset: {offset} makes {sum(found)} layers over {stages} stages; the model has"
            f" {layers}"
        )
    return found


def _counts(value: Any, pipeline: int, virtual: int, where: str) -> list[int]:
    """A number for every stage: from one for each, or from those of a rank for all of its stages."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if len(rows) == 1:
        rows = rows * virtual
    flat = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    if len(flat) != pipeline * virtual or not all(type(number) is int for number in flat):
        raise ExportError(f"{where}: {value} has no whole number for each of {pipeline} x {virtual} stages")
    return flat


def _read_context(settings: Settings, context: int, notes: list[str]) -> tuple[int, int]:
    """Devices in a ring, and by heads."""
    algorithm = settings.word("parallel_config.context_parallel_algo", _RING, (_RING, _HEADS, _BOTH))
    heads = settings.degree("parallel_config.ulysses_degree_in_cp")
    rings = settings.truth("model.model_config.use_ring_attention")
    if context == 1:
        return 1, 1
    if algorithm == _HEADS:
        return 1, context
    if algorithm == _BOTH:
        if context % heads:
            raise ExportError(
                f"parallel_config.ulysses_degree_in_cp: {heads} does not divide context_parallel {context}"
            )
        return context // heads, heads
    if not rings:
        notes.append("context_parallel_algo colossalai_cp gathers keys; priced as a ring")
    return context, 1


def _read_zero(settings: Settings) -> int:
    shards = settings.truth("parallel.parallel_optimizer_config.gradient_accumulation_shard")
    again = settings.truth("recompute_config.parallel_optimizer_comm_recompute")
    settings.value("parallel.parallel_optimizer_config.parallel_optimizer_threshold")
    recomputed = settings.value("recompute_config.recompute") is True
    if not settings.truth("parallel.enable_parallel_optimizer"):
        return 0
    return 3 if again and recomputed else 2 if shards else 1


def _read_replicas(settings: Settings, data: int, context: int) -> int:
    """Groups that share out, of so many devices each; all of them are one where it is not said."""
    where = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    size = settings.integer(where, -1)
    if size < 0:
        return 1
    if size == 0 or data * context % size or data % (data * context // size):
        raise ExportError(f"{where}: {size} devices are no part of {data} data x {context} context parallel ones")
    return data * context // size


def _read_batches(settings: Settings, pipeline: int, notes: list[str]) -> tuple[int, int, int]:
    """Samples of a micro-batch, micro-batches, and how many at a time."""
    samples = settings.degree("runner_config.batch_size")
    steps, parts = (
        settings.degree("runner_config.gradient_accumulation_steps"),
        settings.degree("parallel_config.micro_batch_num"),
    )
    turns = steps * (parts if pipeline > 1 else 1)
    if pipeline > 1 and steps > 1:
        notes.append("batches accumulated around the pipeline are read as more micro-batches in it")
    parallel = settings.degree("micro_batch_interleave_num")
    interleave = settings.degree("model.model_config.fine_grain_interleave")
    if parallel > 1:
        return samples, turns * parallel, parallel
    if interleave == 1:
        return samples, turns, 1
    if samples % interleave == 0:
        return samples // interleave, turns * interleave, interleave
    notes.append(
        f"fine_grain_interleave: {interleave} parts of {samples} {'sample' if samples == 1 else 'samples'} are"
        " priced as one, whose communication hides behind nothing"
    )
    return samples, turns, 1


def _read_recomputation(
    settings: Settings, layers: tuple[int, ...], pipeline: int, notes: list[str]
) -> tuple[tuple[int, ...], tuple[int, ...], Kept]:
    of = "recompute_config"
    full = _recomputed(settings.value(f"{of}.recompute"), layers, pipeline, f"{of}.recompute", notes)
    selected = _recomputed(settings.value(f"{of}.select_recompute"), layers, pipeline, f"{of}.select_recompute", notes)
    norms = _recomputed(
        settings.value(f"{of}.select_comm_recompute"), layers, pipeline, f"{of}.select_comm_recompute", notes
    )
    for name in ("mp_comm_recompute", "recompute_slice_activation"):
        settings.value(f"{of}.{name}")
    selective = tuple(max(0, s - f) for s, f in zip(selected, full, strict=True))
    if any(norms) and norms != selected:
        notes.append("select_comm_recompute for other layers than select_recompute is not priced")
    kept = Kept(but=("elementwise", "normalisation") if any(norms) and norms == selected else ("elementwise",))
    return full, selective, kept if any(selective) else Kept()


def _recomputed(value: Any, layers: tuple[int, ...], pipeline: int, where: str, notes: list[str]) -> tuple[int, ...]:
    """Layers of each stage."""
    if value in (None, False):
        return (0,) * len(layers)
    if value is True:
        return layers
    if isinstance(value, dict):
        notes.append(f"{where}: patterns are not read")
        return (0,) * len(layers)
    counts = _counts(value, pipeline, len(layers) // pipeline, where)
    if min(counts) < 0:
        raise ExportError(f"{where}: {min(counts)} layers; write 0 or more for each stage")
    return tuple(min(count, have) for count, have in zip(counts, layers, strict=True))


def _read_optimizer(settings: Settings) -> str:
    settings.word("optimizer.type", "AdamW", _OPTIMIZERS)
    return "adamw"


def _read_update(settings: Settings, d: Description) -> Update:
    clip = settings.number("runner_wrapper.max_grad_norm", 1.0)
    clips = settings.truth("runner_wrapper.use_clip_grad")
    return Update(buckets=NO_BUCKETS, gradient_dtype=_wide(d), clip_norm=clip if clips else None)


MINDFORMERS = Target(
    name="mindformers",
    about="MindSpore Transformers 2.1: train.yaml",
    main="train.yaml",
    nearest=nearest,
    write=write,
    read=read,
)
