"""Hugging Face Accelerate: the YAML of `accelerate launch`, with FSDP2.

    ZeRO 0                distributed_type MULTI_GPU: DDP, without any other parallelism
    ZeRO 2, 3             distributed_type FSDP, fsdp_version 2, fsdp_reshard_after_forward false, true; there is no 1
    HSDP                  parallelism_config_dp_replicate_size copies of parallelism_config_dp_shard_size shards
    tensor                parallelism_config_tp_size: what the model's own plan cuts (`tp_plan` of transformers); its
                          norms and its embedding are whole
    context               parallelism_config_cp_size: a ring (comm strategy "alltoall") in zigzag order, beside FSDP
    recomputation         fsdp_activation_checkpointing: all blocks or none
    precision             mixed_precision: weights in fp32, computed and reduced in it

The file says nothing of batches: they are arguments of the program, which `launch.sh` hands to one that takes those of
transformers' Trainer. It is read beside the file. There are no pipelines and no expert parallelism.
Source: accelerate 1.15.0, commands/{launch,config/config_args,config/cluster}.py, parallelism_config.py,
utils/{dataclasses,launch,fsdp_utils}.py; transformers, training_args.py.
"""

from collections.abc import Mapping
from dataclasses import replace

from hardware_profiles import engine_words
from planner.export import common
from planner.export.arguments import Options, lines_of, option, options_in
from planner.export.description import Description, ExportError
from planner.export.quoting import one_line
from planner.export.settings import Settings, size_of
from planner.export.target import Facts, Giving, Job, Loss, Reading, Target
from planner.export.yaml_files import settings_of, yaml_text
from planner.sharding.update import PLAIN

_PRECISIONS = engine_words("accelerate")
_OPTIMIZERS = {"adamw": "adamw_torch", "sgd": "sgd"}
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # of FSDP1, from 1 on
_PASSED_OVER = (
    "auto_wrap_policy", "state_dict_type", "cpu_ram_efficient_loading", "sync_module_states", "use_orig_params",
    "transformer_layer_cls_to_wrap", "backward_prefetch", "forward_prefetch",
)  # fmt: skip
_SIZES = "parallelism_config.parallelism_config_"


def nearest(description: Description) -> tuple[Loss, ...]:
    """What Accelerate cannot be told."""
    common.refuse_other_training(description, "Accelerate", tuple(_OPTIMIZERS))
    _refuse(description)
    giving = Giving(description)
    common.give_up_interleave(giving)
    common.give_up_other_rings(giving)
    _give_up_splits(giving)
    _give_up_zero(giving)
    common.give_up_selective(giving, "whole blocks")
    common.give_up_partial_recomputation(giving)
    common.give_up_updates(giving)
    return tuple(giving.losses)


def _refuse(d: Description) -> None:
    """Raise ExportError for what has no place there at all."""
    if d.pipeline > 1:
        raise ExportError(
            f"Accelerate trains without pipelines, the plan has {d.pipeline} stages; plan again with --pipeline 1, or"
            " export to torch or megatron"
        )
    if d.precision not in _PRECISIONS:
        raise ExportError("the export to Accelerate is in bf16 or fp32; plan again with --precision bf16")
    if d.tensor > 1 and d.data * d.context == 1:
        raise ExportError(
            f"Accelerate launches tensor parallelism beside FSDP only, the plan has tensor {d.tensor} alone; plan again"
            " with --data 2 or more"
        )


def _give_up_splits(giving: Giving) -> None:
    d = giving.description
    if d.sequence_parallel:
        giving.up("norms", "along the sequence", "whole", sequence_parallel=False)
    if d.tensor > 1 and d.vocabulary_parallel:
        giving.up("embedding over tensor parallel devices", "vocabulary", "not cut by it", vocabulary_parallel=False)
    if d.expert is not None and (d.expert > 1 or d.whole_experts):
        giving.up("expert parallelism", d.expert, 1, expert=1, whole_experts=False)


def _give_up_zero(giving: Giving) -> None:
    d = giving.description
    if d.data * d.context == 1:
        return
    if d.replicas == d.data and d.tensor * d.context > 1:  # it refuses copies without shards beside anything else
        common.give_up_replicas(giving)
    alone = d.tensor == d.context == 1
    if d.zero == 1 or (d.zero == 0 and not alone):
        giving.up("ZeRO", d.zero, "2: without any it runs data parallelism alone, and it has no 1", zero=2)


def write(job: Job) -> Mapping[str, str]:
    """`accelerate.yaml`, and the script that starts a training program with it."""
    return {"accelerate.yaml": yaml_text(_content(job)), "launch.sh": _script(job)}


