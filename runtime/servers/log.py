"""A log of records: before a record is acknowledged it is completely in the file; otherwise the file is unchanged.

    magic 4 │ sequence 8 │ bytes of the frame 8 │ CRC-32 4 │ frame

The checksum covers the sequence number, the size and the prefix of the frame, which has a separate checksum of its
content: so a size is verified before the bytes are read. The sequence number counts the records of the file from 0.
Logs of version 0.1 are frames without this head; they are read, and new records follow them in the same file.

A log that does not end with a whole record is in one of two states:

    torn       no whole record follows: the writer or the machine was killed. The record was not acknowledged (without
               --flush: not on the disk); the tail is cut off
    damaged    a whole record follows: acknowledged data was changed afterwards. Nothing is cut off without --repair
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from runtime.servers.disk import PASSING, BrokenDiskError, Disk, RefusedWriteError, write_all
from runtime.servers.frames import MAGIC, PREFIX_BYTES, Frame, decode, encode, sizes

_RECORD = struct.Struct("<4sQQI")
_RECORD_MAGIC = b"PSL2"
_SEARCHED = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Record number `number` of a file, and the position after it."""

    frame: Frame
    number: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What follows the last of the `records` whole records of a file, from byte `end` to `size`.

    `fault` says what is wrong there, None where nothing follows. `damaged`: whole records follow. `unsure`: the tail
    may not simply be a truncated record, so a copy must be kept.
    """

    end: int
    size: int
    records: int
    fault: str | None = None
    damaged: bool = False
    unsure: bool = False


class LogReader:
    """The whole records of a file, from its beginning; `ending` is set when they have been read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = file.seek(0, 2)
        self.ending = Ending(end=0, size=self._size, records=0)

    def __iter__(self) -> Iterator[Recorded]:
        end = number = 0
        try:
            while end < self._size:
                frame, end = _record_at(self._file, end, self._size, number)
                number += 1
                yield Recorded(frame=frame, number=number - 1, end=end)
        except _ShortError as error:
            self.ending = Ending(end=end, size=self._size, records=number, fault=str(error))
            return
        except ValueError as error:
            found = self._followed(end + 1, number)
            self.ending = Ending(end=end, size=self._size, records=number, fault=str(error), damaged=found, unsure=True)
            return
        self.ending = Ending(end=end, size=self._size, records=number)

    def _followed(self, start: int, number: int) -> bool:
        """Whether there is a whole record anywhere after `start`."""
        for at in _places(self._file, start):
            try:
                _record_at(self._file, at, self._size, number, later=True)
            except ValueError:
                continue
            return True
        return False


class LogWriter:
    """Appends to a log whose whole records have been read: `end` bytes, `records` of them."""

    def __init__(self, path: Path, disk: Disk, *, flushed: bool, end: int = 0, records: int = 0) -> None:
        self.path, self.end, self._records = path, end, records
        self._before = end  # start of the last record
        self._disk, self._flushed = disk, flushed
        self._descriptor: int | None = disk.open(path)

    def append(self, record: Frame) -> None:
        """Append a record. Raises RefusedWriteError where that was not possible and the log is unchanged, and
        BrokenDiskError where its state is unknown."""
        assert self._descriptor is not None
        try:
            end = write_all(self._disk, self._descriptor, recorded(record, self._records), self.end)
        except OSError as error:
            self.cut()
            if error.errno not in PASSING:
                raise BrokenDiskError(f"{self.path}: cannot append at byte {self.end}: {error.strerror}") from error
            raise RefusedWriteError(f"{self.path}: cannot append at byte {self.end}: {error.strerror}") from error
        if self._flushed:
            self.sync()
        self._before, self.end, self._records = self.end, end, self._records + 1

    def take_back(self) -> None:
        """Cut off the last appended record, which was not acknowledged. Raises BrokenDiskError."""
        assert self._before < self.end
        self.end, self._records = self._before, self._records - 1
        self.cut()
        if self._flushed:
            self.sync()

    def cut(self) -> None:
        """Cut off what follows the last whole record, and check that it is gone. Raises BrokenDiskError."""
        assert self._descriptor is not None
        try:
            if self._disk.size(self._descriptor) != self.end:
                self._disk.truncate(self._descriptor, self.end)
            size = self._disk.size(self._descriptor)
        except OSError as error:
            raise BrokenDiskError(f"{self.path}: cannot be cut to {self.end} bytes: {error.strerror}") from error
        if size != self.end:
            raise BrokenDiskError(f"{self.path}: has {size} bytes after it was cut to {self.end}")

    def sync(self) -> None:
        """Flush everything to the disk. After a failed fsync the content of the disk is unknown, and a second fsync
        would succeed; so the record that is not acknowledged is cut off. Raises BrokenDiskError."""
        assert self._descriptor is not None
        try:
            self._disk.sync(self._descriptor)
        except OSError as error:
            self.cut()
            raise BrokenDiskError(f"{self.path}: cannot be flushed to the disk: {error.strerror}") from error

    def close(self) -> None:
        if self._descriptor is not None:
            self._disk.close(self._descriptor)
            self._descriptor = None


