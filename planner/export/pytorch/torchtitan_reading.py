"""Reads the TOML of torchtitan as a description."""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from planner.export import common
from planner.export.architecture import Architecture
from planner.export.description import Description, ExportError, data_of, micro_batches_of, stages_for, stages_of
from planner.export.files.recipes import Recipe, plain_settings, recipe_in
from planner.export.files.settings import Settings, size_of
from planner.export.pytorch.torchtitan_content import OLD_FP8, SPLIT_POINTS, content_of
from planner.export.pytorch.torchtitan_writing import (
    AGREES,
    DTYPES,
    FLAVORS,
    FP8,
    FP8_RECIPES,
    GATHERED,
    GATHERS,
    HEAD,
    MX,
    OPERATORS,
    SCHEDULES,
    gradient_dtype,
    plainly_bf16,
    read_left_out,
    recomputed_layers,
)
from planner.export.target import Facts, Reading
from planner.export.unmodelled import unmodelled
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.layout.kept import Kept
from planner.sharding.update import BLOCK, PLAIN, Update

_SECTIONS = ("training.", "parallelism.", "activation_checkpoint.", "model.", "job.")
_PARTS = "parallelism.module_fqns_per_model_part"


def read(text: str, facts: Facts) -> Reading:
    """A TOML file, or a function of a Python registry of configurations, as a reading."""
    known: list[str] = []
    later = re.search(r"^def \w+\(", text, re.MULTILINE) is not None
    if later:
        recipe = recipe_in(text, facts.recipe)
        known += recipe.notes
        unknown = next((path for path in recipe.unknown if _NEEDED.match(path)), None)
        if unknown is not None:
            raise ExportError(f"{unknown} = {recipe.unknown[unknown]:.60}: its value is not known; write the number")
        settings, names = _of_registry(recipe)
    else:
        content, known = content_of(text)
        settings, names = Settings(content, "TOML"), ()
    if not any(path.startswith(_SECTIONS) for path, _ in settings.all):
        raise ExportError("it has no training or parallelism of torchtitan; give the file that has them")
    description, notes = _read(settings, facts, later)
    for path in ("training.dtype", "training.mixed_precision_reduce", "training.dataset", "training.steps"):
        settings.value(path)
    return Reading(
        description=common.normalised(description),
        unmodelled=unmodelled(_mattering(settings, names, description)),
        notes=(*known, *notes),
        unread=settings.unread("parallelism", "activation_checkpoint", "training"),
        stack="fsdp-compiled" if _compiles(settings) else "fsdp",
    )


_NEEDED = re.compile(r"parallelism\.\w+_degree$|training\.(\w*batch_size|seq_len|max_context_length|num_tokens_\w+)$")
"""Settings that would be read as if they were not given."""


def _of_registry(recipe: Recipe) -> tuple[Settings, tuple[str, ...]]:
    """A configuration of `config_registry.py` as the keys of the earlier TOML files."""
    given = dict(plain_settings(recipe))
    found: dict[str, Any] = {path: value for path, value in given.items() if value is not None}
    in_tokens = any(path in found for path in _IN_TOKENS)
    length = found.pop("training.max_context_length", _LENGTH if in_tokens else None)
    tokens = found.pop("training.num_tokens_per_microbatch_per_dp_rank", _TOKENS if in_tokens else None)
    if isinstance(length, int) and isinstance(tokens, int) and min(length, tokens) > 0:
        length = min(length, tokens)
        micro_batch, passes = tokens // length, found.pop("parallelism.num_pp_microbatches", 1)
        piped = type(passes) is int and found.get("parallelism.pipeline_parallel_degree", 1) != 1
        found |= {"training.seq_len": length, "training.local_batch_size": micro_batch * (passes if piped else 1)}
        if piped:
            found["parallelism.pipeline_parallel_microbatch_size"] = micro_batch
        step = found.pop("training.num_tokens_per_train_step", None)
        if isinstance(step, int) and step >= length:
            found["training.global_batch_size"] = step // length
    for name in recipe.names:
        if name.endswith("AC.Config"):
            mode = name.rpartition("AC.")[0].rpartition(".")[2].lower()
            found |= {"activation_checkpoint.mode": mode}
            if mode == "selective":
                found["activation_checkpoint.selective_ac_option"] = "op"
        if name.startswith("model_registry "):
            found["model.flavor"] = name.removeprefix("model_registry ")
    parts = recipe.settings.get(_PARTS)
    if isinstance(parts, list) and all(isinstance(part, list) for part in parts):
        found[_PARTS] = parts
    if "activation_checkpoint.mode" not in found:
        found |= _usual_recomputation(recipe)
    sections: dict[str, dict[str, Any]] = {}
    for path, value in found.items():
        section, _, key = path.partition(".")
        if key and "." not in key:
            sections.setdefault(section, {})[key] = value
    return Settings(sections, "Python"), recipe.names


