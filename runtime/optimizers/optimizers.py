"""The optimizers by name: torch's, LAMB, and Muon with AdamW for parameters that are not hidden-layer matrices.

All of them compute updates in float32. A 16-bit weight without a float32 master (see `runtime.update.optimizer`), and
moments that a plan keeps in bfloat16, are widened for the update and rounded back (`runtime.optimizers.narrow`).
"""

import math
import numbers
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Protocol

import torch

from planner.errors import RequestError, unknown_name
from planner.sharding.matrices import ADAMW, MUON
from runtime.optimizers.lamb import Lamb, Total
from runtime.optimizers.muon import Muon, Together
from runtime.optimizers.narrow import NarrowAdamW, NarrowSGD, kept_dtype, wide_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Hyperparameters; the defaults are those of torch.optim.AdamW. `momentum` is SGD's, `muon_momentum` is Muon's;
    Muon shares rate and decay with the AdamW beside it. `undecayed` are parameters without weight decay, by their names
    in the module. `fused`: whether one kernel updates all weights; None: only on an accelerator that has such a
    kernel."""

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 1e-2
    momentum: float = 0.9
    muon_momentum: float = 0.95
    undecayed: frozenset[str] = frozenset()
    fused: bool | None = None

    def __post_init__(self) -> None:
        amounts = {
            "learning_rate": self.learning_rate, "epsilon": self.epsilon, "weight_decay": self.weight_decay,
            "momentum": self.momentum, "muon_momentum": self.muon_momentum,
        }  # fmt: skip
        for name, value in amounts.items():
            if not _is_amount(value):
                raise RequestError(f"OptimizerSettings: {name}={value!r:.40}; give a number of 0 or more{_later(name)}")
        betas: object = self.betas
        if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(_is_amount(b) and b < 1 for b in betas):
            raise RequestError(f"OptimizerSettings: betas={betas!r:.40}; give two numbers of 0 or more, below 1")

    def of_parameters(self, names: Iterable[Sequence[str]]) -> "OptimizerSettings":
        """The same settings, with `undecayed` translated to the first of each parameter's names; parts of a weight
        share its name. Raises RequestError for a name that no parameter has."""
        first: dict[str, list[str]] = {}
        for own in names:
            for name in own:
                first.setdefault(name, []).append(own[0])
        for name in sorted(self.undecayed):
            if name not in first:
                raise RequestError(f"OptimizerSettings.undecayed: {unknown_name('parameter', name, first)}")
        return replace(self, undecayed=frozenset(own for name in self.undecayed for own in first[name]))


def _is_amount(value: object) -> bool:
    """Whether a value is a finite number of 0 or more."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 <= float(value) < math.inf


def _later(name: str) -> str:
    schedules = "; a schedule is set later: step.optimizer.learning_rate = function"
    return schedules if name == "learning_rate" else ""


class Optimizer(Protocol):
    """Updates weights from their gradients."""

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state of each weight."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of groups of weights, which may be changed between steps."""

    def step(self) -> Any:
        """Update every weight that has a gradient."""


def kept_of(optimizer: Optimizer) -> list[MutableMapping[str, Any]]:
    """The states of an optimizer's weights, in their order, in place."""
    return [one.state[weight] for one, _, weight in _slots(optimizer)]


def start_moments(
    optimizer: Optimizer,
    weights: Sequence[torch.Tensor],
    moments: Sequence[Sequence[str]],
    updates: int,
    moment_dtype: str = "fp32",
) -> None:
    """Allocate the moments of all of the optimizer's weights as after `updates` updates, to be written next; none after
    0 updates."""
    for (one, group, key), weight, own in zip(_slots(optimizer), weights, moments, strict=True):
        known = one.state.pop(key, {})
        if updates:
            kept: dict[str, Any] = {kind: known.get(kind) for kind in own}
            for kind in own:
                if kept[kind] is None:
                    kept[kind] = torch.empty_like(weight, dtype=kept_dtype(moment_dtype, weight.dtype))
            if isinstance(one, Lamb):
                kept["step"] = updates
            elif isinstance(one, torch.optim.AdamW):  # a fused kernel reads the step count on the device, as in torch
                device = weight.device if group["fused"] else None
                kept["step"] = torch.tensor(float(updates), dtype=torch.float32, device=device)
            one.state[key] = kept


def _slots(optimizer: Optimizer) -> list[tuple[torch.optim.Optimizer, Mapping[str, Any], torch.Tensor]]:
    """For each weight: the optimizer that updates it, its group, and its key."""
    if isinstance(optimizer, _SideBySide):
        found = [slot for part in optimizer.parts for slot in _slots(part)]
        return [found[place] for place in optimizer.places]
    return [(optimizer, group, weight) for group in optimizer.param_groups for weight in group["params"]]  # type: ignore[misc]


Groups = Sequence[dict[str, Any]]
"""Weights with their weight decay, and whether one kernel updates them, in the form of torch's optimizers."""


def _groups(
    optimizer: str, weights: Sequence[torch.Tensor], names: Sequence[str], settings: OptimizerSettings
) -> Groups:
    """Group adjacent weights with equal settings, so that weights keep their order."""
    alike = [
        (0.0 if name in settings.undecayed else settings.weight_decay, _fused(optimizer, weight, settings))
        for weight, name in zip(weights, names, strict=True)
    ]
    runs = groupby(zip(weights, alike, strict=True), key=itemgetter(1))
    return [
        {"params": [weight for weight, _ in run], "weight_decay": decay, "fused": fused} for (decay, fused), run in runs
    ]


