"""What a collective makes of a piece, and how that lies in memory."""

import itertools
from typing import Any, cast

import pytest
import torch

from runtime.comm import collectives

MORE = 1000.0
"""What the second rank has more than the first in every element."""


class Twins:
    """Two ranks, seen from the first."""

    @staticmethod
    def size() -> int:
        return 2


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Twins:
    def exchange(incoming: torch.Tensor, outgoing: torch.Tensor, group: Twins) -> None:
        """It is sent the first half of both."""
        assert outgoing.is_contiguous()
        assert incoming.is_contiguous()
        incoming.copy_(torch.stack([outgoing[0], outgoing[0] + MORE]))

    def reduce(flat: torch.Tensor, operation: object, group: Twins) -> None:
        flat.copy_(2 * flat + MORE if operation == collectives.dist.ReduceOp.SUM else flat + MORE)

    def scatter(own: torch.Tensor, flat: torch.Tensor, group: Twins) -> None:
        own.copy_(2 * flat.chunk(2)[0] + MORE)

    def gather(whole: torch.Tensor, flat: torch.Tensor, group: Twins) -> None:
        whole.copy_(torch.cat([flat, flat + MORE]))

    monkeypatch.setattr(collectives.dist, "all_to_all_single", exchange)
    monkeypatch.setattr(collectives.dist, "all_reduce", reduce)
    monkeypatch.setattr(collectives.dist, "reduce_scatter_single", scatter)
    monkeypatch.setattr(collectives.dist, "all_gather_single", gather)
    return Twins()


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
def test_an_exchange_keeps_the_order_of_dims_in_memory(twins: Twins, order: tuple[int, ...]) -> None:
    extents = [2, 4, 6, 8]
    stored = torch.arange(384.0).reshape([extents[axis] for axis in order])
    piece = stored.permute([order.index(axis) for axis in range(4)])
    for dim, to_dim in itertools.permutations(range(4), 2):
        moved = collectives.all_to_all(piece, dim, to_dim, twins)  # type: ignore[arg-type]  # all that is asked of it
        first = piece.chunk(2, to_dim)[0]
        assert torch.equal(moved, torch.cat([first, first + MORE], dim))
        assert moved.permute(order).is_contiguous()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("missing", [None, 1])
def test_what_is_gathered_lands_where_there_is_room(twins: Twins, count: int, missing: int | None) -> None:
    pieces, dims = [torch.arange(24.0).reshape(4, 6) + one for one in range(count)], [1, 0, 1][:count]
    extents = [
        -1 if missing is None else 2 * piece.shape[dim] - missing for piece, dim in zip(pieces, dims, strict=True)
    ]
    group: Any = twins  # all that is asked of it

    collective = collectives.coalesced_all_gather(pieces, dims, group, extents)
    collective.call()
    expected = collective.landed()
    room = [torch.full_like(one, -1.0) for one in expected]
    assert all(one.is_contiguous() for one in expected)
    assert collective.fill is not None
    collective.fill(room)
    for own, known in zip(room, expected, strict=True):
        assert torch.equal(own, known)


@pytest.mark.parametrize("count", [1, 3])
def test_pieces_of_one_message_are_what_each_alone_would_be(twins: Twins, count: int) -> None:
    pieces = [torch.arange(24.0).reshape(4, 6), torch.arange(16.0).reshape(2, 8), torch.arange(8.0).reshape(2, 2, 2)]
    pieces, dims, others = pieces[:count], [1, 0, 2][:count], [0, 1, 0][:count]
    group: Any = twins  # all that is asked of it
    for collective, expected in (
        (
            collectives.coalesced_all_reduce([piece.clone() for piece in pieces], group),
            lambda piece, *_: 2 * piece + MORE,
        ),
        (
            collectives.coalesced_reduce_scatter(pieces, dims, group),
            lambda piece, dim, _: 2 * piece.chunk(2, dim)[0] + MORE,
        ),
        (
            collectives.coalesced_all_gather(pieces, dims, group, [-1] * len(pieces)),
            lambda piece, dim, _: torch.cat([piece, piece + MORE], dim),
        ),
        (
            collectives.coalesced_all_to_all(pieces, dims, others, group, [-1] * len(pieces)),
            lambda piece, dim, other: torch.cat([piece.chunk(2, other)[0], piece.chunk(2, other)[0] + MORE], dim),
        ),
    ):
        wanted = [expected(*one) for one in zip(pieces, dims, others, strict=True)]
        collective.call()
        for made, right in zip(collective.landed(), wanted, strict=True):
            assert torch.equal(made, right)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_a_lone_piece_that_lies_as_it_is_sent_is_not_copied(twins: Twins, kind: str) -> None:
    """As `planner.sharding.buckets` and the account of live memory have it."""
    piece, group = torch.arange(24.0).reshape(4, 6), cast("Any", twins)
    sent = {
        "all_gather": lambda one: collectives.coalesced_all_gather([one], [0], group, [-1]),
        "reduce_scatter": lambda one: collectives.coalesced_reduce_scatter([one], [0], group),
        "all_reduce": lambda one: collectives.coalesced_all_reduce([one], group),
    }[kind]
    assert sent(piece).sent.data_ptr() == piece.data_ptr()
    assert sent(piece.T).sent.data_ptr() != piece.data_ptr()


@pytest.mark.parametrize("count", [1, 3])
def test_what_two_processes_do_not_divide_has_zeros_behind_it(twins: Twins, count: int) -> None:
    pieces = [torch.arange(15.0).reshape(5, 3), torch.arange(21.0).reshape(7, 3), torch.ones(3)][:count]
    dims, group = [1, 0, 0][:count], cast("Any", twins)
    scattered = collectives.coalesced_reduce_scatter(pieces, dims, group)
    scattered.call()
    for made, whole, dim in zip(scattered.landed(), pieces, dims, strict=True):
        longer = collectives.extended(whole, dim, whole.shape[dim] + 1)
        assert torch.equal(made, 2 * longer.chunk(2, dim)[0] + MORE)
    halves = [
        collectives.extended(one, dim, one.shape[dim] + 1).chunk(2, dim)[0]
        for one, dim in zip(pieces, dims, strict=True)
    ]
    extents = [one.shape[dim] for one, dim in zip(pieces, dims, strict=True)]
    gathered = collectives.coalesced_all_gather(halves, dims, group, extents)
    gathered.call()
    for made, half, whole, dim in zip(gathered.landed(), halves, pieces, dims, strict=True):
        assert torch.equal(made, torch.cat([half, half + MORE], dim).narrow(dim, 0, whole.shape[dim]))
