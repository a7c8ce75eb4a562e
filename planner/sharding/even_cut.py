"""A dim cut evenly: equally long pieces, but for a shorter last one where its size does not divide.

7 in 3      0 1 2 | 3 4 5 | 6
5 in 4      0 1 | 2 3 | 4 |         nothing is left for the last
"""


def piece_length(size: int, count: int) -> int:
    """How long the pieces of a dim are that is cut into so many, all but the last."""
    return -(-size // count)


def even_piece(size: int, count: int, place: int) -> tuple[int, int]:
    """Where piece number `place` of so many starts and stops."""
    return piece(size, piece_length(size, count), place)


def piece(size: int, length: int, place: int) -> tuple[int, int]:
    """Where piece number `place` starts and stops, where all have this length but the last ones."""
    return min(place * length, size), min((place + 1) * length, size)
