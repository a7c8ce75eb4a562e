"""What the worker processes do in the tests: every function here is called on all ranks at the same time."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from costmodels import Turn
from planner.errors import PlannerError
from planner.graph.fp8 import NO_FP8, Fp8
from planner.graph.trace import trace
from planner.plan.binding.bind import prepare
from planner.plan.plan import Plan
from planner.sharding.layout import PARTIAL, Layout, PaddedShape, replicated
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Duplex
from runtime.comm import collectives
from runtime.comm.device_mesh import Communicators, rank_mesh
from runtime.comm.redistribute import convert, transfer
from runtime.ops.randomness import Draw, dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.step.same_dropout import SameDropout
from runtime.step.same_fp8 import SameFp8, recipes_of
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.dividing import by_hand
from tests.distributed.stale import StaleTraining

CPU = torch.device("cpu")


@cache
def known() -> Communicators:
    """The process groups of this worker: hundreds of plans share them."""
    return Communicators()


SEED = 5
"""Seed of what is dropped."""


@cache
def unsharded(
    model: str, micro_batches: int, samples: int = plans.BATCH, fp8: Fp8 = NO_FP8
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and then buffers of the plain model, on the same micro-batches, by the same recipe."""
    recipes = recipes_of(prepare(plans.traced(model), fp8=fp8)[0].operators)
    module, whole = plans.build(model), plans.inputs(model, samples=samples)
    loss = 0.0
    for number in range(micro_batches):
        part = pytree.tree_map(lambda tensor, number=number: tensor.chunk(micro_batches)[number], whole)
        draw = Draw(seed=SEED, micro_batch=number)
        with SameDropout(dropping(plans.traced(model)), draw), SameFp8(module, recipes):
            value = module(*part) / micro_batches
        value.backward()
        loss += float(value.detach())
    gradients = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
    return loss, gradients, dict(module.named_buffers())


