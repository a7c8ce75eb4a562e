"""What is offloaded is gone from it: an audit finds the live memory that was predicted, and less
than that of the same plan with everything on the device."""

from dataclasses import replace

import pytest

from hardware_profiles import Home
from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime import StageAudit, audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import FULL, KEEPING, Hand, cluster_of
from tests.distributed import offloading, plans
from tests.long_lists import first

CASES = (
    (Hand(model="llama", kind="zero1", mesh=(2, 2), settings={"micro_batches": 2}), "host"),
    (Hand(model="llama4", kind="zero3", mesh=(2,), settings={"stages": (1, 2, 1), **FULL}), "mixed"),
    (Hand(model="gpt4", kind="zero2", mesh=(2,), settings={"stages": (2, 2)}), "disk"),
    (Hand(model="llama", kind="megatron", mesh=(2, 2)), "host"),
)


def audited(plan: Plan, model: str) -> list[StageAudit]:
    return list(audit(plan, plans.traced(model), plans.BATCH, cluster_of(plan)))


def check_falls(model: str, plan: Plan, offloaded: Plan) -> None:
    """The offloaded plan is as predicted on every rank, and needs no more than the other anywhere, less somewhere."""
    falls = []
    for before, stage in zip(audited(plan, model), audited(offloaded, model), strict=True):
        assert stage.unequal == ()
        near = abs(stage.peak / stage.predicted_peak - 1)
        assert near < auditing.MEMORY_TOLERANCE, (stage.live, stage.predicted_live)
        assert stage.peak <= stage.stated
        falls.append(before.peak - stage.peak)
    assert min(falls) >= 0
    assert max(falls) > 0


MANY = {"micro_batches": 4, "global_batch": 32}
SAVED = (
    Hand(model="gpt4", kind="megatron", mesh=(1, 2), settings={**MANY, "stages": (1, 3)}),
    Hand(model="llama4", kind="zero3", mesh=(2,), settings={**MANY, "stages": (2, 2), "schedule": "gpipe"}),
    Hand(model="llama4", kind="zero2", mesh=(2,), settings={**MANY, "stages": (2, 2), "schedule": "zb_h1"}),
    Hand(model="llama4", kind=24, mesh=(2, 2), settings={**MANY, "recomputation": ("full", "none", "none", "full")}),
    Hand(
        model="llama4",
        kind="zero1",
        mesh=(2,),
        settings={**MANY, "stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b"},
    ),
)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("make", first(1, SAVED), ids=str)
def test_what_blocks_save_leaves_the_device(make: Hand) -> None:
    """All of it but for two blocks at a time."""
    plan, home = make(), offloading.everywhere("device")
    check_falls(make.model, plan, offloading.offloaded(plan, home, "host", saved="host"))


ACTIVATIONS = (
    Hand(model="llama4", kind="zero3", mesh=(2,), settings={**MANY, "stages": (2, 2), "schedule": "gpipe", **FULL}),
    Hand(model="llama4", kind="megatron", mesh=(1, 2), settings={**MANY, "stages": (3, 1), **FULL}),
    Hand(model="gpt4", kind="zero3", mesh=(2,), settings={**MANY, "stages": (2, 2), "schedule": "gpipe", **KEEPING}),
    Hand(
        model="llama4",
        kind="zero1",
        mesh=(2,),
        settings={**MANY, "stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b", **FULL},
    ),
)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("make", first(1, ACTIVATIONS), ids=str)
def test_what_flows_into_blocks_leaves_the_device(make: Hand) -> None:
    plan, home = make(), offloading.everywhere("device")
    check_falls(make.model, plan, offloading.offloaded(plan, home, "host"))


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "home"), first(1, CASES), ids=str)
@pytest.mark.parametrize("update", first(1, [Update(), Update(buckets=8192)]), ids=str)
def test_live_memory_falls_as_predicted(make: Hand, home: str, update: Update) -> None:
    plan = make()
    plan = replace(plan, training=replace(plan.training, update=update))
    for before, stage in zip(
        audited(plan, make.model),
        audited(offloading.offloaded(plan, offloading.homes_of(home)), make.model),
        strict=True,
    ):
        assert stage.unequal == ()
        assert stage.live["optimizer state"] == stage.predicted_live["optimizer state"] < before.live["optimizer state"]
        assert abs(stage.peak / stage.predicted_peak - 1) < auditing.MEMORY_TOLERANCE, (
            stage.live,
            stage.predicted_live,
        )
        assert stage.peak <= stage.stated
        assert stage.peak < before.peak


PLAIN = {"micro_batches": 2}
WEIGHTS = (
    (Hand(model="llama4", kind="megatron", mesh=(1, 2), settings=PLAIN), "device", ""),
    (Hand(model="llama4", kind="zero1", mesh=(2,), settings={**PLAIN, **FULL}), "host", ""),
    (Hand(model="gpt4", kind="zero2", mesh=(2,), settings={**PLAIN, "stages": (1, 3), **KEEPING}), "host", ""),
    (Hand(model="llama4", kind="zero3", mesh=(2,), settings={**PLAIN, "stages": (1, 3)}), "device", ""),
    (Hand(model="gpt4", kind="zero1", mesh=(1,), settings={"micro_batches": 1}), "disk", r"\.[023]\."),
    (Hand(model="gpt4", kind="megatron", mesh=(1, 2), settings={**PLAIN, **FULL}), "host", "mlp|c_fc|c_proj"),
)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("make", "states", "pattern"), first(2, WEIGHTS), ids=str)
def test_weights_leave_the_device(make: Hand, states: Home, pattern: str) -> None:
    """Those of no more than two blocks are there at a time."""
    falls = []
    kept = offloading.offloaded(make(), offloading.everywhere(states))
    plan = offloading.offloaded(make(), offloading.everywhere(states), weights=offloading.of_blocks("host", pattern))
    for before, stage in zip(audited(kept, make.model), audited(plan, make.model), strict=True):
        assert stage.unequal == ()
        assert abs(stage.peak / stage.predicted_peak - 1) < auditing.MEMORY_TOLERANCE, (
            stage.live,
            stage.predicted_live,
        )
        assert stage.peak <= stage.stated
        assert stage.live["weights"] == stage.predicted_live["weights"]
        falls.append(before.live["weights"] - stage.live["weights"])
    assert min(falls) >= 0  # of one block, or two, all are there
    assert max(falls) > 0
