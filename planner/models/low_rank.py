"""Low-rank adapters beside linear layers, whose own weights are frozen (Hu et al., arXiv 2106.09685, section 4.1).

    y = W x + b + alpha/r B A x        x ──┬─> W ──────────────> + ─> y
                                           └─> A (r n) ─> B (m r) ─┘
        W (m n) frozen; A uniform, B zero, so that the first step is that of the model without adapters

A module keeps its class, its weights and their names: adapters are `lora_A` and `lora_B` in it, the names that peft
writes. The addition of the adapter applies the scale, so the scale costs nothing.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn

from planner.errors import ModelError
from planner.models.adapters import Adapters

_ROUTER = re.compile(r"(?:^|\.)(?:router|wg|(?:\w*_)?gate)(?:\.|$)")
"""Names of routers, which are adapted only if asked for; `gate_proj` is none."""

_TURNED = "transformers.pytorch_utils.Conv1D"
"""The linear layer of GPT-2 in transformers, whose weight has its inputs first."""


class LowRank:
    """The base class that is put before the class of a linear layer."""

    lora_A: nn.Linear  # noqa: N815  as peft calls them
    lora_B: nn.Linear  # noqa: N815
    lora_scale: float
    lora_dropout: float
    training: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (..., n); the result (..., m)."""
        plain: torch.Tensor = super().forward(x)  # type: ignore[misc]  # of the layer
        read = nn.functional.dropout(x, self.lora_dropout, self.training) if self.lora_dropout else x
        return torch.add(plain, self.lora_B(self.lora_A(read)), alpha=self.lora_scale)


def add_adapters(module: nn.Module, adapters: Adapters, reference: str) -> None:
    """Freeze the weights of a module, and add adapters that are trained. Raises ModelError where there is nothing to
    add them to, and for names that no module has."""
    _refuse_adapted(module, reference)
    layers = dict(_chosen(module, adapters, reference))
    trained = [part for name, part in module.named_modules() if _named(name, adapters.trained)]
    if both := [name for name, part in layers.items() if any(part is one for one in trained)]:
        raise ModelError(f"{both[0]} of {reference} is in --lora-layers and --lora-trained; leave it out of one")
    _refuse_unknown(module, adapters.trained, "--lora-trained", reference)
    module.requires_grad_(False)
    for layer in layers.values():
        _add(layer, adapters)
    for part in trained:
        part.requires_grad_(True)


def _chosen(module: nn.Module, adapters: Adapters, reference: str) -> Iterator[tuple[str, nn.Module]]:
    """The layers that get adapters, with their names."""
    _refuse_unknown(module, adapters.layers, "--lora-layers", reference)
    every = list(module.named_modules())
    if adapters.layers:
        for name, layer in every:
            if _named(name, adapters.layers):
                if _widths(layer) is None:
                    raise ModelError(
                        f"--lora-layers: {name} of {reference} is a {type(layer).__name__}, and adapters stand beside"
                        " linear layers"
                    )
                yield name, layer
        return
    blocks = [name for name, part in every if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) > 1]
    inside = re.compile("|".join(rf"{re.escape(name)}\." if name else r"." for name in blocks) or r"\b\B")
    found = [(n, layer) for n, layer in every if inside.match(n) and _is_called(layer) and not _ROUTER.search(n)]
    if not found:
        raise ModelError(
            f"--lora: {reference} has no linear layers in lists of blocks; say which layers get adapters, as in"
            " --lora-layers q_proj,v_proj"
        )
    yield from found


def _refuse_unknown(module: nn.Module, names: tuple[str, ...], option: str, reference: str) -> None:
    known = [name for name, _ in module.named_modules()]
    for wanted in names:
        if not any(_named(name, (wanted,)) for name in known):
            widths = {n.rpartition(".")[2] for n, part in module.named_modules() if _widths(part) is not None}
            raise ModelError(
                f"{option} {wanted}: no module of {reference} ends in that; its linear layers are"
                f" {', '.join(sorted(widths)[:20]) or 'none'}"
            )


def _named(name: str, wanted: tuple[str, ...]) -> bool:
    """Whether a name is one of these, or ends in one after a dot."""
    return any(name == one or name.endswith(f".{one}") for one in wanted)


def _add(layer: Any, adapters: Adapters) -> None:
    widths = _widths(layer)
    assert widths is not None, "chosen layers are linear"
    read, made = widths
    where = {"device": layer.weight.device, "dtype": layer.weight.dtype, "bias": False}
    layer.lora_A, layer.lora_B = nn.Linear(read, adapters.rank, **where), nn.Linear(adapters.rank, made, **where)
    nn.init.zeros_(layer.lora_B.weight)
    layer.lora_scale, layer.lora_dropout = adapters.alpha / adapters.rank, adapters.dropout
    kind: type = type(layer)
    layer.__class__ = _with_adapters(kind)


@cache
def _with_adapters(kind: type) -> type:
    """A class of linear layers with adapters: one class for layers of the same class."""
    return type(kind.__name__, (LowRank, kind), {})


def _widths(layer: Any) -> tuple[int, int] | None:
    """Input and output widths of a linear layer; None for other modules."""
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if _called(layer) == _TURNED:
        return layer.weight.shape[0], layer.weight.shape[1]
    return None


def _is_called(layer: nn.Module) -> bool:
    """Whether it is a linear layer that is called to compute. Its owner may read its weight instead, as
    `nn.MultiheadAttention` does."""
    return _widths(layer) is not None and not isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)


def _refuse_adapted(module: nn.Module, reference: str) -> None:
    found = next((name for name, _ in module.named_modules() if name.rpartition(".")[2] in ("lora_A", "lora_B")), None)
    if found is not None:
        raise ModelError(f"--lora: {reference} has adapters already ({found}); plan it as it is, without --lora")


def _called(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__name__}"
