"""Reads the YAML of MindFormers as a description."""

import re
from dataclasses import replace
from typing import Any

from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import (
    LARGEST,
    Description,
    ExportError,
    default_gradient_dtype,
    schedule_of,
    stages_for,
    stages_of,
)
from planner.export.files.settings import Settings
from planner.export.files.yaml_files import settings_of
from planner.export.mindspore.mindformers_writing import DTYPES, HYBRID, RING, SCHEDULES, ULYSSES
from planner.export.target import Facts, Reading
from planner.export.unmodelled import UNFUSED, unmodelled
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN, Update

_OPTIMIZERS = ("AdamW", "Adam", "FP32StateAdamWeightDecay", "FusedAdamWeightDecay", "PmaAdamW")
_SECTIONS = ("parallel_config", "recompute_config", "parallel.pipeline_config", "parallel.parallel_optimizer_config")


def read(text: str, facts: Facts) -> Reading:
    """A YAML file as a reading."""
    settings = settings_of(text)
    _refuse_other_forms(settings)
    notes: list[str] = []
    description = common.normalised(_read(settings, facts, notes))
    description = replace(description, update=_read_update(settings, description))
    return Reading(
        description=description,
        unmodelled=(*unmodelled(_mattering(settings)), *_scores(settings)),
        notes=tuple(notes),
        unread=settings.unread(*_SECTIONS),
        stack="mindformers",
    )


def _mattering(settings: Settings) -> list[tuple[str, Any]]:
    """All settings, with the capacity of experts where the file leaves it at 1.1 (tools/register/template.py)."""
    capacity = "moe_config.capacity_factor"
    experts = settings.integer("moe_config.expert_num", 1) > 1
    left = [] if settings.has(capacity) or not experts or _grouped(settings) else [(capacity, 1.1)]
    return [*settings.all, *left]


def _scores(settings: Settings) -> tuple[str, ...]:
    """A message where attention is no fused kernel, as it is not in `LlamaConfig` unless the file says so."""
    where = "model.model_config.use_flash_attention"
    fused = settings.value(where)
    if fused is False or (fused is None and _is_legacy_llama(settings)):
        return (f"{where}: {UNFUSED}",)
    return ()


_OTHER_FORMS = {
    "distribute_parallel_config": "configurations in the form of llm_template_v2_experimental are not read",
    "parallelism": "configurations for dynamic graphs (PyNative) are not read",
}
"""Sections with degrees in other forms than that of `parallel_config`: branch br_feature_llm_trainer of MindFormers
(7 January 2026), and its version 2.0 ("Distributed Parallel Training")."""


def _refuse_other_forms(settings: Settings) -> None:
    """Raise ExportError for a file whose degrees are elsewhere: they would be read as 1."""
    paths = [path for path, _ in settings.all]
    for section, said in _OTHER_FORMS.items():
        if any(path.startswith(f"{section}.") for path in paths):
            raise ExportError(f"{section}: {said}; write parallel_config, recompute_config and runner_config")


def _read(settings: Settings, facts: Facts, notes: list[str]) -> Description:
    of = "parallel_config"
    data, tensor, pipeline, context, expert = _read_degrees(settings, facts, notes)
    _check_model(settings, facts.architecture)
    schedule, virtual, slices = _read_schedule(settings, pipeline)
    layers = _read_layers(settings, facts.layers, pipeline, virtual)
    ring, heads = _read_context(settings, context, notes)
    full, selective, kept = _read_recomputation(settings, layers, pipeline, notes)
    notes += _recomputation_notes(settings, tensor) if any(full) else []
    micro_batch, micro_batches, interleave = _read_batches(settings, pipeline, notes)
    has_experts = expert > 1 or facts.has_experts
    grouped = _grouped(settings)
    extended = grouped and expert > 1 and expert % tensor == 0
    if grouped and tensor > 1 and not extended and has_experts:
        notes.append(f"experts are whole on {tensor} tensor parallel devices there; priced as cut by them")
    settings.value(f"{of}.gradient_aggregation_group")
    whole = settings.truth(f"{of}.vocab_emb_dp", True) and tensor > 1 and pipeline == 1  # a pipeline switches it off
    if whole:
        notes.append("vocab_emb_dp: the embedding is whole on every device there; priced as cut along its hidden dim")
    lengths = ("model.model_config.seq_length", "train_dataset.data_loader.config.seq_length")
    length = next((settings.degree(where) for where in lengths if settings.has(where)), None)
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
        zero=_read_zero(settings, notes),
        replicas=_read_replicas(settings, data, context, notes),
        sequence_parallel=settings.truth(f"{of}.use_seq_parallel"),
        vocabulary_parallel=not whole,
        micro_batch=micro_batch,
        micro_batches=micro_batches,
        interleave=interleave,
        full=full,
        selective=selective,
        kept=kept,
        precision=_read_precision(settings, notes),
        optimizer=_read_optimizer(settings, notes),
        sequence_length=length,
    )


