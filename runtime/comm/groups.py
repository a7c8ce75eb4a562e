"""The processes of a plan by name: which group, how many, and which of them this is.

    names       world                                      all processes
                pipeline                                   the same place in every stage
                axis0, axis1, ...                          differ on that axis of the mesh only
                data, tensor, context, expert, replicated  differ on the axes of that role only
                (`planner.plan.layout.roles`)

A group has ranks of one stage (except `world` and `pipeline`), in ascending order. The role of an axis is the role by
which most of the work is split on it, so it is known once the model has been traced; a role without an axis is a group
of one. Experts may be cut on an axis of any role, so `expert` may share axes with `data`.

`runtime.get_rank` and the similar functions answer for the step that was made last; `TrainingStep.groups` for a given
step.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol
from weakref import WeakValueDictionary

import torch.distributed as dist

from planner.errors import RequestError, unknown_name
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.roles import AxisRole, roles
from runtime.comm.device_mesh import RankMesh, stage_line
from runtime.launchers import launched_by

WORLD, PIPELINE, EXPERT = "world", "pipeline", "expert"
ROLES = ("data", "tensor", "context", "replicated")
_PURPOSE = "asked for by name"


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of a plan as one rank sees them. `bound` is None before the model was traced."""

    place: RankMesh
    bound: BoundPlan | None

    @property
    def names(self) -> tuple[str, ...]:
        """All names, those of mesh axes last."""
        return (WORLD, PIPELINE, *ROLES, EXPERT, *self.place.mesh.names)

    def size(self, name: str) -> int:
        """The number of processes of a group. Raises RequestError for an unknown name, and for a role before the model
        was traced."""
        if name == WORLD:
            return self.place.mesh.size * self.place.stages
        if name == PIPELINE:
            return self.place.stages
        return math.prod(self.place.mesh.sizes[axis] for axis in self._axes(name))

    def rank(self, name: str) -> int:
        """The number of this process in a group, from 0. Raises RequestError as `size` does."""
        return self.ranks(name).index(self._own)

    def ranks(self, name: str) -> tuple[int, ...]:
        """The global ranks of the group that has this process, in ascending order. Raises RequestError as `size`
        does."""
        if name == WORLD:
            return tuple(range(self.size(WORLD)))
        if name == PIPELINE:
            return tuple(stage * self.place.mesh.size + self.place.rank for stage in range(self.place.stages))
        return self._of(self._axes(name), self._own)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group, for the caller's own collectives; None for a group of this process alone.

        The first call for a name is collective: every rank calls it with the same names in the same order. Raises
        RequestError as `size` does.
        """
        if self.size(name) == 1:
            return None
        if name == WORLD:
            return dist.group.WORLD
        if name == PIPELINE:
            return stage_line(self.place, tuple(range(self.place.stages)), _PURPOSE)
        axes = self._axes(name)
        parts = sorted({self._of(axes, rank) for rank in range(self.size(WORLD))})
        return self.place.known.of(parts, _PURPOSE)

    @property
    def _own(self) -> int:
        return self.place.stage * self.place.mesh.size + self.place.rank

    def _of(self, axes: Sequence[int], rank: int) -> tuple[int, ...]:
        """The ranks that differ from this one only on these axes."""
        found = [rank]
        for axis in axes:
            found = [other for one in found for other in self.place.mesh.axes[axis].line(one)]
        return tuple(sorted(found))

    def _axes(self, name: str) -> tuple[int, ...]:
        if name in self.place.mesh.names:
            return (self.place.mesh.names.index(name),)
        if name not in (*ROLES, EXPERT):
            raise RequestError(unknown_name("group", name, self.names))
        if self.bound is None:
            raise RequestError(
                f"group '{name}': the role of a mesh axis is known once the model has been traced; give parallelize an"
                " example, train on a batch first, or ask for an axis by its name"
            )
        axes = enumerate(self._roles)
        return tuple(at for at, axis in axes if (axis.experts if name == EXPERT else axis.role == name))

    @cached_property
    def _roles(self) -> tuple[AxisRole, ...]:
        assert self.bound is not None, "roles are of a bound plan"
        return roles(self.bound).axes


class HasGroups(Protocol):
    """A training step."""

    @property
    def groups(self) -> Groups: ...


_LAST: WeakValueDictionary[str, HasGroups] = WeakValueDictionary()


def set_last(step: HasGroups) -> None:
    """From now on `get_rank` and the similar functions answer for this step, as long as it lives."""
    _LAST["step"] = step


def get_rank(name: str = WORLD) -> int:
    """The number of this process in a named group of the plan, from 0; without a name, among all processes.

    Under a plan `name` is any of `Groups.names`: data, tensor, context, expert, pipeline, replicated, world, or a mesh
    axis. Before `runtime.parallelize` only "world" is known, from the launcher, and is 0 where there is none. Raises
    RequestError for other names, and for a role before the model was traced.
    """
    step = _LAST.get("step")
    if step is not None:
        return step.groups.rank(name)
    _check_early(name)
    launched = launched_by(os.environ)
    return dist.get_rank() if dist.is_initialized() else launched.rank if launched is not None else 0


def get_group_size(name: str = WORLD) -> int:
    """The number of processes of a named group of the plan; names and errors as in `get_rank`."""
    step = _LAST.get("step")
    if step is not None:
        return step.groups.size(name)
    _check_early(name)
    launched = launched_by(os.environ)
    return dist.get_world_size() if dist.is_initialized() else launched.world if launched is not None else 1


def get_group(name: str) -> dist.ProcessGroup | None:
    """The process group of a name, for torch.distributed; None for a group of this process alone.

    The first call for a name is collective. Raises RequestError as `get_rank` does, and where no step was made by
    `runtime.parallelize`.
    """
    step = _LAST.get("step")
    if step is None:
        raise RequestError(f"group '{name}': there is no plan yet; call runtime.parallelize first")
    return step.groups.group(name)


def _check_early(name: str) -> None:
    if name != WORLD:
        raise RequestError(
            f"group '{name}': there is no plan yet; call runtime.parallelize first, or ask for the group 'world'"
        )
