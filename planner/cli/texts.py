"""Texts of files that users name."""

from pathlib import Path

from planner.errors import RequestError


def text_of(path: Path) -> str:
    """Raises RequestError where a file cannot be read as text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: cannot be read: it is not UTF-8 text") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise RequestError(f"{path}: cannot be read: {reason}") from error
