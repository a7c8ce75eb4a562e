"""The names of tensors in checkpoints, whatever the modules of a model are called.

    model.norm.weight                        a tensor of the model
    optimizer/exp_avg/model.norm.weight      an optimizer state of it
    previous/model.norm.weight               the weight of one update ago
    fp8/model.layers.0.mlp.up_proj.weight    amax history of the tensors of its layer
    own.weight@3                             a parameter that each device has for itself: the one of place 3 of a stage
    quoted/optimizer%2Fx.weight              a tensor of the model whose name would be read as one of these

PyTorch lets a module have any name that is not empty and has no dot. Names are data: keys of manifests and of tensor
files, never paths. Names that begin or end like one above, and the key that safetensors files reserve, are quoted as in
a URL.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

OPTIMIZER, PREVIOUS, MASTER, SCALES = "optimizer", "previous", "master", "fp8"
BESIDE = (f"{OPTIMIZER}/", f"{PREVIOUS}/", f"{SCALES}/")
"""Prefixes of the names of tensors that are kept beside the model."""

_QUOTED = "quoted/"
_METADATA = "__metadata__"
"""The header key of a safetensors file that is not a tensor."""
_PLACE = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A parsed name of a checkpoint: the tensor of the model; the place of its device, where each device has its own;
    and the kind: None for the tensor itself, "previous", "fp8", or a kind of optimizer state."""

    tensor: str
    place: int | None
    kind: str | None

    @property
    def of_optimizer(self) -> bool:
        """Whether it is an optimizer state."""
        return self.kind not in (None, PREVIOUS, SCALES)


def saved_name(name: str) -> str:
    """The name in checkpoints of a tensor of the model."""
    own = name.startswith((*BESIDE, _QUOTED)) or _PLACE.fullmatch(name) is not None or name == _METADATA
    return _QUOTED + quote(name, safe="") if own else name


def saved_ties(tied: Mapping[str, str]) -> dict[str, str]:
    """Other names of tensors of the model, each mapped to the first name, as in checkpoints."""
    return {saved_name(name): saved_name(first) for name, first in tied.items()}


def own_name(saved: str, place: int) -> str:
    """The name of one device's copy of a parameter that each device has for itself."""
    return f"{saved}@{place}"


def kept_name(kind: str, saved: str) -> str:
    """The name of an optimizer state of a tensor."""
    return f"{OPTIMIZER}/{kind}/{saved}"


def previous_name(saved: str) -> str:
    """The name of the weight of one update ago."""
    return f"{PREVIOUS}/{saved}"


def scales_name(saved: str) -> str:
    """The name of the amax history of a layer, by its weight."""
    return f"{SCALES}/{saved}"


def read_name(saved: str) -> Kept:
    """Parse a name of a checkpoint."""
    kind, rest = None, saved
    if saved.startswith(f"{OPTIMIZER}/"):
        _, kind, rest = (*saved.split("/", 2), "", "")[:3]
    elif saved.startswith((f"{PREVIOUS}/", f"{SCALES}/")):
        kind, _, rest = saved.partition("/")
    found = _PLACE.fullmatch(rest)
    base, place = (found[1], int(found[2])) if found else (rest, None)
    tensor = unquote(base.removeprefix(_QUOTED)) if base.startswith(_QUOTED) else base
    return Kept(tensor=tensor, place=place, kind=kind)


def with_tensor(kept: Kept, tensor: str) -> str:
    """The name in checkpoints of the same of another tensor of the model."""
    saved = saved_name(tensor)
    saved = saved if kept.place is None else own_name(saved, kept.place)
    if kept.kind is None:
        return saved
    return kept_name(kept.kind, saved) if kept.of_optimizer else f"{kept.kind}/{saved}"


def file_key(saved: str) -> str:
    """The key of a tensor in files of a model alone: its own name, where the format allows it."""
    tensor = read_name(saved).tensor
    return saved if tensor == _METADATA or _stays_quoted(tensor) else tensor


def name_of_key(key: str) -> str:
    """The name in checkpoints of the tensor that files of a model alone have under this key."""
    return key if _stays_quoted(key) else saved_name(key)


def _stays_quoted(key: str) -> bool:
    """Whether the key stays quoted, because files reserve the tensor's own name."""
    return key.startswith(_QUOTED) and key.endswith(_METADATA)
