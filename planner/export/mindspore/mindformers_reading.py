"""Reads the YAML of MindFormers as a description."""

from dataclasses import replace
from typing import Any

from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import (
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
from planner.export.unmodelled import unmodelled
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
        unmodelled=unmodelled(settings.all),
        notes=tuple(notes),
        unread=settings.unread(*_SECTIONS),
        stack="mindformers",
    )


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
    has_experts = expert > 1 or facts.has_experts
    grouped = _grouped(settings)
    extended = grouped and expert > 1 and expert % tensor == 0
    if grouped and tensor > 1 and not extended and has_experts:
        notes.append(f"experts are whole on {tensor} tensor parallel devices there; priced as cut by them")
    settings.value(f"{of}.gradient_aggregation_group")
    whole = settings.truth(f"{of}.vocab_emb_dp", True) and tensor > 1
    if whole:
        notes.append("vocab_emb_dp: the embedding is whole on every device there; priced as cut along its hidden dim")
    known = {theirs: ours for ours, theirs in DTYPES.items()}
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
        zero=_read_zero(settings),
        replicas=_read_replicas(settings, data, context, notes),
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
    """Raise ExportError if the file describes another model than the named one."""
    if a is None:
        return
    known = {
        "num_layers": a.layers, "num_hidden_layers": a.layers, "hidden_size": a.hidden, "num_heads": a.heads,
        "n_kv_heads": a.kv_heads, "intermediate_size": a.experts.width if a.experts else a.ffn,
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


def _read_zero(settings: Settings) -> int:
    shards = settings.truth("parallel.parallel_optimizer_config.gradient_accumulation_shard")
    again = settings.truth("recompute_config.parallel_optimizer_comm_recompute")
    settings.value("parallel.parallel_optimizer_config.parallel_optimizer_threshold")
    recomputed = settings.value("recompute_config.recompute") is True
    level = settings.word("parallel.parallel_optimizer_config.optimizer_level", "", ("", *_LEVELS))
    if not settings.truth("parallel.enable_parallel_optimizer"):
        return 0
    if level:
        return _LEVELS[level]
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
    full, selected, norms = (
        _recomputed(settings, f"{of}.{name}", layers, pipeline)
        for name in ("recompute", "select_recompute", "select_comm_recompute")
    )
    for name in ("mp_comm_recompute", "recompute_slice_activation"):
        settings.value(f"{of}.{name}")
    selective = tuple(max(0, s - f) for s, f in zip(selected, full, strict=True))
    if any(norms) and norms != selected:
        notes.append("select_comm_recompute for other layers than select_recompute is not priced")
    kept = Kept(but=("elementwise", "normalisation") if any(norms) and norms == selected else ("elementwise",))
    return full, selective, kept if any(selective) else Kept()


def _recomputed(settings: Settings, where: str, layers: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    """Layers of each stage. Of patterns of names, such as `feed_forward\\.mul`, the one that is for most layers counts:
    they are those of the activation of the MLP, and of norms."""
    found = (0,) * len(layers)
    for value in (settings.value(where), *settings.below(where)):
        counts = _recomputed_by(value, where, layers, pipeline)
        found = tuple(max(one, other) for one, other in zip(found, counts, strict=True))
    return found


def _recomputed_by(value: Any, where: str, layers: tuple[int, ...], pipeline: int) -> tuple[int, ...]:
    if value in (None, False):
        return (0,) * len(layers)
    if value is True:
        return layers
    counts = _counts(value, pipeline, len(layers) // pipeline, where)
    if min(counts) < 0:
        raise ExportError(f"{where}: {min(counts)} layers; write 0 or more for each stage")
    return tuple(min(count, have) for count, have in zip(counts, layers, strict=True))


def _read_optimizer(settings: Settings) -> str:
    settings.word("optimizer.type", "AdamW", _OPTIMIZERS)
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
    if d.precision == "fp32" or not any(word in ("float16", "bfloat16") for word in stored):
        return update
    return replace(update, master_weights=False, gradient_dtype="parameter")
