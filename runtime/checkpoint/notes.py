"""Notes of the ranks that write a checkpoint: what each has written, or why it could not."""

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

_LARGEST = 2**16  # bytes of a note


def said(note: Path) -> SavedFile:
    """What a rank notes of the file that it wrote. Raises CheckpointError where it could not write, or what it noted is
    damaged."""
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
    """Where it is noted that a file has been written."""
    return (part / file).with_suffix(".json")


def leave(part: Path, file: str, content: Mapping[str, Any]) -> None:
    """A note is whole or not there."""
    note = note_of(part, file)
    fresh = note.with_suffix(".fresh")
    with open(fresh, "w", encoding="utf-8", opener=opener) as opened:
        json.dump(content, opened)
    fresh.replace(note)


def fail(part: Path, file: str, message: str) -> None:
    """Tell rank 0 that it waits in vain, where that can be written at all."""
    try:
        leave(part, file, {"error": message})
    except OSError:
        return
