"""What files of transformers call otherwise than its modules: experts that are stacked as they are read, and renamings.

transformers has a table of conversions for each type of model. Only stacking and renaming are read of it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MERGED, _JOINED = ("MergeModulelist", 0), ("Concatenate", 1)
"""Operations of transformers, each with its dim: experts are stacked; gate and up are joined."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """What files call otherwise than the module: the `sources` of stacks, by the end of their name, and parts of names
    that are `renamed`, there and here."""

    stacks: Mapping[str, tuple[str, ...]]
    renamed: Sequence[tuple[str, str]]

    def name_of(self, name: str) -> str:
        """The name in files of a tensor that has another part in the module."""
        for there, here in reversed(self.renamed):
            name = name.replace(here, there)
        return name


def file_names(module: Any) -> FileNames:
    """What transformers converts as it reads files of a model; nothing where it does more than stack and rename."""
    from transformers import conversion_mapping

    stacks, renamed = dict[str, tuple[str, ...]](), list[tuple[str, str]]()
    for one in conversion_mapping.get_checkpoint_conversion_mapping(module.config.model_type) or ():
        patterns = [*one.source_patterns, *one.target_patterns]
        names = [name for pattern in patterns if (name := _literal(pattern)) is not None]
        if len(one.target_patterns) != 1 or len(names) != len(patterns):
            return FileNames({}, ())
        *sources, target = names
        done = [(type(each).__name__, getattr(each, "dim", None)) for each in getattr(one, "operations", None) or ()]
        if done == [_MERGED, _JOINED][: len(sources)] and all(source.count("*") == 1 for source in sources):
            stacks[target] = tuple(sources)
        elif not done and len(sources) == 1 and "*" not in sources[0] + target:
            renamed.append((sources[0], target))
        else:
            return FileNames({}, ())
    return FileNames(stacks, renamed)


def _literal(pattern: str) -> str | None:
    """The text of a pattern in which only dots are escaped, and stars are numbers; None for other patterns."""
    text = pattern.replace(r"\.", ".")
    return None if re.search(r"[\\^$+?()\[\]{}|]", text) else text
