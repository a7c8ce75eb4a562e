"""Names of a model that transformers has built, whose fused weights are taken apart here
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
from dataclasses import dataclass
from typing import Any

from planner.models.huggingface.taken_apart import Piece
from planner.models.naming.parts import Built, Naming, Part, whole
from planner.models.naming.rules import one_by_one

_MERGED, _JOINED = ("MergeModulelist", 0), ("Concatenate", 1)
"""Operations of transformers, each with its dim: experts are stacked; gate and up are joined."""


@dataclass(frozen=True, slots=True)
class _Files:
    """What files call otherwise than the module: the `sources` of stacks, by the end of their name, and parts of names
    that are `renamed`, there and here."""

    stacks: Mapping[str, tuple[str, ...]]
    renamed: Sequence[tuple[str, str]]

    def name_of(self, name: str) -> str:
        """The name in files of a tensor that has another part in the module."""
        for there, here in reversed(self.renamed):
            name = name.replace(here, there)
        return name


def naming_of_pieces(content: Mapping[str, Any], built: Built, pieces: Mapping[str, Piece], module: Any) -> Naming:
    """What transformers calls the tensors of a `module` with these pieces, by their names here, in its files. `content`
    is the config."""
    files = _files_of(module)
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


def _parts(name: str, shape: tuple[int, ...], piece: Piece | None, files: _Files) -> Iterator[Part]:
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


def _files_of(module: Any) -> _Files:
    """What transformers converts as it reads files of a model; nothing where it does more than stack and rename."""
    from transformers import conversion_mapping

    stacks, renamed = dict[str, tuple[str, ...]](), list[tuple[str, str]]()
    for one in conversion_mapping.get_checkpoint_conversion_mapping(module.config.model_type) or ():
        patterns = *one.source_patterns, *one.target_patterns
        *sources, target = (name for pattern in patterns if (name := _literal(pattern)) is not None)
        done = [(type(each).__name__, getattr(each, "dim", None)) for each in getattr(one, "operations", None) or ()]
        if len(one.target_patterns) != 1 or len(sources) + 1 != len(patterns):
            return _Files({}, ())
        if done == [_MERGED, _JOINED][: len(sources)] and all(source.count("*") == 1 for source in sources):
            stacks[target] = tuple(sources)
        elif not done and len(sources) == 1 and "*" not in sources[0] + target:
            renamed.append((sources[0], target))
        else:
            return _Files({}, ())
    return _Files(stacks, renamed)


def _literal(pattern: str) -> str | None:
    """The text of a pattern in which only dots are escaped, and stars are numbers; None for other patterns."""
    text = pattern.replace(r"\.", ".")
    return None if re.search(r"[\\^$+?()\[\]{}|]", text) else text


def _ignored(module: Any) -> Sequence[str]:
    """Patterns within names in files that transformers does not need."""
    return getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()


def _tied(module: Any, built: Built) -> list[str]:
    """Further names of tensors that are in `built` under another one."""
    return [name for name, _ in module.named_parameters(remove_duplicate=False) if name not in built]
