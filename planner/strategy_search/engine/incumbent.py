"""What the search begins with: the conventional plans that an expert would try, in the order in which he would.

    axes                  what they are for             what stays open
    n                     data, or tensor inside a node ZeRO (each tensor by itself), recomputation, division of blocks
    n/t x t               data, tensor inside a node    the same, and which matmul is split by rows, which by columns
    p ranks of these      pipeline                      the same

One purpose for an axis leaves an operator one candidate or a few, so that such a configuration is evaluated in a tenth
of a second, however large the model. What comes first has the least idle time by its bound, then the fewest ranks of a
pipeline, then the narrowest tensor parallelism; micro-batches have one sample for each data-parallel device, and where
that fits more, as long as it helps. Every one is a configuration of the request with purposes for its axes, so whatever
was decided holds. It is where a search that is stopped early falls back to, and its seconds cut off what is slower;
nothing is proved with it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import parts_of
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.request.space import Configuration, Role

TRIED = 6
"""Conventional configurations that are evaluated until one fits, at most."""

_PURPOSES: dict[int, tuple[tuple[Role, ...], ...]] = {0: ((),), 1: (("data",), ("tensor",)), 2: (("data", "tensor"),)}


def conventional(engine: Engine, families: Sequence[Sequence[Configuration]]) -> list[list[Configuration]]:
    """The first few of the conventional ways to use the devices of a request, each with its micro-batches, the smallest
    first; none where meshes of more axes were asked for."""
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
    """To two digits: what differs by less is as good."""
    return float(f"{seconds:.2g}")
