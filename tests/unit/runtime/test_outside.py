"""Room outside of the device, and copies to and from it beside the work."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from hardware_profiles import Home
from planner.errors import RequestError
from runtime.offload.activations import OffloadedActivations, Trail, alone
from runtime.offload.copy_streams import Lane, Mark, here
from runtime.offload.storage import Outside
from tests.refusals import refused

CPU = torch.device("cpu")


@pytest.mark.parametrize("home", ["host", "disk"])
def test_a_row_is_zeros_that_keep_what_is_written(tmp_path: Path, home: str) -> None:
    row = Outside(folder=tmp_path).room(home, 4096 + 12, CPU)
    assert row.dtype == torch.uint8
    assert not row.any()
    row[4096:].view(torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert row[4096:].view(torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert list(tmp_path.iterdir()) == []  # files have no name, so that nothing is left behind


def test_a_file_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    with refused(RequestError, tmp_path / "nowhere", os.strerror(errno.ENOENT)):
        Outside(folder=tmp_path / "nowhere").room("disk", 16, CPU)
    with refused(RequestError, tmp_path, "1073741824.000 GiB"):
        Outside(folder=tmp_path).room("disk", 2**60, CPU)


def test_a_lane_does_one_thing_after_the_other_and_waits_for_other_lanes() -> None:
    done: list[str] = []
    gate = threading.Event()
    first, second = Lane(CPU), Lane(CPU)

    def slow() -> None:
        gate.wait(60)
        done.append("a")

    slow_mark = first.run(slow)
    behind = first.run(lambda: done.append("b"))
    other = second.run(lambda: done.append("c"), after=(behind, here(CPU)))
    assert done == []
    gate.set()
    for mark in (other, slow_mark, behind):
        mark.wait()
    assert done == ["a", "b", "c"]


def test_what_a_lane_meets_is_raised_where_somebody_waits() -> None:
    def broken() -> None:
        raise OSError("the disk is gone")

    mark = Lane(CPU).run(broken)
    with pytest.raises(OSError, match="the disk is gone"):
        mark.wait()


def test_where_nothing_is_real_nothing_is_done() -> None:
    done: list[str] = []
    Lane(CPU, pretended=True).run(lambda: done.append("a"), after=(Mark(None),)).wait()
    assert done == []


@pytest.mark.parametrize("home", ["host", "disk"])
def test_memory_is_given_back_and_taken_again(home: Home) -> None:
    """The first block's when the second is done, the last one's at the end; and one ahead on the way back."""
    sizes: list[int] = []
    reads = OffloadedActivations(device=CPU, outside=Outside())
    trail = Trail(reads)
    tensors = [torch.arange(8.0) + number for number in range(3)]
    whole = [tensor.clone() for tensor in tensors]
    told = lambda storage: sizes.append(storage.nbytes())  # noqa: E731
    backs = [
        trail.offload(number, alone([tensor], []), home, told)
        for number, tensor in zip((4, 5, 6), tensors, strict=True)
    ]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 32]
    trail.let_go()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
    backs[2]()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 32, 32]
    assert torch.equal(tensors[2], whole[2])
    backs[1]()
    backs[0]()
    assert all(map(torch.equal, tensors, whole))
    assert sizes == [0, 0, 0, 32, 32, 32]


def test_behind_a_section_that_offloads_nothing_nothing_comes_ahead() -> None:
    trail = Trail(OffloadedActivations(device=CPU, outside=Outside()))
    tensors = [torch.ones(8) for _ in range(2)]
    backs = [
        trail.offload(number, alone([tensor], []), "host", lambda storage: None)
        for number, tensor in zip((1, 3), tensors, strict=True)
    ]
    trail.let_go()
    backs[1]()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 32]
    backs[0]()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [32, 32]


def test_memory_that_others_share_stays() -> None:
    shared, part, own = torch.ones(8), torch.ones(16)[:4], torch.ones(2)
    assert [storage._cdata for storage in alone([shared, part, own, own.view(2, 1)], [shared.view(2, 4)])] == [
        own.untyped_storage()._cdata
    ]