_OPTIMIZERS = ("Adam", "AdamW")
"""Source: torchtitan/components/optimizer.py (build_optimizers); those of other trees have others."""

_IN_TOKENS = ("training.max_context_length", "training.num_tokens_per_microbatch_per_dp_rank",
              "training.num_tokens_per_train_step", "parallelism.num_pp_microbatches")  # fmt: skip
_LENGTH, _TOKENS = 2048, 16384
"""Settings of versions that count batches in tokens, and their defaults (torchtitan/config/configs.py, b5bcd76c)."""


def _usual_recomputation(recipe: Recipe) -> dict[str, Any]:
    """What a `Trainer.Config` recomputes that says nothing of it: by operators (torchtitan/trainer.py, b5bcd76c; in its
    first versions every second layer). What a configuration of another file says is not known."""
    said = "activation_checkpoint" in recipe.settings or "Trainer.Config" not in recipe.names
    if said and not any(name.endswith("ActivationCheckpointConfig") for name in recipe.names):
        return {"activation_checkpoint.mode": "none"}
    return {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}


def _mattering(settings: Settings, names: tuple[str, ...], d: Description) -> Iterator[tuple[str, Any]]:
    yield from ((path, value) for path, value in settings.all if not path.startswith(("quantize.", f"{OLD_FP8}.")))
    converters = [str(settings.value("model.converters") or ""), *names]
    if d.fp8:
        if any("grouped_mm" in text for text in converters):  # of experts
            yield "model.converters.fp8", True
        return
    words = ("float8", "mxfp8", "nvfp4", "mx'")  # as in ['quantize.linear.mx']
    if any(word in text.lower() for text in converters for word in words):
        yield "model.converters.fp8", True


def _compiles(settings: Settings) -> bool:
    """Whether the model is compiled."""
    parts = settings.value("compile.components")
    return settings.value("compile.enable") is True and (not isinstance(parts, list) or "model" in parts)


