"""Reads the arguments of transformers' `Trainer` and of tools based on it, from scripts and files of YAML or JSON.

    swift sft --model Qwen/Qwen2.5-7B --deepspeed zero3 ...         ms-swift
    model_name_or_path: ..., deepspeed: examples/ds_z3_config.json  LLaMA-Factory
    accelerate launch --config_file zero3.yaml sft.py ...           TRL, alignment-handbook, open-instruct
    deepspeed main.py --zero_stage 3 ...                            DeepSpeed-Chat

DeepSpeed or FSDP does the sharding. If a file of theirs is named but not given, only its name is known, and this is
noted. Sources: transformers, training_args.py; ms-swift, swift/arguments; LLaMA-Factory, src/llamafactory/hparams; all
as of November 2026.
"""

import re
from dataclasses import replace
from typing import Any

from planner.export.description import ExportError
from planner.export.files.arguments import Options
from planner.export.files.settings import Settings, size_of
from planner.export.pytorch import deepspeed
from planner.export.pytorch.trainer_arguments import BATCH, MARK, Given, given_in
from planner.export.pytorch.trainer_sharding import Fsdp, Zero, fsdp_of, zero_of
from planner.export.target import Facts, Reading
from planner.export.unmodelled import unmodelled

_OTHERS = re.compile(r"^base_model:|^[ \t]*[\"']?\w+_model_parallel_size[\"']?\s*:", re.MULTILINE)
_MODELS = ("model", "model_name_or_path", "model_id", "base_model_name_or_path", "model_id_or_path")
_LENGTHS = ("max_length", "max_seq_length", "model_max_length", "cutoff_len", "max_seq_len", "block_size")
_ADAPTED = ("finetuning_type", "tuner_type", "train_type", "sft_type")
_OF_ZERO = ("deepspeed", "zero_stage", "offload", "offload_optimizer_device", "offload_param_device")
"""Arguments of DeepSpeed that are priced."""
_EACH = ("nproc_per_node", "num_gpus", "gpus")
"""Devices of a machine, in the words of torchrun and of DeepSpeed's launcher."""
_SWIFT_BATCH = 16  # samples of a step that ms-swift aims at by default
_TRAINER_BATCH = 8
_LLAMA_FACTORY_LENGTH = 2048


def is_trainers(text: str) -> bool:
    """Whether a file has arguments of the `Trainer`, and none of files that are read elsewhere."""
    return MARK.search(text) is not None and _OTHERS.search(text) is None


def engine_of(text: str) -> str | None:
    """The engine of these settings, "deepspeed" or "accelerate"; None if there are none of the `Trainer`."""
    if not is_trainers(text):
        return None
    return "accelerate" if zero_of(given_in(text)) is None else "deepspeed"


def model_named(text: str) -> str:
    """The name of the model in the file; empty if it has none."""
    return given_in(text).word(*_MODELS)


def read(text: str, facts: Facts) -> Reading:
    """A script, or a file of YAML or JSON, as a reading."""
    given = given_in(text)
    devices = facts.devices or _devices(given)
    if devices is None:
        raise ExportError("the file does not say how many devices there are; give --devices")
    facts = replace(facts, devices=devices)
    zero, notes = zero_of(given), list(given.options.notes)
    fsdp = fsdp_of(given) if zero is None else None
    micro, steps, length = _sizes(given, facts, devices, notes)
    again = given.truth("gradient_checkpointing", given.swift or given.factory) or given.truth(
        "activation_checkpointing"
    )
    again = again and not given.truth("disable_gradient_checkpointing")
    precision = _precision(given)
    if precision == "fp32" and not given.word("mixed_precision", "torch_dtype", "dtype"):
        notes.append("nothing is said of bf16 or fp16: priced in fp32")
    reading = (
        _of_accelerate(given, fsdp, facts, micro, steps, again, precision, notes)
        if zero is None
        else _of_deepspeed(given, zero, facts, micro, steps, again, precision)
    )
    offloads = fsdp is not None and fsdp.offload
    described = replace(reading.description, sequence_length=length or facts.own_length)
    return replace(
        reading,
        description=described,
        unmodelled=unmodelled([*_mattering(given, zero), ("fsdp.offload_params", offloads)]),
        notes=(*(zero.notes if zero else ()), *notes, *(note for note in reading.notes if "overlap_comm" not in note)),
        unread=(),
    )


def _devices(given: Given) -> int | None:
    """Number of processes that the launcher starts; None if the file does not tell, as with 1 to 4 machines."""
    variables, machines = given.options.variables, given.machines
    each = next((found for name in _EACH if (found := size_of(given.word(name))) is not None), None)
    if each is not None:
        return given.options.scheduled if machines is None else each * machines
    if (processes := size_of(given.word("num_processes"))) is not None:
        return processes
    if given.swift:
        own, seen = variables.get("NPROC_PER_NODE"), variables.get("CUDA_VISIBLE_DEVICES", "0")
        if own is None and "," in seen:
            raise ExportError(
                f"CUDA_VISIBLE_DEVICES={seen:.40} without NPROC_PER_NODE: one process puts layers on several devices"
                " and works on one at a time, which no plan does; set NPROC_PER_NODE"
            )
        each, machines = size_of(own or "1"), size_of(variables.get("NNODES", "1"))
        return None if each is None or machines is None else each * machines
    return given.options.scheduled


