"""Frames: the messages between workers and servers, and the records in a server's log.

    magic 4 │ bytes of the header 4 │ bytes of the arrays 8 │ CRC-32 of both 4 │ header: JSON │ the arrays

The header has the kind, some fields, and name, dtype and shape of every array. Nothing in a frame is ever executed: it
contains only JSON and numbers. The same bytes are sent and logged, so one piece of code checks, applies and replays a
push.
"""

import json
import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError

Array = NDArray[Any]

MAGIC = b"PSF1"
_PREFIX = struct.Struct("<4sIQI")
PREFIX_BYTES = _PREFIX.size
_DTYPES = ("<i4", "<i8", "<f4", "<f8")
LARGEST_HEADER = 2**22
LARGEST_BODY = 2**31
"""Maximum bytes of the arrays of one frame; larger data is sent in several frames."""

_DEEPEST = 16  # maximum nesting of objects and lists in a header; ours have four levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: its kind, its fields, and its arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Raises RequestError for arrays or fields that are too large for one, AssertionError for a
    dtype that frames do not support."""
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    assert all(array.dtype.str in _DTYPES for array in arrays.values()), {n: a.dtype.str for n, a in arrays.items()}
    size = sum(array.nbytes for array in arrays.values())
    if size > LARGEST_BODY:
        raise RequestError(f"a message '{frame.kind}' of {size} bytes; the limit is {LARGEST_BODY}: make it smaller")
    content = {
        "kind": frame.kind,
        "fields": dict(frame.fields),
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
    }
    header = json.dumps(content).encode()
    if len(header) > LARGEST_HEADER:
        raise RequestError(
            f"a message '{frame.kind:.80}' with a header of {len(header)} bytes; the limit is {LARGEST_HEADER}:"
            " name fewer tables in it, or shorter ones"
        )
    body = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]  # the memory itself, no copy
    crc = zlib.crc32(header)
    for part in body:
        crc = zlib.crc32(part, crc)
    return b"".join([_PREFIX.pack(MAGIC, len(header), size, crc), header, *body])


def decode(prefix: bytes, content: memoryview) -> Frame:
    """The frame with this prefix and content. Raises only ValueError, for one that is damaged or was not made by
    `encode`; no memory is allocated for what its header promises."""
    _, size, _, crc = _PREFIX.unpack(prefix)
    if zlib.crc32(content) != crc:
        raise ValueError("its checksum does not match")
    header = _header(bytes(content[:size]))
    arrays, at = {}, size
    for name, dtype, shape in header["arrays"]:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes > len(content) - at:
            raise ValueError(f"array '{name}' of shape {shape} has {nbytes} bytes, and {len(content) - at} are left")
        arrays[name] = np.frombuffer(content[at : at + nbytes], dtype=dtype).reshape(shape)
        at += nbytes
    if at != len(content):
        raise ValueError(f"{len(content) - at} bytes belong to no array")
    return Frame(kind=header["kind"], fields=header["fields"], arrays=arrays)


def _header(data: bytes) -> dict[str, Any]:
    """A header with kind, fields and arrays as `encode` writes them. Raises ValueError."""
    try:
        header = json.loads(data)
    except RecursionError:
        raise ValueError("its header is too deep") from None
    if data.count(b"[") + data.count(b"{") > _DEEPEST and _depth(header) > _DEEPEST:
        raise ValueError("its header is too deep")
    if not (isinstance(header, dict) and header.keys() == {"kind", "fields", "arrays"}):
        raise ValueError("its header does not have a kind, fields and arrays")
    kind, fields, arrays = header["kind"], header["fields"], header["arrays"]
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(arrays, list)):
        raise ValueError("its header has a kind, fields or arrays of another type")
    for one in arrays:
        if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and _is_shape(one[2])):
            raise ValueError(f"an array is described as {str(one)[:80]}")
        if one[1] not in _DTYPES:
            raise ValueError(f"array '{one[0]}' has dtype {str(one[1])[:80]}")
    return header


def _is_shape(shape: object) -> bool:
    """Whether this is a list of up to four sizes; no frame is large enough for a size of 2^40."""
    return (
        isinstance(shape, list) and len(shape) <= 4 and all(type(size) is int and 0 <= size < 2**40 for size in shape)
    )


def _depth(value: object) -> int:
    """The nesting depth of lists and objects; stops beyond `_DEEPEST`."""
    layer: list[object] = [value]
    for depth in range(_DEEPEST + 1):
        layer = [one for outer in layer for one in _inside(outer)]
        if not layer:
            return depth
    return _DEEPEST + 1


def _inside(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def sizes(prefix: bytes, largest: int = LARGEST_HEADER + LARGEST_BODY) -> int:
    """Bytes that follow a prefix. Raises ValueError for an invalid prefix, or one that promises more than a frame may
    have."""
    magic, header, body, _ = _PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError("this is no frame")
    if header > LARGEST_HEADER or body > LARGEST_BODY or header + body > largest:
        raise ValueError(f"a frame of {header} and {body} bytes")
    return int(header + body)


class FrameReader:
    """Makes frames of the bytes that a connection receives. A frame has at most `largest` bytes after its prefix."""

    def __init__(self, largest: int = LARGEST_HEADER + LARGEST_BODY) -> None:
        self.largest = largest
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes. `next` returns the frames."""
        self._buffer += data

    @property
    def wanted(self) -> int:
        """Bytes of the frame that has begun, including its prefix; 0 before the prefix is complete. Raises ValueError
        for anything that is not a frame, or too large."""
        if len(self._buffer) < PREFIX_BYTES:
            return 0
        return PREFIX_BYTES + sizes(bytes(self._buffer[:PREFIX_BYTES]), self.largest)

    def next(self) -> Frame | None:
        """The next frame, None where it is incomplete. Raises ValueError for anything that is not a frame."""
        end = self.wanted
        if not end or len(self._buffer) < end:
            return None
        if len(self._buffer) == end:
            whole, self._buffer = self._buffer, bytearray()
        else:
            whole = self._buffer[:end]
            del self._buffer[:end]
        return decode(bytes(whole[:PREFIX_BYTES]), memoryview(whole).toreadonly()[PREFIX_BYTES:])
