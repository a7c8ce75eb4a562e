"""The numbers of a small plan: devices on each axis, pipeline ranks, micro-batches, slices, samples.

An axis of many devices becomes one of two, or of four where a way of a tensor is worth its while only there. A pipeline
keeps a rank between the first and the last, which receives and sends, where there are processes enough; virtual stages
a chunk between, too, or two. Of micro-batches as many are kept as the schedule needs for a first, a steady and a last
phase; where the large plan has fewer of them than ranks, the small one has, too.
"""

import math
from dataclasses import dataclass, replace

from planner.errors import RequestError
from planner.plan.plan import Plan, Training
from planner.plan.schedule import telling_micro_batches
from planner.sharding.mesh import Mesh, MeshAxis

_BETWEEN = 3
"""The first, the last, and one between them."""
_BOTH_BETWEEN = 4
"""Where ranks take chunks in turn, an even and an odd rank between them do not change turns alike; nor do an even and
an odd chunk."""

_IN_FP8 = 8
"""What dims are even multiples of, so that they are multiples of 16 as those of products in fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallNumbers:
    """Everything about a small plan that is counted. `unit` is what its dims are multiples of: the product of all axes,
    at least 2, and 8 where layers are in fp8."""

    mesh: Mesh
    ranks: int
    virtual: int
    slices: int
    interleave: int
    micro_batches: int
    unit: int

    @property
    def processes(self) -> int:
        return self.ranks * self.mesh.size


def small_numbers(plan: Plan, processes: int, wide: int | None = None, *, both_between: bool = False) -> SmallNumbers:
    """Those of the smallest plan with the decisions of `plan`, on at most so many processes; the axis `wide`, if any,
    has four devices. `both_between`: two chunks stand for those between the first and the last of a rank, not one.

    Raises RequestError where the axes alone need more.
    """
    mesh = small_mesh(plan.mesh, wide)
    fewest = min(2, plan.pipeline)
    if mesh.size * fewest > processes:
        raise RequestError(
            f"--processes {processes}: axes of 2 and a pipeline of {fewest} need {mesh.size * fewest} processes; give"
            f" {mesh.size * fewest} or more"
        )
    wanted = (_BOTH_BETWEEN if plan.virtual_stages > 1 else _BETWEEN, _BETWEEN, 2, 1)
    ranks = next(count for count in wanted if count <= plan.pipeline and mesh.size * count <= processes)
    slices, interleave = min(plan.slices, 2 if plan.slices % 2 == 0 else _BETWEEN), min(plan.training.interleave, 2)
    virtual = min(plan.virtual_stages, _BOTH_BETWEEN if both_between else _BETWEEN)
    return SmallNumbers(
        mesh=mesh,
        ranks=ranks,
        virtual=virtual,
        slices=slices,
        interleave=interleave,
        micro_batches=_micro_batches(plan, ranks, virtual, interleave),
        unit=math.lcm(max(2, mesh.size), _IN_FP8 if plan.training.fp8 else 1) * (slices if slices > 2 else 1),
    )


def small_mesh(mesh: Mesh, wide: int | None = None) -> Mesh:
    """The same axes with two devices each, the axis `wide` with four; those with one device keep it. Their links are
    so much faster or slower that a collective of a whole tensor takes as long, relatively to those on other axes, so
    that redistributions take the same way: (n - 1) / n of it is sent."""
    axes, stride = list[MeshAxis](), 1
    for at, axis in reversed(list(enumerate(mesh.axes))):
        size = min(axis.size, 4 if at == wide else 2)
        share = 1.0 if axis.size == size else (size - 1) / size / ((axis.size - 1) / axis.size)
        axes.append(replace(axis, size=size, stride=stride, bandwidth=float(f"{axis.bandwidth * share:.6g}")))
        stride *= size
    return Mesh(axes=tuple(reversed(axes)))


def _micro_batches(plan: Plan, ranks: int, virtual: int, interleave: int) -> int:
    """A multiple of `interleave`, and of the ranks where virtual stages go in rounds."""
    turns = plan.training.turns
    if ranks == 1:
        return min(turns, 2) * interleave
    if virtual > 1:
        return max(1, min(turns // plan.pipeline, 3)) * ranks * interleave
    if turns < plan.pipeline:
        return max(1, min(turns, ranks - 1)) * interleave
    most = replace(plan, stages=plan.stages[:ranks], training=_with_turns(plan.training, 2 * ranks + 1, interleave))
    return min(turns * interleave, telling_micro_batches(most))


def _with_turns(training: Training, turns: int, interleave: int) -> Training:
    return replace(training, micro_batches=turns * interleave, interleave=interleave)
