"""What a collective makes of a piece, and how that lies in memory."""

import itertools

import pytest
import torch

from runtime.comm import collectives


class Twins:
    """Two ranks of which the other has the same piece."""

    @staticmethod
    def size() -> int:
        return 2


@pytest.fixture
def twins(monkeypatch: pytest.MonkeyPatch) -> Twins:
    def exchange(incoming: torch.Tensor, outgoing: torch.Tensor, group: Twins) -> None:
        """The first rank is sent the first half of both."""
        assert outgoing.is_contiguous()
        assert incoming.is_contiguous()
        incoming.copy_(torch.stack([outgoing[0]] * group.size()))

    monkeypatch.setattr(collectives.dist, "all_to_all_single", exchange)
    return Twins()


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
def test_an_exchange_keeps_the_order_of_dims_in_memory(twins: Twins, order: tuple[int, ...]) -> None:
    extents = [2, 4, 6, 8]
    stored = torch.arange(384.0).reshape([extents[axis] for axis in order])
    piece = stored.permute([order.index(axis) for axis in range(4)])
    for dim, to_dim in itertools.permutations(range(4), 2):
        moved = collectives.all_to_all(piece, dim, to_dim, twins)  # type: ignore[arg-type]  # all that is asked of it
        first = piece.chunk(2, to_dim)[0]
        assert torch.equal(moved, torch.cat([first, first], dim))
        assert moved.permute(order).is_contiguous()
