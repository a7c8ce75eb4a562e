"""What plans with products in fp8 compute again and say again, for each recipe: no more than without fp8."""

from typing import Any

import pytest

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import Fp8
from runtime import audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import Hand, cluster_of
from tests.distributed import plans
from tests.distributed.dividing import by_hand

AGAIN = [{"recomputation": "full"}, {"recomputation": "selective", "kept": ("q_proj/linear", "down_proj/linear")}]


def expect_equal(plan: Any, model: str) -> None:
    (stage,) = audit(plan, plans.traced(model), plans.BATCH, cluster_of(plan))
    assert stage.unequal == ()
    assert abs(stage.peak / stage.predicted_peak - 1) < auditing.MEMORY_TOLERANCE


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize("settings", AGAIN, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_block_is_computed_again_up_to_its_last_product(recipe: str, settings: dict[str, Any]) -> None:
    plan = Hand(model="llama", kind="megatron", mesh=(2, 2), settings={"fp8": Fp8(recipe=recipe), **settings})()
    expect_equal(plan, "llama")


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize("model", ["wide", "ungated-wide"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_are_computed_again_as_without_fp8(recipe: str, model: str) -> None:
    fp8 = Fp8(recipe=recipe, experts=True, dispatch=True)
    expect_equal(by_hand("tensor inside", model, plans.mesh_of(2, 2), fp8=fp8, recomputation="full"), model)
