"""Files and folders for their owner alone, whatever the umask is."""

import os
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def opener(path: str, flags: int) -> int:
    """For `open(path, "x", opener=opener)`: a file that only its owner reads and writes; no link is followed."""
    opened = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE)
    os.fchmod(opened, FILE)
    return opened


def make_folder(path: Path) -> None:
    """Make a folder. Raises FileExistsError where there is anything of that name."""
    os.mkdir(path, FOLDER)
    os.chmod(path, FOLDER)


def ensure_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there: what somebody else made keeps its permissions."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def replace_text(path: Path, text: str) -> None:
    """Write a file so that it is either whole or as it was."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.fresh")
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
