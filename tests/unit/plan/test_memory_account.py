"""What a redistribution takes: the steps of a scalar, which has no dim that a step could name, and what is held while
steps are done, and while others go on."""

from dataclasses import replace

import pytest

from planner.plan.prediction.memory.account import MemoryAccount, Piece, moved
from planner.sharding.layout import PARTIAL, REPLICATE
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.redistribute import Step, redistribution

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


SQUARE = Mesh(
    axes=tuple(MeshAxis(name=name, size=2, stride=stride, bandwidth=1e9) for name, stride in (("a", 2), ("b", 1)))
)


@pytest.mark.parametrize("gives", [False, True])
def test_what_is_given_away_is_held_until_all_steps_are_done(gives: bool) -> None:
    """Autograd has the gradient until the function returns."""
    account = MemoryAccount(now={"gradient": 0.0})
    piece = Piece(account.new(64.0, "gradient"), (2, 8))
    made = moved(
        account,
        piece,
        [Step("all_gather", 0, 0), Step("all_gather", 1, 0)],
        SQUARE,
        (0, 0),
        4,
        then="work",
        gives=gives,
    )
    assert (made.shape, account.peak) == ((8, 8), 64.0 + 128.0 + 256.0)
    assert account.now["gradient"] == 256.0 + (0.0 if gives else 64.0)


@pytest.mark.parametrize("gives", [False, True])
@pytest.mark.parametrize(
    ("step", "taken", "left"),
    [
        (Step("reduce_scatter", 0, 0, padding=1), 128.0 + 64.0, 64.0),  # from a padded copy
        (Step("reduce_scatter", 0, 1), 96.0 + 48.0, 48.0),  # from a copy with the cut dim first
        (Step("all_reduce", 0), 96.0, 96.0),
    ],
    ids=str,
)
def test_while_a_copy_is_under_way_what_was_given_away_is_gone(
    step: Step, taken: float, left: float, gives: bool
) -> None:
    account = MemoryAccount(now={"gradient": 0.0})

    def work() -> None:
        piece = Piece(account.new(96.0, "gradient"), (3, 8))
        moved(account, piece, [step], SQUARE, (0, 0), 4, then="work", gives=gives)

    under_way, then = (sum(nbytes for nbytes, _ in turn.changes) for turn in account.recorded(work))
    kept = 0.0 if gives else 96.0
    assert (under_way, under_way + then) == (taken + kept, left + kept)


@pytest.mark.parametrize(
    ("step", "copied"),
    [
        (Step("all_gather", 0, 0), 256.0),  # what has arrived, in natural order
        (Step("reduce_scatter", 0, 0), 128.0),  # what is sent, in the order of devices
        (Step("all_to_all", 0, 0, 1), 128.0),
        (Step("all_to_all", 0, 1, 0), 128.0),
        (Step("slice", 0, 0), 64.0),  # which is no view
    ],
    ids=str,
)
def test_pieces_in_zigzag_order_are_copied(step: Step, copied: float) -> None:
    peaks = []
    for zigzag in ((), (0,)):
        account = MemoryAccount(now={"value": 0.0})
        piece = Piece(account.new(128.0, "value"), (4, 8))
        moved(account, piece, [replace(step, zigzag=zigzag)], SQUARE, (0, 0), 4)
        peaks.append(account.peak)
    assert peaks[1] - peaks[0] == copied
