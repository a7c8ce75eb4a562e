"""Plans whose linear layers are in fp8, each compared with the plain model under the same recipe."""

from dataclasses import replace

from planner.errors import CheckpointError
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.binding.bind import prepare
from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime.checkpoint.saving import Checkpoints
from runtime.ops.randomness import dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep
from runtime.step.same_fp8 import recipes_of
from tests.distributed import plans
from tests.distributed.dividing import by_hand
from tests.distributed.tasks import KEPT, SEED, build_step, plan_of, planned, relative, worst_error
from tests.distributed.tasks_alltoall import without
from tests.refusals import refused

SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1e-6)  # Adam divides rounding by epsilon


def parity(
    model: str,
    recipe: str,
    sizes: tuple[int, ...],
    seeds: list[int | str],
    settings: dict[str, object],
) -> list[float]:
    """The worst error of loss and gradients under each plan."""
    mesh, errors = plans.mesh_of(*sizes), []
    for seed in seeds:
        plan = plan_of(model, mesh, seed, kept=KEPT, fp8=Fp8(recipe=recipe), **settings)
        errors.append(worst_error(build_step(model, plan), model, plan.training.micro_batches))
    return errors


def experts(
    recipe: str,
    sizes: tuple[int, ...],
    ways: list[str],
    settings: dict[str, object],
    fp8: dict[str, bool],
    once: bool = False,
    model: str = "wide64",
    lacking: tuple[int, ...] = (),
) -> list[float]:
    """The same of experts that are divided in some ways, where these axes are `lacking` the all-to-all."""
    mesh, errors = without(plans.mesh_of(*sizes), lacking), []
    for way in ways:
        own = Fp8(recipe=recipe, **fp8)
        plan = by_hand(way, model, mesh, kept=KEPT, fp8=own, **settings)
        plan = replace(plan, training=replace(plan.training, tokens_once=once))
        errors.append(worst_error(build_step(model, plan), model, plan.training.micro_batches))
    return errors


def without_agreement(model: str, recipe: str, sizes: tuple[int, ...]) -> float:
    """The worst error where devices take the largest elements of their own pieces for those of the whole."""
    from runtime.ops.fp8 import scaled_products

    agreed = scaled_products.collectives
    scaled_products.collectives = _Alone  # type: ignore[assignment]
    try:
        return parity(model, recipe, sizes, ["megatron"], {})[0]
    finally:
        scaled_products.collectives = agreed


class _Alone:
    all_reduce_max = staticmethod(lambda term, group: term)


def weights_without_agreement(recipe: str) -> float:
    """The worst error of a step whose weights are cast by the largest elements of the pieces of each device."""
    from runtime.ops.fp8 import weight_scales

    agreed = weight_scales.collectives
    weight_scales.collectives = _Alone  # type: ignore[assignment]
    try:
        fp8 = {"gathered": True}
        return steps_of("llama64", (4,), ["zero3"], {"gathers": "block"}, fp8, recipe, steps=1)[0][0]
    finally:
        weight_scales.collectives = agreed


def steps_of(
    model: str,
    sizes: tuple[int, ...],
    seeds: list[int | str],
    settings: dict[str, object],
    fp8: dict[str, bool],
    recipe: str = "delayed",
    steps: int = 4,
) -> list[tuple[float, float]]:
    """Under each plan, which may divide experts by hand ("experts: WAY"), the worst error of losses and weights over
    some steps beside the plain model under the same recipe, delayed scales of histories of two steps and a margin; and
    by how much fp8 changes the loss of the last step."""
    mesh, found = plans.mesh_of(*sizes), []
    own = {"history": 2, "margin": 1} if RECIPES[recipe].delayed else {}
    for seed in seeds:
        words = {"kept": KEPT, "fp8": Fp8(recipe=recipe, **own, **fp8), **settings}  # type: ignore[arg-type]
        gathers = words.pop("gathers", None)
        plan = planned(model, mesh, seed, **words)
        if gathers is not None:
            update = Update(buckets="none", gathers=str(gathers))
            plan = replace(plan, training=replace(plan.training, update=update))
        step, plain, wide = build_step(model, plan, SETTINGS), plain_of(model, plan), plain_of(model, plan, bare=True)
        errors, far = [], 0.0
        for number in range(steps):
            batch = plans.inputs(model, samples=plan.training.global_batch, seed=number)
            step.evaluate(*batch)  # reads scales, and adds nothing
            errors.append(float(step.rank.scales.kept()[1].sum()))
            loss, expected, other = step(*batch), plain(batch, {}), wide(batch, {})
            errors.append(abs(loss - expected) / abs(expected))
            far = abs(expected - other) / abs(expected)
        kept = plain.kept()
        errors += [relative(whole, kept[name]) for name, whole in step.full_parameters().items() if name in kept]
        for name in step.rank.scales.names:
            errors.append(relative(step.rank.scales.history_of(name), kept[f"fp8/{name}"]))
        found.append((max(errors), far))
    return found


def plain_of(model: str, plan: Plan, *, bare: bool = False) -> UnshardedStep:
    """The plain model, `bare` without fp8."""
    graph = prepare(plans.traced(model), fp8=plan.training.fp8)[0]
    recipes = {} if bare else recipes_of(graph.operators)
    batched = frozenset(range(len(plans.inputs(model))))
    return UnshardedStep(
        plans.build(model), plan.training, SETTINGS, batched, dropping=dropping(graph), recipes=recipes, seed=SEED
    )


def handed_on(model: str, folder: str, first: str, then: str) -> float:
    """The error of the next loss of a plan that goes on where another one has saved, beside that one going on."""
    fp8 = Fp8(recipe="delayed", history=3)
    mesh = plans.mesh_of(2, 2)
    steps = [build_step(model, plan_of(model, mesh, seed, fp8=fp8), SETTINGS) for seed in (first, then)]
    batches = [plans.inputs(model, seed=number) for number in range(3)]
    for step in steps:
        step.prepare(*batches[0])
    for batch in batches[:2]:
        steps[0](*batch)
    checkpoints = Checkpoints(folder)
    checkpoints.save(steps[0])
    checkpoints.wait()
    Checkpoints(folder, read_only=True).restore(steps[1])
    own, other = (step(*batches[2]) for step in steps)
    longer, bare = (
        build_step(model, plan_of(model, mesh, then, **{"fp8": one} if one else {}), SETTINGS)
        for one in (replace(fp8, history=5), NO_FP8)
    )
    for step in (longer, bare):
        step.prepare(*batches[0])
    with refused(CheckpointError, "other shape", "plan with --fp8-history 3"):
        Checkpoints(folder, read_only=True).restore(longer)
    found = Checkpoints(folder, read_only=True).restore(bare)  # has no use for histories
    assert found is not None
    assert found.step == bare.steps == 2
    return abs(own - other) / abs(own)
