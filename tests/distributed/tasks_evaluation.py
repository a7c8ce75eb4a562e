"""What the worker processes do in the tests of evaluation: all ranks call a function here at the same time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from planner.plan.plan import Plan
from planner.strategy_search.request.space import Pinned
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.dividing import by_hand
from tests.distributed.offloading import of_blocks, offloaded, staying
from tests.distributed.searched import searched_plan
from tests.distributed.tasks import CPU, SEED, known, plan_of, relative

CROSS_ENTROPY = frozenset({"dlrm", "wide-deep", "towers", "bags", "assorted"})
"""Models without a single cross entropy."""


@contextmanager
def written_logits() -> Iterator[list[torch.Tensor]]:
    """What cross entropies are given meanwhile, rows of logits."""
    found: list[torch.Tensor] = []
    cross_entropy = F.cross_entropy

    def noting(logits: torch.Tensor, *args: object, **words: object) -> torch.Tensor:
        found.append(logits.detach().flatten(0, -2))
        return cross_entropy(logits, *args, **words)  # type: ignore[arg-type]

    F.cross_entropy = noting
    try:
        yield found
    finally:
        F.cross_entropy = cross_entropy


@torch.no_grad()
def unsharded(module: nn.Module, batch: object, parts: int) -> tuple[float, torch.Tensor | None]:
    """Loss and logits of the plain model as it is evaluated, on the same micro-batches."""
    module.eval()
    loss = 0.0
    with written_logits() as logits:
        for number in range(parts):
            part = pytree.tree_map(lambda tensor, number=number: tensor.chunk(parts)[number], batch)
            loss += float(module(*part)) / parts
    module.train()
    return loss, torch.cat(logits) if logits else None


def made(model: str, how: str | int, sizes: tuple[int, ...], settings: Mapping[str, object]) -> Plan:
    """A plan at random, by hand, with experts cut by hand ("experts: WAY"), or searched ("search")."""
    mesh, words = plans.mesh_of(*sizes), dict(settings)
    gathers, homes = str(words.pop("gathers", "each")), words.pop("offload", None)
    if how == "search":
        plan = searched_plan(model, 4, pinned=Pinned(**words))  # type: ignore[arg-type]
    elif isinstance(how, str) and how.startswith("experts: "):
        plan = by_hand(how.removeprefix("experts: "), model, mesh, **words)
    else:
        plan = plan_of(model, mesh, how, **words)
    if homes is not None:
        weights, activations = homes  # type: ignore[misc]
        plan = offloaded(plan, staying, activations, of_blocks(weights))
    update = replace(plan.training.update, gathers=gathers) if gathers != "each" else plan.training.update
    return replace(plan, training=replace(plan.training, update=replace(update, buckets="none")))


def built(model: str, plan: Plan, lowered: bool = True) -> TrainingStep:
    return parallelize(
        plans.build(model), plan, traced=plans.traced(model), device=CPU, known=known(), seed=SEED, lowered=lowered
    )


def state(step: TrainingStep) -> list[torch.Tensor]:
    """All that a rank keeps between steps, and what is drawn next."""
    rank = step.rank
    kept = [parameter.content.clone() for parameter in rank.parameters.values()]
    kept += [p.gradient.clone() for p in rank.parameters.values() if p.gradient is not None]
    kept += [state.clone() for state in rank.optimizer.states()]
    kept += [buffer.clone() for _, buffer in sorted(rank.buffers.items())]
    return [*kept, torch.get_rng_state(), torch.tensor([rank.steps, rank.samples])]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


Found = tuple[float, float, bool, bool]
"""How far the loss and the logits are off, relatively; whether nothing has changed; whether a loss came that is the
same with outputs and without."""


def evaluated(model: str, how: str | int, sizes: tuple[int, ...], settings: Mapping[str, object]) -> Found:
    """Evaluate after a step of training, which gives running statistics and states something to hold."""
    words = dict(settings)
    lowered, trains = bool(words.pop("lowered", True)), words.get("schedule") != "forward"
    plan = made(model, how, sizes, words)
    step = built(model, plan, lowered)
    samples, parts = plan.training.global_batch, plan.training.micro_batches
    module = plans.build(model)
    if trains:
        step(*plans.inputs(model, samples=samples))
        _take_over(module, step)
    batch = plans.inputs(model, seed=1, samples=samples)
    step.prepare(*batch)
    wanted, logits = unsharded(module, batch, parts)
    before = state(step)
    loss = step.evaluate(*batch)
    error = 0.0
    again = loss
    if model not in CROSS_ENTROPY:
        found = step.evaluate_with(["logits"], *batch)
        again = found.loss
        assert logits is not None
        error = relative(found.outputs["logits"].flatten(0, -2).double(), logits.double())
    return abs(loss - wanted) / abs(wanted), error, alike(before, state(step)), again == loss


@torch.no_grad()
def _take_over(module: nn.Module, step: TrainingStep) -> None:
    """Give the plain model the weights and buffers of a step."""
    weights, buffers = step.full_parameters(), step.changed_buffers()
    for name, weight in module.named_parameters():
        weight.copy_(weights[name])
    for name, buffer in module.named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def all_evaluated(
    cases: list[tuple[str, str | int, tuple[int, ...], Mapping[str, object]]],
) -> list[Found]:
    return [evaluated(*case) for case in cases]


def trained_the_same(model: str, how: str | int, sizes: tuple[int, ...], settings: Mapping[str, object]) -> bool:
    """Whether three steps are bit for bit the same with evaluations between them and without, also where gradients wait
    for an update."""
    plan = made(model, how, sizes, settings)
    samples, losses, ends = plan.training.global_batch, [], []
    for looks in (False, True):
        step, found = built(model, plan), []
        for number in range(3):
            batch = plans.inputs(model, seed=number, samples=samples)
            found.append(step(*batch))
            if looks:
                step.evaluate(*plans.inputs(model, seed=7, samples=samples))
        found.append(float(step.accumulate(*plans.inputs(model, seed=3, samples=samples))))
        if looks:
            step.evaluate(*plans.inputs(model, seed=7, samples=samples))
        losses.append(found)
        ends.append(state(step))
    return losses[0] == losses[1] and alike(*ends)
