"""What the worker processes do in the tests of experts that are exchanged under other work: every function here is
called on all ranks at the same time."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from planner.plan.plan import Plan
from planner.sharding.update import Update
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans, tasks
from tests.distributed.dividing import by_hand
from tests.distributed.exchanging import exchanged
from tests.distributed.overlapping import overlapped


def planned(model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict[str, Any]) -> Plan:
    """A plan by hand, in one of the ways in which experts are divided."""
    given = dict(settings)
    gathers, chunks, once = given.pop("gathers", None), given.pop("chunks", None), given.pop("once", False)
    plan = by_hand(way, model, plans.mesh_of(*sizes), kept=tasks.KEPT, **given)
    training = replace(plan.training, tokens_once=once)
    if gathers is not None:
        training = replace(training, update=Update(buckets="none", gathers=gathers))
    plan = replace(plan, training=training)
    return exchanged(plan if chunks is None else overlapped(plan, model, chunks), model, there)


def step_of(plan: Plan, model: str, *, lowered: bool) -> TrainingStep:
    """A step of a plan."""
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
    model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict[str, Any]
) -> tuple[float, float, int]:
    """The worst error of loss, gradients and buffers beside the unsharded model, in lowered programs and in the general
    executor, and how many operators with experts are exchanged under other work."""
    plan = planned(model, way, sizes, there, settings)
    errors = [
        tasks.worst_error(step_of(plan, model, lowered=lowered), model, plan.training.micro_batches)
        for lowered in (True, False)
    ]
    return errors[0], errors[1], len(plan.training.expert_overlap)


def trained(model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict[str, Any]) -> tuple[float, bool]:
    """How far losses of two steps, weights behind them and an evaluation with logits are from those without overlaps;
    and whether the first step was compared over all ranks, operator by operator."""
    plan = planned(model, way, sizes, there, settings)
    found = []
    for one in (plan, replace(plan, training=replace(plan.training, expert_overlap=()))):
        step = step_of(one, model, lowered=True)
        batches = [plans.inputs(model, samples=plan.training.global_batch) for _ in range(2)]
        values = [torch.tensor(step(*batch)) for batch in batches]
        values += [piece.piece.detach().clone() for piece in step.rank.parameters.values()]
        evaluated = step.evaluate_with(["logits"], *batches[0])
        found.append([*values, torch.tensor(evaluated.loss), evaluated.outputs["logits"].float()])
        checked = not step.rank.check_layouts
    return max(tasks.relative(one, other) for one, other in zip(*found, strict=True)), checked


def meanwhile(
    model: str, way: str, sizes: tuple[int, ...], there: int, settings: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """How many products run between the start of each all-to-all of rows and the wait for it, in a forward and in a
    backward pass, in the order in which they are waited for."""
    plan = planned(model, way, sizes, there, settings)
    step = step_of(plan, model, lowered=True)
    batch = plans.inputs(model, samples=plan.training.global_batch)
    step.accumulate(*batch)
    told, passes = _Told(), list[list[int]]()
    start, back = dist.all_to_all_single, torch.autograd.backward

    def started(incoming: torch.Tensor, sent: torch.Tensor, *rest: Any, **named: Any) -> Any:
        work = start(incoming, sent, *rest, **named)
        rows = sent.dim() == 2 and sent.is_floating_point()  # neither counts nor weights of rows
        return _Waited(work, told) if rows else work

    def turned(*given: Any, **named: Any) -> None:
        passes.append(told.between)
        told.between = []
        back(*given, **named)
        passes.append(told.between)
        told.between = []

    dist.all_to_all_single, torch.autograd.backward = started, turned  # type: ignore[assignment]
    try:
        with told:
            step.accumulate(*batch)
    finally:
        dist.all_to_all_single, torch.autograd.backward = start, back
    return passes[0], passes[1]


def in_pairs(model: str, way: str, sizes: tuple[int, ...], settings: dict[str, Any]) -> tuple[int, int, float, float]:
    """How often passes that run together go on after one another, in how many pairs of turns; and the loss of the step
    beside that without pairs."""
    step = step_of(planned(model, way, sizes, 3, settings), model, lowered=True)
    batch = plans.inputs(model, samples=step.plan.training.global_batch)
    step.accumulate(*batch)
    alternation, pipeline = step.rank.alternation, step.rank.pipeline
    switches, resume = [0], alternation._resume

    def counted(number: int) -> None:
        switches[0] += 1
        resume(number)

    alternation._resume = counted  # type: ignore[method-assign]
    loss, turns = float(step.accumulate(*batch)), len(pipeline.paired)
    pipeline.paired = frozenset()
    return switches[0], turns, loss, float(step.accumulate(*batch))


class _Waited:
    def __init__(self, work: Any, told: "_Told") -> None:
        self._work, self._told, self._before = work, told, told.products

    def wait(self) -> object:
        self._told.between.append(self._told.products - self._before)
        return self._work.wait()


class _Told(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.between: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "mm." in str(function) or "grouped" in str(function)
        return function(*args, **(kwargs or {}))
