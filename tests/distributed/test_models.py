"""Fifteen models and more, each under ten plans and more on two and on four processes: they compute what the plain
model computes, and learn as it does.

Some plans are random (any legal strategy and stored layout of everything), some are those that the search finds for
degrees decided by hand. Loss, every gradient and changed buffers agree to 1e-5 of the largest magnitude, the losses of
20 steps to 1e-4. Models with batch norm compute in float64, as in float32 they are off by as much themselves. A further
model is a row of `MODELS`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from planner.plan.binding.bind import prepare
from planner.plan.file import dump_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.space import FREE, Pinned
from tests.distributed import plans
from tests.distributed.searched import searched_plan

TOLERANCE, LOSSES = 1e-5, 1e-4
PLANS = 10
"""At least so many for each model and number of processes."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row of `plans.MODELS`. `whole` says that the batch is part of its shapes, so that there are no micro-batches;
    `decided` is decided by hand in every search, whatever else is."""

    name: str
    whole: bool = False
    decided: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.name


MODELS = (
    Model(name="llama"),
    Model(name="llama-one"),
    Model(name="llama-heads"),
    Model(name="gpt"),
    Model(name="gpt-untied"),
    Model(name="mixture", decided={"expert": 1, "mesh": None}),  # an exchange of rows is not executed
    Model(name="assorted", whole=True),
    Model(name="dropping"),
    Model(name="vit"),
    Model(name="resnet64"),
    Model(name="dlrm"),
    Model(name="wide-deep"),
    Model(name="bags"),
    Model(name="gated", whole=True),
    Model(name="unusual", whole=True),
    Model(name="towers"),
)
POOLS = {2: "pair", 4: "pool"}
FULL, SELECTIVE = (
    {"recomputation": "full"},
    {"recomputation": "selective", "kept": ("linear", "norm", "attention", "conv2d")},
)
RANDOM: Mapping[int, Sequence[tuple[tuple[int, ...], int, Mapping[str, object]]]] = {
    2: (((2,), 1, {}), ((2,), 1, FULL), ((2,), 2, {}), ((1, 2), 2, FULL), ((2,), 2, SELECTIVE), ((2,), 1, {})),
    4: (((2, 2), 1, {}), ((4,), 1, FULL), ((1, 4), 2, {}), ((2, 2), 2, FULL), ((4,), 2, SELECTIVE), ((2, 2), 1, {})),
}
"""Mesh, micro-batches and recomputation of random plans by the number of processes."""

SEARCHED = {
    2: (
        FREE,
        Pinned(data=2, zero=3, micro_batches=1, recompute="full"),
        Pinned(data=2, zero=2, micro_batches=2),
        Pinned(tensor=2, sequence_parallel=True, micro_batches=2),
        Pinned(tensor=2, micro_batches=1, recompute="selective"),
    ),
    4: (
        FREE,
        Pinned(data=4, zero=3, micro_batches=1, recompute="selective"),
        Pinned(data=2, tensor=2, zero=2, micro_batches=2, recompute="full"),
        Pinned(data=2, tensor=2, zero=1, micro_batches=1, sequence_parallel=True),
        Pinned(tensor=4, micro_batches=2),
    ),
}


def plans_of(model: Model, processes: int) -> tuple[Callable[[], Plan], ...]:
    """Random and searched ones, and pipelines where there are blocks: each is made when it is called."""
    blocks = prepare(plans.traced(model.name))[1].count
    found: list[Callable[[], Plan]] = [
        partial(
            plans.random_plan, model.name, plans.mesh_of(*sizes), seed, **settings, micro_batches=parts(model, number)
        )
        for seed, (sizes, number, settings) in enumerate(RANDOM[processes])
    ]
    pins = [pinned if blocks else replace(pinned, recompute=None) for pinned in SEARCHED[processes]]
    found += [partial(searched, model, processes, pinned) for pinned in pins]
    if blocks > 1:
        mesh = plans.mesh_of(processes // 2)
        found.append(partial(plans.random_plan, model.name, mesh, 7, stages=(1, blocks - 1), micro_batches=2))
        found.append(partial(searched, model, processes, Pinned(pipeline=2, mesh=mesh.sizes, micro_batches=2)))
    return tuple(found)


def searched(model: Model, processes: int, pinned: Pinned) -> Plan:
    own = replace(pinned, micro_batches=1) if model.whole else pinned
    return searched_plan(model.name, processes, pinned=replace(own, **model.decided))


def parts(model: Model, micro_batches: int) -> int:
    return 1 if model.whole else micro_batches


@pytest.mark.cases(0, 0)
@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_model_computes_the_same_under_every_plan(request, model: Model, processes: int) -> None:
    found = [make() for make in plans_of(model, processes)]
    assert len(set(found)) >= PLANS
    workers = request.getfixturevalue(POOLS[processes])
    for errors in workers.run("tasks_models", "parity", model.name, [dump_plan(plan) for plan in found]):
        assert max(errors) < TOLERANCE, errors


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_model_learns_the_same_under_every_plan(request, model: Model, processes: int) -> None:
    """The last plan that was searched, on four processes, and a random one before it, on two: pipelines where there are
    blocks."""
    found = plans_of(model, processes)
    plan = found[-1 if processes == 4 else -2]()
    workers = request.getfixturevalue(POOLS[processes])
    for errors in workers.run("tasks_models", "training", model.name, [dump_plan(plan)]):
        assert max(errors) < LOSSES, errors
