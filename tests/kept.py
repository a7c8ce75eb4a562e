"""What is slow to make and the same in every process, kept in files: traced graphs, above all.

    build/tests/<sources>/<name>.pickle      <sources>: a digest of code and configs, and versions of Python and PyTorch

Any change of these makes everything anew. The folder is the project's own and only its owner writes there, so that
pickles are safe to read. Of processes that want the same thing at once one makes it, and the others wait for it: ranks
of a pool, above all, which all want the same graph at the same time.
"""

import fcntl
import hashlib
import os
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
_CODE = (
    "costmodels", "hardware_profiles", "planner", "runtime", "tests/configs", "tests/distributed", "tests/replicas.py",
    "tests/unit/search/cases.py",
)  # fmt: skip
_KEPT = 3  # folders of sources that stay

_making = set[str]()  # by this process: it would wait for itself

T = TypeVar("T")


def kept(name: str, make: Callable[[], T]) -> T:
    """What `make` returns, or returned in another process for this `name`, which says all that it depends on beside
    our code."""
    path = _folder() / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.pickle"
    if not path.exists():
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which a process that ends gives back, however it ends
            if not path.exists():
                assert name not in _making
                _making.add(name)
                try:
                    made = make()
                finally:
                    _making.remove(name)
                own = path.with_suffix(f".{os.getpid()}")
                own.write_bytes(pickle.dumps(made))
                own.replace(path)
                return made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch's own classes, about how they are pickled
        return pickle.loads(path.read_bytes())


@cache
def _folder() -> Path:
    digest = hashlib.sha256(f"{sys.version} {torch.__version__}".encode())
    for place in _CODE:
        files = (ROOT / place).rglob("config.json" if place == "tests/configs" else "*.py")
        for path in sorted(files) or [ROOT / place]:
            digest.update(f"{path}\n".encode() + path.read_bytes())
    above = ROOT / "build" / "tests"
    folder = above / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    others = sorted((found for found in above.iterdir() if found != folder), key=lambda found: found.stat().st_mtime)
    for old in others[: max(0, len(others) + 1 - _KEPT)]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
