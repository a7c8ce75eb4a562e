"""An even cut of a dim: pieces of equal length, with a shorter last one where the count does not divide the size.

7 in 3      0 1 2 | 3 4 5 | 6
5 in 4      0 1 | 2 3 | 4 |         nothing is left for the last
"""


def piece_length(size: int, count: int) -> int:
    """Length of the pieces of a dim that is cut into `count` pieces; the last one may be shorter."""
    return -(-size // count)


def even_piece(size: int, count: int, place: int) -> tuple[int, int]:
    """Where piece number `place` of `count` starts and stops."""
    return piece(size, piece_length(size, count), place)


def piece(size: int, length: int, place: int) -> tuple[int, int]:
    """Where piece number `place` starts and stops if pieces have this length; the last ones may be shorter."""
    return min(place * length, size), min((place + 1) * length, size)
