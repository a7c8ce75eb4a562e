"""Traced graphs of models on disk, so that a model is traced once: tracing takes a third of planning, and more for a
large model of Hugging Face, which is traced at two batches.

    FOLDER/graph-<digest of the key>.json      {"schema_version": 1, "key": {...}, "graph": text}

The key is everything that a graph depends on: the model with its changes, dtype and sequence length, the sources
of the zoo, of tracing and of this form, the build of PyTorch, and Python. For a `config.json` it is the content of the
file, wherever it is, and names, sizes and times of the sources of transformers. `planner.plan.carried` makes the text.

A file is data: JSON of exactly these keys, read without following links, only up to a size, and only in a folder in
which nobody but its owner writes; nothing in it is ever executed. If a file is broken, or has another key or form, the
model is traced anew and the file written over. So the cache costs nothing but space, and changes no result. Files are
written whole or not at all; if together they exceed `MOST` bytes, the least recently used ones are deleted.

Graphs of other models are not kept: what a factory makes depends on code that has no name. Nor are those with operators
of a model's own code, as autograd functions are (BLOOM of transformers has one): a process that has not traced the
model does not know them.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware_profiles.foreign import ForeignTextError, decoded, parse_json
from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.models.huggingface.from_config import is_config
from planner.models.overrides import canonical_reference, split_reference
from planner.models.zoo import is_of_zoo
from planner.plan.carried import LONGEST, Carried, graph_text, own_graph
from planner.plan.writing import write_atomically

SCHEMA_VERSION = 1
MOST = 64 * 2**20
"""Most bytes of all graph files together; the graph of Llama 70B takes 70 kB, that of DeepSeek-V3 130 kB."""

_SOURCES = ("graph", "models", "plan/carried.py")
"""The sources in the package `planner` that make a graph and its text."""
_OF_CONFIGS = (*_SOURCES, "sharding")
"""And the sources that decide with which batches a model computes."""
_KNOWN = ("aten.", "planner.")
"""What the names of operators begin with that every process knows: those of PyTorch, and ours."""
_PATTERN = "graph-*.json"
_LEFT = 3600.0
"""Seconds after which an unfinished file of a process counts as abandoned."""

GraphKey = Mapping[str, str | int | None]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    key: dict[str, str | int | None]
    graph: Annotated[str, Field(max_length=LONGEST)]
    only_batch: str | None = None
    notes: list[str] = []


def graph_key(reference: str, *, dtype: str, sequence_length: int | None) -> GraphKey | None:
    """Everything that the graph of a zoo model or of a `config.json` depends on; None for a model from elsewhere, and
    where it cannot be told because sources cannot be read."""
    name, _ = split_reference(reference)
    of_zoo = is_of_zoo(reference)
    if ":" in name or not (of_zoo or is_config(name)):
        return None
    canonical, config = canonical_reference(reference), dict[str, str]()
    try:
        if not of_zoo:
            path = Path(name, "config.json") if Path(name).is_dir() else Path(name)
            said = hashlib.sha256(_content(path.resolve())).hexdigest()
            config = {"config": said, "transformers": _state_of("transformers")}
            canonical = canonical.removeprefix(name)
        torch = hashlib.sha256((_folder_of("torch") / "version.py").read_bytes()).hexdigest()
        sources = _digest_of_sources(_SOURCES if of_zoo else _OF_CONFIGS)
    except OSError:
        return None
    return {
        "reference": canonical,
        "dtype": dtype,
        "sequence_length": sequence_length,
        "sources": sources,
        "torch": torch,
        "python": sys.version,
        **config,
    }


def graph_path(folder: Path, key: GraphKey) -> Path:
    """The file of a key."""
    return folder / f"graph-{hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:32]}.json"


def read_graph(folder: Path, key: GraphKey) -> Carried | None:
    """The graph that a folder keeps for a key; None where there is none that can be used."""
    path = graph_path(folder, key)
    try:
        if _fault_of(folder):
            return None
        file = _File.model_validate(parse_json(decoded(_content(path))))
        if file.key != key:
            return None
        graph = replace(own_graph(file.graph), only_batch=file.only_batch, notes=tuple(file.notes))
        if _of_the_model(graph.graph):
            return None
        os.utime(path)
    except (OSError, ForeignTextError, ValidationError, PlanFileError):
        return None
    return graph


def keep_graph(folder: Path, key: GraphKey, traced: Carried) -> str:
    """Keep a graph, as it was traced. Returns why it cannot be kept, or an empty text."""
    if traced.graph.constants:
        return "the model makes tensors in its forward pass, whose values no file has"
    if own := _of_the_model(traced.graph):
        return f"{own} is an operator of the model's own code, which is known once the model is traced"
    text = graph_text(traced.graph, batch=traced.batch, sequence_length=traced.sequence_length)
    if text is None:
        return "the graph is too long"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if fault := _fault_of(folder):
            return fault
        file = _File(
            schema_version=SCHEMA_VERSION,
            key=dict(key),
            graph=text,
            only_batch=traced.only_batch,
            notes=list(traced.notes),
        )
        write_atomically(graph_path(folder, key), file.model_dump_json(), private=True)
        _make_room(folder)
    except PlanFileError as error:
        return str(error)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def _of_the_model(graph: OperatorGraph) -> str:
    """An operator that only the model's code makes known, such as an autograd function; empty where there is none."""
    return next((op.op for op in graph.operators if not op.op.startswith(_KNOWN)), "")


def _folder_of(package: str) -> Path:
    """The folder where a package is installed; the package is not imported. Raises OSError where it is not
    installed."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"{package} is not installed")
    return Path(found.origin).parent


@functools.cache
def _state_of(package: str) -> str:
    """The state of the sources of a package, by names, sizes and times of change: thousands of files, read once in a
    process. Raises OSError."""
    root, digest = _folder_of(package), hashlib.sha256()
    for folder, inner, names in os.walk(root):
        inner.sort()
        for name in sorted(name for name in names if name.endswith(".py")):
            path = os.path.join(folder, name)
            found = os.stat(path)
            digest.update(f"{os.path.relpath(path, root)} {found.st_size} {found.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _digest_of_sources(places: Sequence[str]) -> str:
    """Digest of sources of the planner by their names and contents. Raises OSError."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for place in places:
        paths = [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py"))
        for path in paths:
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _fault_of(folder: Path) -> str:
    """Why others could have written into a folder; empty where it belongs to its owner alone. Raises OSError."""
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder}: it is no folder"
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{folder}: others may write there; take a folder of your own (chmod 700)"
    return ""


def _content(path: Path) -> bytes:
    """The content of a plain file of at most the size that is written. Raises OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(2 * LONGEST) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    return content


def _make_room(folder: Path) -> None:
    """Delete the least recently used files until all take at most `MOST` bytes, and abandoned unfinished files."""
    for path, found in _files(folder, f".{_PATTERN}.*"):
        if found.st_mtime < time.time() - _LEFT:
            path.unlink(missing_ok=True)
    files = sorted(_files(folder, _PATTERN), key=lambda one: one[1].st_mtime)
    total = sum(found.st_size for _, found in files)
    for path, found in files:
        if total <= MOST:
            break
        path.unlink(missing_ok=True)
        total -= found.st_size


def _files(folder: Path, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
    """Files with their status; files that another process deletes meanwhile are left out."""
    for path in folder.glob(pattern):
        with contextlib.suppress(FileNotFoundError):
            yield path, path.lstat()
