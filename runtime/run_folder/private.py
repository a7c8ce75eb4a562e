"""Files and folders for their owner alone, whatever the umask is."""

import os
from pathlib import Path

FILE, FOLDER = 0o600, 0o700


def opener(path: str, flags: int) -> int:
    """For `open(path, "x", opener=opener)`: a file that only its owner can read and write; links are not followed."""
    opened = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE)
    os.fchmod(opened, FILE)
    return opened


def make_folder(path: Path) -> None:
    """Create a folder. Raises FileExistsError if the name is taken."""
    os.mkdir(path, FOLDER)
    os.chmod(path, FOLDER)


def ensure_folder(path: Path) -> None:
    """Create a folder and its parents, unless they exist; existing ones keep their permissions."""
    if path.is_dir():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file atomically."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.fresh")
    fresh.unlink(missing_ok=True)
    with open(fresh, "x", encoding="utf-8", opener=opener) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