def recorded(frame: Frame, number: int) -> list[bytes]:
    """The bytes of a record: its head and its frame."""
    data = encode(frame)
    return [_RECORD.pack(_RECORD_MAGIC, number, len(data), _checksum(number, data)), data]


class _ShortError(ValueError):
    """The file ends inside of a record whose size is verified."""


def _record_at(file: BinaryIO, at: int, size: int, number: int, *, later: bool = False) -> tuple[Frame, int]:
    """The record that begins at a byte, and the position after it. Raises ValueError where there is no whole record
    with this number, or with a `later` one."""
    file.seek(at)
    head = file.read(_RECORD.size + PREFIX_BYTES)
    if head[:4] != _RECORD_MAGIC[: len(head)]:
        return _frame_at(file, at, size, head)
    if len(head) < _RECORD.size + PREFIX_BYTES:
        raise _ShortError(f"the file ends after {len(head)} bytes of a record")
    _, found, length, checksum = _RECORD.unpack(head[: _RECORD.size])
    prefix = head[_RECORD.size :]
    if checksum != zlib.crc32(prefix, zlib.crc32(head[4:20])):
        raise ValueError("the checksum of its head does not match")
    if found < number if later else found != number:
        raise ValueError(f"it says that it is record {found}")
    end = at + _RECORD.size + length
    if PREFIX_BYTES + sizes(prefix) != length:
        raise ValueError(f"a frame of {sizes(prefix)} bytes in a record of {length}")
    if end > size:
        raise _ShortError(f"the file ends after {size - at} of the {end - at} bytes of a record")
    return decode(prefix, memoryview(file.read(length - PREFIX_BYTES))), end


def _frame_at(file: BinaryIO, at: int, size: int, head: bytes) -> tuple[Frame, int]:
    """A record of version 0.1: a frame, whose size is not verified."""
    prefix = head[:PREFIX_BYTES]
    if len(prefix) < PREFIX_BYTES:
        if head[:4] == MAGIC[: len(head)]:
            raise _ShortError(f"the file ends after {len(prefix)} bytes of a record")
        raise ValueError(f"the file ends with {len(prefix)} bytes that begin no record")
    end = at + PREFIX_BYTES + sizes(prefix)
    if end > size:
        raise ValueError(f"it says that it ends at byte {end}, and the file does at {size}")
    file.seek(at + PREFIX_BYTES)
    return decode(prefix, memoryview(file.read(end - at - PREFIX_BYTES))), end


def _places(file: BinaryIO, start: int) -> Iterator[int]:
    """Positions, from `start` on, where a record may begin."""
    while True:
        file.seek(start)
        piece = file.read(_SEARCHED)
        found = sorted(at for magic in (_RECORD_MAGIC, MAGIC) for at in _occurrences(piece, magic))
        yield from (start + at for at in found)
        if len(piece) < _SEARCHED:
            return
        start += len(piece) - len(MAGIC) + 1


def _occurrences(piece: bytes, magic: bytes) -> Iterator[int]:
    at = piece.find(magic)
    while at >= 0:
        yield at
        at = piece.find(magic, at + 1)


def _checksum(number: int, frame: bytes) -> int:
    head = _RECORD.pack(_RECORD_MAGIC, number, len(frame), 0)[4:20]
    return zlib.crc32(frame[:PREFIX_BYTES], zlib.crc32(head))
