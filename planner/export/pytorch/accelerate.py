"""Hugging Face Accelerate: the YAML of `accelerate launch`, with FSDP2.

    ZeRO 0                distributed_type MULTI_GPU: DDP, without any other parallelism
    ZeRO 2, 3             distributed_type FSDP, fsdp_version 2, fsdp_reshard_after_forward false, true; there is no 1
    HSDP                  parallelism_config_dp_replicate_size replicas of parallelism_config_dp_shard_size shards
    tensor                parallelism_config_tp_size: what the model's own plan cuts (`tp_plan` of transformers); its
                          norms are whole, and its embedding is priced so (transformers 5.22 cuts its vocabulary).
                          The program loads the model with a `DistributedConfig`. transformers then shards it itself,
                          as ZeRO 3, and Accelerate takes it as it is: no other ZeRO, no replicas, no context
    context               parallelism_config_cp_size: a ring (comm strategy "alltoall") in zigzag order, beside FSDP
    recomputation         fsdp_activation_checkpointing: all blocks or none; beside tensor parallelism, and without
                          FSDP, an argument of the program
    precision             mixed_precision: weights in fp32, computed and reduced in it
    micro-batches         arguments of the program; with sync_each_batch gradients are sharded after each, without it
                          they are whole on every device until a step ends

The file does not state batches. They are arguments of the program; `launch.sh` passes them to one that accepts those of
transformers' Trainer, and is read beside the file. There are no pipelines and no expert parallelism. Source: accelerate
1.15.0, commands/{launch,config/config_args,config/cluster}.py, parallelism_config.py,
utils/{dataclasses,launch,fsdp_utils}.py; transformers 5.24, training_args.py, trainer.py, and distributed/
{configuration_utils,fsdp,mixin}.py.
"""

from collections.abc import Mapping

from planner.export import common
from planner.export.description import Description, ExportError
from planner.export.files.arguments import lines_of, option
from planner.export.files.quoting import one_line
from planner.export.files.yaml_files import yaml_text
from planner.export.pytorch.accelerate_reading import OPTIMIZERS, PRECISIONS, SYNC_EACH_BATCH, read
from planner.export.target import Asked, Giving, Job, Loss, Target

_SHARDED = 3  # the ZeRO stage that gathers weights again


def nearest(description: Description) -> tuple[Loss, ...]:
    """What Accelerate cannot be told."""
    common.refuse_other_training(description, "Accelerate", tuple(OPTIMIZERS))
    _refuse(description)
    giving = Giving(description)
    common.give_up_offload(giving)
    common.give_up_interleave(giving)
    common.give_up_fp8(giving)
    common.give_up_other_rings(giving)
    _give_up_splits(giving)
    _give_up_zero(giving)
    common.give_up_selective(giving, "whole blocks")
    common.give_up_partial_recomputation(giving)
    common.give_up_updates(giving)
    return tuple(giving.losses)


def _refuse(d: Description) -> None:
    """Raise ExportError for features that Accelerate does not have at all."""
    if d.pipeline > 1:
        raise ExportError(
            f"Accelerate trains without pipelines, the plan has {d.pipeline} stages; plan again with --pipeline 1, or"
            " export to torch or megatron"
        )
    if d.precision not in PRECISIONS:
        raise ExportError("the export to Accelerate is in bf16 or fp32; plan again with --precision bf16")
    if d.tensor > 1 and d.data * d.context == 1:
        raise ExportError(
            f"Accelerate launches tensor parallelism beside FSDP only, the plan has tensor {d.tensor} alone; plan again"
            " with --data 2 or more"
        )
    if d.tensor > 1 and d.context > 1:
        raise ExportError(
            "transformers (from 5.20 on) has no context parallelism beside tensor parallelism, the plan has"
            f" tensor {d.tensor} x context {d.context}; plan again with one of them"
        )


def _give_up_splits(giving: Giving) -> None:
    d = giving.description
    if d.sequence_parallel:
        giving.up("norms", "along the sequence", "whole", sequence_parallel=False)
    if d.tensor > 1 and d.vocabulary_parallel:
        giving.up("embedding over tensor-parallel devices", "vocabulary", "replicated", vocabulary_parallel=False)
    if d.expert is not None and (d.expert > 1 or d.whole_experts):
        giving.up("expert parallelism", d.expert, 1, expert=1, whole_experts=False)


