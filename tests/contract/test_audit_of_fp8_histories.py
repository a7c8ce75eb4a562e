"""Delayed scales are made from histories, which are memory: the prediction counts them, an audit finds them, and the
search fills devices with them."""

from dataclasses import replace

import pytest

from hardware_profiles import load_profile
from planner.fp8_recipes import EXPERT_TENSORS
from planner.graph.fp8 import NO_FP8, Fp8, delayed_scales, history_bytes
from planner.plan.binding.bind import bind, prepare
from planner.plan.prediction.memory.chunks import STATES
from planner.plan.prediction.predict import predict
from planner.sharding.mesh import build_mesh
from planner.strategy_search.request.folding import fold
from planner.strategy_search.tables.table_builder import TableBuilder
from runtime import audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import Hand, cluster_of
from tests.distributed import plans
from tests.distributed.dividing import by_hand

DELAYED = Fp8(recipe="delayed", history=2000)


def test_an_audit_finds_the_histories_that_are_counted() -> None:
    plan = Hand(model="llama", kind="megatron", mesh=(2, 2), settings={"fp8": DELAYED, "micro_batches": 2})()
    traced = plans.traced("llama")
    short = replace(plan, training=replace(plan.training, fp8=replace(DELAYED, history=1)))
    machine = cluster_of(plan)
    long, brief = (predict(bind(one, traced, plans.BATCH), machine) for one in (plan, short))
    layers = 2 * 7
    saved = layers * (history_bytes(DELAYED) - history_bytes(replace(DELAYED, history=1)))
    assert dict(long.memory)["optimizer state"] - dict(brief.memory)["optimizer state"] == pytest.approx(saved)
    (stage,) = audit(plan, traced, plans.BATCH, machine)
    assert stage.unequal == ()
    assert stage.live[STATES] == pytest.approx(stage.predicted_live[STATES], rel=1e-6)
    assert abs(stage.peak / stage.predicted_peak - 1) < auditing.MEMORY_TOLERANCE


@pytest.mark.slow
def test_those_of_experts_are_counted_for_each_of_them() -> None:
    fp8 = replace(DELAYED, experts=True)
    plan = by_hand("tensor inside", "wide", plans.mesh_of(2, 2), fp8=fp8)
    traced = plans.traced("wide")
    machine = cluster_of(plan)
    (stage,) = audit(plan, traced, plans.BATCH, machine)
    assert stage.unequal == ()
    assert stage.live[STATES] == pytest.approx(stage.predicted_live[STATES], rel=1e-6)
    assert stage.live[STATES] > 2 * history_bytes(fp8, (EXPERT_TENSORS[3], 4))


def test_the_tables_of_a_search_count_them() -> None:
    graph, blocks = prepare(plans.traced("llama"), fp8=DELAYED)
    machine = load_profile("h100-80gb").with_devices(4)
    mesh = build_mesh(machine, (2, 2))
    builders = (
        TableBuilder(mesh=mesh, cluster=machine, precision="fp32", optimizer="adamw", dominated=True, fp8=fp8)
        for fp8 in (DELAYED, NO_FP8)
    )
    with_them, without = (builder.build(fold(graph, blocks)).parameters for builder in builders)
    layers = delayed_scales(graph.operators, graph.types)
    more = {one.name: one.prices.state - other.prices.state for one, other in zip(with_them, without, strict=True)}
    assert layers.keys() & more.keys()
    for name, nbytes in more.items():
        assert nbytes == pytest.approx(history_bytes(DELAYED) if name in layers else 0.0)
