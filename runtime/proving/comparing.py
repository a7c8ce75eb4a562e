"""How one rank proves small plans: it trains each beside the unsharded model, and compares.

    1   forward and backward of a batch          loss, every gradient, buffers        nothing changes
    2   two training steps                       losses, changes of every weight

The first compares gradients where they are accumulated, in the plan's stored layouts. The second has all parts of a
step: buckets that start early, prefetched gathers, clipping, the sharded optimizer, regathered weights. The optimizer's
epsilon is so large that the update is proportional to the gradient, so that a doubled sum shows; it would not show in
the sign, which is all that determines Adam's first step. In 16 bits the unsharded model uses the experts that the plan
chose (`runtime.reference.same_choices`).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path

import torch

from planner.graph.in_float64 import InFloat64, float64_by_default
from planner.graph.operator_graph import OperatorGraph
from planner.models.zoo import BuiltModel
from planner.plan.binding.model_of import build_planned
from planner.plan.plan import Plan
from planner.plan.shrinking.shrink import EXACT
from planner.sharding.matrices import matrices_of
from runtime.comm.device_mesh import Communicators
from runtime.data.datasets import synthetic_batches
from runtime.ops.randomness import dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.processes.progress import relative_difference
from runtime.proving.differences import (
    SINGLY,
    Differences,
    changes,
    floor_of,
    is_something,
    rounding,
    together,
    whole_norm,
    worst,
)
from runtime.reference.per_replica import forward_per_replica
from runtime.reference.same_choices import choices_of
from runtime.reference.unsharded import UnshardedStep
from runtime.servers.addresses import Addresses
from runtime.step.arguments import Arguments
from runtime.step.same_fp8 import recipes_of
from runtime.step.training_step import TrainingStep, parallelize

STEPS = 2
SEED = 0
SETTINGS = OptimizerSettings(learning_rate=0.1, epsilon=0.1)
_CPU = torch.device("cpu")


def compared(
    plan: Plan,
    given: str | None,
    known: Communicators,
    servers: Addresses | None = None,
    traced: OperatorGraph | None = None,
    *,
    exact: bool = False,
) -> Differences | None:
    """Train a small plan on this rank; returns its differences from the unsharded model, on the first rank. `traced` is
    the graph of its model, where known. An `exact` plan is for a model in float64. Collective."""
    with float64_by_default() if exact else nullcontext():
        return _compared(plan, given, known, servers, traced, exact)


def _compared(
    plan: Plan,
    given: str | None,
    known: Communicators,
    servers: Addresses | None,
    traced: OperatorGraph | None,
    exact: bool,
) -> Differences | None:
    torch.manual_seed(SEED)
    built = build_planned(plan, given, device="cpu", dtype="float64" if exact else None)
    enliven(built.module)
    if exact:
        built.module.double()  # its buffers, too
    step = parallelize(
        built.module, plan, optimizer=SETTINGS, device=_CPU, traced=traced, known=known, seed=SEED, servers=servers
    )
    with _meaning(exact and traced is None):
        step.prepare(*built.args, **built.kwargs)
    plain = _plain(built, step) if step.place.rank == 0 and step.place.stage == 0 else None
    batches = list(islice(synthetic_batches(built, plan, _CPU, SEED), 1 + STEPS))
    if not plan.schedule_kind.trains:
        return _evaluated(step, plain, batches, exact)
    return _trained(step, plain, batches, dict(built.module.named_parameters()), exact)


def enliven(module: torch.nn.Module) -> None:
    """Initialize weights so large that attention differs between tokens, and no gradient is as small as rounding:
    matrices have the standard deviation 1 / sqrt(rows)."""
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.normal_(std=min(weight.shape[-2:]) ** -0.5)


def _plain(built: BuiltModel, step: TrainingStep) -> UnshardedStep:
    batched = frozenset(number for number, name in enumerate(step.matcher.names) if name in step.pieces.batched)
    return UnshardedStep(
        built.module,
        step.plan.training,
        SETTINGS,
        batched,
        step.rank.pieces,
        dropping=dropping(step.rank.bound.graph),
        recipes=recipes_of(step.rank.bound.graph.operators),
        matrices=matrices_of(step.rank.bound.graph),
        cuts=step.rank.bound.graph.cuts,
        seed=SEED,
        forward=forward_per_replica(built.module, step.plan, *step.traced, step.matcher.names, step.place),
    )


def _evaluated(
    step: TrainingStep, plain: UnshardedStep | None, batches: Sequence[Arguments], exact: bool
) -> Differences | None:
    """The differences of the losses, for a forward-only plan."""
    losses = [(step.evaluate(*one.args, **one.kwargs), one) for one in batches]
    if plain is None:
        return None
    with _meaning(exact):
        worst_loss = max(relative_difference(loss, plain.evaluate(*_given(step, one))) for loss, one in losses)
    return Differences(
        precision=EXACT if exact else step.plan.training.precision,
        steps=len(batches),
        parameters=0,
        loss=worst_loss,
        gradient=None,
        worst_gradient="",
        change=None,
        worst_change="",
        buffer=None,
    )


def _meaning(exact: bool) -> AbstractContextManager[object]:
    """The meaning of float32 in the unsharded model."""
    return InFloat64() if exact else nullcontext()


def _given(step: TrainingStep, batch: Arguments) -> tuple[tuple[object, ...], dict[str, object]]:
    found = step.matcher.arguments(batch.args, batch.kwargs)
    return tuple(found.args), dict(found.kwargs)


def _trained(
    step: TrainingStep,
    plain: UnshardedStep | None,
    batches: Sequence[Arguments],
    weights: dict[str, torch.nn.Parameter],
    exact: bool,
) -> Differences | None:
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    chosen = () if exact else _chosen(step, batches[0])
    loss, gradients, buffers = _first_pass(step, batches[0])
    losses = [step(*batch.args, **batch.kwargs) for batch in batches[1:]]
    after = step.full_parameters()
    if plain is None:
        return None
    singly = exact or step.plan.training.precision in SINGLY
    with _meaning(exact):
        wanted_loss, wanted, wanted_buffers = plain.gradients(*_given(step, batches[0]), chosen)
        wanted_losses = [plain(*_given(step, batch)) for batch in batches[1:]]
    wanted = {name: tensor for name, tensor in wanted.items() if name in step.rank.bound.parameters}  # on the devices
    gradient, worst_gradient = worst(gradients, wanted, floor_of(wanted))
    moved = changes({name: weight.detach() for name, weight in weights.items()}, before)
    change, worst_change = worst(changes(after, before), moved, _least_change(moved, before))
    if not is_something(wanted) or not is_something(moved):
        gradient = float("inf")  # nothing to compare: a proof without gradients would prove nothing
    held = {name: wanted_buffers[name].double() for name in buffers}
    pairs = zip([loss, *losses], [wanted_loss, *wanted_losses], strict=True)
    return Differences(
        precision=EXACT if exact else step.plan.training.precision,
        steps=STEPS,
        parameters=len(wanted),
        loss=max(relative_difference(found, expected) for found, expected in pairs),
        gradient=gradient if singly else together(gradients, wanted),
        worst_gradient=worst_gradient,
        change=change if singly else None,
        worst_change=worst_change if singly else "",
        buffer=worst(buffers, held, 1e-6)[0] if singly and held else None,
        fp8=bool(step.plan.training.fp8),
    )


def _chosen(step: TrainingStep, batch: Arguments) -> Sequence[torch.Tensor | None]:
    """The routers' choices, where rounding may change them; None where elements are dropped, because the training
    step's choices are then unknown. Collective."""
    graph = step.rank.bound.graph
    names = choices_of(graph)
    if not any(names) or dropping(graph):
        return ()
    found = step.evaluate_with([name for name in names if name], *batch.args, **batch.kwargs).outputs
    return [found[name] if name else None for name in names]


def _least_change(moved: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> float:
    return max(1e-4 * whole_norm(moved), rounding(before))


def _first_pass(step: TrainingStep, batch: Arguments) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and changed buffers of a batch; everything is restored afterwards."""
    buffers = dict(step.rank.buffers)
    loss = float(step.accumulate(*batch.args, **batch.kwargs))
    gradients = {name: tensor.clone() for name, tensor in step.full_gradients().items()}
    changed = {name: tensor.double() for name, tensor in step.changed_buffers().items()}
    for parameter in step.rank.parameters.values():
        parameter.gradient = None
    step.rank.tables.forget()
    step.rank.scales.forget()
    step.rank.buffers.update(buffers)
    return loss, gradients, changed


def addresses(folder: str | None, count: int) -> Addresses | None:
    """The addresses of the parameter servers, if there are any."""
    return None if folder is None else Addresses(folder=Path(folder), count=count)
