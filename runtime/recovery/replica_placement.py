"""Which ranks keep which cells of a run's state in the memory of their hosts: every cell lies on two hosts."""

from collections.abc import Sequence

from planner.sharding.mesh import Mesh
from runtime.checkpoint.spread import Spread, holders

Cell = tuple[str, int]
"""A tensor of the state, and the number of one of its cells."""


def replica_holders(
    found: Sequence[Spread], mesh: Mesh, stages: int, hosts: Sequence[int]
) -> dict[Cell, tuple[int, ...]]:
    """For every cell the ranks that keep it: one that holds it, and one on another host where there is another, which
    holds it too if there is such a one, else on the next host. Of several the one with the least to keep so far.

    `hosts` are those of all ranks. Every rank finds the same. O(T D) for T tensors and D devices.
    """
    load = [0] * (stages * mesh.size)
    answer: dict[Cell, tuple[int, ...]] = {}
    for spread, cells in holders(found, mesh):
        size = spread.cell_bytes(mesh)
        for number, holding in enumerate(cells):
            first = min(holding, key=lambda rank: (load[rank], rank))
            elsewhere = [rank for rank in holding if hosts[rank] != hosts[first]] or _next(hosts, hosts[first])
            chosen = [first, *sorted(elsewhere, key=lambda rank: (load[rank], rank))[:1]]
            for rank in chosen:
                load[rank] += size
            answer[spread.name, number] = tuple(chosen)
    return answer


def _next(hosts: Sequence[int], host: int) -> list[int]:
    """The ranks of the next host; none where there is one host."""
    order = sorted(set(hosts))
    after = order[(order.index(host) + 1) % len(order)]
    return [rank for rank, one in enumerate(hosts) if one == after and after != host]
