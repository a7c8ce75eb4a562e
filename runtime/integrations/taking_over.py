"""How both integrations take over a module, its optimizer and its checkpoints when a plan trains it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
from planner.errors import CheckpointError, PlannerError, RequestError
from planner.plan.plan import Plan
from planner.plan.writing import write_atomically
from runtime.checkpoint.folder import checkpoints, newest
from runtime.checkpoint.manifest import read_manifest
from runtime.checkpoint.saving import Checkpoints
from runtime.checkpoint.together import together
from runtime.comm.exchange import rank_number
from runtime.integrations.saved_values import values_of
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.training_step import TrainingStep

SHARDED = "sharded"
"""The folder with the runtime's checkpoint, inside of another library's checkpoint."""

CURRENT = "current.json"
"""The file beside it that holds the name of the current checkpoint."""

_VALUES = "values"

_SAME = {"lr", "betas", "eps", "weight_decay", "momentum"}  # settings that OptimizerSettings has
_OFF = ("amsgrad", "maximize", "nesterov", "dampening")  # options that no optimizer of the runtime supports


def missing(package: str, error: ImportError) -> RequestError:
    """The error where the library of an integration cannot be imported."""
    return RequestError(f"{package} cannot be imported ({error}); pip install 'parallel-planner[integrations]'")


def let_go(module: nn.Module) -> None:
    """Free the weights of a module after the ranks have taken them over: its parameters stay, without elements.
    Computing with the module then raises an error, instead of using the weights from before training."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def settings_of(optimizer: torch.optim.Optimizer, module: nn.Module, plan: Plan, prefix: str = "") -> OptimizerSettings:
    """The hyperparameters of a torch optimizer over all weights of a module, whose names in the plan begin with
    `prefix`; groups may have no weight decay. Raises RequestError for an optimizer that the runtime does not have, and
    for another one than the plan's."""
    kind = type(optimizer)
    name = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adamw", torch.optim.SGD: "sgd"}.get(kind)
    groups = optimizer.param_groups
    if name is None:
        raise RequestError(
            f"{kind.__name__}: a plan is trained with AdamW, with Adam without weight decay, or with SGD; take one of"
            " these"
        )
    if kind is torch.optim.Adam and any(group["weight_decay"] for group in groups):
        raise RequestError("Adam with weight_decay adds it to gradients, which the runtime does not; take AdamW")
    check_optimizer(name, plan)
    _check_groups(groups)
    given = {id(parameter) for group in groups for parameter in group["params"]}
    left = [name for name, one in module.named_parameters() if one.requires_grad and id(one) not in given]
    if left:
        raise RequestError(
            f"the optimizer lacks {left[0]}{f' and {len(left) - 1} more' if left[1:] else ''}, and a plan updates every"
            " weight that requires a gradient; call requires_grad_(False) on those, or give all to the optimizer"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    first = next((group for group in groups if group["weight_decay"]), groups[0])
    undecayed = (one for group in groups if group["weight_decay"] != first["weight_decay"] for one in group["params"])
    return OptimizerSettings(
        learning_rate=float(first["lr"]),
        betas=tuple(first.get("betas", (0.9, 0.999))),
        epsilon=first.get("eps", 1e-8),
        weight_decay=first["weight_decay"],
        momentum=first.get("momentum", 0.0),
        undecayed=frozenset(prefix + names[id(one)] for one in undecayed if one.requires_grad),
    )


def check_steady(optimizer: torch.optim.Optimizer, begun: Sequence[Mapping[str, Any]]) -> None:
    """Raise RequestError where something but the learning rate has changed in the groups since `begun` (copies of
    them): a schedule changed it, and the runtime follows the learning rate alone."""
    for group, before in zip(optimizer.param_groups, begun, strict=True):
        for key in sorted(_SAME - {"lr"}):
            if group.get(key) != before.get(key):
                raise RequestError(
                    f"{key} of the optimizer changed from {before.get(key)} to {group.get(key)}, and under a plan only"
                    " the learning rate changes; give OneCycleLR and CyclicLR cycle_momentum=False, and take out other"
                    " changes"
                )


def check_methods(own: object, known: type, names: Sequence[str], reason: str) -> None:
    """Raise RequestError where the user's class overrides methods that a plan does not call."""
    for name in names:
        if getattr(type(own), name, None) is not getattr(known, name, None):
            raise RequestError(f"{type(own).__name__}.{name}: {reason}")


def check_optimizer(name: str, plan: Plan) -> None:
    """Raise RequestError where the plan was made for the states of another optimizer."""
    planned = plan.training.optimizer
    if name != planned:
        raise RequestError(
            f"the optimizer is {name}, and the plan counts on the states of {planned}; plan again with --optimizer"
            f" {name}"
        )


def check_clipping(limit: float | None, option: str, plan: Plan) -> None:
    """Raise RequestError where gradients are to be clipped to another norm than the plan's; 0 and None clip nothing."""
    planned = plan.training.update.clip_norm
    if (limit or None) == planned:
        return
    here = "does not clip" if planned is None else f"clips to {planned:g}"
    again = f"plan again with --clip-norm {limit:g}" if limit else "plan again without --clip-norm"
    raise RequestError(
        f"{option}={limit!r}: the plan {here}, and clipping is part of a plan; give {option}={planned or 0:g}, or"
        f" {again}"
    )


def save_sharded(step: TrainingStep, folder: Path, values: str) -> None:
    """Write a runtime checkpoint into a folder inside of another library's checkpoint, with that library's state
    (`as_text`). It is whole or not there; an earlier one stays until then. Collective; returns when it is whole."""
    saving = Checkpoints(folder / SHARDED, keep=1, asynchronous=False)
    try:
        written = saving.save(step, data={_VALUES: values})
        saving.wait()
    finally:
        saving.close()

    def point() -> None:
        if rank_number() == 0:
            try:
                write_atomically(folder / CURRENT, json.dumps({"checkpoint": written.name}) + "\n")
            except PlannerError as error:
                raise CheckpointError(str(error)) from error

    together(point)


def saved_beside(folder: Path) -> Any:
    """The other library's state in a checkpoint of `save_sharded`. Raises CheckpointError."""
    found = _current(folder)
    data = read_manifest(found).progress.data or {}
    text = data.get(_VALUES)
    if not isinstance(text, str):
        raise CheckpointError(
            f"{found}: has nothing that this version of the runtime kept beside a plan; name a checkpoint that it saved"
        )
    return values_of(text, found)


def restore_sharded(step: TrainingStep, folder: Path) -> None:
    """Continue from a checkpoint of `save_sharded`, under any plan. Collective. Raises CheckpointError."""
    Checkpoints(folder / SHARDED, read_only=True).restore(step, _current(folder))


def _current(folder: Path) -> Path:
    """The checkpoint that was saved there last; an earlier training may have left another one with more steps."""
    try:
        content = parse_json(read_text(folder / CURRENT))
        name = content.get("checkpoint") if isinstance(content, dict) else None
    except ForeignTextError:
        name = None
    sharded = folder / SHARDED
    found = next((path for path in checkpoints(sharded) if path.name == name), None) or newest(sharded)
    if found is None:
        raise CheckpointError(
            f"{folder}: has no complete checkpoint of a plan in {SHARDED}; name one that training saved"
        )
    return found


def _check_groups(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        for key in _OFF:
            if group.get(key):
                raise RequestError(f"{key}={group[key]!r}: no optimizer of the runtime does that; leave it out")
        differing = sorted(key for key in _SAME & set(group) if group[key] != groups[0][key])
        decays = {one["weight_decay"] for one in groups}
        if differing == ["weight_decay"] and 0 in decays and len(decays) == 2:
            continue
        if differing:
            raise RequestError(
                f"the optimizer has groups of weights with several values of {differing[0]}; the runtime has one, and"
                " weights without weight decay: give the groups the same settings, and weight_decay one value or 0"
            )
