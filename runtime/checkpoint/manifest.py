"""The manifest of a checkpoint lists its tensors and their files. It is written last.

    {"digest": "…", "content": {…}}      digest of the content as one line of JSON

A tensor is cut into equal cells; the last cell of a dim may be shorter (`regions`). `cuts` is the number of cells on
each dim. `files` has the file number of each cell, row by row; in its file a cell has the name of the tensor. All input
is checked before it is used: exact keys, consistent counts, file names that are not paths.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import xxhash
from pydantic import ConfigDict, Field, TypeAdapter

from hardware_profiles.foreign import AbsentFileError, ForeignTextError, Limits, form_fault, parse_json, read_text
from planner.errors import CheckpointError, PlannerError
from planner.graph.placed import place_of
from planner.plan.file import dump_plan, parse_plan
from planner.plan.plan import Plan
from planner.plan.writing import write_atomically
from runtime.checkpoint.regions import can_be_cut, covered
from runtime.guard_settings import GuardState
from runtime.run_folder.identity import Origin

MANIFEST = "manifest.json"
FORMAT_VERSION = 2
_READ = (1, 2)  # version 1 has no origin
_LIMITS = Limits(size=2**30, values=2**26)
MOST_DIMS = 64
"""Dims of a tensor: PyTorch's own limit."""
"""Bytes of a manifest: a checkpoint of thousands of ranks has millions of cells."""
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Count = Annotated[int, Field(ge=0)]
_Cuts = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of a checkpoint: its name, its bytes, and the XXH3 checksum of all of them (128 bits, hexadecimal)."""

    __pydantic_config__ = _STRICT

    name: str
    bytes: _Count
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCut:
    """Where a part of a weight lies in the tensor `of` all its parts: from `start` on along `dim`."""

    __pydantic_config__ = _STRICT

    of: str
    dim: _Count
    start: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor of a checkpoint: its whole shape, torch's name of its dtype, the files of its cells, and the `lengths`
    of its cells on each dim where it is not cut evenly (None in earlier versions). `cut` says that it is a part of a
    weight that holds several matrices (`runtime.checkpoint.fused`)."""

    __pydantic_config__ = _STRICT

    shape: tuple[_Count, ...]
    dtype: str
    cuts: tuple[_Cuts, ...]
    files: tuple[_Count, ...]
    lengths: tuple[_Cuts, ...] | None = None
    cut: SavedCut | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come: optimizer steps; updates (equal to the steps, or one per micro-batch under
    "pipedream"); consumed samples; the seed of all random numbers (seed and step are their whole state); the data
    position that the user saves; and the state of the guard (`runtime.step.guard`), where a guard is on."""

    __pydantic_config__ = _STRICT

    step: _Count
    updates: _Count
    samples: _Count
    seed: int
    data: dict[str, Any] | None = None
    guard: GuardState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint. `kind` is "sliced" (the full state, one file per rank) or "merged" (the model alone, in files as
    Hugging Face writes them). `optimizer` is the one that the states belong to, None where there are none. `tied` has
    other names of tensors. `plan` is the content of the plan file under which the checkpoint was written. `names` says
    whose tensor names are used: the model's own, or in a merged checkpoint those of Hugging Face's transformers; None
    where the files did not say. `origin` is the run and the folder in which it was saved, None in earlier versions and
    for files written outside of a run."""

    __pydantic_config__ = _STRICT

    format_version: int
    kind: Literal["sliced", "merged"]
    progress: Progress
    optimizer: str | None
    files: tuple[SavedFile, ...]
    tensors: dict[str, SavedTensor]
    tied: dict[str, str] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    names: Literal["own", "huggingface"] | None = "own"
    origin: Origin | None = None

    @property
    def bytes(self) -> int:
        """Bytes of all files without the manifest."""
        return sum(file.bytes for file in self.files)

    def tables_outside(self) -> frozenset[str]:
        """The tensors that were tables off the devices."""
        placed = tuple((self.plan or {}).get("training", {}).get("placed", {}).items())
        return frozenset(name for name in self.tensors if place_of(name, placed) is not None)

    def per_replica(self) -> tuple[tuple[str, ...], int]:
        """The operators that each replica computed on its own samples, and the number of replicas; no operators and 1
        where they were computed over the whole batch."""
        training = (self.plan or {}).get("training", {})
        patterns, count = tuple(training.get("per_replica", ())), training.get("replicas", 0)
        return (patterns, count) if patterns and count > 1 else ((), 1)

    def written_under(self) -> Plan | None:
        """The plan under which it was written. Raises PlanFileError where this version cannot read the plan."""
        return None if self.plan is None else parse_plan(json.dumps(self.plan))


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as a manifest stores it."""
    content: dict[str, Any] = parse_json(dump_plan(plan))
    return content


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder. Raises CheckpointError where it cannot be written."""
    content = asdict(manifest)
    for tensor in content["tensors"].values():
        for name in [name for name in ("lengths", "cut") if tensor[name] is None]:  # as earlier versions read it
            del tensor[name]
    try:
        write_atomically(
            folder / MANIFEST, json.dumps({"digest": _digest(content), "content": content}) + "\n", private=True
        )
    except PlannerError as error:
        raise CheckpointError(str(error)) from error


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError, naming the file, where there is none or it is damaged."""
    path = folder / MANIFEST
    try:
        found = parse_json(read_text(path, _LIMITS.size), _LIMITS)
    except AbsentFileError as error:
        raise CheckpointError(f"{path}: {error}; give the folder of a checkpoint") from error
    except ForeignTextError as error:
        raise CheckpointError(f"{path}: {error}: it is damaged; take another checkpoint") from error
    if not isinstance(found, dict) or set(found) != {"digest", "content"}:
        raise CheckpointError(f"{path}: is not the manifest of a checkpoint; give the folder of one")
    content = found["content"]
    version = content.get("format_version") if isinstance(content, dict) else None
    if _digest(content) != found["digest"]:
        raise CheckpointError(
            f"{path}: is damaged: it does not have the digest that it states; take another checkpoint"
        )
    if version not in _READ:
        raise CheckpointError(
            f"{path}: is of format {version!r}, and this version reads {' and '.join(map(str, _READ))}; read it with"
            " the version that wrote it"
        )
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(content))
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path}: {form_fault(error)}; it was edited wrongly, take another one") from error
    fault = _fault(manifest)
    if fault is not None:
        raise CheckpointError(f"{path}: {fault}; it was edited wrongly, take another one")
    return manifest


def saved_file(content: Any) -> SavedFile:
    """The record of a written file, from JSON's types. Raises pydantic's ValidationError for anything else."""
    return TypeAdapter(SavedFile).validate_json(json.dumps(content))


def _digest(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _is_cut(tensor: SavedTensor) -> bool:
    """Whether the cells are consistent with the shape of the tensor."""
    if len(tensor.cuts) != len(tensor.shape):
        return False
    if tensor.lengths is None:
        return all(map(can_be_cut, tensor.shape, tensor.cuts))
    fits = len(tensor.lengths) == len(tensor.shape)
    return fits and all(map(covered, tensor.shape, tensor.cuts, tensor.lengths))


def _fault(manifest: Manifest) -> str | None:
    """What is inconsistent in a manifest of the right form."""
    names = [file.name for file in manifest.files]
    if len(set(names)) < len(names):
        return "a file is listed twice"
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            return f"{name!r} is not the name of a tensor file"
    for name, tensor in manifest.tensors.items():
        if len(tensor.shape) > MOST_DIMS:
            return f"tensor '{name}' has {len(tensor.shape)} dims; tensors have {MOST_DIMS} at most"
        if not _is_cut(tensor):
            return f"tensor '{name}' of shape {tensor.shape} cannot be cut into {tensor.cuts} pieces"
        if len(tensor.files) != math.prod(tensor.cuts) or any(file >= len(names) for file in tensor.files):
            return f"tensor '{name}' has cells in files that are not listed"
    return _cut_fault(manifest.tensors)


def _cut_fault(tensors: Mapping[str, SavedTensor]) -> str | None:
    """What is inconsistent in parts of weights: they follow each other along one dim."""
    parts = [(tensor.cut, name, tensor) for name, tensor in tensors.items() if tensor.cut is not None]
    ends: dict[str, tuple[object, int]] = {}
    for cut, name, tensor in sorted(parts, key=lambda one: (one[0].of, one[0].start)):
        rest = (cut.dim, tensor.shape[: cut.dim], tensor.shape[cut.dim + 1 :], tensor.dtype)
        known, end = ends.get(cut.of, (rest, 0))
        if cut.dim >= len(tensor.shape) or cut.of in tensors or (rest, cut.start) != (known, end):
            return f"tensor '{name}' is no part of '{cut.of}' behind the one before it"
        ends[cut.of] = rest, cut.start + tensor.shape[cut.dim]
    return None
