"""What is predicted of experts that are exchanged under other work is what the runtime emits: collectives, products,
and live memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from planner.plan.plan import Plan
from runtime.auditing.audit import audit
from tests.contract.test_audit import LOOSER, cluster_of
from tests.distributed import plans, tasks
from tests.distributed.dividing import by_hand
from tests.distributed.exchanging import exchanged

FULL = {"recomputation": "full"}
IN_PARTS = {"stages": (1, 1), "micro_batches": 2, "schedule": "zb_h1", "recomputation": "full"}
IN_PAIRS = {"stages": (1,) * 4, "virtual_stages": 2, "schedule": "dualpipe_v", "micro_batches": 6, "global_batch": 12}
TURNS = {"micro_batches": 4, "global_batch": 8, "interleave": 2}


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """A plan by hand in one of the ways in which experts are divided, so many operators while rows go there."""

    model: str
    way: str
    mesh: tuple[int, ...]
    there: int = 3
    settings: Mapping[str, object] = field(default_factory=dict)

    def __call__(self) -> Plan:
        plan = by_hand(self.way, self.model, plans.mesh_of(*self.mesh), kept=tasks.KEPT, **self.settings)
        return exchanged(plan, self.model, self.there)


CASES = (
    Exchanged(model="mixture", way="samples", mesh=(2, 1), settings=FULL),
    Exchanged(model="beside", way="folded", mesh=(1, 2), settings=FULL),
    Exchanged(model="mixture", way="samples", mesh=(2, 1), settings=IN_PARTS),
    Exchanged(model="mixture", way="samples", mesh=(2, 1), there=0),
    Exchanged(model="mixture", way="tensor inside", mesh=(2, 2), there=4, settings={"recomputation": "selective"}),
    Exchanged(model="mixture", way="samples", mesh=(2, 1), there=0, settings={**TURNS, **FULL}),
    Exchanged(model="mixture4", way="samples", mesh=(2, 1), settings=IN_PAIRS),
    Exchanged(model="capped", way="samples", mesh=(2, 1), there=1),
    Exchanged(model="ungated", way="samples", mesh=(2, 1), settings=FULL),
    Exchanged(model="deepseek", way="zero3", mesh=(2, 2), settings=FULL),
)


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("make", CASES, ids=str)
def test_exchanges_under_work_send_and_compute_as_predicted(make: Exchanged) -> None:
    plan = make()
    assert plan.training.expert_overlap
    for stage in audit(plan, plans.traced(make.model), plans.BATCH, cluster_of(plan)):
        assert stage.unequal == ()
        assert abs(stage.peak / stage.predicted_peak - 1) < LOOSER, (stage.live, stage.predicted_live)
