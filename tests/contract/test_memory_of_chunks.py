"""What a product and its collective allocate in chunks is no more than is predicted of them, by the allocator's own
events, nor much less."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from planner.plan.prediction.walk.product_overlap import chunk_bytes
from runtime.comm.chunked_collectives import Chunks
from runtime.ops.overlapped_products import OperandCall, ResultCall, Way

RANKS, BATCH, SEQUENCE, HIDDEN, MADE = 4, 16, 64, 256, 512
MUCH = 0.7  # of what is predicted; whole, a product may need no copy of its rows


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())  # type: ignore[no-untyped-call]
    yield dist.group.WORLD
    dist.destroy_process_group()


def allocated(run: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that something allocates at the fullest, and at its end; its result."""
    with profile(profile_memory=True, activities=[ProfilerActivity.CPU]) as profiled:
        found = run()
    events = [one for one in profiled.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore[union-attr]
    now = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert most > 0
    return most, now, found


def way_of(chunks: int, group: Any, *, summed: bool) -> Way:
    """A way along the sequence; `summed` by all ranks, which all have the whole."""
    moved = {} if summed else {"moved": 1, "ranks": RANKS}
    return Way(chunks=Chunks(dim=0, count=chunks, **moved), group=group)


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_an_operand_arrives_and_its_gradient_leaves(group: Any, chunks: int) -> None:
    way = way_of(chunks, group, summed=False)
    call = OperandCall(forward=way, backward=way, biased=(False, False), kept=(), through=True, shared=False)
    piece = torch.randn(BATCH, SEQUENCE // RANKS, HIDDEN, requires_grad=True)
    weights = [torch.randn(MADE, HIDDEN, requires_grad=True) for _ in range(2)]
    fullest, left, results = allocated(lambda: call([piece, *weights]))
    made = [one for one in results if one is not None]
    moved, beside = (1 + RANKS) * piece.nbytes, made[0].nbytes
    assert left == RANKS * piece.nbytes + sum(one.nbytes for one in made)  # the operand is kept
    assert fullest - left <= chunk_bytes(moved, beside, chunks)
    assert chunks == 1 or fullest - left >= MUCH * chunk_bytes(moved, beside, chunks)
    gradients = [torch.ones_like(one) for one in made]
    fullest, _, _ = allocated(lambda: torch.autograd.backward(made, gradients))
    assert fullest <= chunk_bytes(moved, beside, chunks) + sum(one.nbytes for one in (piece, *weights))


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_a_result_leaves_and_its_gradient_arrives(group: Any, chunks: int, summed: bool) -> None:
    leaving, arriving = way_of(chunks, group, summed=summed), way_of(chunks, None if summed else group, summed=summed)
    call = ResultCall(forward=leaving, backward=arriving)
    rows = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    weight = torch.randn(MADE, HIDDEN, requires_grad=True)
    fullest, left, (made,) = allocated(lambda: call([rows, weight]))
    whole = BATCH * SEQUENCE * MADE * 4
    moved = whole if summed else whole + made.nbytes
    assert left == made.nbytes
    assert fullest - left <= chunk_bytes(moved, rows.nbytes, chunks)
    assert chunks == 1 or fullest - left >= MUCH * chunk_bytes(moved, rows.nbytes, chunks)
    if not summed:
        fullest, _, _ = allocated(lambda: made.backward(torch.ones_like(made)))
        own = made.nbytes + whole + rows.nbytes + weight.nbytes  # gradients, that of the result gathered
        assert fullest <= chunk_bytes(moved, rows.nbytes, chunks) + own
