"""Frames: what is sent arrives, what is damaged is seen, and nothing else is taken for one."""

import numpy as np
import pytest

from planner.errors import RequestError
from runtime.servers.frames import LARGEST_HEADER, Frame, FrameReader, encode
from tests.refusals import refused

PUSH = Frame(
    kind="push",
    fields={"worker": 1, "learning_rate": None},
    arrays={"rows0": np.array([3, 5], np.int64), "gradients0": np.ones((2, 4), np.float32)},
)
EMPTY = Frame(kind="rows", arrays={"values0": np.zeros((0, 4), np.float32)})


def same(one: Frame, other: Frame) -> bool:
    if (one.kind, one.fields, one.arrays.keys()) != (other.kind, other.fields, other.arrays.keys()):
        return False
    pairs = [(one.arrays[name], other.arrays[name]) for name in one.arrays]
    return all(a.shape == b.shape and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_frames_arrive_in_whatever_pieces_they_come(step: int) -> None:
    data, reader, found = encode(PUSH) + encode(EMPTY) + encode(PUSH), FrameReader(), []
    for at in range(0, len(data), step):
        reader.feed(data[at : at + step])
        while (frame := reader.next()) is not None:
            found.append(frame)
    assert len(found) == 3
    assert all(map(same, found, (PUSH, EMPTY, PUSH)))


def test_every_flipped_bit_is_seen() -> None:
    data = encode(PUSH)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            reader = FrameReader()
            reader.feed(bytes(damaged))
            assert reader.next() is None, f"byte {at}"  # its length says that more must come
        except ValueError:
            continue


def test_a_header_that_nobody_could_read_is_not_written() -> None:
    """It was: the snapshot of a server with many tables was written, and then taken for damaged."""
    with refused(RequestError, "shard", "header", 4194304):
        encode(Frame(kind="shard", fields={"tables": ["x" * 100] * 50_000}))
    reader = FrameReader()
    reader.feed(encode(Frame(kind="shard", fields={"tables": "x" * (LARGEST_HEADER - 60)})))
    assert reader.next() is not None


def test_what_is_no_frame_is_refused() -> None:
    reader = FrameReader()
    reader.feed(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
    with refused(ValueError, "frame"):
        reader.next()
