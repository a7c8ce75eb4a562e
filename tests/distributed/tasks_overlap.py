"""What the worker processes do in the tests of tensor parallelism under its products: every function here is called on
all ranks at the same time."""

from dataclasses import replace

from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans, tasks
from tests.distributed.overlapping import overlapped


def built(
    model: str,
    kind: int | str,
    sizes: tuple[int, ...],
    chunks: tuple[int, int],
    settings: dict[str, object],
    *,
    lowered: bool,
) -> TrainingStep:
    """A step of a plan with so many chunks."""
    given = dict(settings)
    gathers = given.pop("gathers", None)
    plan: Plan = tasks.plan_of(model, plans.mesh_of(*sizes), kind, **given)
    training = plan.training
    if gathers is not None:
        training = replace(training, update=Update(buckets="none", gathers=gathers))  # type: ignore[arg-type]
    plan = overlapped(replace(plan, training=training), model, *chunks)
    return parallelize(
        plans.build(model),
        plan,
        traced=plans.traced(model),
        device=tasks.CPU,
        known=tasks.known(),
        seed=tasks.SEED,
        lowered=lowered,
    )


def parity(
    model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, int], settings: dict[str, object]
) -> tuple[float, float, dict[str, int]]:
    """The worst error of loss and gradients beside the unsharded model, in lowered programs and in the general
    executor, and how many overlaps the plan has by their kinds."""
    micro_batches = int(settings.get("micro_batches", 1))  # type: ignore[call-overload]
    errors = []
    for lowered in (True, False):
        step = built(model, kind, sizes, chunks, settings, lowered=lowered)
        errors.append(tasks.worst_error(step, model, micro_batches))
    kinds = [one.kind for one in overlaps_of(step.rank.bound)]
    return errors[0], errors[1], {kind: kinds.count(kind) for kind in kinds}
