"""Reads saved tensors, box by box, whichever library wrote them.

    a folder with a manifest            sliced or merged: sizes and checksums are known
    model.safetensors.index.json        a model in Hugging Face's format: several files, or one file without an index
    one file of tensors

Files are mapped into memory, and only the bytes of a box are touched. The safetensors library refuses files with a
wrong header; a tensor that is read must have the promised shape and dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from hardware_profiles.foreign import ForeignTextError, form_fault, parse_json, read_text
from planner.errors import CheckpointError
from runtime.checkpoint.folder import checkpoints, incomplete, newest
from runtime.checkpoint.manifest import MANIFEST, Manifest, SavedFile, SavedTensor, read_manifest
from runtime.checkpoint.regions import Region, cells_meeting, whole
from runtime.checkpoint.state_names import file_key, name_of_key
from runtime.checkpoint.tensor_files import DTYPES, check_file, check_size, dtype_of, regular_size

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_OPEN = 64  # files that are mapped at a time
_NAMED = 5  # tensors that a message names; the others are counted


class Readable(Protocol):
    """Tensors that can be read box by box: a `Source`, or one under other names."""

    @property
    def path(self) -> Path:
        """Where it is."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors, by name."""

    @property
    def files(self) -> tuple[SavedFile, ...]:
        """The files."""

    @property
    def manifest(self) -> Manifest | None:
        """The manifest; None for files in another library's format."""

    @property
    def tied(self) -> Mapping[str, str]:
        """Other names of tensors."""

    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """A box of a tensor, all of it where none is given; on the CPU, or `into` a tensor of its extent."""

    def check(
        self, share: Callable[[int], bool] = lambda number: True, on_block: Callable[[], None] = lambda: None
    ) -> None:
        """Raise CheckpointError where a file differs from what was written."""

    def release(self) -> None:
        """Unmap the files."""


@dataclass(kw_only=True)
class Source:
    """Tensors of a checkpoint by name. `manifest` is None for files in another library's format, which have no
    checksums."""

    path: Path
    tensors: Mapping[str, SavedTensor]
    files: tuple[SavedFile, ...]
    manifest: Manifest | None = None
    tied: Mapping[str, str] = field(default_factory=dict)
    _opened: dict[int, Any] = field(default_factory=dict)

    def read(self, name: str, region: Region | None = None, into: torch.Tensor | None = None) -> torch.Tensor:
        """A box of a tensor, all of it where none is given; on the CPU, or `into` a tensor of its extent.

        Raises CheckpointError, naming the file, where a file is not what it should be.
        """
        tensor = self.tensors[name]
        wanted = whole(tensor.shape) if region is None else region
        found = torch.empty(wanted.extent, dtype=dtype_of(tensor.dtype)) if into is None else into
        for number, cell in cells_meeting(tensor.shape, tensor.cuts, wanted, tensor.lengths):
            common = wanted.common(cell)
            piece = self._cell(tensor.files[number], name, tensor, cell.extent)[common.within(cell)]
            found[common.within(wanted)].copy_(piece)
        return found

    def check(
        self, share: Callable[[int], bool] = lambda number: True, on_block: Callable[[], None] = lambda: None
    ) -> None:
        """Raise CheckpointError, naming the file, where a file whose number is in the `share` is missing, truncated or
        changed; `on_block` is called after every block that is read. For files without a manifest, only their presence
        is checked."""
        for number, file in enumerate(self.files):
            if self.manifest is not None and share(number):
                check_file(self.path, file, on_block)

    def release(self) -> None:
        """Unmap all files: what was read of them no longer counts as memory of this process."""
        self._opened.clear()

    def _key(self, name: str) -> str:
        """The key of a tensor in its file."""
        return file_key(name) if self.manifest is None or self.manifest.kind == "merged" else name

    def _cell(self, file: int, name: str, tensor: SavedTensor, extent: tuple[int, ...]) -> Any:
        path = self.path / self.files[file].name
        try:
            if file not in self._opened:
                if len(self._opened) >= _OPEN:
                    self._opened.pop(next(iter(self._opened)))
                if self.manifest is not None:
                    check_size(self.path, self.files[file])
                self._opened[file] = safe_open(path, "pt")
            piece = self._opened[file].get_slice(self._key(name))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: is missing; take another checkpoint") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: cannot be read: {_first_line(error)}; take another checkpoint") from error
        shape, dtype = tuple(piece.get_shape()), DTYPES.get(piece.get_dtype(), piece.get_dtype())
        if (shape, dtype) != (extent, tensor.dtype):
            raise CheckpointError(
                f"{path}: is of another checkpoint: it has '{name}' as {dtype} of shape {shape}, but the manifest says"
                f" {tensor.dtype} of shape {extent}; take another checkpoint"
            )
        return piece[...]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def located(path: Path) -> Path:
    """The file or folder of a checkpoint; in a folder with several checkpoints, the newest. Raises CheckpointError
    where there is none."""
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist; give a checkpoint folder, or a folder of several")
    if path.is_file() or any((path / name).is_file() for name in (MANIFEST, INDEX, SINGLE)):
        return path
    inside = newest(path) or next(reversed(checkpoints(path)), None)  # where all were left aside, the last one
    if inside is None:
        pickles = any(path.glob("*.bin")) or any(path.glob("*.pt")) or any(path.glob("*.distcp"))
        why = " (pickles are not read, they can run code)" if pickles else ""
        part = f"; {found[-1]}" if (found := incomplete(path)) else ""
        raise CheckpointError(
            f"{path}: has no complete checkpoint{why}; give a folder with {MANIFEST}, {INDEX} or {SINGLE} in it{part}"
        )
    return inside


