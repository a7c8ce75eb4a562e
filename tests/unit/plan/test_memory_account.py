"""What a redistribution takes: the steps of a scalar, which has no dim that a step could name."""

import pytest

from planner.plan.prediction.memory_account import MemoryAccount, Piece, moved
from planner.sharding.layout import PARTIAL, REPLICATE
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.redistribute import redistribution

MESH = Mesh(axes=(MeshAxis(name="axis0", size=2, stride=1, bandwidth=1e9),))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("before", "after"), [(PARTIAL, REPLICATE), (REPLICATE, PARTIAL)])
def test_a_scalar_is_summed_or_made_a_term(before, after, rank: int) -> None:
    account = MemoryAccount(now={"loss": 0.0})
    piece = Piece(account.new(4.0, "loss"), ())
    steps = redistribution((), MESH, (before,), (after,))
    assert steps
    made = moved(account, piece, steps, MESH, (rank,), 4)
    assert made.shape == ()
    assert made.storage.nbytes == 4.0
