"""The manifest of a checkpoint: what is in it, and in which file; written last.

    {"digest": "…", "content": {…}}      the digest is that of the content as one line of JSON

A tensor is cut into equal cells, the last of a dim may be shorter (`regions`): `cuts` says into how many on each dim,
`files` has for each cell, row by row, the number of its file, in which it goes by the name of the tensor. Whatever is
read is checked before it is used: exact keys, counts that fit each other, names of files that are no paths.
"""

import json
import math
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
_READ = (1, 2)  # the first has no origin
_LIMITS = Limits(size=2**30, values=2**26)
MOST_DIMS = 64
"""Of a tensor: PyTorch's own limit."""
"""Of a manifest: thousands of ranks have millions of cells."""
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
class SavedTensor:
    """A tensor of a checkpoint: the shape of the whole, the name of its dtype as torch has it, where its cells are, and
    their `lengths` on each dim where it is not cut evenly (None in versions before)."""

    __pydantic_config__ = _STRICT

    shape: tuple[_Count, ...]
    dtype: str
    cuts: tuple[_Cuts, ...]
    files: tuple[_Count, ...]
    lengths: tuple[_Cuts, ...] | None = None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come: optimizer steps, updates (as many, or one for each micro-batch under "pipedream"),
    samples of the data that were used up; the seed of what is drawn at random, which with the step is all there is
    to know of it; what the user keeps of the data's position; and what the guard remembers (`runtime.step.guard`),
    where there is one that looks."""

    __pydantic_config__ = _STRICT

    step: _Count
    updates: _Count
    samples: _Count
    seed: int
    data: dict[str, Any] | None = None
    guard: GuardState | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint. `kind` is "sliced" (all of the state, a file of each rank) or "merged" (the model alone, in files
    as others have them); `optimizer` that of the states, None where there are none; `tied` other names of tensors;
    `plan` the content of the plan file that it was written under; `names` whose the names of its tensors are: the
    model's own, or in a merged one those of Hugging Face's transformers; None where files did not say; `origin` the
    run and the folder that it was saved in, None in versions before and for what was written outside of a run."""

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
        """Of all files but the manifest."""
        return sum(file.bytes for file in self.files)

    def tables_outside(self) -> frozenset[str]:
        """Its tensors that were tables outside of the devices."""
        placed = tuple((self.plan or {}).get("training", {}).get("placed", {}).items())
        return frozenset(name for name in self.tensors if place_of(name, placed) is not None)

    def per_replica(self) -> tuple[tuple[str, ...], int]:
        """The operators that replicas computed by themselves, and how many of these there were: none, and one, where
        the whole batch was computed together."""
        training = (self.plan or {}).get("training", {})
        patterns, count = tuple(training.get("per_replica", ())), training.get("replicas", 0)
        return (patterns, count) if patterns and count > 1 else ((), 1)

    def written_under(self) -> Plan | None:
        """The plan that it was written under. Raises PlanFileError where this version cannot read it."""
        return None if self.plan is None else parse_plan(json.dumps(self.plan))


def plan_content(plan: Plan) -> dict[str, Any]:
    """A plan as a manifest has it."""
    content: dict[str, Any] = parse_json(dump_plan(plan))
    return content


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder. Raises CheckpointError where it cannot be written."""
    content = asdict(manifest)
    for tensor in content["tensors"].values():
        if tensor["lengths"] is None:  # as versions before read it
            del tensor["lengths"]
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
    """What says of a file that it was written, in JSON's types. Raises pydantic's ValidationError for anything else."""
    return TypeAdapter(SavedFile).validate_json(json.dumps(content))


def _digest(content: Any) -> str:
    text = json.dumps(content, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def _is_cut(tensor: SavedTensor) -> bool:
    """Whether its cells are those of a tensor of its shape."""
    if len(tensor.cuts) != len(tensor.shape):
        return False
    if tensor.lengths is None:
        return all(map(can_be_cut, tensor.shape, tensor.cuts))
    fits = len(tensor.lengths) == len(tensor.shape)
    return fits and all(map(covered, tensor.shape, tensor.cuts, tensor.lengths))


def _fault(manifest: Manifest) -> str | None:
    """What does not fit in a manifest of the right form."""
    names = [file.name for file in manifest.files]
    if len(set(names)) < len(names):
        return "a file is listed twice"
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            return f"{name!r} is no name of a file of tensors"
    for name, tensor in manifest.tensors.items():
        if len(tensor.shape) > MOST_DIMS:
            return f"tensor '{name}' has {len(tensor.shape)} dims; tensors have {MOST_DIMS} at most"
        if not _is_cut(tensor):
            return f"tensor '{name}' of shape {tensor.shape} cannot be cut into {tensor.cuts} pieces"
        if len(tensor.files) != math.prod(tensor.cuts) or any(file >= len(names) for file in tensor.files):
            return f"tensor '{name}' has cells in files that are not listed"
    return None
