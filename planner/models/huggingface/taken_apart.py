"""Weights of transformers that hold several matrices, taken apart, so that tensor parallelism divides each of them.

    transformers   x ─ gate_up_proj, (2 F) x H ─ chunk ─┬─ gate      cut in two, one rank would have all of the gate,
                                                        └─ up        the other one all of what it multiplies
    here           x ─┬─ gate_up_proj.gate_proj, F x H ─── gate      each rank has half of both, as in Megatron-LM
                      └─ gate_up_proj.up_proj, F x H ───── up

A layer gives its parts joined, so code of transformers that splits them works as before; in a graph the parts are read
directly (`planner.graph.rewriting.unjoined`). Results and gradients are the same. Matrices of experts are parameters
without a layer, and are read by `gate_and_up`.

Shape legend: H hidden, E experts, F width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_HALVED = "planner_halved"
"""The attribute of experts for the dim along which gate and up lie behind each other."""

_GATE_UP = ("gate_proj", "up_proj")
_ENDINGS = ("", "_bias")
_QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A parameter `ours` that lies at `at` along the dim `dim` of the parameter `theirs` in transformers."""

    ours: str
    theirs: str
    dim: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fused:
    """A layer of a module: its attribute, the names of its parts, and their sizes, where it can be taken apart."""

    attribute: str
    parts: tuple[str, ...]
    sizes: Callable[[Any], tuple[int, ...] | None]


def _equal(attribute: str, parts: tuple[str, ...], unless: str = "") -> _Fused:
    """A layer with parts of equal size. It stays whole where the module has the setting `unless`."""

    def sizes(owner: Any) -> tuple[int, ...] | None:
        each, rest = divmod(_outputs(getattr(owner, attribute)), len(parts))
        return None if rest or (unless and getattr(owner, unless)) else (each,) * len(parts)

    return _Fused(attribute=attribute, parts=parts, sizes=sizes)


def _heads(owner: Any) -> tuple[int, ...]:
    kept = owner.num_key_value_heads * owner.head_dim
    return owner.config.num_attention_heads * owner.head_dim, kept, kept


_LLAMA_LIKE = _equal("gate_up_proj", _GATE_UP)
_PHI = _Fused(attribute="qkv_proj", parts=_QKV, sizes=_heads)
_MODERN = _equal("Wi", ("input_proj", "gate_proj"))

_FUSED: Mapping[str, _Fused] = {
    "DiaMLP": _LLAMA_LIKE,
    "GPT2Attention": _equal("c_attn", _QKV, unless="is_cross_attention"),
    "Glm4MLP": _LLAMA_LIKE,
    "Glm4vTextMLP": _LLAMA_LIKE,
    "GlmImageTextMLP": _LLAMA_LIKE,
    "GlmMLP": _LLAMA_LIKE,
    "GlmOcrTextMLP": _LLAMA_LIKE,
    "ModernBertAttention": _equal("Wqkv", _QKV),
    "ModernBertDecoderMLP": _MODERN,
    "ModernBertMLP": _MODERN,
    "MptAttention": _equal("Wqkv", _QKV, unless="clip_qkv"),
    "Phi3Attention": _PHI,
    "Phi3MLP": _LLAMA_LIKE,
    "Phi4MultimodalAttention": _PHI,
    "Phi4MultimodalMLP": _LLAMA_LIKE,
}
"""By the class of transformers 5.24 that splits what such a layer gives, and does nothing else with it."""


def take_apart(module: Any) -> None:
    """Take apart, in place, layers and experts' matrices of a model of transformers that hold several matrices. A
    parameter that is shared stays whole."""
    from torch import nn

    from planner.models.huggingface.joined_layers import TakenApart

    shared = _shared(module)
    for name, owner in list(module.named_modules()):
        kind = type(owner).__name__
        fused = _FUSED.get(kind) if type(owner).__module__.startswith("transformers.") else None
        layer = getattr(owner, fused.attribute, None) if fused is not None else None
        if fused is not None and (isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"):
            sizes = fused.sizes(owner)
            path = f"{name}.{fused.attribute}" if name else fused.attribute
            if sizes is not None and sum(sizes) == _outputs(layer) and f"{path}.weight" not in shared:
                setattr(owner, fused.attribute, TakenApart(layer, fused.parts, sizes))
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
    from planner.models.huggingface.joined_layers import TakenApart

    for name, part in module.named_modules():
        path = f"{name}." if name else ""
        if isinstance(part, TakenApart):
            for kind in ("weight", "bias"):
                found = [getattr(layer, kind) for layer in part.layers]
                if all(one is not None for one in found):
                    dim = outputs_dim(part.layers[0]) if kind == "weight" else 0
                    names = [f"{path}{own}.{kind}" for own in part.parts]
                    yield from _along(names, path + kind, dim, found)
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


def _outputs(layer: Any) -> int:
    return int(layer.weight.shape[outputs_dim(layer)])


def outputs_dim(layer: Any) -> int:
    """The dim of a layer's weight that has its outputs: the last one of a `Conv1D` of transformers."""
    return 1 if type(layer).__name__ == "Conv1D" else 0


def _shared(module: Any) -> set[str]:
    """Names of parameters that have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for found in names.values() if len(found) > 1 for name in found}
