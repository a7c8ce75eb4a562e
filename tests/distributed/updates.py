"""Tasks about what becomes of gradients: every function here is called on all ranks at the same time."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.plan import Plan
from planner.sharding.layout import PARTIAL, REPLICATE, shard
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter, own_copies
from planner.sharding.update import Update
from runtime.comm.async_collectives import Flight
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.tasks import CPU, Counted, known, relative

RATES = {"adamw": 1e-3, "sgd": 1e-2, "lamb": 1e-2, "muon": 1e-3}


def store_hybrid(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
    """States cut over the inner axis, copies over the outer."""
    return StoredParameter(weight=(REPLICATE,) * 2, gradient=(PARTIAL,) * 2, state=(REPLICATE, shard(0)))


def plan_of(model: str, kind: str, sizes: tuple[int, ...], update: Update, **settings: Any) -> Plan:
    mesh = plans.mesh_of(*sizes)
    if kind == "hybrid":
        plan = plans.make_plan(model, mesh, plans.on_samples, store_hybrid, plans.load_samples, **settings)
    elif kind.startswith("random"):
        plan = plans.random_plan(model, mesh, int(kind[6:]), **settings)
    else:
        plan = plans.hand_plan(kind, model, mesh, **settings)
    return replace(plan, training=replace(plan.training, update=update))


def step_of(
    model: str,
    plan: Plan,
    settings: OptimizerSettings | None = None,
    module: nn.Module | None = None,
    graph: OperatorGraph | None = None,
) -> TrainingStep:
    return parallelize(
        module or plans.build(model),
        plan,
        optimizer=settings,
        example=plans.batch(),
        traced=graph or plans.traced(model),
        device=CPU,
        known=known(),
    )


class PlainLamb:
    """LAMB as its paper writes it, on whole weights."""

    def __init__(self, weights: Sequence[torch.Tensor], rate: float, epsilon: float, decay: float) -> None:
        self.weights, self.rate, self.epsilon, self.decay = list(weights), rate, epsilon, decay
        self.moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in self.weights]
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for at, weight in enumerate(self.weights):
            mean, square = self.moments[at]
            mean = 0.9 * mean + 0.1 * weight.grad
            square = 0.999 * square + 0.001 * weight.grad**2
            self.moments[at] = (mean, square)
            direction = (mean / (1 - 0.9**self.steps)) / ((square / (1 - 0.999**self.steps)).sqrt() + self.epsilon)
            direction = direction + self.decay * weight
            lengths = weight.norm(), direction.norm()
            ratio = lengths[0] / lengths[1] if min(lengths) > 0 else 1.0
            weight -= self.rate * ratio * direction

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None


class PlainMuon:
    """Muon on whole matrices, iterating as its authors write it, and torch's AdamW for the rest."""

    def __init__(self, weights: Mapping[str, torch.Tensor], rate: float, decay: float) -> None:
        self.matrices = [w for name, w in weights.items() if w.dim() > 1 and not AT_THE_ENDS.search(name)]
        self.rest = torch.optim.AdamW(
            [w for w in weights.values() if all(w is not m for m in self.matrices)], rate, eps=1e-6
        )
        self.momenta = [torch.zeros_like(w) for w in self.matrices]
        self.rate, self.decay = rate, decay

    @torch.no_grad()
    def step(self) -> None:
        self.rest.step()
        for at, weight in enumerate(self.matrices):
            self.momenta[at] = 0.95 * self.momenta[at] + 0.05 * weight.grad
            update = 0.05 * weight.grad + 0.95 * self.momenta[at]
            x = update / torch.linalg.matrix_norm(update, keepdim=True)
            for _ in range(5):
                square = x @ x.mT
                x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
            weight *= 1 - self.rate * self.decay
            weight -= self.rate * 0.2 * max(weight.shape[-2:]) ** 0.5 * x

    def zero_grad(self) -> None:
        self.rest.zero_grad()
        for weight in self.matrices:
            weight.grad = None


AT_THE_ENDS = re.compile("embed|head|wte|wpe|router")
"""Names of embeddings, and of what makes logits."""


