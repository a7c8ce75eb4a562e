"""Where the pieces of a dim start and stop that is cut evenly."""

import pytest

from planner.sharding.even_cut import even_piece, piece_length


@pytest.mark.parametrize(
    ("size", "count", "pieces"),
    [
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (7, 3, [(0, 3), (3, 6), (6, 7)]),
        (5, 4, [(0, 2), (2, 4), (4, 5), (5, 5)]),
        (1, 3, [(0, 1), (1, 1), (1, 1)]),
        (4, 1, [(0, 4)]),
    ],
)
def test_only_the_last_piece_is_shorter(size: int, count: int, pieces: list[tuple[int, int]]) -> None:
    assert [even_piece(size, count, place) for place in range(count)] == pieces


def test_pieces_hold_every_element_once() -> None:
    for size in range(20):
        for count in range(1, 8):
            pieces = [even_piece(size, count, place) for place in range(count)]
            assert [at for start, stop in pieces for at in range(start, stop)] == list(range(size))
            assert max(stop - start for start, stop in pieces) == piece_length(size, count)