def build_step(model: str, plan: Plan, settings: OptimizerSettings | None = None) -> TrainingStep:
    return parallelize(
        plans.build(model),
        plan,
        optimizer=settings,
        traced=plans.traced(model),
        device=CPU,
        known=known(),
        seed=SEED,
    )


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference, relative to the largest magnitude; gradients that are zero but for rounding have a floor."""
    return float((found - wanted).abs().max()) / max(float(wanted.abs().max()), 1e-3)


KEPT = ("linear", "conv2d", "scaled_dot_product_attention", "silu", "gelu", "norm")
"""Ends of the names of the operators that blocks under selective recomputation keep."""


def plan_of(model: str, mesh: Mesh, seed: int | str, **settings: object) -> Plan:
    """A random plan, or one by hand."""
    if isinstance(seed, int):
        return plans.random_plan(model, mesh, seed, **settings)
    return plans.hand_plan(seed, model, mesh, **settings)


def planned(model: str, mesh: Mesh, kind: int | str, **settings: object) -> Plan:
    """The same, or one whose experts are divided by hand in a way ("experts: WAY")."""
    if isinstance(kind, str) and kind.startswith("experts: "):
        return by_hand(kind.removeprefix("experts: "), model, mesh, **settings)
    return plan_of(model, mesh, kind, **settings)


def parity(
    model: str, sizes: tuple[int, ...], seeds: list[int | str], micro_batches: int, recomputation: str | tuple[str, ...]
) -> list[float]:
    """The worst error of loss, gradients and changed buffers under each random plan, or plan by hand."""
    mesh: Mesh = plans.mesh_of(*sizes)
    errors = []
    for seed in seeds:
        plan = plan_of(model, mesh, seed, micro_batches=micro_batches, recomputation=recomputation, kept=KEPT)
        errors.append(worst_error(build_step(model, plan), model, micro_batches))
    return errors


def worst_error(step: TrainingStep, model: str, micro_batches: int) -> float:
    """The worst error of loss, gradients and changed buffers after one batch."""
    samples = step.plan.training.global_batch
    loss, gradients, buffers = unsharded(model, micro_batches, samples, step.plan.training.fp8)
    found = float(step.accumulate(*plans.inputs(model, samples=samples)))
    whole, changed = step.full_gradients(), step.changed_buffers()
    assert whole.keys() == gradients.keys()
    assert changed.keys() >= {buffer for buffer, _ in step.rank.bound.graph.updates}
    assert not any(tensor.requires_grad for tensor in changed.values())
    return max(
        abs(found - loss) / abs(loss),
        *(relative(whole[name], gradients[name]) for name in gradients),
        *(relative(changed[name].double(), buffers[name].double()) for name in changed),
    )


def pipelined(
    model: str,
    sizes: tuple[int, ...],
    stages: tuple[int, ...],
    seeds: list[int | str],
    micro_batches: int,
    recomputation: str,
) -> tuple[list[float], list[tuple[str, int]]]:
    """The worst error of loss and gradients under each random plan with these stages, and the order of the turns."""
    mesh: Mesh = plans.mesh_of(*sizes)
    errors = []
    turns: list[tuple[str, int]] = []
    for seed in seeds:
        plan = plan_of(
            model, mesh, seed, micro_batches=micro_batches, recomputation=recomputation, kept=KEPT, stages=stages
        )
        step = build_step(model, plan)
        errors.append(worst_error(step, model, micro_batches))
        turns = [(turn.kind, turn.micro_batch) for turn in step.rank.pipeline.turns]
    return errors, turns


def scheduled(
    model: str, kind: int | str, sizes: tuple[int, ...], settings: dict[str, object]
) -> tuple[float, list[Turn], int]:
    """The worst error of loss and gradients under a plan with stages, the turns as they were taken, and most
    micro-batches that were live at once."""
    plan = plan_of(model, plans.mesh_of(*sizes), kind, **settings)
    step = build_step(model, plan)
    error = worst_error(step, model, plan.training.micro_batches)
    return error, list(step.rank.pipeline.turns), step.rank.pipeline.most_live


def train_pipelined(model: str, sizes: tuple[int, ...], stages: tuple[int, ...], seed: int) -> float:
    """The worst error of losses and weights over 5 steps of SGD with momentum, stages sharing tied weights."""
    settings = OptimizerSettings(learning_rate=1e-2)
    plan = plans.random_plan(model, plans.mesh_of(*sizes), seed, optimizer="sgd", micro_batches=2, stages=stages)
    step = build_step(model, plan, settings)
    module = plans.build(model)
    plain = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-2)
    worst = 0.0
    for number in range(5):
        batch = plans.batch(seed=number)
        loss = module(*batch)
        loss.backward()
        plain.step()
        plain.zero_grad()
        worst = max(worst, abs(step(*batch) - float(loss)) / float(loss))
    found = step.full_parameters()
    return max(worst, *(relative(found[name], weight.detach()) for name, weight in module.named_parameters()))


def train(model: str, kind: str, sizes: tuple[int, ...], optimizer: str, micro_batches: int) -> float:
    """The worst error of losses and weights over 5 optimizer steps, against torch's optimizer on the plain model."""
    rate = 1e-3 if optimizer == "adamw" else 1e-2
    settings = OptimizerSettings(learning_rate=rate, epsilon=1e-6)  # Adam divides rounding by epsilon
    mesh = plans.mesh_of(*sizes)
    if kind.startswith("random"):
        plan = plans.random_plan(model, mesh, int(kind[6:]), optimizer=optimizer, micro_batches=micro_batches)
    else:
        plan = plans.hand_plan(kind, model, mesh, optimizer=optimizer, micro_batches=micro_batches)
    step = build_step(model, plan, settings)
    module = plans.build(model)
    plain: torch.optim.Optimizer = torch.optim.AdamW(module.parameters(), lr=rate, eps=1e-6)
    if optimizer == "sgd":
        plain = torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9, weight_decay=1e-2)
    worst = 0.0
    for number in range(5):
        batch = plans.batch(seed=number)
        loss = 0.0
        for part in zip(*(tensor.chunk(micro_batches) for tensor in batch), strict=True):
            value = module(*part) / micro_batches
            value.backward()
            loss += float(value.detach())
        plain.step()
        plain.zero_grad()
        worst = max(worst, abs(step(*batch) - loss) / loss)
    found = step.full_parameters()
    return max(worst, *(relative(found[name], weight.detach()) for name, weight in module.named_parameters()))


