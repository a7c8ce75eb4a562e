"""Reads the YAML of `accelerate launch` as a description, and that of axolotl, which is based on Accelerate.

DeepSpeed inside it is read like DeepSpeed's own settings: `deepspeed_config.zero_stage` and the like. A configuration
of axolotl also names model, batches and length. Source: accelerate 1.15.0, utils/dataclasses.py (DeepSpeedPlugin);
axolotl, utils/schemas and core/trainers.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardware_profiles import engine_words
from planner.export import common
from planner.export.description import Description, ExportError
from planner.export.files.arguments import Options, options_in
from planner.export.files.settings import Settings, size_of
from planner.export.files.yaml_files import settings_of
from planner.export.pytorch import deepspeed, trainer_reading
from planner.export.target import Facts, Reading
from planner.export.unmodelled import unmodelled
from planner.sharding.update import PLAIN

PRECISIONS = engine_words("accelerate")
RECOMPUTING = ("gradient_checkpointing", "activation_checkpointing")
"""Of transformers' Trainer; the second is the name from 5.23 on, and the first will end with version 6."""
OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
SYNC_EACH_BATCH = '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'
"""--accelerator_config of transformers' Trainer with which FSDP reduces gradients after every micro-batch."""
_WHOLE = (
    "gradients of a micro-batch stay whole on every device until the step ends, unless accelerator_config has"
    " sync_each_batch: priced as reduced after each, so memory is more than this"
)
"""Source: accelerate 1.15.0, accelerator.py (no_sync: set_requires_gradient_sync); transformers 5.24.0, trainer.py."""
_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
_ONE_MACHINE = "HYBRID_SHARD: the file does not say how many machines there are: priced with one replica"
_SIZES = "parallelism_config.parallelism_config_"
_KEYS = (
    "distributed_type",
    "num_processes",
    "mixed_precision",
    "fsdp_config",
    "deepspeed_config",
    "parallelism_config",
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # of FSDP1, from 1 on
_PASSED_OVER = (
    "auto_wrap_policy", "state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params",
    "transformer_layer_cls_to_wrap", "backward_prefetch", "forward_prefetch",
)  # fmt: skip


_ZERO_STAGE = 2
"""Default of `zero_stage` (accelerate 1.15.0, utils/dataclasses.py: DeepSpeedPlugin)."""
_AXOLOTL_LENGTH = "512"
"""Default of `sequence_len` (axolotl, utils/schemas/config.py, 002a637c)."""


def read(text: str, facts: Facts) -> Reading:
    """A YAML file, and the script beside it, as a reading; or the arguments of a program that is based on
    Accelerate."""
    if trainer_reading.is_trainers(text):
        return trainer_reading.read(text, facts)
    settings = settings_of(text)
    if settings.has("base_model"):
        return _read_axolotl(settings, facts)
    if not any(path.startswith(_KEYS) for path, _ in settings.all):
        raise ExportError(f"it has none of the keys of Accelerate ({', '.join(_KEYS[:3])}, ...); give its file")
    if settings.word("distributed_type", "NO") == "DEEPSPEED":
        return _read_deepspeed(settings, facts)
    return reading_of(settings, options_in(facts.beside), facts, settings, bool(facts.beside))


def reading_of(settings: Settings, options: Options, facts: Facts, said: Settings, batches: bool) -> Reading:
    """Settings in the words of Accelerate, with the arguments of its program; `said` are those of the file itself."""
    notes: list[str] = [] if batches else [common.batches_left_open(facts)]
    description = common.normalised(_read(settings, options, facts))
    synced = re.search(r"""sync_each_batch\W{1,4}true""", " ".join(options.words("accelerator_config")), re.IGNORECASE)
    if description.zero and description.micro_batches > 1 and not synced:
        notes.append(_WHOLE)
    if not settings.has("num_machines") and "HYBRID" in str(settings.value(_STRATEGY)).upper():
        notes.append(_ONE_MACHINE)
    clip = options.number("max_grad_norm", 1.0)
    update = replace(PLAIN, clip_norm=clip if clip > 0 else None) if batches else PLAIN
    _pass_over(settings)
    return Reading(
        description=replace(description, update=update),
        unmodelled=unmodelled((*said.all, ("mixed_precision: fp8", said.value("mixed_precision") == "fp8"))),
        notes=tuple(notes),
        unread=settings.unread("fsdp_config", "parallelism_config"),
        stack="fsdp",
    )


def _read_deepspeed(settings: Settings, facts: Facts) -> Reading:
    """DeepSpeed under Accelerate, with its settings in the same file."""
    of = "deepspeed_config."
    inside = {path.removeprefix(of): value for path, value in settings.all if path.startswith(of)}
    if "deepspeed_config_file" in inside:
        raise ExportError(
            "distributed_type: DEEPSPEED; import the file that deepspeed_config_file names"
            f" ({inside['deepspeed_config_file']!s:.80}), from deepspeed"
        )
    stage = settings.integer(f"{of}zero_stage", _ZERO_STAGE)
    places = {what: settings.word(f"{of}offload_{what}_device", "none") for what in ("optimizer", "param")}
    devices = facts.devices or settings.integer("num_processes", 0) or None
    said = _mixed(settings, ("no", "bf16", "fp16", "fp8"))
    in_fp8 = said == "fp8"  # bf16 but for linear layers, which is not priced (`unmodelled`)
    words = {word: said == word or (in_fp8 and word == "bf16") for word in ("bf16", "fp16")}
    content: dict[str, Any] = {
        "zero_optimization": {"stage": stage, **deepspeed.offloaded(stage, places)},
        "gradient_accumulation_steps": inside.get("gradient_accumulation_steps", 1),
        "sequence_parallel_size": settings.integer(f"{_SIZES}sp_size", 1),
        **{word: {"enabled": on} for word, on in words.items()},
    }
    if "gradient_clipping" in inside:
        content["gradient_clipping"] = inside["gradient_clipping"]
    reading = deepspeed.reading_of(Settings(content, "YAML"), replace(facts, devices=devices))
    priced = tuple(f"{of}offload_{what}_device" for what in places)
    others = (one for one in settings.all if one[0] not in priced)
    return replace(reading, unmodelled=unmodelled((*others, ("mixed_precision: fp8", in_fp8))), unread=())


def _read_axolotl(settings: Settings, facts: Facts) -> Reading:
    """A configuration of axolotl, in the words of Accelerate and of transformers' Trainer."""
    if settings.has("deepspeed"):
        raise ExportError(
            f"deepspeed: import the file that it names ({settings.value('deepspeed')!s:.80}), from deepspeed"
        )
    given = dict(settings.all)
    inside = {
        path.rpartition(".")[2].removeprefix("fsdp_"): v for path, v in given.items() if path.startswith("fsdp_config")
    }
    sharded = bool(inside) or settings.has("fsdp")
    tensor, replicate = (settings.degree(name) for name in ("tensor_parallel_size", "dp_replicate_size"))
    context = settings.degree("context_parallel_size", settings.degree("sequence_parallel_degree"))
    rest = tensor * replicate * context
    if facts.devices is None:
        raise ExportError("the file does not say how many devices there are; give --devices")
    if facts.devices % rest:
        raise ExportError(f"its degrees make {rest}, which do not divide {facts.devices} devices; give --devices")
    sizes = {
        "tp_size": tensor,
        "cp_size": context,
        "dp_replicate_size": replicate,
        "dp_shard_size": facts.devices // rest,
    }
    content: dict[str, Any] = {
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "num_processes": facts.devices,
        "mixed_precision": _axolotl_precision(given),
    }
    if sharded:
        content["fsdp_config"] = {f"fsdp_{name}": value for name, value in inside.items()}
        content["fsdp_config"]["fsdp_version"] = inside.get("version", given.get("fsdp_version", 1))
        content["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    names = {
        "micro_batch_size": "per_device_train_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "sequence_len": "block_size",
        "max_grad_norm": "max_grad_norm",
    }
    options: dict[str, tuple[str, ...]] = {
        theirs: (str(given[name]),) for name, theirs in names.items() if given.get(name) is not None
    }
    options.setdefault("block_size", (_AXOLOTL_LENGTH,))
    notes = _batch_notes(settings)
    optimizer = str(given.get("optimizer") or "adamw")
    options["optim"] = ("adamw_torch" if re.match(r"(paged_)?adamw", optimizer) else optimizer,)
    if given.get("gradient_checkpointing"):
        options["gradient_checkpointing"] = ()
    if given.get("accelerator_config.gradient_accumulation_kwargs.sync_each_batch") is True:
        options["accelerator_config"] = (SYNC_EACH_BATCH,)
    reading = reading_of(Settings(content, "YAML"), Options(options), facts, settings, True)
    description = _with_experts(reading.description, settings.degree("expert_parallel_size"))
    return replace(reading, description=description, notes=(*reading.notes, *notes))


def _batch_notes(settings: Settings) -> list[str]:
    """A note on `batch_size`, from which axolotl makes no accumulation: its steps are 1 unless they are given, before
    it is looked at (utils/schemas/training.py: HyperparametersConfig; utils/config: normalize_config)."""
    if not settings.has("batch_size"):
        return []
    wanted, micro = settings.degree("batch_size"), settings.degree("micro_batch_size")
    if settings.has("gradient_accumulation_steps"):
        raise ExportError("batch_size and gradient_accumulation_steps: axolotl takes one of them; leave one out")
    if wanted == micro:
        return []
    return [
        f"batch_size: {wanted}: axolotl accumulates nothing for it; priced with micro-batches of {micro}, one a step"
        f" (gradient_accumulation_steps: {wanted // micro or 1} says otherwise)"
    ]


def _axolotl_precision(given: Mapping[str, Any]) -> str:
    """The word of Accelerate for what axolotl computes in: bf16 unless the file says otherwise."""
    bf16 = given.get("bf16", not given.get("fp16"))
    if bf16 in (True, "auto", "full") or given.get("bfloat16"):
        return "bf16"
    return "fp16" if given.get("fp16") or given.get("float16") else "no"


def _with_experts(description: Description, degree: int) -> Description:
    """The description with experts over `degree` of the data-parallel devices."""
    if degree == 1:
        return description
    if description.expert is None:
        raise ExportError(f"expert_parallel_size: {degree}: the model has no experts; leave it out, or name another")
    if description.data % degree:
        raise ExportError(
            f"expert_parallel_size: {degree} does not divide {description.data} data parallel devices; give --devices"
        )
    return replace(description, expert=degree)


def _pass_over(settings: Settings) -> None:
    """Mark keys as read that are not part of a plan."""
    for name in _PASSED_OVER:
        settings.value(f"fsdp_config.fsdp_{name}")
    for name in ("cp_comm_strategy", "cp_backend", "sp_backend"):
        settings.value(f"{_SIZES}{name}")


def _read(settings: Settings, options: Options, facts: Facts) -> Description:
    kind = settings.word("distributed_type", "NO")
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise ExportError(
            f"distributed_type: {kind} is not supported; supported are NO, FSDP, DEEPSPEED, MULTI_GPU and other MULTI_*"
        )
    if settings.integer(f"{_SIZES}sp_size", 1) > 1:
        raise ExportError(f"{_SIZES}sp_size: sequences split by DeepSpeed are not read; cp_size is")
    tensor, context = (settings.degree(f"{_SIZES}{name}_size") for name in ("tp", "cp"))
    data = _read_data(settings, facts, tensor * context)
    zero, replicas = _read_zero(settings, data) if kind == "FSDP" else (0, 1)
    asked = [options.flag(name) for name in RECOMPUTING]
    again = settings.truth("fsdp_config.fsdp_activation_checkpointing") or any(asked)
    none = (0,)
    known = {theirs: ours for ours, theirs in PRECISIONS.items()}
    known["fp8"] = "bf16"  # only linear layers are in 8 bits, which is not priced (`unmodelled`)
    optimizers = {theirs: ours for ours, theirs in OPTIMIZERS.items()} | {"adamw_torch_fused": "adamw"}
    optim = options.word("optim", "adamw_torch")
    if optim not in optimizers:
        raise ExportError(f"--optim {optim}: plans are read with {', '.join(optimizers)}")
    return Description(
        layers=(facts.layers,),
        data=data,
        tensor=tensor,
        ring=context,
        zigzag=context > 1,
        expert=1 if facts.has_experts else None,
        zero=zero,
        replicas=replicas,
        vocabulary_parallel=tensor == 1,
        micro_batch=options.degree("per_device_train_batch_size"),
        micro_batches=options.degree("gradient_accumulation_steps"),
        full=(facts.layers,) if again else none,
        selective=none,
        precision=known[_mixed(settings, tuple(known))],
        optimizer=optimizers[optim],
        sequence_length=options.size("block_size") or facts.own_length,
    )


def _mixed(settings: Settings, known: tuple[str, ...]) -> str:
    """`mixed_precision`, of which YAML reads a bare `no` as false (accelerate, commands/config/config_args.py)."""
    return "no" if settings.value("mixed_precision") is False else settings.word("mixed_precision", "no", known)


def _read_data(settings: Settings, facts: Facts, rest: int) -> int:
    devices = settings.integer("num_processes", -1)
    devices = facts.devices or devices
    if devices < 1:
        raise ExportError("num_processes: the file leaves it open how many devices there are; give --devices")
    replicate, shard = (settings.degree(f"{_SIZES}dp_{name}_size") for name in ("replicate", "shard"))
    degrees = replicate * shard * rest
    if degrees == 1:
        return devices
    if degrees != devices:
        raise ExportError(f"the sizes of parallelism_config make {degrees} devices, and there are {devices}")
    return replicate * shard


def _read_zero(settings: Settings, data: int) -> tuple[int, int]:
    """The ZeRO stage, and the number of replicas of the groups that shard."""
    of = "fsdp_config.fsdp_"
    if settings.integer(f"{of}version", 1) == 2:
        return (
            3 if settings.truth(f"{of}reshard_after_forward", True) else 2,
            settings.degree(f"{_SIZES}dp_replicate_size"),
        )
    word = settings.value(f"{of}sharding_strategy") or settings.value(f"{of}reshard_after_forward") or "FULL_SHARD"
    number = size_of(str(word))
    name = str(word) if number is None else _STRATEGIES[number - 1] if number <= len(_STRATEGIES) else ""
    if name not in _STRATEGIES:
        raise ExportError(f"{of}sharding_strategy: {word!r:.80}; there are {', '.join(_STRATEGIES)}")
    nodes = settings.degree("num_machines") if name.startswith("HYBRID") else 1
    if data % nodes:
        raise ExportError(f"{of}sharding_strategy: {name} over {nodes} machines, which do not divide {data} devices")
    return {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}[name], nodes
