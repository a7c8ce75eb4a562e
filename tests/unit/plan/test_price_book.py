"""What walks over plans of one graph share: a prediction is the same, whatever was predicted before."""

from collections.abc import Sequence
from dataclasses import replace

from planner.plan.binding.bind import BoundPlan, bind_prepared
from planner.plan.plan import Group, Prediction
from planner.plan.prediction.loosening import loosened
from planner.plan.prediction.predict import predict
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.search import search
from tests.unit.search.cases import cluster_of, request_of

MODEL, CLUSTER = "llama-6-tied", cluster_of("h100-80gb", 8)


def found(pinned: Pinned) -> BoundPlan:
    return search(request_of(MODEL, CLUSTER, 8, pinned=pinned)).plans[0].bound


def recomputed(groups: Sequence[Group], how: str, blocks: range) -> tuple[Group, ...]:
    """Groups of a block each, some blocks recomputed otherwise."""
    return tuple(
        replace(one, recomputation=how, kept=()) if one.blocks and one.first_block in blocks else one for one in groups
    )


def predicted(bound: BoundPlan, *, alone: bool) -> Prediction:
    """What is predicted of a plan, `alone` on a graph of which nothing was derived."""
    whole = replace(bound.whole) if alone else bound.whole
    return predict(bind_prepared(bound.plan, whole, bound.blocks), CLUSTER)


def test_a_prediction_does_not_depend_on_those_before_it() -> None:
    first = found(Pinned(mesh=(2, 4), pipeline=1, micro_batches=2))
    plan = first.plan
    training = replace(plan.training, tensor_overlap=(), expert_overlap=())
    groups = loosened(first).groups
    others = [
        replace(plan, groups=recomputed(groups, "full", range(6))),
        replace(plan, training=training),
        replace(plan, groups=recomputed(groups, "none", range(6))),
        replace(plan, groups=recomputed(groups, "full", range(3, 4)), training=training),
        plan,
    ]
    shared = [predicted(replace(first, plan=one), alone=False) for one in others]
    assert len({one.step_seconds for one in shared}) > 2  # they differ
    assert shared == [predicted(replace(first, plan=one), alone=True) for one in others]
