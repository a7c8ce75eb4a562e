"""What workers and servers send each other, and what a server writes into its log: frames.

    magic 4 │ bytes of the header 4 │ bytes of the arrays 8 │ CRC-32 of both 4 │ header: JSON │ the arrays

The header has the kind, some fields, and name, dtype and shape of every array. Nothing in a frame is ever executed:
JSON and numbers are all there is. The same bytes travel and are logged, so a push is checked, applied and replayed by
one piece of code.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from planner.errors import RequestError

Array = NDArray[Any]

_MAGIC = b"PSF1"
_PREFIX = struct.Struct("<4sIQI")
_DTYPES = ("<i4", "<i8", "<f4", "<f8")
LARGEST_HEADER = 2**22
LARGEST_BODY = 2**31
"""Bytes of the arrays of one frame. Whoever sends more sends several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: its kind, its fields, and its arrays by name."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)


def encode(frame: Frame) -> bytes:
    """The bytes of a frame. Raises RequestError for arrays that are too large for one, AssertionError for a dtype that
    does not travel."""
    arrays = {name: np.ascontiguousarray(array) for name, array in frame.arrays.items()}
    assert all(array.dtype.str in _DTYPES for array in arrays.values()), {n: a.dtype.str for n, a in arrays.items()}
    content = {
        "kind": frame.kind,
        "fields": dict(frame.fields),
        "arrays": [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()],
    }
    header = json.dumps(content).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    if len(body) > LARGEST_BODY:
        raise RequestError(
            f"a message '{frame.kind}' of {len(body)} bytes; {LARGEST_BODY} are the most: make it smaller"
        )
    crc = zlib.crc32(body, zlib.crc32(header))
    return _PREFIX.pack(_MAGIC, len(header), len(body), crc) + header + body


def decode(prefix: bytes, content: memoryview) -> Frame:
    """The frame with this prefix and content. Raises ValueError for one that is damaged."""
    _, size, _, crc = _PREFIX.unpack(prefix)
    if zlib.crc32(content) != crc:
        raise ValueError("its checksum does not match")
    header = json.loads(bytes(content[:size]))
    arrays, at = {}, size
    for name, dtype, shape in header["arrays"]:
        if dtype not in _DTYPES or any(not isinstance(n, int) or n < 0 for n in shape):
            raise ValueError(f"array '{name}' has dtype {dtype} and shape {shape}")
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = count * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(content[at : at + nbytes], dtype=dtype, count=count).reshape(shape)
        at += nbytes
    if at != len(content):
        raise ValueError(f"{len(content) - at} bytes belong to no array")
    return Frame(kind=header["kind"], fields=header["fields"], arrays=arrays)


def sizes(prefix: bytes) -> int:
    """Bytes that follow a prefix. Raises ValueError where it is none, or promises more than a frame may have."""
    magic, header, body, _ = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise ValueError("this is no frame")
    if header > LARGEST_HEADER or body > LARGEST_BODY:
        raise ValueError(f"a frame of {header} and {body} bytes")
    return int(header + body)


class FrameReader:
    """Makes frames of the bytes that a connection receives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are whole with this data. Raises ValueError for what is no frame."""
        self._buffer += data
        while len(self._buffer) >= _PREFIX.size:
            prefix = bytes(self._buffer[: _PREFIX.size])
            end = _PREFIX.size + sizes(prefix)
            if len(self._buffer) < end:
                return
            content = memoryview(bytes(self._buffer[_PREFIX.size : end]))
            del self._buffer[:end]
            yield decode(prefix, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A frame in a file, and the place behind it."""

    frame: Frame
    end: int


def read_frames(file: BinaryIO, length: int) -> Iterator[Recorded]:
    """The whole frames at the beginning of a file of `length` bytes. A last one that was not written to its end, as
    when the writer is killed, is left out. Raises ValueError, with the place, for one that is whole and damaged."""
    at = 0
    while length - at >= _PREFIX.size:
        prefix = file.read(_PREFIX.size)
        try:
            size = sizes(prefix)
            if at + _PREFIX.size + size > length:
                return
            frame = decode(prefix, memoryview(file.read(size)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"what begins at byte {at} is damaged: {error}") from error
        at += _PREFIX.size + size
        yield Recorded(frame=frame, end=at)
