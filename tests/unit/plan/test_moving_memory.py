"""Memory of redistributions on their way."""

import pytest

from hardware_profiles import load_profile
from planner.plan.binding.bind import bind
from planner.plan.prediction.memory.live import live_memory
from planner.plan.prediction.memory.moving import most_moving
from planner.plan.prediction.predict import predict, stage_costs
from tests.distributed import plans


@pytest.mark.parametrize("seed", [3, 11, 22])
def test_no_moment_of_a_random_plan_takes_more_than_is_predicted(seed: int) -> None:
    cluster = load_profile("cpu").with_devices(4)
    plan = plans.random_plan("llama", plans.mesh_of(2, 2), seed)
    bound = bind(plan, plans.traced("llama"), plans.BATCH)
    (cost,) = stage_costs(bound, cluster)
    live = sum(live_memory(bound, 0, cost.memory, cost.rows).values())
    (moving,) = most_moving(bound)
    assert moving > 0
    predicted = dict(predict(bound, cluster).memory)
    assert predicted["transient"] == max(cost.memory["transient"], moving)
    assert live <= sum(cost.memory.values()) - cost.memory["transient"] + predicted["transient"]


def test_nothing_moves_on_one_device() -> None:
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(1))
    assert most_moving(bind(plan, plans.traced("llama"), plans.BATCH)) == [0.0]
