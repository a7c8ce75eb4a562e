"""Notes of the ranks that write a checkpoint: each says what it has written, or why it could not."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hardware_profiles.foreign import ForeignTextError, form_fault, parse_json, read_text
from planner.errors import CheckpointError
from runtime.checkpoint.manifest import (
    SavedFile,
    saved_file,
)
from runtime.run_folder.private import opener

_LARGEST = 2**16  # maximum bytes of a note


def said(note: Path) -> SavedFile:
    """The file that a rank has written, from its note. Raises CheckpointError where the rank could not write, or the
    note is damaged."""
    try:
        found = parse_json(read_text(note, _LARGEST))
        if isinstance(found, dict) and isinstance(found.get("error"), str):
            raise CheckpointError(found["error"])
        return saved_file(found)
    except ForeignTextError as error:
        raise CheckpointError(f"{note}: {error}") from error
    except ValidationError as error:
        raise CheckpointError(f"{note}: {form_fault(error)}") from error


def note_of(part: Path, file: str) -> Path:
    """The path of the note that a file has been written."""
    return (part / file).with_suffix(".json")


def leave(part: Path, file: str, content: Mapping[str, Any]) -> None:
    """Write a note; it is whole or not there."""
    note = note_of(part, file)
    fresh = note.with_suffix(".fresh")
    with open(fresh, "w", encoding="utf-8", opener=opener) as opened:
        json.dump(content, opened)
    fresh.replace(note)


def fail(part: Path, file: str, message: str) -> None:
    """Tell rank 0 that the file will not come, if a note can be written at all."""
    try:
        leave(part, file, {"error": message})
    except OSError:
        return
