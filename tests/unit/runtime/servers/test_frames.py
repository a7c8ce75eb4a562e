"""Frames: what is sent arrives, what is damaged is seen, and nothing else is taken for one."""

import io

import numpy as np
import pytest

from runtime.servers.frames import Frame, FrameReader, encode, read_frames

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
        found += reader.feed(data[at : at + step])
    assert len(found) == 3
    assert all(map(same, found, (PUSH, EMPTY, PUSH)))


def test_every_flipped_bit_is_seen() -> None:
    data = encode(PUSH)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        try:
            found = list(FrameReader().feed(bytes(damaged)))
        except ValueError:
            continue
        assert found == [], f"byte {at}"  # its length says that more must come


def test_a_file_that_was_not_written_to_its_end_gives_the_whole_frames() -> None:
    data, end = encode(PUSH) + encode(EMPTY), len(encode(PUSH))
    for length in range(len(data) + 1):
        found = list(read_frames(io.BytesIO(data[:length]), length))
        assert [one.end for one in found] == [place for place in (end, len(data)) if place <= length]


def test_damage_in_the_midst_of_a_file_is_no_end() -> None:
    data = bytearray(encode(PUSH) + encode(EMPTY))
    data[40] ^= 1
    with pytest.raises(ValueError, match="what begins at byte 0 is damaged: its checksum does not match"):
        list(read_frames(io.BytesIO(bytes(data)), len(data)))


def test_what_is_no_frame_is_refused() -> None:
    with pytest.raises(ValueError, match="this is no frame"):
        list(FrameReader().feed(b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"))