def plain_optimizer(name: str, weights: Mapping[str, torch.Tensor]) -> Any:
    rate = RATES[name]
    if name == "muon":
        return PlainMuon(weights, rate, 1e-2)
    weights = list(weights.values())
    if name == "lamb":
        return PlainLamb(weights, rate, 1e-6, 1e-2)
    if name == "sgd":
        return torch.optim.SGD(weights, lr=rate, momentum=0.9, weight_decay=1e-2)
    return torch.optim.AdamW(weights, lr=rate, eps=1e-6)


def train(
    model: str,
    kind: str,
    sizes: tuple[int, ...],
    optimizer: str,
    update: Update,
    micro_batches: int = 1,
    stages: tuple[int, ...] = (),
    steps: int = 20,
    scale: float = 1.0,
) -> tuple[float, list[float]]:
    """The worst error of losses, norms and weights over some steps, against torch's optimizer on the plain model whose
    gradients are `scale` times those of its mean loss; and the norms."""
    settings = OptimizerSettings(learning_rate=RATES[optimizer], epsilon=1e-6)
    plan = plan_of(model, kind, sizes, update, optimizer=optimizer, micro_batches=micro_batches, stages=stages)
    step = step_of(model, plan, settings)
    module = plans.build(model)
    plain = plain_optimizer(optimizer, dict(module.named_parameters()))
    worst, norms = 0.0, []
    for number in range(steps):
        batch = plans.batch(seed=number)
        loss = module(*batch)
        (loss * scale).backward()
        worst = max(worst, abs(step(*batch) - float(loss)) / float(loss))
        if update.clip_norm is not None:
            norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), update.clip_norm))
            worst = max(worst, abs(step.gradient_norm - norm) / norm)
            norms.append(norm)
        plain.step()
        plain.zero_grad()
    found = step.full_parameters()
    weights = dict(module.named_parameters())
    return max(worst, *(relative(found[name], weight.detach()) for name, weight in weights.items())), norms


def half(kind: str, sizes: tuple[int, ...], optimizer: str, update: Update) -> tuple[Any, ...]:
    """Three steps in bfloat16 beside the plain model trained alike: the largest relative difference of the loss, dtypes
    of the gradients that were added up, of masters, of their states, and of what the backward pass reduces."""
    graph = trace(plans.build("llama").bfloat16(), plans.batch())
    settings = OptimizerSettings(learning_rate=RATES[optimizer])
    plan = plan_of("llama", kind, sizes, update, graph=graph, optimizer=optimizer)
    step = step_of("llama", plan, settings, plans.build("llama").bfloat16(), graph)
    plain = UnshardedStep(plans.build("llama").bfloat16(), plan.training, settings, frozenset({0, 1}))
    worst, reduced = 0.0, set()
    for number in range(3):
        batch = plans.batch(seed=number)
        expected = plain(batch, {})
        worst = max(worst, abs(step(*batch) - expected) / expected)
    with Dtypes() as dtypes:
        step.accumulate(*plans.batch())
    reduced = dtypes - {"torch.int64"}
    sums = {str(parameter.local_gradient().dtype) for parameter in step.rank.parameters.values()}
    step.rank.optimizer.step()
    masters = {str(master.weight.dtype) for master in step.rank.optimizer._masters}
    values = [value for state in step.rank.optimizer._optimizer.state.values() for value in state.values()]
    states = {str(value.dtype) for value in values if isinstance(value, torch.Tensor) and value.dim()}
    return worst, sorted(sums), sorted(masters), sorted(states), sorted(reduced)


