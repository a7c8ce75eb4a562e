"""Chunks of collectives: in which order they start, are waited for and are multiplied, and what becomes of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.comm import chunked_collectives
from runtime.comm.chunked_collectives import Arriving, Chunks, Leaving, rows_of

RANKS = 2


class Link:
    """A group of two ranks that hold the same, and what they do in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.started = 0

    def _work(self, finish: Callable[[], Any]) -> Any:
        number, self.started = self.started, self.started + 1
        self.events.append(f"start {number}")
        link = self

        class Work:
            def wait(self) -> None:
                finish()
                link.events.append(f"arrived {number}")

        return Work()

    def gather(self, made: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        return self._work(lambda: made.copy_(torch.cat([sent] * RANKS)))

    def scatter(self, made: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        return self._work(lambda: made.copy_(RANKS * sent.chunk(RANKS)[0]))

    def reduce(self, term: torch.Tensor, group: Any, async_op: bool) -> Any:
        assert async_op
        return self._work(lambda: term.mul_(RANKS))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    found = Link()
    monkeypatch.setattr(chunked_collectives.dist, "all_gather_single", found.gather)
    monkeypatch.setattr(chunked_collectives.dist, "reduce_scatter_single", found.scatter)
    monkeypatch.setattr(chunked_collectives.dist, "all_reduce", found.reduce)
    return found


def test_the_next_chunk_is_on_its_way_while_one_is_used(link: Link) -> None:
    piece, chunks = torch.arange(12.0).view(1, 6, 2), Chunks(dim=1, count=3, moved=1, ranks=RANKS)
    arriving = Arriving(piece, chunks, None)  # type: ignore[arg-type]
    for number, _ in enumerate(arriving):
        link.events.append(f"use {number}")
    assert link.events == [
        "start 0", "arrived 0", "start 1", "use 0", "arrived 1", "start 2", "use 1", "arrived 2", "use 2",
    ]  # fmt: skip
    assert torch.equal(arriving.whole, torch.cat([piece, piece], dim=1))


def test_chunks_leave_while_others_are_made(link: Link) -> None:
    whole, chunks = torch.arange(16.0).view(2, 4, 2), Chunks(dim=0, count=2, moved=1, ranks=RANKS)
    leaving = Leaving(chunks, None, torch.empty(2, 2, 2))  # type: ignore[arg-type]
    for number in range(2):
        link.events.append(f"make {number}")
        leaving.send(chunks.whole(whole, number).contiguous())
    assert torch.equal(leaving.land(), RANKS * whole[:, :2])
    assert link.events == ["make 0", "start 0", "make 1", "start 1", "arrived 0", "arrived 1"]


def test_other_work_waits_for_none_of_the_last_two_chunks(link: Link) -> None:
    """As the products of weight gradients, behind those of the last chunk."""
    whole, chunks = torch.arange(24.0).view(3, 4, 2), Chunks(dim=0, count=3, moved=1, ranks=RANKS)
    leaving = Leaving(chunks, None, torch.empty(3, 2, 2))  # type: ignore[arg-type]
    for number in range(3):
        leaving.send(chunks.whole(whole, number).contiguous())
    link.events.append("others")
    assert torch.equal(leaving.land(), RANKS * whole[:, :2])
    assert link.events == ["start 0", "start 1", "arrived 0", "start 2", "others", "arrived 1", "arrived 2"]


def test_no_more_than_two_chunks_that_leave_are_held(link: Link) -> None:
    whole, chunks = torch.arange(32.0).view(4, 4, 2), Chunks(dim=0, count=4, moved=1, ranks=RANKS)
    leaving = Leaving(chunks, None, torch.empty(4, 2, 2))  # type: ignore[arg-type]
    for number in range(4):
        link.events.append(f"make {number}")
        leaving.send(chunks.whole(whole, number).contiguous())
    assert torch.equal(leaving.land(), RANKS * whole[:, :2])
    assert link.events == [
        "make 0", "start 0", "make 1", "start 1", "arrived 0", "make 2", "start 2", "arrived 1", "make 3", "start 3",
        "arrived 2", "arrived 3",
    ]  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
def test_a_sum_of_all_ranks_is_whole(link: Link, dim: int) -> None:
    term, chunks = torch.arange(16.0).view(2, 4, 2), Chunks(dim=dim, count=2)
    leaving = Leaving(chunks, None, torch.empty_like(term))  # type: ignore[arg-type]
    for number in range(2):
        leaving.send(chunks.whole(term, number).clone(memory_format=torch.contiguous_format))
    assert torch.equal(leaving.land(), RANKS * term)


@pytest.mark.parametrize(("dim", "moved"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_chunks_of_a_whole_are_all_of_it(dim: int, moved: int) -> None:
    chunks = Chunks(dim=dim, count=2, moved=moved, ranks=RANKS)
    whole = torch.zeros(8, 4, 3)
    for number in range(2):
        chunks.whole(whole, number).add_(1.0)
    assert torch.equal(whole, torch.ones(8, 4, 3))
    assert chunks.shape(chunks.shape_of_piece(whole.shape)) == whole.shape
    assert rows_of(chunks.whole(whole, 0)).shape == (16, 3)
