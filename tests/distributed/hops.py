"""What a ring computes in each hop, without processes."""

from runtime.ops.attention.attention_pieces import Hop
from runtime.ops.attention.ring_attention import Ring


def work_of_hops(size: int, length: int, zigzag: bool) -> list[list[float]]:
    """For every device of a causal ring the pairs of query and key that it meets in each hop."""

    def pairs(hop: Hop) -> float:
        queries, keys = (rows.stop - rows.start for rows in (hop.queries, hop.keys))
        return queries * keys / (2 if hop.causal else 1)

    rings = [Ring(group=Size(size), place=place, causal=True, zigzag=zigzag) for place in range(size)]
    return [[sum(map(pairs, hops)) for hops in ring.hops(length, length)] for ring in rings]


class Size:
    """A group of processes of which only the number is known."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size
