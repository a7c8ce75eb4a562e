"""Plans whose linear layers are in fp8, each compared with the plain model under the same recipe."""

from dataclasses import replace

from planner.graph.fp8 import Fp8
from tests.distributed import plans
from tests.distributed.dividing import by_hand
from tests.distributed.tasks import KEPT, build_step, plan_of, worst_error


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
) -> list[float]:
    """The same of experts that are divided in some ways."""
    mesh, errors = plans.mesh_of(*sizes), []
    for way in ways:
        own = Fp8(recipe=recipe, **fp8)
        plan = by_hand(way, "wide64", mesh, kept=KEPT, fp8=own, **settings)
        plan = replace(plan, training=replace(plan.training, tokens_once=once))
        errors.append(worst_error(build_step("wide64", plan), "wide64", plan.training.micro_batches))
    return errors


def without_agreement(model: str, recipe: str, sizes: tuple[int, ...]) -> float:
    """The worst error where devices take the largest elements of their own pieces for those of the whole."""
    from runtime.ops import fp8_linear

    agreed = fp8_linear.collectives
    fp8_linear.collectives = _Alone  # type: ignore[assignment]
    try:
        return parity(model, recipe, sizes, ["megatron"], {})[0]
    finally:
        fp8_linear.collectives = agreed


class _Alone:
    all_reduce_max = staticmethod(lambda term, group: term)