def _content(job: Job) -> dict[str, object]:
    d = job.description
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if d.zero else "MULTI_GPU" if d.devices > 1 else "NO",
        "mixed_precision": _PRECISIONS[d.precision],
        "num_machines": job.nodes,
        "num_processes": d.devices,
        "main_training_function": "main",
    }
    if not d.zero:
        return found
    found["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": d.zero == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": any(d.full),
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    sizes: dict[str, object] = {
        "dp_replicate_size": d.replicas,
        "dp_shard_size": d.data // d.replicas,
        "tp_size": d.tensor,
        "cp_size": d.context,
    }
    if d.context > 1:
        sizes["cp_comm_strategy"] = "alltoall"
    found["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    return found


def _script(job: Job) -> str:
    d = job.description
    many = job.nodes > 1
    how = (
        f"Run it on each of {job.nodes} nodes: NODE_RANK=0..{job.nodes - 1} MASTER_ADDR=first-node"
        if many
        else f"Runs on one node with {job.processes} devices:"
    )
    network = (
        ' --machine_rank "${NODE_RANK:?}" --main_process_ip "${MASTER_ADDR:?}" --main_process_port'
        ' "${MASTER_PORT:-29500}"'
        if many
        else ""
    )
    program = [
        option("per_device_train_batch_size", d.micro_batch),
        option("gradient_accumulation_steps", d.micro_batches),
        option("max_grad_norm", 0 if d.update.clip_norm is None else d.update.clip_norm),
        option("optim", _OPTIMIZERS[d.optimizer]),
    ]
    if d.sequence_length is not None:
        program.append(option("block_size", d.sequence_length))
    title = [
        f"{one_line(job.model)} with Accelerate 1.15; TRAIN is a program that takes the arguments of transformers'"
        " Trainer and",
        "--block_size, the tokens of a sample, as run_clm.py does. One that calls Accelerator itself finds how many",
        "micro-batches there are in the environment. What is given to the script goes to the program too.",
        f"{how} TRAIN=train.py bash launch.sh",
    ]
    if d.zero == 0 and any(d.full):
        program.append(option("gradient_checkpointing"))
    start = f'accelerate launch --config_file "$(dirname "$0")/accelerate.yaml"{network}'
    lines = [f"{start} \\", '  "${TRAIN:?}" \\', *(f"  {line} \\" for line in lines_of(program)), '  "$@"']
    head = "".join(f"# {line}\n" for line in title)
    export = f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={d.micro_batches}\n"
    return f"#!/usr/bin/env bash\n{head}set -euo pipefail\n{export}\n" + "\n".join(lines) + "\n"


def read(text: str, facts: Facts) -> Reading:
    """A YAML file, and the script beside it, as a description."""
    settings, options, notes = settings_of(text), options_in(facts.beside), list[str]()
    description = common.normalised(_read(settings, options, facts, notes))
    clip = options.number("max_grad_norm", 1.0)
    update = replace(PLAIN, clip_norm=clip if clip > 0 else None) if facts.beside else PLAIN
    _pass_over(settings)
    return Reading(
        description=replace(description, update=update),
        notes=(*notes, *settings.unread("fsdp_config", "parallelism_config")),
    )


def _pass_over(settings: Settings) -> None:
    """Keys that are no part of a plan."""
    for name in _PASSED_OVER:
        settings.value(f"fsdp_config.fsdp_{name}")
    for name in ("cp_comm_strategy", "cp_backend", "sp_backend"):
        settings.value(f"{_SIZES}{name}")


def _read(settings: Settings, options: Options, facts: Facts, notes: list[str]) -> Description:
    kind = settings.word("distributed_type", "NO")
    if kind == "DEEPSPEED":
        raise ExportError(
            "distributed_type: DEEPSPEED; import the file that deepspeed_config_file names, from deepspeed"
        )
    if kind not in ("NO", "FSDP") and not kind.startswith("MULTI_"):
        raise ExportError(
            f"distributed_type: {kind} is not supported; supported are NO, FSDP, MULTI_GPU and other MULTI_*"
        )
    if settings.integer(f"{_SIZES}sp_size", 1) > 1:
        raise ExportError(f"{_SIZES}sp_size: sequences split by DeepSpeed are not read; cp_size is")
    tensor, context = (settings.degree(f"{_SIZES}{name}_size") for name in ("tp", "cp"))
    data = _read_data(settings, facts, tensor * context)
    zero, replicas = _read_zero(settings, data) if kind == "FSDP" else (0, 1)
    again = settings.truth("fsdp_config.fsdp_activation_checkpointing") or options.flag("gradient_checkpointing")
    if settings.truth("fsdp_config.fsdp_offload_params"):
        notes.append("fsdp_offload_params: parameters in host memory are priced as in the device's")
    if not facts.beside:
        notes.append("the file leaves batches to the program: priced as one micro-batch of one sample on each device")
    none = (0,)
    known = {theirs: ours for ours, theirs in _PRECISIONS.items()}
    optimizers = {theirs: ours for ours, theirs in _OPTIMIZERS.items()} | {"adamw_torch_fused": "adamw"}
    optim = options.word("optim", "adamw_torch")
    if optim not in optimizers:
        raise ExportError(f"--optim {optim}: plans are read with {', '.join(optimizers)}")
    a = facts.architecture
    experts, usual = a is not None and a.experts is not None, None if a is None else a.sequence
    return Description(
        layers=(facts.layers,),
        data=data,
        tensor=tensor,
        ring=context,
        zigzag=context > 1,
        expert=1 if experts else None,
        zero=zero,
        replicas=replicas,
        vocabulary_parallel=tensor == 1,
        micro_batch=options.degree("per_device_train_batch_size"),
        micro_batches=options.degree("gradient_accumulation_steps"),
        full=(facts.layers,) if again else none,
        selective=none,
        precision=known[settings.word("mixed_precision", "no", known)],
        optimizer=optimizers[optim],
        sequence_length=options.size("block_size") or usual,
    )


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
    """The stage of ZeRO, and copies of what it shares out."""
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


ACCELERATE = Target(
    name="accelerate",
    about="Accelerate 1.15 with FSDP2: accelerate.yaml",
    main="accelerate.yaml",
    beside="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
)
