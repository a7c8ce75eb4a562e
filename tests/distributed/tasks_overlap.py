"""What the worker processes do in the tests of tensor parallelism under its products: every function here is called on
all ranks at the same time."""

from dataclasses import replace

import torch

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
    chunks: tuple[int, ...],
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
    model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, ...], settings: dict[str, object]
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


def trained(
    model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, ...], settings: dict[str, object]
) -> tuple[float, bool]:
    """How far losses of two steps, weights behind them and an evaluation with logits are from those without overlaps;
    and whether the first step was compared over all ranks, operator by operator."""
    found = []
    for overlaps in (True, False):
        step = built(model, kind, sizes, chunks, settings, lowered=True)
        if not overlaps:
            step = parallelize(
                plans.build(model),
                replace(step.plan, training=replace(step.plan.training, tensor_overlap=())),
                traced=plans.traced(model),
                device=tasks.CPU,
                known=tasks.known(),
                seed=tasks.SEED,
            )
        batches = [plans.inputs(model, samples=step.plan.training.global_batch) for _ in range(2)]
        values = [torch.tensor(step(*batch)) for batch in batches]
        values += [piece.piece.detach().clone() for piece in step.rank.parameters.values()]
        evaluated = step.evaluate_with(["logits"], *batches[0])
        found.append([*values, torch.tensor(evaluated.loss), evaluated.outputs["logits"].float()])
        checked = not step.rank.check_layouts
    return max(tasks.relative(one, other) for one, other in zip(*found, strict=True)), checked


def compiled(
    model: str, kind: int | str, sizes: tuple[int, ...], chunks: tuple[int, ...], settings: dict[str, object]
) -> tuple[float, int]:
    """How far the loss and gradients of a second step with fused chains are from those without; how many chains."""
    found = []
    for fuses in (True, False):
        plan = built(model, kind, sizes, chunks, settings, lowered=True).plan
        step = parallelize(
            plans.build(model),
            plan,
            traced=plans.traced(model),
            device=tasks.CPU,
            known=tasks.known(),
            seed=tasks.SEED,
            check_layouts=False,
            compiled=fuses,
        )
        batch = plans.inputs(model, samples=plan.training.global_batch)
        values = [torch.tensor(step(*batch)), torch.tensor(step.accumulate(*batch))]
        found.append(values + [p.local_gradient().clone() for p in step.rank.parameters.values() if p.trainable])
        if step.rank.programs.compiled is not None:
            chains = len(step.rank.programs.compiled.texts)
    return max(tasks.relative(one, other) for one, other in zip(*found, strict=True)), chains
