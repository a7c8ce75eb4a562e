"""Which ranks keep which cells of a run's state in the memory of their hosts: every cell lies on two hosts."""

from collections.abc import Mapping, Sequence

from planner.sharding.mesh import Mesh
from runtime.checkpoint.regions import cell_region
from runtime.checkpoint.spread import Spread
from runtime.checkpoint.tensor_files import dtype_of

Cell = tuple[str, int]
"""A tensor of the state, and the number of one of its cells."""


def keepers(found: Sequence[Spread], mesh: Mesh, stages: int, hosts: Sequence[int]) -> dict[Cell, tuple[int, ...]]:
    """For every cell the ranks that keep it: one that holds it, and one on another host where there is another, which
    holds it too if there is such a one, else on the next host. Of several the one with the least to keep so far.

    `hosts` are those of all ranks. Every rank finds the same. O(T D) for T tensors and D devices.
    """
    load = [0] * (stages * mesh.size)
    answer: dict[Cell, tuple[int, ...]] = {}
    for spread in found:
        size = cell_region(spread.shape, spread.cuts(mesh), 0).elements * dtype_of(spread.dtype).itemsize
        for number, holding in sorted(_holders(spread, mesh).items()):
            first = min(holding, key=lambda rank: (load[rank], rank))
            elsewhere = [rank for rank in holding if hosts[rank] != hosts[first]] or _next(hosts, hosts[first])
            chosen = [first, *sorted(elsewhere, key=lambda rank: (load[rank], rank))[:1]]
            for rank in chosen:
                load[rank] += size
            answer[spread.name, number] = tuple(chosen)
    return answer


def held(spread: Spread, mesh: Mesh, rank: int) -> int | None:
    """The number of the cell of a tensor that a rank holds; None where it has nothing of it."""
    stage, place = divmod(rank, mesh.size)
    if not spread.held_at(stage, place):
        return None
    return spread.cell(mesh, place) if spread.only is None else 0


def _holders(spread: Spread, mesh: Mesh) -> Mapping[int, list[int]]:
    """The ranks that hold each cell."""
    cells: dict[int, list[int]] = {}
    for stage in spread.stages:
        for rank in range(stage * mesh.size, (stage + 1) * mesh.size):
            number = held(spread, mesh, rank)
            if number is not None:
                cells.setdefault(number, []).append(rank)
    return cells


def _next(hosts: Sequence[int], host: int) -> list[int]:
    """The ranks of the next host; none where there is one host."""
    order = sorted(set(hosts))
    after = order[(order.index(host) + 1) % len(order)]
    return [rank for rank, one in enumerate(hosts) if one == after and after != host]