class Dtypes(Counted):
    """Dtypes of what is reduce-scattered."""

    NAMES = ("reduce_scatter",)

    def __enter__(self) -> Any:
        super().__enter__()
        self.found: set[str] = set()
        return self.found

    def _counting(self, name: str, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noting(term: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.found.add(str(term.dtype))
            return original(term, *rest)

        return noting


def alike(
    model: str, kind: str, sizes: tuple[int, ...], buckets: list[Any], micro_batches: int, stages: tuple[int, ...]
) -> tuple[list[float], list[int]]:
    """For each choice of buckets the largest difference of a weight after 3 steps from that without; and how many
    buckets had started before the backward pass was over in the last step."""
    settings = OptimizerSettings(learning_rate=1e-2)
    weights, early = [], []
    for choice in ("none", *buckets):
        update = Update(buckets=choice)
        plan = plan_of(model, kind, sizes, update, optimizer="sgd", micro_batches=micro_batches, stages=stages)
        step = step_of(model, plan, settings)
        finish, started = step.rank.optimizer.reduction.finish, []

        def noting(finish: Any = finish, started: list[int] = started, step: TrainingStep = step) -> Any:
            started.append(len(step.rank.optimizer.reduction._flights))
            return finish()

        step.rank.optimizer.reduction.finish = noting  # type: ignore[method-assign]
        for number in range(3):
            step(*plans.batch(seed=number))
        weights.append(step.full_parameters())
        early.append(started[-1])
    plain, *bucketed = weights
    return [max(float((w[n] - plain[n]).abs().max()) for n in plain) for w in bucketed], early[1:]


def waited(model: str, kind: str, sizes: tuple[int, ...], size: int) -> tuple[int, int]:
    """How many buckets of a step had started when its backward pass was over, and how many of them had been waited
    for."""
    plan = plan_of(model, kind, sizes, Update(buckets=size), optimizer="sgd")
    step = step_of(model, plan)
    reduction, land, found = step.rank.optimizer.reduction, Flight.land, list[tuple[int, int]]()
    finish, landed = reduction.finish, set[Flight]()

    def noting(flight: Flight) -> list[torch.Tensor]:
        landed.add(flight)
        return land(flight)

    def finishing() -> dict[str, torch.Tensor]:
        found.append((len(reduction._flights), len(landed.intersection(reduction._flights))))
        return finish()

    reduction.finish = finishing  # type: ignore[method-assign]
    with mock.patch.object(Flight, "land", noting):
        for number in range(2):
            step(*plans.batch(seed=number))
    return found[-1]


def other_values(broadcast: bool, meta: bool = False) -> tuple[str, float]:
    """Ranks build the model from different seeds: the error that is raised, or how far weights and buffers are from
    those of rank 0."""
    torch.manual_seed(10 + dist.get_rank())
    module = plans.MODELS["llama"]()
    if meta and dist.get_rank():
        module.to("meta")
    plan = plan_of("llama", "zero3", (4,), Update(buckets="none", broadcast=broadcast))
    try:
        step = step_of("llama", plan, module=module)
    except PlannerError as error:
        return str(error), 0.0
    torch.manual_seed(10)
    first = plans.MODELS["llama"]()
    found = step.full_parameters()
    return "", max(float((found[n] - w.detach()).abs().max()) for n, w in first.named_parameters())


def local(pattern: str, sizes: tuple[int, ...]) -> tuple[float, bool, list[float], float]:
    """Two steps with parameters of a rank's own: how far the own one is from an update by this rank's samples alone,
    whether ranks end with different values, the norms of every rank, and the norm that they make."""

    def store(name: str, shape: tuple[int, ...], mesh: Mesh) -> StoredParameter:
        return own_copies(len(mesh.axes)) if name == pattern else plans.store_zero1(name, shape, mesh)

    plan = plans.make_plan("llama", plans.mesh_of(*sizes), plans.on_samples, store, plans.load_samples, optimizer="sgd")
    update = Update(local_parameters=(pattern,), clip_norm=1e6, buckets=4096)
    plan = replace(plan, training=replace(plan.training, update=update))
    module = plans.build("llama")
    with torch.no_grad():
        module.get_parameter(pattern).add_(0.01 * dist.get_rank())  # own values from the start
    settings = OptimizerSettings(learning_rate=1e-2, weight_decay=0.0, momentum=0.0)
    step = step_of("llama", plan, settings, module)
    before = step.rank.parameters[pattern].piece.detach().clone()
    step.accumulate(*plans.batch())
    own = step.rank.parameters[pattern].local_gradient().clone()
    whole = step.full_gradients()
    step.rank.optimizer.step()
    after = step.rank.parameters[pattern].piece.detach()
    away = float((after - (before - 1e-2 * own)).abs().max())
    every = [torch.zeros_like(after) for _ in range(4)]
    dist.all_gather(every, after.contiguous())
    squares = own.square().sum()
    dist.all_reduce(squares)
    shared = sum(float(g.square().sum()) for n, g in whole.items() if n != pattern)
    return away, not torch.equal(every[0], every[1]), [step.gradient_norm], (shared + float(squares)) ** 0.5
