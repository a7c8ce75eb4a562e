"""Files of tensors in the safetensors format: a header in JSON, then the bytes of every tensor. No code, no pickle.

    8 bytes     length of the header, little endian
    header      {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}, filled up with spaces
    bytes       of the tensors, end to end, row by row, wide dtypes first so that each is aligned

We write them ourselves, tensor by tensor and block by block, because the library needs all bytes at once. So a file may
be larger than memory, and its checksum is computed on the way. The library reads them.

Format: https://github.com/huggingface/safetensors (README, "Format"). Checksum: XXH3 with 128 bits. It detects
accidental damage and is no signature: whoever can change a file can change its manifest."""

import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash

from planner.errors import CheckpointError
from runtime.checkpoint.manifest import SavedFile
from runtime.run_folder.private import opener

DTYPES: Mapping[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""From dtype names of the format to those of torch."""

_WORDS = {name: word for word, name in DTYPES.items()}
_PART = 8 * 2**20  # bytes that are written, or read for a checksum, at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A tensor to be written: `blocks` gives its elements in memory order, as tensors on the CPU."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize


def dtype_of(name: str) -> torch.dtype:
    """The dtype of torch with this name. Raises CheckpointError for a dtype that tensor files do not have."""
    if name not in _WORDS:
        raise CheckpointError(f"dtype {name} cannot be in a checkpoint; those that can: {', '.join(_WORDS)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in plans and manifests."""
    return str(dtype).removeprefix("torch.")


def write_tensors(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str], on_block: Callable[[], None] = lambda: None
) -> SavedFile:
    """Write a new file that only its owner can read, and wait until it is on disk; `on_block` is called after every
    block. Raises CheckpointError where that fails."""
    ordered = sorted(entries, key=lambda entry: (-dtype_of(entry.dtype).itemsize, entry.name))
    found, total = xxhash.xxh3_128(), 0
    try:
        with open(path, "xb", buffering=2**20, opener=opener) as file:
            for part in _parts(ordered, metadata):
                found.update(part)
                file.write(part)
                total += len(part)
                on_block()
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from error
    return SavedFile(name=path.name, bytes=total, checksum=found.hexdigest())


def _parts(entries: Sequence[Entry], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield _header(entries, metadata)
    for entry in entries:
        written = 0
        for block in entry.blocks():
            raw = _bytes_of(block)
            for start in range(0, len(raw), _PART):
                yield raw[start : start + _PART]
            written += len(raw)
        assert written == entry.bytes, f"{entry.name}: {written} bytes of {entry.bytes}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in memory order; no copy if it is contiguous."""
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    content: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for entry in entries:
        stop = start + entry.bytes
        content[entry.name] = {
            "dtype": _WORDS[entry.dtype], "shape": list(entry.shape), "data_offsets": [start, stop]
        }  # fmt: skip
        start = stop
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_file(folder: Path, file: SavedFile, on_block: Callable[[], None] = lambda: None) -> None:
    """Read a file and raise CheckpointError, with its name, where it is not the file that was written; `on_block` is
    called after every block."""
    path = folder / file.name
    check_size(folder, file)
    try:
        with open(path, "rb", buffering=0) as opened:
            found = _checksum(opened, on_block)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if found != file.checksum:
        raise CheckpointError(
            f"{path}: is damaged, or of another checkpoint: its checksum is {found}, and {file.checksum} was written;"
            " take another checkpoint"
        )


def regular_size(path: Path) -> int:
    """Bytes of a file. Raises CheckpointError for anything but a regular file (opening a pipe waits for a writer, and
    reading a device may never end), OSError where there is none."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path}: is not a regular file; take another checkpoint")
    return found.st_size


def check_size(folder: Path, file: SavedFile) -> None:
    """Raise CheckpointError where a file is missing or has another size than recorded."""
    path = folder / file.name
    try:
        size = regular_size(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: is missing; take another checkpoint") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if size != file.bytes:
        what = "is truncated" if size < file.bytes else "is too long"
        raise CheckpointError(
            f"{path}: {what}: it has {size} bytes, and {file.bytes} were written; take another checkpoint"
        )


def _checksum(file: BinaryIO, on_block: Callable[[], None]) -> str:
    found, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PART))
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        found.update(buffer[:count])
        on_block()
    return found.hexdigest()
