"""A model with adapters on two processes: loss and all gradients are those of the model that is not sharded."""

import pytest

from planner.plan.file import dump_plan
from planner.strategy_search.request.space import Pinned
from tests.distributed import plans
from tests.distributed.searched import searched_plan

WAYS = {
    "tensor": Pinned(tensor=2, micro_batches=2),
    "stages": Pinned(pipeline=2, mesh=(1,), micro_batches=4, virtual_stages=2),
}
OTHERS = {
    "without sequence parallelism": Pinned(tensor=2, micro_batches=1, sequence_parallel=False),
    "zero 3": Pinned(data=2, zero=3, micro_batches=1, recompute="full"),
    "context": Pinned(context=2, micro_batches=1),
}


@pytest.mark.cases(1, 4)
@pytest.mark.slow
@pytest.mark.parametrize("ways", [WAYS, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["usual", "others"])
def test_gradients_are_those_of_the_unsharded_model(ways: dict[str, Pinned], pair) -> None:
    found = [searched_plan("adapted64", 2, pinned=way) for way in ways.values()]
    found.append(plans.random_plan("adapted64", plans.mesh_of(2), len(ways), micro_batches=1))
    for errors in pair.run("tasks_models", "parity", "adapted64", [dump_plan(plan) for plan in found]):
        assert max(errors) < 1e-6, dict(zip((*ways, "random"), errors, strict=True))
