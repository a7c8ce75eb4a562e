"""What the worker processes do for tests of plans without the all-to-all."""

from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from planner.sharding.mesh import Mesh
from tests.distributed import plans
from tests.distributed.tasks import build_step, worst_error


def without(mesh: Mesh, axes: tuple[int, ...]) -> Mesh:
    """The mesh, of which these axes lack the all-to-all."""
    return Mesh(axes=tuple(replace(axis, alltoall=at not in axes) for at, axis in enumerate(mesh.axes)))


def errors(model: str, sizes: tuple[int, ...], seeds: list[int]) -> list[float]:
    """The worst error of loss, gradients and buffers under each random plan, where nobody may call it."""

    def refused(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("an all-to-all was called")

    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", refused)
        for seed in seeds:
            mesh = without(plans.mesh_of(*sizes), tuple(range(len(sizes))))
            found.append(worst_error(build_step(model, plans.random_plan(model, mesh, seed)), model, 1))
    return found


def calls(model: str, sizes: tuple[int, ...], seed: int) -> int:
    """How often a random plan calls it on axes that have it."""
    count = 0
    call = dist.all_to_all_single

    def counted(*args: Any, **settings: Any) -> Any:
        nonlocal count
        count += 1
        return call(*args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        worst_error(build_step(model, plans.random_plan(model, plans.mesh_of(*sizes), seed)), model, 1)
    return count
