"""Which ranks keep which cells of a run's state in host memory: every cell is on two hosts."""

from collections.abc import Sequence

from planner.sharding.mesh import Mesh
from runtime.checkpoint.spread import Spread, holders

Cell = tuple[str, int]
"""The name of a tensor of the state, and the number of one of its cells."""


def replica_holders(
    found: Sequence[Spread], mesh: Mesh, stages: int, hosts: Sequence[int]
) -> dict[Cell, tuple[int, ...]]:
    """For every cell the ranks that keep it: a rank that holds it, and one on another host, if there is one. The second
    rank also holds it if possible, else it is on the next host. Among several, the one with the fewest bytes so far.

    `hosts` has the host of every rank. Every rank computes the same. O(T D) for T tensors and D devices.
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
    """The ranks of the next host; none where there is only one host."""
    order = sorted(set(hosts))
    after = order[(order.index(host) + 1) % len(order)]
    return [rank for rank, one in enumerate(hosts) if one == after and after != host]