def open_checkpoint(path: Path) -> Source:
    """The checkpoint at a path: its folder, a folder of several (the newest one is opened), a Hugging Face folder, or a
    file of tensors. Raises CheckpointError where there is none."""
    path = located(path)
    if path.is_file():
        return _single(path.parent, path.name)
    if not (path / MANIFEST).is_file():
        return _indexed(path) if (path / INDEX).is_file() else _single(path, SINGLE)
    manifest = read_manifest(path)
    return Source(path=path, tensors=manifest.tensors, files=manifest.files, manifest=manifest, tied=manifest.tied)


def _single(folder: Path, name: str) -> Source:
    if not name.endswith(".safetensors"):
        raise CheckpointError(
            f"{folder / name}: is not a .safetensors file; give one, or the folder of a checkpoint (pickles are not"
            " read, they can run code)"
        )
    return _foreign(folder, (name,))


class _Index(BaseModel):
    """The field that is read from an index: the file of each tensor."""

    model_config = ConfigDict(strict=True)

    weight_map: dict[str, str]


def _indexed(folder: Path) -> Source:
    try:
        weights = _Index.model_validate(parse_json(read_text(folder / INDEX))).weight_map
    except ForeignTextError as error:
        raise CheckpointError(f"{folder / INDEX}: is not an index of tensor files: {error}") from error
    except ValidationError as error:
        raise CheckpointError(f"{folder / INDEX}: is not an index of tensor files: {form_fault(error)}") from error
    names = tuple(sorted(set(weights.values())))
    for name in names:
        if name != Path(name).name:
            raise CheckpointError(f"{folder / INDEX}: {name!r} is not the name of a file in this folder")
    found = _foreign(folder, names)
    missing = sorted(key for key in weights if name_of_key(key) not in found.tensors)
    if missing:
        raise CheckpointError(f"{folder / weights[missing[0]]}: lacks '{missing[0]}', which {INDEX} says is in it")
    return found


def _foreign(folder: Path, names: tuple[str, ...]) -> Source:
    """Whole tensors in files without a manifest."""
    tensors, files = {}, []
    for number, name in enumerate(names):
        path = folder / name
        try:
            size = regular_size(path)
            with safe_open(path, "pt") as opened:
                for key in opened.offset_keys():
                    piece = opened.get_slice(key)
                    dtype, shape = piece.get_dtype(), tuple(piece.get_shape())
                    tensors[name_of_key(key)] = SavedTensor(
                        shape=shape, dtype=DTYPES.get(dtype, dtype), cuts=(1,) * len(shape), files=(number,)
                    )
            files.append(SavedFile(name=name, bytes=size, checksum=""))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: is missing; give a folder with all of its files") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: is not a tensor file: {_first_line(error)}") from error
    return Source(path=folder, tensors=tensors, files=tuple(files))


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
