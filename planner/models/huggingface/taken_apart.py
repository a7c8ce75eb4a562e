"""Matrices of experts of transformers that lie in one parameter, taken apart: tensor parallelism divides each of them.

    transformers   gate_up_proj, E 2F H ─ chunk ─┬─ gate      cut in two, one rank would have all of the gate,
                                                 └─ up        the other one all of what it multiplies
    here           gate_proj, E F H ──────────────── gate     each rank has half of both
                   up_proj, E F H ────────────────── up

Results and gradients are the same. Matrices of experts are parameters without a layer, and are read by `gate_and_up`.
Those of linear layers are taken apart in the graph (`planner.graph.rewriting.fused_weights`).

Shape legend: E experts, F width, H hidden.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HALVED = "planner_halved"
"""The attribute of experts for the dim along which gate and up lie behind each other."""

_GATE_UP = ("gate_proj", "up_proj")
_ENDINGS = ("", "_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A parameter `ours` that lies at `at` along the dim `dim` of the parameter `theirs` in transformers."""

    ours: str
    theirs: str
    dim: int
    at: int


def take_apart(module: Any) -> None:
    """Take apart, in place, matrices of experts of a model of transformers that lie in one parameter."""
    for owner in list(module.modules()):
        if hasattr(owner, _HALVED):
            _halve(owner)


def mark_halved(experts: Any, dim: int) -> None:
    """Say that `gate_up_proj` of experts has the gate in the first half of a dim, and up in the second one; its bias,
    if there is one, along its last dim."""
    setattr(experts, _HALVED, dim)


def gate_and_up(experts: Any, ending: str = "") -> tuple[Any, Any]:
    """Both halves of `gate_up_proj` of experts, or with the ending "_bias" of its bias: parameters of their own where
    they have been taken apart."""
    names = [f"{name}{ending}" for name in _GATE_UP]
    if hasattr(experts, names[0]):
        gate, up = (getattr(experts, name) for name in names)
    else:
        gate, up = getattr(experts, f"gate_up_proj{ending}").chunk(2, dim=_halved_dim(experts, ending))
    return gate, up


def _halved_dim(experts: Any, ending: str) -> int:
    return 1 if ending else int(getattr(experts, _HALVED))


def _halve(experts: Any) -> None:
    """Make the halves of matrices, and of biases, parameters of their own, if they are not."""
    import torch

    for ending in _ENDINGS:
        both = getattr(experts, f"gate_up_proj{ending}", None)
        if both is not None:
            halves = [
                half.detach().clone(memory_format=torch.contiguous_format) for half in gate_and_up(experts, ending)
            ]
            delattr(experts, f"gate_up_proj{ending}")
            for name, half in zip(_GATE_UP, halves, strict=True):
                setattr(experts, f"{name}{ending}", torch.nn.Parameter(half, both.requires_grad))


def pieces_of(module: Any) -> Iterator[Piece]:
    """What has been taken apart in a model."""
    for name, part in module.named_modules():
        path = f"{name}." if name else ""
        for ending in _ENDINGS if hasattr(part, _HALVED) else ():
            names = [f"{own}{ending}" for own in _GATE_UP]
            if hasattr(part, names[0]):
                found = [getattr(part, own) for own in names]
                dim = _halved_dim(part, ending)
                yield from _along([path + own for own in names], f"{path}gate_up_proj{ending}", dim, found)


def together(module: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors of a model, each under its name in transformers."""
    import torch

    made, joined = dict(tensors), dict[tuple[str, int], list[Any]]()
    for piece in pieces_of(module):
        if piece.ours in made:
            joined.setdefault((piece.theirs, piece.dim), []).append(made.pop(piece.ours))
    return made | {name: torch.cat(found, dim=dim) for (name, dim), found in joined.items()}


def _along(names: Sequence[str], theirs: str, dim: int, found: Sequence[Any]) -> Iterator[Piece]:
    at = 0
    for name, one in zip(names, found, strict=True):
        yield Piece(ours=name, theirs=theirs, dim=dim, at=at)
        at += one.shape[dim]