def _adamw(weights: Groups, settings: OptimizerSettings, total: Total, moments: str) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}
    if _is_narrow(weights, moments):
        return NarrowAdamW(list(weights), moments=moments, **common)
    return torch.optim.AdamW(list(weights), **common)


def _sgd(weights: Groups, settings: OptimizerSettings, total: Total, moments: str) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"lr": settings.learning_rate, "momentum": settings.momentum}
    if _is_narrow(weights, moments):
        return NarrowSGD(list(weights), moments=moments, **common)
    return torch.optim.SGD(list(weights), **common)


def _is_narrow(weights: Groups, moments: str) -> bool:
    """Whether weights or their moments have another dtype than the update."""
    return any(
        not weight.dtype == wide_dtype(weight.dtype) == kept_dtype(moments, weight.dtype)
        for group in weights
        for weight in group["params"]
    )


FUSED = ("adamw", "sgd")
"""The optimizers with a fused accelerator kernel."""


def _fused(name: str, weight: torch.Tensor, settings: OptimizerSettings) -> bool | None:
    """Whether a fused kernel updates a weight together with others; None: torch chooses. The kernel needs equal strides
    of weights, gradients and moments, so a weight that is a column slice of a kept one is updated without it."""
    return updates_at_once(name, weight.device.type, settings) and weight.is_contiguous()


def updates_at_once(name: str, device_type: str, settings: OptimizerSettings) -> bool | None:
    """Whether one kernel updates all contiguous weights on such a device; None: torch chooses. On an accelerator torch
    chooses a chain of kernels, which takes 2.7 times as long on an H200 (10.3 and 3.8 ms for 470 million
    parameters)."""
    if name not in FUSED:
        return None
    return (has_one_kernel(name, device_type) or None) if settings.fused is None else settings.fused


def has_one_kernel(name: str, device_type: str) -> bool:
    """Whether devices of this type are accelerators with one kernel for all updates of this optimizer."""
    if name not in FUSED or device_type in ("cpu", "meta"):
        return False
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::_fused_{name}_", key)


def _lamb(weights: Groups, settings: OptimizerSettings, total: Total, moments: str) -> torch.optim.Optimizer:
    return Lamb(
        list(weights),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        weight_decay=settings.weight_decay,
        moments=moments,
        total=total,
    )


OPTIMIZERS: Mapping[str, Callable[[Groups, OptimizerSettings, Total, str], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "lamb": _lamb,
    "sgd": _sgd,
}


MOMENTS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "muon": ("momentum_buffer",),
    "sgd": ("momentum_buffer",),
}
"""The states per element of a weight, for each optimizer, by torch's names."""


def every_moment(name: str, settings: OptimizerSettings | None = None) -> tuple[str, ...]:
    """The states that a plan with this optimizer keeps of any weight; with Muon, other parameters have AdamW's."""
    beside = MOMENTS[ADAMW] if name == MUON else ()
    return (*(MOMENTS[name] if settings is None else moments_of(name, settings)), *beside)


def moments_of(name: str, settings: OptimizerSettings) -> tuple[str, ...]:
    """The states per element that the optimizer of this name keeps after its first update."""
    return () if name == "sgd" and not settings.momentum else MOMENTS[name]


def make_optimizer(
    name: str,
    weights: Sequence[torch.Tensor],
    settings: OptimizerSettings,
    total: Total = lambda squares: squares,
    names: Sequence[str] = (),
    together: Sequence[Together] = (),
    moment_dtype: str = "fp32",
) -> Optimizer:
    """The optimizer of this name over these tensors, the parameters of these names; `total` adds up sums of squares of
    pieces (see `runtime.optimizers.lamb`). Muon updates the weights that are in a group of `together`. Moments are kept
    in the dtype that `moment_dtype` names.

    Raises RequestError for an unknown name.
    """
    if name not in (*OPTIMIZERS, MUON):
        raise RequestError(unknown_name("optimizer", name, (*OPTIMIZERS, MUON)))
    names = names or [""] * len(weights)
    if name == MUON:
        return _with_muon(weights, settings, names, together, moment_dtype)
    return OPTIMIZERS[name](_groups(name, weights, names, settings), settings, total, moment_dtype)


def _with_muon(
    weights: Sequence[torch.Tensor],
    settings: OptimizerSettings,
    names: Sequence[str],
    together: Sequence[Together],
    moment_dtype: str,
) -> Optimizer:
    """Muon over matrices, and AdamW over the others."""
    matrices = sorted(place for group in together for place in group.places)
    others = sorted({*range(len(weights))} - {*matrices})
    order = {place: at for at, place in enumerate((*matrices, *others))}
    parts: list[Optimizer] = []
    if matrices:
        groups = _groups(MUON, [weights[at] for at in matrices], [names[at] for at in matrices], settings)
        own = [replace(group, places=tuple(order[place] for place in group.places)) for group in together]
        rate, decay, momentum = settings.learning_rate, settings.weight_decay, settings.muon_momentum
        parts.append(Muon(groups, own, lr=rate, weight_decay=decay, momentum=momentum, moments=moment_dtype))
    if others:
        rest, called = [weights[at] for at in others], [names[at] for at in others]
        parts.append(make_optimizer(ADAMW, rest, settings, names=called, moment_dtype=moment_dtype))
    return _SideBySide(parts, [order[at] for at in range(len(weights))])


class _SideBySide:
    """Several optimizers, each over some of the weights; the weights of all `parts`, concatenated, are at these
    `places`."""

    def __init__(self, parts: Sequence[Optimizer], places: Sequence[int]) -> None:
        self.parts, self.places = parts, places

    @property
    def state(self) -> Mapping[Any, Any]:
        return {weight: values for part in self.parts for weight, values in part.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()
