"""Names of a model that transformers has built, whose fused weights are taken apart here
(`planner.models.huggingface.taken_apart`)."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.models.huggingface.taken_apart import Piece
from planner.models.naming.parts import Built, Naming, Part, whole


def naming_of_pieces(content: Mapping[str, Any], built: Built, pieces: Mapping[str, Piece], module: Any) -> Naming:
    """What transformers calls the tensors of a `module` with these pieces, by their names here; the other names are its
    own. `content` is the config."""
    parts = [
        _part(pieces[name], shape) if name in pieces else whole(name, name, shape) for name, (shape, _) in built.items()
    ]
    prefix = getattr(module, "base_model_prefix", "")
    return Naming(
        parts=tuple(parts),
        config=content,
        model_types=tuple(dict.fromkeys((str(content.get("model_type")), module.config.model_type))),
        base=f"{prefix}." if prefix else "",
        unused=(*map(re.escape, _tied(module, built)), *(f".*(?:{pattern}).*" for pattern in _ignored(module))),
        built=built,
    )


def _part(piece: Piece, shape: tuple[int, ...]) -> Part:
    start = (0,) * len(shape)
    dims = tuple(range(len(shape)))
    there = tuple(piece.at if dim == piece.dim else 0 for dim in dims)
    return Part(ours=piece.ours, theirs=piece.theirs, at=start, extent=shape, there=there, dims=dims)


def _ignored(module: Any) -> Sequence[str]:
    """Patterns within names in files that transformers does not need."""
    return getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()


def _tied(module: Any, built: Built) -> list[str]:
    """Further names of tensors that are in `built` under another one."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in built]
