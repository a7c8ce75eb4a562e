"""What `export.json` says of a folder that `plan export` wrote: the engine and the model."""

import os
from dataclasses import dataclass
from pathlib import Path

from hardware_profiles.foreign import SETTINGS, ForeignTextError, parse_json, read_text

MARKER = "export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The engine and the model of an exported folder; None where it does not say."""

    engine: str | None = None
    model: str | None = None


def exported_as(folder: Path) -> Record:
    """What the `export.json` of a folder says; nothing for a file, or for a folder without one.

    A model counts if it is in the zoo: nothing that a file names is opened or imported.
    """
    from planner.export.targets import OPERATOR_TARGETS, TARGETS
    from planner.models.zoo import is_of_zoo

    path = folder / MARKER
    if not os.path.isfile(path):
        return Record()
    try:
        content = parse_json(read_text(path), SETTINGS)
    except ForeignTextError:  # of another tool
        return Record()
    found = content if isinstance(content, dict) else {}
    engine, model = found.get("engine"), found.get("model")
    return Record(
        engine=engine if isinstance(engine, str) and engine in {**TARGETS, **OPERATOR_TARGETS} else None,
        model=model if isinstance(model, str) and is_of_zoo(model) else None,
    )