def _read(settings: Settings, facts: Facts, later: bool) -> tuple[Description, list[str]]:
    """The description in settings, and notes on it; `later` says whether the version is one without TOML."""
    notes = list[str]()
    _check_model(settings, facts.architecture, notes)
    settings.word("optimizer.name", "AdamW", _OPTIMIZERS)
    tensor, pipeline, context = (
        settings.degree(f"parallelism.{name}_parallel_degree") for name in ("tensor", "pipeline", "context")
    )
    data, replicas = _read_data(settings, facts, tensor * pipeline * context)
    replicated = data == replicas and context == 1
    layers, virtual, schedule = _read_stages(settings, facts.layers, pipeline)
    local = settings.degree("training.local_batch_size", 8)
    micro_batch = settings.degree("parallelism.pipeline_parallel_microbatch_size") if pipeline > 1 else local
    left_open = settings.integer("training.global_batch_size", -1) == -1
    global_batch = local * data if left_open else settings.degree("training.global_batch_size")
    if pipeline > 1 and global_batch != local * data:
        notes.append("batches accumulated around the pipeline are read as more micro-batches in it")
    expert = settings.degree("parallelism.expert_parallel_degree")
    has_experts = expert > 1 or facts.has_experts
    precision = _read_precision(settings)
    reshard = settings.word("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    after = (pipeline == 1) if reshard == "default" else reshard == "always"
    if pipeline > 1 and after and not replicated:
        notes.append(
            "fsdp_reshard_after_forward beside a pipeline: gradients are whole until a step ends, as in ZeRO 1;"
            " priced without gathering weights again"
        )
    description = Description(
        layers=layers,
        virtual_stages=virtual,
        schedule=schedule,
        data=data,
        tensor=tensor,
        ring=context,
        zigzag=context > 1 and settings.word("parallelism.context_parallel_load_balancer", "headtail") == "headtail",
        expert=expert if has_experts else None,
        whole_experts=settings.degree("parallelism.expert_tensor_parallel_degree") == 1 and tensor > 1 and expert > 1,
        zero=0 if replicated else 1 if pipeline > 1 else 3 if after else 2,
        replicas=replicas,
        sequence_parallel=tensor > 1 and settings.truth("parallelism.enable_sequence_parallel", True),
        micro_batch=micro_batch,
        micro_batches=micro_batches_of(global_batch, micro_batch, data),
        full=(0,) * len(layers),
        selective=(0,) * len(layers),
        precision=precision,
        sequence_length=settings.degree("training.seq_len", 2048),
        fp8=_read_fp8(settings, notes),
    )
    if context > 1 and settings.word("parallelism.context_parallel_rotate_method", "allgather") == "allgather":
        notes.append("keys of a context are gathered there, where nothing hides them; priced as a ring")
    if tensor > 1 and settings.truth("parallelism.disable_loss_parallel"):
        notes.append("disable_loss_parallel: the loss is priced over parts of the words, so memory is more than this")
    description = _with_recomputation(settings, common.normalised(description), notes)
    return replace(description, update=_read_update(settings, description, later)), notes


def _read_fp8(settings: Settings, notes: list[str]) -> Fp8:
    """Linear layers in fp8, if the file has a recipe for them and leaves out only layers that plans can leave out."""
    converters = settings.value("model.converters")
    known = set(map(str, converters)) if isinstance(converters, list) else set[str]()
    old = OLD_FP8 in known and known.isdisjoint((FP8, MX))
    converter = MX if MX in known and FP8 not in known else FP8
    where = OLD_FP8 if old and any(path.startswith(f"{OLD_FP8}.") for path, _ in settings.all) else converter
    names = settings.value(f"{where}.filter_fqns")
    name = settings.word(f"{where}.recipe_name", "mxfp8_cublas" if converter == MX else "")
    recipe = next((ours for ours, theirs in FP8_RECIPES.items() if theirs == (converter, name)), None)
    left_out = read_left_out([str(one) for one in names]) if isinstance(names, list) else ()
    if known.isdisjoint((FP8, MX, OLD_FP8)) or {FP8, MX} <= known or recipe is None or left_out is None:
        return NO_FP8
    if not isinstance(names, list) or HEAD not in names:
        notes.append("filter_fqns: the head is priced as left out of fp8")
    agreed, gathered = settings.truth(f"{where}.{AGREES}"), settings.truth(f"{where}.{GATHERS}")
    if gathered and recipe in GATHERED and not agreed:
        notes.append(f"{AGREES}: scales of weights are priced as agreed on at once")
    return Fp8(recipe=recipe, left_out=left_out, gathered=gathered and recipe in GATHERED)


def _check_model(settings: Settings, a: Architecture | None, notes: list[str]) -> None:
    """Raise ExportError if the file is for another size of a model than the named one; a toy is noted."""
    name, flavor = settings.word("model.name", ""), settings.word("model.flavor", "")
    if a is None or not flavor:
        return
    from planner.export.architecture import architecture_of

    known = {pair: model for model, pair in FLAVORS.items()}.get((name, _WAYS.sub("", flavor)))
    if known is not None and architecture_of(known, a.sequence, latent=True) != a:
        raise ExportError(f"model.flavor: the file is for {name} {flavor}; give --model {known}")
    if flavor.startswith("debugmodel"):
        notes.append(f"model.flavor: {flavor} is a toy of torchtitan; priced as the model that is named")


_WAYS = re.compile(r"_(flex|varlen)(_attn)?$")
"""Ends of flavors that differ in how attention is computed."""


def _read_data(settings: Settings, facts: Facts, rest: int) -> tuple[int, int]:
    """Data-parallel degree, and number of replicas that each have all weights."""
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
    known = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    word = settings.word("parallelism.pipeline_parallel_schedule", "1F1B")
    parts = settings.value(_PARTS)
    if pipeline == 1:
        return (layers,), 1, "1f1b"
    if word.lower() not in known:
        raise ExportError(f"parallelism.pipeline_parallel_schedule: {word}; plans have {', '.join(SCHEDULES.values())}")
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
    points = settings.value(f"parallelism.{SPLIT_POINTS}")
    if points:
        stages = _between(points, layers)
        if len(stages) % pipeline:
            raise ExportError(
                f"parallelism.{SPLIT_POINTS}: {len(stages)} stages do not divide over {pipeline} pipeline ranks"
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
    elif schedule not in ("1f1b", "gpipe"):
        virtual = 2
    return _shared_out(layers, stages_for(layers, pipeline, virtual), ends), virtual, schedule


def _between(points: object, layers: int) -> tuple[int, ...]:
    """Layers of stages, where each stage but the first begins with a named layer."""
    where = f"parallelism.{SPLIT_POINTS}"
    names = points if isinstance(points, list) else str(points).split(",")
    first = [size_of(str(name).strip().removeprefix("layers.")) for name in names]
    bounds = [0, *(0 if place is None else place for place in first), layers]
    if any(after <= before for before, after in itertools.pairwise(bounds)):
        raise ExportError(f"{where}: {names!s:.80}; write layers in their order, such as layers.8, below {layers}")
    return tuple(after - before for before, after in itertools.pairwise(bounds))


def _layers_of_parts(parts: object) -> tuple[int, ...]:
    """Layers of every stage; each stage is a list of names of modules."""
    if not isinstance(parts, list) or not all(isinstance(part, list) for part in parts):
        raise ExportError("parallelism.module_fqns_per_model_part: write a list of names for each stage")
    if not all(isinstance(name, str) for part in parts for name in part):
        raise ExportError("parallelism.module_fqns_per_model_part: write names of modules, such as layers.0")
    return tuple(sum(name.startswith("layers.") for name in part) for part in parts)


def _fewer(settings: Settings, where: str) -> int:
    """How many layers less than others the first or the last stage has."""
    found = settings.integer(where, 1)
    if found < 0:
        raise ExportError(f"{where}: {found}; write 0 or more")
    return found


def _shared_out(layers: int, stages: int, less: list[int]) -> tuple[int, ...]:
    """Layers of every stage if the ends have fewer: equal parts of all, the ends less by that; the first stages take
    the rest."""
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
        return replace(d, selective=d.layers, kept=Kept(but=OPERATORS))
    every = size_of(option)
    if every is None:
        raise ExportError(f"activation_checkpoint.selective_ac_option: {option:.80}; it is op or a number from 1 on")
    return replace(d, full=recomputed_layers(d, every))


def _read_precision(settings: Settings) -> str:
    known = {theirs: ours for ours, theirs in DTYPES.items()}
    computed = known[settings.word("training.mixed_precision_param", "bfloat16", known)]
    return "bf16" if settings.word("training.dtype", "float32", known) == "bfloat16" else computed


def _read_update(settings: Settings, d: Description, later: bool) -> Update:
    """Gradients and dtypes. Since April 2026 (00b7f569) FSDP keeps fp32 weights on one data-parallel device, too."""
    clip = settings.number("training.max_norm", 1.0)
    plain = (plainly_bf16(d) and not later) or settings.value("training.dtype") == "bfloat16"
    return replace(
        PLAIN,
        clip_norm=None if math.isinf(clip) or clip <= 0 else clip,
        master_weights=not plain,
        gradient_dtype=gradient_dtype(d, plain),
        moment_dtype="bf16" if plain else PLAIN.moment_dtype,
        gathers=BLOCK if d.fp8.gathered else PLAIN.gathers,  # as FSDP does, also for weights in fp8
    )