def _sizes(given: Given, facts: Facts, devices: int, notes: list[str]) -> tuple[int, int, int | None]:
    """Samples of a micro-batch, micro-batches, and tokens of a sample."""
    micro = given.count(BATCH) or (1 if given.swift else _TRAINER_BATCH)
    steps = given.count("gradient_accumulation_steps")
    if steps is None:
        steps = max(1, -(-_SWIFT_BATCH // (micro * devices))) if given.swift else 1
    length = next((found for name in _LENGTHS if (found := given.count(name)) is not None), None)
    if length is None and given.factory:
        length = _LLAMA_FACTORY_LENGTH
    if length is not None and not (given.truth("packing") or given.truth("neat_packing")):
        notes.append(f"samples are priced with {length} tokens each, the most that they may have")
    return micro, steps, length


def _precision(given: Given) -> str:
    for name in ("bf16", "fp16"):
        if name in given.values and given.truth(name):
            return name
    word = given.word("mixed_precision", "torch_dtype", "dtype")
    if word in ("bf16", "bfloat16") or (not word and given.swift):
        return "bf16"
    return "fp16" if word in ("fp16", "float16") else "bf16" if given.word("pure_bf16") else "fp32"


def _of_deepspeed(
    given: Given, zero: Zero, facts: Facts, micro: int, steps: int, again: bool, precision: str
) -> Reading:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": _clip_norm(given),
        "optimizer": {"type": _of_deepspeed_optimizer(given)},
        "zero_optimization": {
            "stage": zero.stage,
            "overlap_comm": True,
            **deepspeed.offloaded(zero.stage, zero.offload),
        },
        "sequence_parallel_size": given.count("sequence_parallel_size") or 1,
    }
    if again:
        content["activation_checkpointing"] = {"number_checkpoints": facts.layers}
    if precision != "fp32":
        content[precision] = {"enabled": True}
    return deepspeed.reading_of(Settings(content, "YAML"), facts)


def _of_accelerate(
    given: Given,
    fsdp: Fsdp | None,
    facts: Facts,
    micro: int,
    steps: int,
    again: bool,
    precision: str,
    notes: list[str],
) -> Reading:
    from planner.export.pytorch.accelerate_reading import reading_of

    if given.count("sequence_parallel_size") not in (None, 1):
        raise ExportError("sequence_parallel_size: sequences split without DeepSpeed are not read")
    content: dict[str, Any] = {
        "distributed_type": "MULTI_GPU" if fsdp is None else "FSDP",
        "num_processes": facts.devices,
        "mixed_precision": "no" if precision == "fp32" else precision,
    }
    if fsdp is not None:
        content["fsdp_config"] = dict(fsdp.settings)
        notes += fsdp.notes
        if given.machines is not None:
            content["num_machines"] = given.machines
    elif facts.devices != 1:
        launched = given.word("config_file")
        said = f"{launched:.80}: its name says nothing" if launched else "nothing is said"
        notes.append(f"{said} of FSDP or DeepSpeed: priced with all weights and states on every device")
    options: dict[str, tuple[str, ...]] = {
        "per_device_train_batch_size": (str(micro),),
        "gradient_accumulation_steps": (str(steps),),
        "max_grad_norm": (given.word("max_grad_norm") or "1.0",),
        "optim": (_optimizer(given),),
        "accelerator_config": (given.word("accelerator_config"),),
    }
    if again:
        options["gradient_checkpointing"] = ()
    if precision == "bf16" and given.word("torch_dtype", "dtype") in ("bfloat16", "bf16") and not given.swift:
        notes.append("torch_dtype: weights and states are in 16 bits there; priced with weights and states in fp32")
    made = Settings(content, "YAML")
    return reading_of(made, Options(options), facts, made, True)


def _optimizer(given: Given) -> str:
    """The optimizer, from the Trainer's words; its variants of AdamW differ in where states are."""
    word = given.word("optim") or "adamw_torch"
    return "adamw_torch" if re.match(r"(paged_)?adamw", word) else word


def _of_deepspeed_optimizer(given: Given) -> str:
    """The optimizer in the words of DeepSpeed. Raises ExportError for one that plans are not read with."""
    word, known = _optimizer(given), {"adamw_torch": "AdamW", "sgd": "SGD"}
    if word not in known:
        raise ExportError(f"--optim {word:.80}: plans are read with {', '.join(known)}; write one of them in the file")
    return known[word]


def _clip_norm(given: Given) -> float:
    """The norm to which gradients are clipped; the Trainer clips to 1 unless it is told."""
    word = given.word("max_grad_norm")
    return Options({"max_grad_norm": (word,)} if word else {}).number("max_grad_norm", 1.0)


def _mattering(given: Given, zero: Zero | None) -> list[tuple[str, Any]]:
    priced = ("fsdp_config",) if zero is None else _OF_ZERO
    found: list[tuple[str, Any]] = [(name, value) for name, value in given.values.items() if name not in priced]
    found = [(name, True if value == "" else value) for name, value in found]
    kind = given.word(*_ADAPTED)
    if kind and kind != "full":
        found.append((next(name for name in _ADAPTED if name in given.values), kind))
        found.append(("adapter", kind) if "lora" in kind else ("unfrozen_parameters", kind))
    if given.word("use_peft", "use_lora") or (given.word("lora_dim") not in ("", "0")):
        found.append(("adapter", True))
    if given.word("rlhf_type", "beta", "max_prompt_length") or given.word("stage") in (
        "dpo",
        "kto",
        "ppo",
        "rm",
        "orpo",
    ):
        found.append(("rl", True))
    return found
