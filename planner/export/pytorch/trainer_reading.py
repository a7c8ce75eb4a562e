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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hardware_profiles.foreign import ForeignTextError
from planner.export.description import ExportError
from planner.export.files.arguments import Options, options_in
from planner.export.files.settings import Settings, checked_count, size_of
from planner.export.files.yaml_files import parse_yaml
from planner.export.pytorch import deepspeed
from planner.export.target import Facts, Reading
from planner.export.unmodelled import unmodelled

_BATCH = "per_device_train_batch_size"
_MARK = re.compile(rf"(?:^[ \t]*|^{{.*?)[\"']?{_BATCH}[\"']?[ \t]*:|^[^#\n]*--{_BATCH}\b", re.MULTILINE)
_OTHERS = re.compile(r"^base_model:|^[ \t]*[\"']?\w+_model_parallel_size[\"']?\s*:", re.MULTILINE)
_MODELS = ("model", "model_name_or_path", "model_id", "base_model_name_or_path", "model_id_or_path")
_LENGTHS = ("max_length", "max_seq_length", "model_max_length", "cutoff_len", "max_seq_len", "block_size")
_ADAPTED = ("finetuning_type", "tuner_type", "train_type", "sft_type")
_SWIFT_BATCH = 16  # samples of a step that ms-swift aims at by default
_TRAINER_BATCH = 8
_LLAMA_FACTORY_LENGTH = 2048
_STAGE = re.compile(r"(?:z|zero|stage|ds)[-_]?(?:stage)?[-_]?([0-3])(?![0-9])", re.IGNORECASE)
_FSDP = re.compile(r"fsdp", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Arguments by name, with the `variables` of a script and the `launcher`'s own options."""

    values: Mapping[str, str]
    options: Options
    swift: bool
    yaml: bool

    def word(self, *names: str) -> str:
        """The first of these arguments that is given and not off; else empty."""
        for name in names:
            found = self.values.get(name, "").strip()
            if found and found.lower() not in ("none", "null", "false"):
                return found
        return ""

    def truth(self, name: str, default: bool = False) -> bool:
        found = self.values.get(name)
        return default if found is None else found.strip().lower() in ("", "true", "1", "yes")

    def count(self, name: str) -> int | None:
        """A whole number of 1 or more; None if it is not given."""
        word = self.word(name)
        if not word or word == "auto":
            return None
        found = size_of(word)
        if found is None:
            kind = "a variable that the file does not set, and no" if word.startswith("$") else "no"
            raise ExportError(f"{name}: {word:.80}: {kind} number of 1 or more; write the number in the file")
        return checked_count(name, found)


def is_trainers(text: str) -> bool:
    """Whether a file has arguments of the `Trainer`, and none of files that are read elsewhere."""
    return _MARK.search(text) is not None and _OTHERS.search(text) is None


def engine_of(text: str) -> str | None:
    """The engine of these settings, "deepspeed" or "accelerate"; None if there are none of the `Trainer`."""
    if not is_trainers(text):
        return None
    return "accelerate" if _stage(_given(text))[0] is None else "deepspeed"


def model_named(text: str) -> str:
    """The name of the model in the file; empty if it has none."""
    return _given(text).word(*_MODELS)


def read(text: str, facts: Facts) -> Reading:
    """A script, or a file of YAML or JSON, as a reading."""
    given = _given(text)
    devices = facts.devices or _devices(given)
    if devices is None:
        raise ExportError("the file does not say how many devices there are; give --devices")
    facts = replace(facts, devices=devices)
    stage, offloaded, notes = _stage(given)
    micro, steps, length = _sizes(given, facts, devices, notes)
    again = given.truth("gradient_checkpointing", given.swift or _factory(given)) or given.truth(
        "activation_checkpointing"
    )
    again = again and not given.truth("disable_gradient_checkpointing")
    precision = _precision(given)
    if precision == "fp32" and not given.word("mixed_precision", "torch_dtype", "dtype"):
        notes.append("nothing is said of bf16 or fp16: priced in fp32")
    reading = (
        _of_accelerate(given, facts, micro, steps, again, precision, notes)
        if stage is None
        else _of_deepspeed(given, facts, stage, offloaded, micro, steps, again, precision)
    )
    described = replace(reading.description, sequence_length=length or facts.own_length)
    return replace(
        reading,
        description=described,
        unmodelled=unmodelled(_mattering(given)),
        notes=(*notes, *(note for note in reading.notes if "overlap_comm" not in note)),
        unread=(),
    )


def _given(text: str) -> _Given:
    if text.lstrip().startswith("{") or re.search(rf"^[\"']?{_BATCH}[\"']?\s*:", text, re.MULTILINE):
        try:
            content = parse_yaml(text)
        except ForeignTextError as error:
            raise ExportError(str(error)) from error
        values = {str(name): str(value) for name, value in content.items()} if isinstance(content, dict) else {}
        return _Given(values=values, options=Options({}), swift=False, yaml=True)
    options = options_in(text)
    values = {name.replace("-", "_"): " ".join(words) for name, words in options.all}
    return _Given(
        values=values,
        options=options,
        swift=re.search(r"\bswift(?: |/cli/)(sft|pt|rlhf)\b", text) is not None,
        yaml=False,
    )


def _factory(given: _Given) -> bool:
    """Whether it is a file of LLaMA-Factory."""
    return "finetuning_type" in given.values or "cutoff_len" in given.values


def _devices(given: _Given) -> int | None:
    """Number of processes that the launcher starts."""
    variables = given.options.variables
    for each, nodes in (("nproc_per_node", "nnodes"), ("num_gpus", "num_nodes"), ("gpus", "num_nodes")):
        found = size_of(given.word(each))
        if found is not None:
            return found * (size_of(given.word(nodes)) or 1)
    if (processes := size_of(given.word("num_processes"))) is not None:
        return processes
    if given.swift:
        own, seen = variables.get("NPROC_PER_NODE"), variables.get("CUDA_VISIBLE_DEVICES", "0")
        if own is None and "," in seen:
            raise ExportError(
                f"CUDA_VISIBLE_DEVICES={seen:.40} without NPROC_PER_NODE: one process puts layers on several devices"
                " and works on one at a time, which no plan does; set NPROC_PER_NODE"
            )
        return (size_of(own or "1") or 1) * (size_of(variables.get("NNODES", "1")) or 1)
    return given.options.scheduled


def _stage(given: _Given) -> tuple[int | None, bool, list[str]]:
    """The ZeRO stage of DeepSpeed (None if it is not used), whether states are on the host, and notes."""
    if given.word("zero_stage", "deepspeed_stage"):
        word = given.word("zero_stage", "deepspeed_stage")
        if word not in ("0", "1", "2", "3"):
            raise ExportError(f"zero_stage: {word:.40}: there are 0 to 3; write one of them in the file")
        return int(word), given.truth("offload"), []
    named = given.word("deepspeed", "deepspeed_config_file", "deepspeed_config")
    launched = given.word("config_file")
    if not named and launched and not _FSDP.search(launched):
        named = launched if re.search(r"zero|deepspeed|ds_", launched, re.IGNORECASE) else ""
    if not named:
        return None, False, []
    found = _STAGE.search(named.rpartition("/")[2])
    if found is None:
        raise ExportError(f"deepspeed: {named:.80}: its name does not say the stage of ZeRO; import this file instead")
    offloaded = re.search(r"offload|cpu", named, re.IGNORECASE) is not None
    stage = int(found[1])
    if given.swift and re.fullmatch(r"zero[0-3](_offload)?", named):
        return stage, offloaded, []
    kind = f"ZeRO {stage}" + (" with states and weights on the host" if offloaded else "")
    return stage, offloaded, [f"{named:.80}: read as {kind} by its name; what else this file says is not known"]


def _sizes(given: _Given, facts: Facts, devices: int, notes: list[str]) -> tuple[int, int, int | None]:
    """Samples of a micro-batch, micro-batches, and tokens of a sample."""
    micro = given.count(_BATCH) or (1 if given.swift else _TRAINER_BATCH)
    steps = given.count("gradient_accumulation_steps")
    if steps is None:
        steps = max(1, -(-_SWIFT_BATCH // (micro * devices))) if given.swift else 1
    length = next((found for name in _LENGTHS if (found := given.count(name)) is not None), None)
    if length is None and _factory(given):
        length = _LLAMA_FACTORY_LENGTH
    if length is not None and not (given.truth("packing") or given.truth("neat_packing")):
        notes.append(f"samples are priced with {length} tokens each, the most that they may have")
    return micro, steps, length


def _precision(given: _Given) -> str:
    for name in ("bf16", "fp16"):
        if name in given.values and given.truth(name):
            return name
    word = given.word("mixed_precision", "torch_dtype", "dtype")
    if word in ("bf16", "bfloat16") or (not word and given.swift):
        return "bf16"
    return "fp16" if word in ("fp16", "float16") else "bf16" if given.word("pure_bf16") else "fp32"


def _of_deepspeed(
    given: _Given, facts: Facts, stage: int, offloaded: bool, micro: int, steps: int, again: bool, precision: str
) -> Reading:
    content: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": _clip_norm(given),
        "optimizer": {"type": _of_deepspeed_optimizer(given)},
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        "sequence_parallel_size": given.count("sequence_parallel_size") or 1,
    }
    if offloaded and stage:
        content["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            content["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if again:
        content["activation_checkpointing"] = {"number_checkpoints": facts.layers}
    if precision != "fp32":
        content[precision] = {"enabled": True}
    return deepspeed.reading_of(Settings(content, "YAML"), facts)


def _of_accelerate(
    given: _Given, facts: Facts, micro: int, steps: int, again: bool, precision: str, notes: list[str]
) -> Reading:
    from planner.export.pytorch.accelerate_reading import reading_of

    sharded = given.word("fsdp", "use_fsdp") or ("fsdp" if _FSDP.search(given.word("config_file")) else "")
    if given.count("sequence_parallel_size") not in (None, 1):
        raise ExportError("sequence_parallel_size: sequences split without DeepSpeed are not read")
    content: dict[str, Any] = {
        "distributed_type": "FSDP" if sharded else "MULTI_GPU",
        "num_processes": facts.devices,
        "mixed_precision": "no" if precision == "fp32" else precision,
    }
    if sharded:
        content["fsdp_config"] = {"fsdp_sharding_strategy": _strategy(sharded)}
        named = given.word("fsdp_config", "config_file")
        if named and not named.startswith("{"):
            notes.append(f"{named:.80}: what this file says of FSDP is not known; read as {_strategy(sharded)}")
    elif facts.devices != 1:
        notes.append("nothing is said of FSDP or DeepSpeed: priced with all weights and states on every device")
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


def _strategy(sharded: str) -> str:
    words = sharded.lower()
    kinds = {"shard_grad_op": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD", "no_shard": "NO_SHARD"}
    return next((kind for word, kind in kinds.items() if word in words), "FULL_SHARD")


def _optimizer(given: _Given) -> str:
    """The optimizer, from the Trainer's words; its variants of AdamW differ in where states are."""
    word = given.word("optim") or "adamw_torch"
    return "adamw_torch" if re.match(r"(paged_)?adamw", word) else word


def _of_deepspeed_optimizer(given: _Given) -> str:
    """The optimizer in the words of DeepSpeed. Raises ExportError for one that plans are not read with."""
    word, known = _optimizer(given), {"adamw_torch": "AdamW", "sgd": "SGD"}
    if word not in known:
        raise ExportError(f"--optim {word:.80}: plans are read with {', '.join(known)}; write one of them in the file")
    return known[word]


def _clip_norm(given: _Given) -> float:
    """The norm to which gradients are clipped; the Trainer clips to 1 unless it is told."""
    word = given.word("max_grad_norm")
    return Options({"max_grad_norm": (word,)} if word else {}).number("max_grad_norm", 1.0)


def _mattering(given: _Given) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = [
        (name, value) for name, value in given.values.items() if name not in ("deepspeed", "zero_stage", "offload")
    ]
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