def half_precision(micro_batches: int) -> tuple[float, bool]:
    """Training in bfloat16: largest relative difference of the loss, and whether the masters are float32."""
    from runtime.reference.unsharded import UnshardedStep

    graph = trace(plans.build("llama").bfloat16(), plans.batch())
    plan = plans.hand_plan("zero1", "llama", plans.mesh_of(4), graph=graph)
    settings = OptimizerSettings(learning_rate=1e-2)
    step = parallelize(
        plans.build("llama").bfloat16(), plan, traced=graph, optimizer=settings, device=CPU, known=known()
    )
    plain = UnshardedStep(plans.build("llama").bfloat16(), plan.training, settings, frozenset({0, 1}))
    worst = 0.0
    for number in range(3):
        batch = plans.batch(seed=number)
        expected = plain(batch, {})
        worst = max(worst, abs(step(*batch) - expected) / expected)
    weights = step.full_parameters().values()
    return worst, all(weight.dtype == torch.bfloat16 for weight in weights)


class Counted:
    """Counts the collectives that the runtime issues while active."""

    NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_reduce_max", "all_to_all")

    def __enter__(self) -> Counter[str]:
        self.counts: Counter[str] = Counter()
        self.originals = {name: getattr(collectives, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(collectives, name, self._counting(name, original))
        return self.counts

    def __exit__(self, *raised: object) -> None:
        for name, original in self.originals.items():
            setattr(collectives, name, original)

    def _counting(self, name, original):
        def counting(*arguments):
            self.counts[name] += 1
            return original(*arguments)

        return counting


def communication(kind: str, sizes: tuple[int, ...], recomputation: str) -> dict[str, dict[str, int]]:
    """Collectives of one micro-batch, forward and backward, and of the update, under a hand-made plan of a Llama."""
    plan = plans.hand_plan(kind, "llama", plans.mesh_of(*sizes), recomputation=recomputation, kept=KEPT)
    step = build_step("llama", plan)
    inputs = step.inputs_of(*plans.batch())(0)
    rank = step.rank
    with Counted() as forward:
        loss = rank.executors[0](rank.parameters, rank.buffers, inputs)[rank.bound.graph.loss]
    with Counted() as backward:
        loss.backward()
    with Counted() as update:
        rank.optimizer.step()
    return {"forward": dict(forward), "backward": dict(backward), "update": dict(update)}


def cross_entropy(reduction: str, label_smoothing: float, dtype: torch.dtype) -> float:
    """The worst error of loss and gradient over all strategies of a lone cross entropy on a 2 x 2 mesh."""
    mesh = plans.mesh_of(2, 2)

    def build() -> nn.Module:
        torch.manual_seed(3)
        return plans.Loss(reduction, label_smoothing, dtype)

    targets = torch.tensor([5, 0, 1, 31, 5, 7, 9, 16, 15, 3, 5, 5, 2, 30, 8, 17])
    plain = build()
    loss = plain(targets)
    loss.backward()
    graph = trace(build(), (targets,))
    worst = 0.0
    for number in range(16):
        plan = plans.random_plan("loss", mesh, number, graph=graph)
        step = parallelize(build(), plan, traced=graph, device=CPU, known=known())
        found = step.accumulate(targets)
        gradient = step.full_gradients()["logits_NV"]
        worst = max(worst, relative(found, loss.detach().float()), relative(gradient, plain.logits_NV.grad.float()))
    return worst


def redistributions(sizes: tuple[int, ...], seed: int, count: int, padded: bool = False) -> int:
    """Random redistributions of random tensors, or of parameters whose shards are padded, forward and backward; returns
    how many collectives were needed."""
    extents = (1, 16, 17, 31, 33, 34) if padded else (1, 2, 3, 4, 8, 12)
    mesh = plans.mesh_of(*sizes)
    place = rank_mesh(mesh, CPU, known=known())
    random_ = random.Random(seed)
    with Counted() as counts:
        for number in range(count):
            shape = tuple(random_.choice(extents) for _ in range(random_.randint(0, 3 if padded else 4)))
            shape = PaddedShape(shape) if padded else shape
            ends = []
            for _ in range(2):
                layout = plans.random_layout(random_, shape, mesh, partial=True)
                back = tuple(p if p.is_shard else random_.choice((plans.REPLICATE, PARTIAL)) for p in layout)
                ends.append(Duplex(forward=layout, gradient=back))
            made, wanted = ends
            generator = torch.Generator().manual_seed(seed * 1000 + number)
            value, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
            piece = term(value, made.forward, place).requires_grad_()
            between = transfer(shape, mesh, made, wanted, differentiable=True)
            moved = piece if between is None else between(piece, place)
            check(moved.detach(), value, wanted.forward, place)
            (back,) = torch.autograd.grad(moved, piece, term(gradient, wanted.gradient, place))
            check(back, gradient, made.gradient, place)
            check(convert(piece, shape, made.forward, wanted.forward, place), value, wanted.forward, place)
    return sum(counts.values())


def term(whole: torch.Tensor, layout: Layout, place) -> torch.Tensor:
    """This rank's piece of a tensor; where the layout is partial, an uneven share of the sum."""
    cut = tuple(p if p.is_shard else plans.REPLICATE for p in layout)
    piece = convert(whole, PaddedShape(whole.shape), replicated(len(cut)), cut, place)
    for placement, size, coordinate in zip(layout, place.mesh.sizes, place.coordinate, strict=True):
        if placement == PARTIAL:
            piece = piece * (coordinate + 1) / (size * (size + 1) / 2)
    return piece.clone()


def check(piece: torch.Tensor, whole: torch.Tensor, layout: Layout, place) -> None:
    """Assert that the pieces of all ranks are those of `whole`: slices of it, terms that sum to slices of it."""
    cut = tuple(p if p.is_shard else plans.REPLICATE for p in layout)
    total = piece.contiguous()
    for axis, placement in enumerate(layout):
        if placement == PARTIAL and place.mesh.sizes[axis] > 1:
            total = total.clone()
            dist.all_reduce(total, group=place.group(axis))
    expected = convert(whole, PaddedShape(whole.shape), replicated(len(cut)), cut, place)
    torch.testing.assert_close(total, expected.contiguous(), rtol=1e-12, atol=1e-12)


def refusal(case: str) -> tuple[str, str]:
    """Name and message of the error that a plan which cannot run is refused with."""
    mesh = plans.mesh_of(2, 1) if case == "world" else plans.mesh_of(2, 2)
    plan = plans.random_plan("llama", mesh, 0, stages=(1, 1) if case == "stages" else ())
    model = "gpt" if case == "fingerprint" else "llama"
    batch = plans.batch(samples=3) if case == "batch" else plans.batch(seed=dist.get_rank() if case == "ranks" else 0)
    try:
        step = parallelize(plans.build(model), plan, traced=plans.traced(model), device=CPU, known=known())
        step(*batch)
    except PlannerError as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def raise_on_one_rank() -> None:
    """One rank fails while the others wait for it."""
    if dist.get_rank() == 2:
        raise RuntimeError("rank 2 has a problem")
    dist.barrier()


def train_dropping() -> tuple[float, list[float]]:
    """The worst difference of the losses of three steps of two equal micro-batches and the unsharded model's, for two
    seeds; and the losses, which differ by what was dropped alone, as the weights do not move."""
    from runtime.reference.unsharded import UnshardedStep

    settings = OptimizerSettings(learning_rate=0.0)
    graph = plans.traced("dropping")
    plan = plans.random_plan("dropping", plans.mesh_of(2, 2), 3, micro_batches=2)
    tokens, labels = (torch.cat([half, half]) for half in plans.batch(samples=plans.BATCH // 2))
    worst, losses = 0.0, []
    for seed in (0, 1):
        step = parallelize(
            plans.build("dropping"),
            plan,
            traced=graph,
            optimizer=settings,
            device=CPU,
            known=known(),
            seed=seed,
        )
        plain = UnshardedStep(
            plans.build("dropping"), plan.training, settings, frozenset({0, 1}), dropping=dropping(graph), seed=seed
        )
        for _ in range(3):
            expected = plain((tokens, labels), {})
            worst = max(worst, abs(step(tokens, labels) - expected) / expected)
            losses.append(expected)
    return worst, losses


def asynchronous(
    model: str, kind: int | str, sizes: tuple[int, ...], windows: list[int], settings: dict[str, object]
) -> tuple[float, float, list[Turn]]:
    """Windows of so many batches each, with stale weights: the worst error of losses and weights, how far apart losses
    and weights are from those of the same steps without staleness, and the turns of the last window."""
    plan = plan_of(model, plans.mesh_of(*sizes), kind, optimizer="sgd", **settings)
    rate = 1e-1
    step = build_step(model, plan, OptimizerSettings(learning_rate=rate))
    module, parts = plans.build(model), plan.training.micro_batches
    step.prepare(*plans.batch(seed=0))
    stage_of = {name: cut.stage for cut in step.rank.cuts for name in cut.parameters}
    stale, plain = (StaleTraining(module, of, rate) for of in (stage_of, dict.fromkeys(stage_of, 0)))
    worst, apart, number = 0.0, 0.0, 0
    for count in windows:
        batches = [plans.batch(seed=number + at) for at in range(count)]
        number += count
        cut = [list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True)) for batch in batches]
        found = step.window(batches)
        if plan.schedule == "pipedream":
            each = stale.pipedream([part for batch in cut for part in batch])
            wanted = [sum(each[at * parts : (at + 1) * parts]) / parts for at in range(count)]
            for part in (part for batch in cut for part in batch):
                plain.pipedream([part])
        else:
            wanted = stale.two_versions(cut)
            for batch in cut:
                plain._train(batch, [len(plain.versions[0]) - 1])
        worst = max(worst, *(abs(one - other) / other for one, other in zip(found, wanted, strict=True)))
    weights, updated = step.full_parameters(), plain.weights()
    for name, weight in stale.weights().items():
        worst = max(worst, relative(weights[name], weight))
        apart = max(apart, relative(updated[name], weight))
    return worst, apart, list(step.rank.pipeline.turns)


def summed(model: str, kind: str, sizes: tuple[int, ...], settings: dict[str, object]) -> list[float]:
    """How many times the gradients of a mean those of a sum are, by parameter, where they are not almost zero."""
    plan = plan_of(model, plans.mesh_of(*sizes), kind, **settings)
    found = []
    for gradients in ("mean", "sum"):
        training = replace(plan.training, update=replace(plan.training.update, gradients=gradients))
        step = build_step(model, replace(plan, training=training))
        step.accumulate(*plans.inputs(model, samples=plan.training.global_batch))
        found.append(step.full_gradients())
    mean, total = found
    return [float(total[name].abs().max() / mean[name].abs().max()) for name in mean if mean[name].abs().max() > 1e-6]