_BY_DATA = (0, "0", "data_parallel", "stand_alone")
_BY_STRATEGY = (None, 1, "1", "semi_auto_parallel")


def _read_degrees(settings: Settings, facts: Facts, notes: list[str]) -> tuple[int, int, int, int, int]:
    """Degrees of data, tensor, pipeline, context and expert parallelism. Data-parallel mode has none but that of its
    devices (trainer/base_trainer.py: _check_global_batch_size_for_auto_parallel)."""
    names = ("data_parallel", "model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
    data, tensor, pipeline, context, expert = (settings.degree(f"parallel_config.{name}") for name in names)
    mode = settings.value("parallel.parallel_mode")
    several = max(data, tensor, pipeline, context, expert) > 1
    if settings.value("use_parallel") is False and several:
        notes.append("use_parallel is off: priced with the degrees, as with --use_parallel True of the program")
    if mode in _BY_DATA and mode is not False:
        if facts.devices is None:
            raise ExportError(f"parallel.parallel_mode: {mode}: all devices are data parallel; give --devices")
        if several:
            notes.append(f"parallel_mode {mode}: the degrees of parallel_config have no effect; all are data parallel")
        return facts.devices, 1, 1, 1, 1
    if mode in (2, "2", "auto_parallel"):
        notes.append(f"parallel_mode {mode}: MindSpore may change strategies; priced with the degrees of the file")
    elif mode not in _BY_STRATEGY:
        raise ExportError(f"parallel.parallel_mode: {mode!r:.80} is not read; write 1 (semi_auto_parallel)")
    return data, tensor, pipeline, context, expert


def _check_model(settings: Settings, a: Architecture | None) -> None:
    """Raise ExportError if the file describes another model than the named one."""
    if a is None:
        return
    of = "model.model_config"
    known = {
        "num_layers": a.layers, "num_hidden_layers": a.layers, "hidden_size": a.hidden, "num_heads": a.heads,
        "num_attention_heads": a.heads, "n_kv_heads": a.kv_heads, "num_key_value_heads": a.kv_heads,
        "intermediate_size": a.ffn,
    }  # fmt: skip
    if a.experts is not None:
        known |= {"num_experts": a.experts.count, "num_experts_per_tok": a.experts.chosen}
        known["moe_intermediate_size"] = a.experts.width
        if not any(settings.has(f"{where}.moe_intermediate_size") for where in (of, "moe_config")):
            known["intermediate_size"] = a.experts.width
        elif not a.experts.dense_layers:
            del known["intermediate_size"]  # no block has it
    if a.latent is not None:  # its keys have no heads of their own
        del known["n_kv_heads"], known["num_key_value_heads"]
    for name, wanted in known.items():
        found = settings.value(f"{of}.{name}")
        if found is not None and found != wanted:
            raise ExportError(f"{of}.{name}: {found}, the model that --model names has {wanted}")


def _is_legacy_llama(settings: Settings) -> bool:
    return bool(settings.value("model.model_config.type") == "LlamaConfig")


def _read_precision(settings: Settings, notes: list[str]) -> str:
    """The dtype of products; that of `LlamaConfig` is fp16 unless it is said (models/llama/llama_config.py)."""
    known = {theirs: ours for ours, theirs in DTYPES.items()}
    of = "model.model_config"
    if not settings.has(f"{of}.compute_dtype") and not _is_legacy_llama(settings) and settings.below(of):
        notes.append("compute_dtype is not said: priced in bf16")
    return known[settings.word(f"{of}.compute_dtype", "float16" if _is_legacy_llama(settings) else "bfloat16", known)]


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
    if scheduler not in SCHEDULES:
        raise ExportError(f"{of}.pipeline_scheduler: {scheduler}; plans have {', '.join(SCHEDULES)}")
    if scheduler == "seqpipe" and slices > 1:
        return "seqpipe", number, slices
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
    """A number for every stage, from one for each stage, or from one for each rank and all of its stages."""
    rows = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if len(rows) == 1:
        rows = rows * virtual
    flat = [number for row in rows for number in (row if isinstance(row, list) else [row])]
    if len(flat) != pipeline * virtual or not all(type(number) is int for number in flat):
        raise ExportError(f"{where}: {value} has no whole number for each of {pipeline} x {virtual} stages")
    return flat


def _read_context(settings: Settings, context: int, notes: list[str]) -> tuple[int, int]:
    """Degrees of ring attention and of Ulysses."""
    algorithm = settings.word("parallel_config.context_parallel_algo", RING, (RING, ULYSSES, HYBRID))
    heads = settings.degree("parallel_config.ulysses_degree_in_cp")
    rings = settings.truth("model.model_config.use_ring_attention")
    if context == 1:
        return 1, 1
    if algorithm == ULYSSES:
        return 1, context
    heads = heads if algorithm == HYBRID else 1
    if context % heads:
        raise ExportError(f"parallel_config.ulysses_degree_in_cp: {heads} does not divide context_parallel {context}")
    if not rings and heads < context:
        notes.append(f"context_parallel_algo {algorithm} gathers keys without use_ring_attention; priced as a ring")
    return context // heads, heads


_LEVELS = {"level1": 1, "level2": 2, "level3": 3}
"""Of MindSpore's `optimizer_level` (`set_auto_parallel_context`): weights and states are cut; gradients too; weights
are gathered again before the backward pass."""


def _grouped(settings: Settings) -> bool:
    """Whether experts are whole: over tensor and data parallel devices. They always are in models that are built from
    `model_type` and its kind (use_legacy: False; parallel_core/training_graph/transformer/moe/ffn.py, 2.1.0)."""
    parts = settings.integer("moe_config.expert_model_parallel", 0)
    return settings.truth("moe_config.use_gmm") or parts == 1 or settings.value("use_legacy") is False


def _read_zero(settings: Settings, notes: list[str]) -> int:
    shards = settings.truth("parallel.parallel_optimizer_config.gradient_accumulation_shard")
    again = settings.truth("recompute_config.parallel_optimizer_comm_recompute")
    settings.value("parallel.parallel_optimizer_config.parallel_optimizer_threshold")
    recomputed = settings.value("recompute_config.recompute") is True
    level = settings.word("parallel.parallel_optimizer_config.optimizer_level", "", ("", *_LEVELS))
    if not settings.truth("parallel.enable_parallel_optimizer"):
        return 0
    if level:
        return _LEVELS[level]
    if again and recomputed and not shards:
        notes.append("gradient_accumulation_shard is off: gradients are whole there, so memory may be more than this")
    elif again and not recomputed and settings.value("recompute_config.recompute"):
        notes.append(
            "parallel_optimizer_comm_recompute: weights of some blocks are gathered again; priced as kept, so memory is"
            " less than this"
        )
    return 3 if again and recomputed else 2 if shards else 1


def _read_replicas(settings: Settings, data: int, context: int, notes: list[str]) -> int:
    """Number of groups that shard, each of a stated number of devices; 1 if it is not stated.

    A number that does not divide the devices of a weight has no effect (MindSpore, `set_auto_parallel_context`).
    """
    where = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    size = settings.integer(where, -1)
    if size < 0:
        return 1
    if size and data * context % size:
        if settings.truth("parallel.enable_parallel_optimizer"):
            notes.append(f"{where}: {size} does not divide {data * context} devices, and has no effect")
        return 1
    if size == 0 or data % (data * context // size):
        raise ExportError(f"{where}: {size} devices are no part of {data} data x {context} context parallel ones")
    return data * context // size


def _read_batches(settings: Settings, pipeline: int, notes: list[str]) -> tuple[int, int, int]:
    """Samples of a micro-batch, micro-batches, and the number of interleaved ones."""
    samples = settings.degree("runner_config.batch_size")
    steps, parts = (
        settings.degree("runner_config.gradient_accumulation_steps"),
        settings.degree("parallel_config.micro_batch_num"),
    )
    turns = parts if pipeline > 1 else steps
    if pipeline > 1 and steps > 1:
        notes.append("runner_config.gradient_accumulation_steps has no effect beside a pipeline")
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
    swaps = settings.value("swap_config.swap") is True
    if swaps and any(isinstance(settings.value(f"{of}.{name}"), list) for name in ("recompute", "select_recompute")):
        raise ExportError(f"{of}: lists beside swap_config name single layers, which are not read; write true or false")
    full, selected, norms = (
        _recomputed(settings, f"{of}.{name}", layers, pipeline, notes)
        for name in ("recompute", "select_recompute", "select_comm_recompute")
    )
    for name in ("mp_comm_recompute", "recompute_slice_activation"):
        settings.value(f"{of}.{name}")
    excluded = [f"{name}_exclude" for name in ("select_recompute", "select_comm_recompute")]
    excluded = [name for name in excluded if settings.value(f"{of}.{name}") or any(settings.below(f"{of}.{name}"))]
    if excluded:
        notes.append(f"{', '.join(excluded)}: priced as recomputed all the same, so memory is more than this")
    selective = tuple(max(0, s - f) for s, f in zip(selected, full, strict=True))
    if any(norms) and norms != selected:
        notes.append("select_comm_recompute for other layers than select_recompute is not priced")
    kept = Kept(but=("elementwise", "normalisation") if any(norms) and norms == selected else ("elementwise",))
    return full, selective, kept if any(selective) else Kept()


def _recomputation_notes(settings: Settings, tensor: int) -> list[str]:
    """Notes on what blocks that are recomputed whole keep beside tensor parallelism."""
    of = "recompute_config"
    if tensor == 1:
        return []
    found = []
    if settings.value(f"{of}.mp_comm_recompute") is False:
        found.append(
            "mp_comm_recompute is off: results of collectives are kept; priced as sent again, so a step takes less, and"
            " memory is more, than this"
        )
    sliced = settings.value(f"{of}.recompute") is True and settings.truth(f"{of}.recompute_slice_activation")
    if sliced and not settings.truth("parallel_config.use_seq_parallel"):
        found.append("recompute_slice_activation: inputs of blocks are priced whole, so memory is less than this")
    return found


_OF_BLOCKS = re.compile(r"(?<!mat)mul|silu|gelu|swiglu|activation|norm|cast|add", re.IGNORECASE)
"""In patterns of what `Kept` leaves out: the activation of the MLP, and norms."""


def _recomputed(
    settings: Settings, where: str, layers: tuple[int, ...], pipeline: int, notes: list[str]
) -> tuple[int, ...]:
    """Layers of each stage. Of patterns of names, such as `feed_forward\\.mul`, the one that is for most layers counts:
    they are those of the activation of the MLP, and of norms. Others are noted."""
    given = settings.value(where)
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        rows: list[tuple[str, Any]] = [(name, True) for name in given]
    else:
        settings.below(where)
        rows = [(name[len(where) + 1 :], value) for name, value in settings.all if name.startswith(f"{where}.")]
        rows = rows or [("activation", given)]
    others = [name for name, value in rows if value and not _OF_BLOCKS.search(name)]
    if others:
        notes.append(f"{where}: {', '.join(others[:3]):.120} priced as kept, so memory is less than this")
    found = (0,) * len(layers)
    for name, value in rows:
        if name not in others:
            counts = _recomputed_by(value, where, layers, pipeline)
            found = tuple(max(one, other) for one, other in zip(found, counts, strict=True))
    return found


def _recomputed_by(value: Any, where: str, layers: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """Layers of each stage, from a switch, a number or a switch for each rank, or rows of them for its stages
    (parallel_core/training_graph/transformer/utils.py: LayerSetting, 1.7.0)."""
    if value in (None, False, []):
        return (0,) * len(layers)
    if value is True:
        return layers
    virtual = len(layers) // pipeline
    if not isinstance(value, list) or not any(isinstance(row, list) for row in value):
        return _over_stages(_numbers(value, where, pipeline), layers, pipeline)
    rows = [[row] * pipeline if isinstance(row, bool) else row for row in value]
    counts = _numbers([one for row in rows for one in (row if isinstance(row, list) else [row])], where, len(layers))
    if any(not isinstance(row, list) or len(row) != pipeline for row in rows) or len(rows) != virtual:
        raise ExportError(f"{where}: {value!r:.80} has no row of {pipeline} numbers for each of {virtual} stages")
    return tuple(min(count, have) for count, have in zip(counts, layers, strict=True))


def _numbers(value: Any, where: str, wanted: int) -> list[int]:
    """So many numbers of layers, of which a switch is none or all."""
    switches = {True: LARGEST, False: 0}
    counts = (
        [switches.get(one, one) if isinstance(one, bool) else one for one in value] if isinstance(value, list) else []
    )
    if len(counts) != wanted or any(type(count) is not int for count in counts):
        raise ExportError(f"{where}: {value!r:.80} has no whole number for each of {wanted} ranks or stages")
    if min(counts) < 0:
        raise ExportError(f"{where}: {min(counts)} layers; write 0 or more for each stage")
    return counts


def _over_stages(counts: list[int], layers: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """The recomputed layers of every rank, over its stages in turn as long as they have layers left
    (_alloc_recompute_layer)."""
    found = [0] * len(layers)
    for rank, count in enumerate(counts):
        stages = range(rank, len(layers), pipeline)
        left = min(count, sum(layers[stage] for stage in stages))
        while left:
            for stage in stages:
                if left and found[stage] < layers[stage]:
                    found[stage] += 1
                    left -= 1
    return tuple(found)


def _read_optimizer(settings: Settings, notes: list[str]) -> str:
    if settings.word("optimizer.type", "AdamW", _OPTIMIZERS) == "PmaAdamW":
        notes.append("PmaAdamW keeps a mean of the weights too: priced without it, so memory is more than this")
    return "adamw"


def _read_update(settings: Settings, d: Description) -> Update:
    """The dtypes of gradients and moments.

    Parameters that are created in 16 bits are updated in 16 bits, with moments in fp32, and have gradients in their own
    dtype: mindformers/core/optim/adamw.py keeps no copy in fp32.
    """
    clip = settings.number("runner_wrapper.max_grad_norm", 1.0)
    clips = settings.truth("runner_wrapper.use_clip_grad")
    update = replace(PLAIN, gradient_dtype=default_gradient_dtype(d), clip_norm=clip if clips else None)
    words = ("param_init_type", "param_init_dtype", "params_dtype")
    stored = [settings.value(f"model.model_config.{word}") for word in words]
    if _is_legacy_llama(settings) and not any(stored):
        stored = ["float16"]  # models/llama/llama_config.py
    if d.precision == "fp32" or not any(word in ("float16", "bfloat16") for word in stored):
        return update
    return replace(update, master_weights=False, gradient_dtype="parameter")
