"""Conventional plans that the search begins with: those that an expert would try, in the order of an expert.

    axes                  what they are for             what stays open
    n                     data, or tensor inside a node ZeRO (each tensor by itself), recomputation, division of blocks
    n/t x t               data, tensor inside a node    the same, and which matmul is split by rows, which by columns
    p ranks of these      pipeline                      the same

With one purpose for an axis an operator has one candidate or a few. So such a configuration is evaluated in a tenth of
a second, however large the model. The plans with the lowest bound, that is the least idle time, come first, then those
with the fewest pipeline ranks, then those with the lowest tensor degree. Micro-batches have one sample for each
data-parallel device, and more if that fits, as long as it helps. Every one is a configuration of the request with
purposes for its axes, so all decisions of the user hold. A search that is stopped early falls back to this plan, and
its seconds cut off slower plans; it proves nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import parts_of
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.request.space import Configuration, Role

TRIED = 6
"""Maximum number of conventional configurations that are evaluated until one fits."""

_PURPOSES: dict[int, tuple[tuple[Role, ...], ...]] = {0: ((),), 1: (("data",), ("tensor",)), 2: (("data", "tensor"),)}


def conventional(engine: Engine, families: Sequence[Sequence[Configuration]]) -> list[list[Configuration]]:
    """The first few conventional ways to use the devices of a request, each with its micro-batches, the smallest first;
    empty if the request asks for meshes of more axes."""
    nodes = {group.levels[0].fan_out or group.devices for group in parts_of(engine.request.cluster)}
    found: dict[object, list[tuple[int, int, int, Configuration]]] = {}
    decided = engine.request.pinned.mesh is not None
    for members in families:
        first = members[0]
        inside = {1, *(min(node, math.prod(first.mesh)) for node in nodes)}
        for roles in (first.roles,) if first.roles else _PURPOSES.get(len(first.mesh), ()):
            data, tensor = _degrees(first.mesh, roles)
            if not first.roles and tensor not in inside and not decided:
                continue
            ladder = [
                (part, one.virtual_stages, tensor, one if first.roles else replace(one, roles=roles))
                for one in members
                if (part := engine.request.padded_batch // one.micro_batches) % data == 0
            ]
            if ladder:
                found.setdefault(ladder[0][3].family, []).extend(ladder)
    ladders = [sorted(members, key=lambda member: member[:2]) for members in found.values()]
    ladders.sort(key=lambda members: (_coarse(engine.bound(members[0][3])), members[0][3].pipeline, members[0][2]))
    return [[one for *_, one in members] for members in ladders[:TRIED]]


def _degrees(mesh: Sequence[int], roles: Sequence[Role]) -> tuple[int, int]:
    """Data and tensor parallel degrees of a mesh whose axes have purposes."""
    degrees = dict(zip(roles, mesh, strict=True))
    return math.prod(degrees.get(role, 1) for role in ("data", "replica", "nodes", "expert")), degrees.get("tensor", 1)


def _coarse(seconds: float) -> float:
    """Rounded to two digits: smaller differences do not matter."""
    return float(f"{seconds:.2g}")
