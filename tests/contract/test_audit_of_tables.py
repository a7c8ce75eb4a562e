"""An audit of plans with tables outside of the devices: what crosses the link between host and device is predicted,
byte by byte, and so is the rest."""

from collections.abc import Mapping

import pytest

from planner.graph.placed import Placed
from planner.plan.binding.bind import BoundPlan, bind
from planner.sharding.stored import own_copies
from runtime import StageAudit, audit
from runtime.auditing import audit as auditing
from tests.contract.test_priced_is_emitted import cluster_of
from tests.distributed import plans
from tests.long_lists import first

PLACED = {
    "dlrm": (("tables.1.*", "servers"), ("tables.*", "host")),
    "wide-deep": (("tables.*", "servers"), ("wide.*", "host")),
}
WORDS = (("model.embed_tokens.*", "host"),)
CASES = [(model, sizes, seed) for seed in range(4) for model in PLACED for sizes in ((2,), (2, 2))]


def audited(model: str, sizes: tuple[int, ...], seed: int) -> tuple[StageAudit, BoundPlan]:
    plan = plans.random_plan(model, plans.mesh_of(*sizes), seed, placed=PLACED[model], micro_batches=1 + seed % 2)
    graph = plans.traced(model)
    (stage,) = audit(plan, graph, plans.BATCH, cluster_of(plan))
    return stage, bind(plan, graph, plans.BATCH)


PIPELINES = [
    ("gpt-untied", (("wpe.*", "host"), ("wte.*", "servers")), {"stages": (1, 1)}),
    ("llama4", WORDS, {"stages": (1, 1, 1, 1), "virtual_stages": 2, "schedule": "interleaved_1f1b"}),
    ("llama4", WORDS, {"stages": (2, 2), "schedule": "zb_h1"}),
]


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "placed", "settings"), first(1, PIPELINES))
def test_rows_cross_the_link_of_the_first_stage_alone(model: str, placed: Placed, settings: dict[str, object]) -> None:
    """Of eight micro-batches, fewer of which run."""
    mesh, batch = plans.mesh_of(2), {"global_batch": 32, "micro_batches": 8}
    plan = plans.random_plan(model, mesh, 2, placed=placed, **batch, **settings)
    early, late = audit(plan, plans.traced(model), plans.BATCH, cluster_of(plan))
    for stage in (early, late):
        assert stage.unequal == ()
        assert stage.agrees, (stage.live, stage.predicted_live)
    crossing = [row for row in early.collectives if row.kind == auditing.HOST_LINK]
    assert len(crossing) >= len(placed)
    assert all(row.emitted == 8 for row in crossing)
    assert all(row.kind != auditing.HOST_LINK for row in late.collectives)


def by_hand() -> StageAudit:
    """Half the samples on each of two devices; the audited one is the second."""
    how = plans.on_samples, lambda *_: own_copies(1), plans.load_samples
    plan = plans.make_plan("dlrm", plans.mesh_of(2), *how, placed=PLACED["dlrm"])
    (stage,) = audit(plan, plans.traced("dlrm"), plans.BATCH, cluster_of(plan))
    return stage


@pytest.mark.cases(1, 3)
@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes", "seed"), first(4, CASES))
def test_what_crosses_the_link_is_what_is_predicted(model: str, sizes: tuple[int, ...], seed: int) -> None:
    stage, bound = audited(model, sizes, seed)
    assert stage.unequal == ()
    assert stage.agrees, (stage.live, stage.predicted_live)
    crossing = [row for row in stage.collectives if row.kind == auditing.HOST_LINK]
    tables = {op.operator.name for op in bound.operators if op.rule.outside is not None}
    assert {row.operator for row in crossing if row.phase == "forward"} == tables
    assert all(row.emitted == bound.plan.training.micro_batches for row in crossing)


def test_all_samples_cross_once_each_way() -> None:
    """By hand: where each of two devices looks up half the samples, w bytes of each go to it and come back."""
    stage = by_hand()
    crossing = [(row.phase, row.nbytes) for row in stage.collectives if row.kind == auditing.HOST_LINK]
    rows = plans.BATCH // 2 * plans.DLRM_CONFIG.table_width * 4
    assert sorted(crossing) == [("backward", rows)] * 3 + [("forward", rows)] * 3


def test_rows_that_were_not_predicted_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    crossing_of = auditing.crossing_rows

    def wrong(bound: BoundPlan, rank: int, place: int) -> Mapping[tuple[str, str], float]:
        return {key: nbytes for key, nbytes in crossing_of(bound, rank, place).items() if key[0] != "backward"}

    monkeypatch.setattr(auditing, "crossing_rows", wrong)
    stage = by_hand()
    assert not stage.agrees
    assert {(row.phase, row.predicted, row.emitted) for row in stage.unequal} == {("backward", 0, 1)}
