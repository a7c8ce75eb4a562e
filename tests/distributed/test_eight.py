"""Eight processes: what four cannot show, as three kinds of parallelism at once, long pipelines, long rings.

Plans are searched once and handed over as plan files; loss, gradients and buffers are those of the plain model. What
takes long on two cores are starts, not steps, so that all share one pool of processes.
"""

import pytest

from planner.plan.file import dump_plan
from planner.plan.plan import Plan
from planner.strategy_search.request.space import Pinned
from tests.distributed.searched import searched_plan
from tests.long_lists import rarely

pytestmark = pytest.mark.thorough

TOLERANCE = 1e-5
PATIENCE = 900.0  # seconds, where eight processes share a core or two with others
CUBE = {"data": 2, "context": 2, "tensor": 2}
PLANS: dict[str, tuple[str, Pinned]] = {
    "ring, tensor and data": ("llama", Pinned(**CUBE, context_by="ring", sequence_parallel=True, zero=1)),
    "heads, tensor and data": ("llama-heads", Pinned(**CUBE, zero=3, recompute="full")),
    "pipeline and tensor": ("llama4", Pinned(pipeline=4, tensor=2, sequence_parallel=True, micro_batches=4)),
    "pipeline of eight": ("llama8", Pinned(pipeline=8, micro_batches=8, recompute="selective")),
    "taken apart": ("llama4", Pinned(pipeline=4, data=2, zero=2, schedule="zb_h1", micro_batches=4)),
    "interleaved": ("llama8", Pinned(pipeline=4, virtual_stages=2, tensor=2, micro_batches=4, recompute="full")),
    "experts in a pipeline": ("mixture4", Pinned(pipeline=2, data=4, expert=4, zero=1, micro_batches=2)),
    "experts and heads": ("deepseek", Pinned(data=4, tensor=2, expert=4, zero=2, micro_batches=2)),
    "ring of eight": ("llama", Pinned(context=8, context_by="ring", zigzag=False)),
    "heads inside of a ring": ("llama", Pinned(context=8, context_by="hybrid", ulysses=4)),
    "two at a time": ("llama", Pinned(data=2, tensor=4, interleave=2, micro_batches=4)),
    "slices": ("llama4", Pinned(pipeline=4, data=2, zero=1, schedule="seqpipe", slices=4, micro_batches=2)),
    "ZeRO 3": ("gpt", Pinned(data=8, zero=3, recompute="selective")),
}


def planned(name: str) -> Plan:
    model, pinned = PLANS[name]
    return searched_plan(model, 8, pinned=pinned, global_batch=8)


ALSO_ON_FOUR = ("taken apart", "experts in a pipeline", "two at a time", "slices", "ZeRO 3")
"""Eight of them show little that four do not."""


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*(name for name in PLANS if name not in ALSO_ON_FOUR), *rarely(ALSO_ON_FOUR)])
def test_plans_for_eight_devices(eight, name: str) -> None:
    plan = planned(name)
    assert plan.mesh.size * len(plan.stages) == 8 * plan.virtual_stages
    answers = eight.run("tasks_models", "parity", PLANS[name][0], [dump_plan(plan)], timeout=PATIENCE)
    assert len(answers) == 8
    for errors in answers:
        assert max(errors) < TOLERANCE, errors


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "sizes"), [("llama", (2, 2, 2)), *rarely([("mixture", (4, 2)), ("vit", (2, 4))])], ids=str
)
def test_random_plans(eight, model: str, sizes: tuple[int, ...]) -> None:
    """Any legal strategy of every operator, and any layout of every weight."""
    seeds = [0, 1]
    for errors in eight.run("tasks", "parity", model, sizes, seeds, 1, "none", timeout=PATIENCE):
        assert max(errors) < TOLERANCE, dict(zip(seeds, errors, strict=True))


@pytest.mark.slow
def test_the_plans_are_what_they_are_called() -> None:
    """Three axes of two, all devices on one of them, a ring inside of which heads are split."""
    assert planned("ring, tensor and data").mesh.sizes == (2, 2, 2)
    assert planned("ring of eight").mesh.sizes == (8,)
    assert planned("heads inside of a ring").mesh.sizes == (2, 4)
    assert [len(planned(name).stages) for name in ("pipeline of eight", "interleaved", "slices")] == [8, 8, 4]
    assert planned("two at a time").training.interleave == 2
