"""Names of a model that transformers has built, whose matrices of experts are taken apart here
(`planner.models.huggingface.taken_apart`).

    here                             in the module of transformers    in its files
    experts.gate_proj, E F H    ┐    experts.gate_up_proj, E 2F H ┐   experts.0.gate_proj.weight, F H
    experts.up_proj, E F H      ┘                                 ┘   experts.0.up_proj.weight, F H
    experts.down_proj, E H F         experts.down_proj, E H F         experts.0.down_proj.weight, H F   ... of each

transformers itself says which stacks its files have in parts, and what else they call otherwise. Where it does more,
names are those of the module.

Shape legend: E experts, F width, H hidden.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planner.models.huggingface.file_names import FileNames, file_names
from planner.models.huggingface.taken_apart import Piece
from planner.models.naming.parts import Built, Naming, Part, whole
from planner.models.naming.rules import one_by_one


def naming_of_pieces(content: Mapping[str, Any], built: Built, pieces: Mapping[str, Piece], module: Any) -> Naming:
    """What transformers calls the tensors of a `module` with these pieces, by their names here, in its files. `content`
    is the config."""
    files = file_names(module)
    parts = [part for name, (shape, _) in built.items() for part in _parts(name, shape, pieces.get(name), files)]
    prefix = getattr(module, "base_model_prefix", "")
    return Naming(
        parts=tuple(parts),
        config=content,
        model_types=tuple(dict.fromkeys((str(content.get("model_type")), module.config.model_type))),
        base=f"{prefix}." if prefix else "",
        unused=(*map(re.escape, _tied(module, built)), *(f".*(?:{pattern}).*" for pattern in _ignored(module))),
        built=built,
    )


def _parts(name: str, shape: tuple[int, ...], piece: Piece | None, files: FileNames) -> Iterator[Part]:
    theirs = name if piece is None else piece.theirs
    for end, sources in files.stacks.items():
        if f".{theirs}".endswith(f".{end.removeprefix('.')}") and len(sources) == (1 if piece is None else 2):
            source = sources[0 if piece is None or not piece.at else 1]
            stem = theirs[: len(theirs) - len(end.removeprefix("."))]
            yield from one_by_one(name, files.name_of(stem + source.removeprefix(".").replace("*", "{}")), shape)
            return
    if piece is None:
        yield whole(name, files.name_of(name), shape)
        return
    start, dims = (0,) * len(shape), tuple(range(len(shape)))
    there = tuple(piece.at if dim == piece.dim else 0 for dim in dims)
    yield Part(ours=name, theirs=files.name_of(theirs), at=start, extent=shape, there=there, dims=dims)


def _ignored(module: Any) -> Sequence[str]:
    """Patterns within names in files that transformers does not need."""
    return getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()


def _tied(module: Any, built: Built) -> list[str]:
    """Further names of tensors that are in `built` under another one."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in built]
