"""Weights that are gathered in fp8: what an audit finds sent and alive is what was priced, and it is less."""

from dataclasses import replace
from typing import Any

import pytest

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import GATHERED, Fp8
from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime import audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import Hand, cluster_of
from tests.distributed import plans

SELECTIVE: dict[str, Any] = {"recomputation": "selective", "kept": ("q_proj/linear", "down_proj/linear")}
CASES: list[tuple[str, tuple[int, ...], str, dict[str, Any]]] = [
    ("zero3", (2, 2), "ahead", {}),
    ("megatron", (2, 2), "block", {"recomputation": "full"}),
    ("zero2", (4,), "ahead", {"micro_batches": 2, **SELECTIVE}),
    ("zero3", (4,), "block", {"recomputation": "full"}),
    ("megatron", (2, 2), "ahead", {}),
    ("zero3", (4,), "ahead", {"micro_batches": 2, **SELECTIVE}),
]


def plan_of(recipe: str, kind: str, mesh: tuple[int, ...], gathers: str, settings: dict[str, Any]) -> Plan:
    own = {"history": 2} if RECIPES[recipe].delayed else {}
    fp8 = Fp8(recipe=recipe, gathered=True, **own)
    plan = Hand(model="llama", kind=kind, mesh=mesh, settings={"fp8": fp8, **settings})()
    update = Update(buckets="none", gathers=gathers)
    return replace(plan, training=replace(plan.training, update=update))


@pytest.mark.cases(2, 5)
@pytest.mark.parametrize(
    ("kind", "mesh", "gathers", "settings", "recipe"), [(*case, recipe) for case in CASES for recipe in GATHERED]
)
def test_messages_are_equal_and_live_memory_is_close(
    kind: str, mesh: tuple[int, ...], gathers: str, settings: dict[str, Any], recipe: str
) -> None:
    plan = plan_of(recipe, kind, mesh, gathers, settings)
    (stage,) = audit(plan, plans.traced("llama"), plans.BATCH, cluster_of(plan))
    assert stage.unequal == ()
    assert abs(stage.peak / stage.predicted_peak - 1) < auditing.MEMORY_TOLERANCE / 2
