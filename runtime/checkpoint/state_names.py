"""How checkpoints call what they keep, whatever the modules of a model are called.

    model.norm.weight                        a tensor of the model
    optimizer/exp_avg/model.norm.weight      what the optimizer keeps of it
    previous/model.norm.weight               the weight of one update ago
    fp8/model.layers.0.mlp.up_proj.weight    the largest elements of the tensors of its layer in steps before
    own.weight@3                             of a parameter that each device has for itself: that of place 3 of a stage
    quoted/optimizer%2Fx.weight              a tensor of the model whose name would be read as one of these

PyTorch lets a module be called anything that is not empty and has no dot. Names are data: they are keys of manifests
and of files of tensors, never paths. Those that begin or end like a name above, and the one key that files of tensors
keep for themselves, are quoted as in a URL.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

OPTIMIZER, PREVIOUS, MASTER, SCALES = "optimizer", "previous", "master", "fp8"
BESIDE = (f"{OPTIMIZER}/", f"{PREVIOUS}/", f"{SCALES}/")
"""How the names of tensors begin that are kept beside the model."""

_QUOTED = "quoted/"
_METADATA = "__metadata__"
"""The key of the header of a safetensors file that is no tensor."""
_PLACE = re.compile(r"(.*)@([0-9]+)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a name in a checkpoint says: the tensor of the model, the place of its device where each has its own, and
    what is kept of it: None for itself, "previous", "fp8", or a kind of the optimizer's."""

    tensor: str
    place: int | None
    kind: str | None

    @property
    def of_optimizer(self) -> bool:
        """Whether the optimizer keeps it."""
        return self.kind not in (None, PREVIOUS, SCALES)


def saved_name(name: str) -> str:
    """How checkpoints call a tensor of the model."""
    own = name.startswith((*BESIDE, _QUOTED)) or _PLACE.fullmatch(name) is not None or name == _METADATA
    return _QUOTED + quote(name, safe="") if own else name


def saved_ties(tied: Mapping[str, str]) -> dict[str, str]:
    """Other names of tensors of the model, each with the first, as checkpoints call them."""
    return {saved_name(name): saved_name(first) for name, first in tied.items()}


def own_name(saved: str, place: int) -> str:
    """The name of a parameter that each device has for itself, of one of them."""
    return f"{saved}@{place}"


def kept_name(kind: str, saved: str) -> str:
    """The name of what the optimizer keeps of a tensor."""
    return f"{OPTIMIZER}/{kind}/{saved}"


def previous_name(saved: str) -> str:
    """The name of the weight of one update ago."""
    return f"{PREVIOUS}/{saved}"


def scales_name(saved: str) -> str:
    """The name of the largest elements in steps before of the tensors of a layer, by its weight."""
    return f"{SCALES}/{saved}"


def read_name(saved: str) -> Kept:
    """What a name in a checkpoint says."""
    kind, rest = None, saved
    if saved.startswith(f"{OPTIMIZER}/"):
        _, kind, rest = (*saved.split("/", 2), "", "")[:3]
    elif saved.startswith((f"{PREVIOUS}/", f"{SCALES}/")):
        kind, _, rest = saved.partition("/")
    found = _PLACE.fullmatch(rest)
    base, place = (found[1], int(found[2])) if found else (rest, None)
    tensor = unquote(base.removeprefix(_QUOTED)) if base.startswith(_QUOTED) else base
    return Kept(tensor=tensor, place=place, kind=kind)


def file_key(saved: str) -> str:
    """How files of a model alone call one of its tensors: by its own name, where a file can have that."""
    tensor = read_name(saved).tensor
    return saved if tensor == _METADATA or _stays_quoted(tensor) else tensor


def name_of_key(key: str) -> str:
    """How checkpoints call a tensor that files of a model alone have under this key."""
    return key if _stays_quoted(key) else saved_name(key)


def _stays_quoted(key: str) -> bool:
    """Whether it is how files call a tensor whose name they keep for themselves."""
    return key.startswith(_QUOTED) and key.endswith(_METADATA)
