"""What shards weights and states under transformers' `Trainer`: DeepSpeed, FSDP, or nothing.

    accelerate launch --use_deepspeed --zero_stage 3 ...   options of the launcher
    accelerate launch --use_fsdp --fsdp_version 2 ...
    accelerate launch --config_file zero3.yaml ...         a file of which only the name is known
    --deepspeed ds_z3_config.json                          arguments of the Trainer
    --fsdp full_shard --fsdp_config '{"version": 2}'

Source: accelerate 1.15.0, commands/launch.py; transformers 5.24.0, training_args.py (_process_fsdp_args,
_apply_legacy_fsdp_to_config).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.export.description import ExportError
from planner.export.pytorch.trainer_arguments import Given

_STAGE = re.compile(r"(?:z|zero|stage|ds)[-_]?(?:stage)?[-_]?([0-3])(?![0-9])", re.IGNORECASE)
_FSDP = re.compile(r"fsdp", re.IGNORECASE)
_DEEPSPEED = re.compile(r"zero|deepspeed|ds_", re.IGNORECASE)
_WHOLE = re.compile(r"ddp|multi[-_]?gpu|single", re.IGNORECASE)
_DEFAULT_STAGE = 2
"""Of Accelerate's launcher."""
_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
_OF_FSDP2 = ("", "full_shard", "shard_grad_op")


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """The ZeRO stage of DeepSpeed, where its `offload` puts what, and notes on how it is known."""

    stage: int
    offload: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    """FSDP in the words of Accelerate's `fsdp_config`, whether weights and states are offloaded, and notes."""

    settings: Mapping[str, Any]
    offload: bool = False
    notes: tuple[str, ...] = ()


def zero_of(given: Given) -> Zero | None:
    """What is said of DeepSpeed; None if it is not used."""
    if word := given.word("zero_stage", "deepspeed_stage"):
        if word not in ("0", "1", "2", "3"):
            raise ExportError(f"zero_stage: {word:.40}: there are 0 to 3; write one of them in the file")
        whole = {"optimizer": "cpu", "param": "cpu"} if given.truth("offload") else {}
        return Zero(stage=int(word), offload=whole | _launched_offload(given))
    launched = given.word("config_file")
    named = given.word("deepspeed", "deepspeed_config_file", "deepspeed_config")
    if (
        not named
        and launched
        and not _FSDP.search(launched)
        and (given.on("use_deepspeed") or _DEEPSPEED.search(launched))
    ):
        named = launched
    if not named:
        on = given.on("use_deepspeed")
        return Zero(stage=_DEFAULT_STAGE, offload=_launched_offload(given)) if on else None
    if named.startswith("{"):
        raise ExportError("deepspeed: its settings stand inside this file; import them from a file of their own")
    found = _STAGE.search(named.rpartition("/")[2])
    if found is None:
        raise ExportError(f"deepspeed: {named:.80}: its name does not say the stage of ZeRO; import this file instead")
    stage, away = int(found[1]), re.search(r"offload|cpu", named, re.IGNORECASE) is not None
    offload = {"optimizer": "cpu", "param": "cpu"} if away else {}
    if given.swift and re.fullmatch(r"zero[0-3](_offload)?", named):
        return Zero(stage=stage, offload=offload)
    kind = f"ZeRO {stage}" + (" with states and weights on the host" if away else "")
    return Zero(
        stage=stage,
        offload=offload,
        notes=(f"{named:.80}: read as {kind} by its name; what else this file says is not known",),
    )


def _launched_offload(given: Given) -> dict[str, str]:
    places = {what: given.word(f"offload_{what}_device") for what in ("optimizer", "param")}
    return {what: place for what, place in places.items() if place}


def fsdp_of(given: Given) -> Fsdp | None:
    """What is said of FSDP without DeepSpeed; None if it is not used.

    Raises ExportError for a file of the launcher whose name does not say whether it uses any of them.
    """
    options = {name: _value(word) for name, word in given.values.items() if name.startswith("fsdp_")}
    options.pop("fsdp_config", None)
    launched = given.word("config_file")
    if given.on("use_fsdp"):
        return Fsdp(settings=options, notes=_known_by_name(launched))
    if _of_trainer(given):
        return _trainers(given)
    if _FSDP.search(launched):
        return Fsdp(settings=options, notes=_known_by_name(launched))
    if launched and not _WHOLE.search(launched.rpartition("/")[2]) and not given.on("multi_gpu"):
        raise ExportError(
            f"config_file: {launched:.80}: its name does not say whether FSDP or DeepSpeed is used; import this file"
            " instead"
        )
    return None


def _known_by_name(path: str) -> tuple[str, ...]:
    return (f"{path:.80}: what this file says of FSDP is not known",) if path else ()


def _of_trainer(given: Given) -> bool:
    said = given.values.get("fsdp")
    if said == "" and not given.yaml:
        raise ExportError("--fsdp: nothing stands behind it; write full_shard or the like, or leave it out")
    return bool(said) and given.on("fsdp") and said != "[]"


def _trainers(given: Given) -> Fsdp:
    """The Trainer's `fsdp`, true or words, and its `fsdp_config`, whose keys may begin with fsdp_."""
    inside = {name.removeprefix("fsdp_"): _value(value) for name, value in given.section("fsdp_config").items()}
    words = re.findall(r"\w+", given.word("fsdp").lower())
    strategy = next((word for word in words if word in _STRATEGIES), "")
    version = inside.pop("version", 2 if strategy in _OF_FSDP2 else 1)
    again = inside.pop("reshard_after_forward", None)
    offload = bool(inside.pop("cpu_offload", "offload" in words))
    settings = {f"fsdp_{name}": value for name, value in inside.items()} | {"fsdp_version": version}
    if version == 1:
        settings["fsdp_sharding_strategy"] = str(again or strategy or "full_shard").upper()
    else:
        settings["fsdp_reshard_after_forward"] = strategy != "shard_grad_op" if again is None else again
    named = given.word("fsdp_config")
    return Fsdp(settings=settings, offload=offload, notes=() if named.startswith("{") else _known_by_name(named))


def _value(word: object) -> Any:
    """A word of a command line as YAML has it: a truth, a number, or itself."""
    text = str(word).strip()
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if re.fullmatch(r"\d{1,9}", text) else word