def _give_up_zero(giving: Giving) -> None:
    d = giving.description
    if d.data * d.context == 1:
        return
    if d.tensor > 1 or (d.replicas == d.data and d.context > 1):  # it refuses replicas without shards beside a context
        common.give_up_replicas(giving)
    alone = d.tensor == d.context == 1
    if d.tensor > 1 and d.zero < _SHARDED:
        giving.up("ZeRO", d.zero, "3: transformers shards models with tensor parallelism itself", zero=_SHARDED)
    elif d.zero == 1 or (d.zero == 0 and not alone):
        giving.up("ZeRO", d.zero, "2: Accelerate has no 1, and ZeRO 0 only without other parallelism", zero=2)


def write(job: Job) -> Mapping[str, str]:
    """`accelerate.yaml`, and the script that starts a training program with it.

    Raises ExportError for tensor parallelism of a model that has no plan in transformers (GPT-2), or one without
    attention (DeepSeek-V3).
    """
    a = job.architecture
    if (
        job.description.tensor > 1
        and a is not None
        and (a.family == "gpt" or (a.routing is not None and a.routing.sigmoid))
    ):
        raise ExportError(
            f"transformers has no tensor parallelism for the attention of {job.model}, the plan has"
            f" {job.description.tensor}; plan again with --tensor 1"
        )
    return {"accelerate.yaml": yaml_text(_content(job)), "launch.sh": _script(job)}


def fill_in(job: Job) -> Asked:
    """What the file leaves open."""
    d = job.description
    program = "a program that takes the arguments of transformers' `Trainer`, and `--block_size` for samples"
    if d.zero and d.micro_batches > 1:
        program += (
            "; one that calls `Accelerator` itself gives it"
            f" `GradientAccumulationPlugin(num_steps={d.micro_batches}, sync_each_batch=True)`"
        )
    if d.tensor > 1:
        narrow = ", fsdp_mixed_precision=True" if d.precision != "fp32" else ""
        program += (
            "; it loads its model with `from_pretrained(..., dtype=torch.float32, distributed_config="
            f"DistributedConfig(tp_size={d.tensor}, fsdp_size={d.data}{narrow}))` of transformers 5.22 or later, which"
            " `run_clm.py` does not"
        )
    if d.context > 1:
        program += "; its model attends with `sdpa`"
    return (("TRAIN", program), ("", "its model, data and learning rate, as arguments of `launch.sh`"))


def _content(job: Job) -> dict[str, object]:
    d = job.description
    found: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if d.zero else "MULTI_GPU" if d.devices > 1 else "NO",
        "mixed_precision": PRECISIONS[d.precision],
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
        "fsdp_activation_checkpointing": any(d.full) and not _by_program(d),
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


def _by_program(d: Description) -> bool:
    """Whether the model recomputes by itself: Accelerate wraps nothing without FSDP, nor what is sharded already
    (utils/fsdp_utils.py, fsdp2_prepare_model)."""
    return d.zero == 0 or d.tensor > 1


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
        option("optim", OPTIMIZERS[d.optimizer]),
    ]
    if d.optimizer == "sgd":
        program.append(option("optim_args", f"momentum={common.SGD_MOMENTUM}"))
    if d.zero and d.micro_batches > 1:
        program.append(option("accelerator_config", SYNC_EACH_BATCH))
    if d.sequence_length is not None:
        program.append(option("block_size", d.sequence_length))
    title = [
        f"{one_line(job.model)} with Accelerate 1.15; TRAIN is a program that takes the arguments of transformers'"
        " Trainer and",
        "--block_size, the tokens of a sample, as run_clm.py does. One that calls Accelerator itself finds how many",
        "micro-batches there are in the environment. What is given to the script goes to the program too.",
        f"{how} TRAIN=train.py bash launch.sh",
    ]
    if _by_program(d) and any(d.full):
        program.append(option("gradient_checkpointing"))
    start = f'accelerate launch --config_file "$(dirname "$0")/accelerate.yaml"{network}'
    lines = [f"{start} \\", '  "${TRAIN:?}" \\', *(f"  {line} \\" for line in lines_of(program)), '  "$@"']
    head = "".join(f"# {line}\n" for line in title)
    export = f"export ACCELERATE_GRADIENT_ACCUMULATION_STEPS={d.micro_batches}\n"
    return f"#!/usr/bin/env bash\n{head}set -euo pipefail\n{export}\n" + "\n".join(lines) + "\n"


ACCELERATE = Target(
    name="accelerate",
    about="Accelerate 1.15 with FSDP2: accelerate.yaml",
    main="accelerate.yaml",
    beside="launch.sh",
    nearest=nearest,
    write=write,
    read=read,
    fill_in=fill_in,
    latent=True,
)
