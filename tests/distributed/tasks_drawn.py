"""What the worker processes do with drawn combinations (`drawing`): train and evaluate beside the unsharded model."""

from dataclasses import replace
from functools import cache

from planner.graph.in_float64 import InFloat64
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.binding.bind import prepare
from planner.plan.plan import Plan
from planner.sharding.discover import discover
from planner.sharding.update import Update
from runtime.ops.randomness import dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep
from runtime.step.same_fp8 import recipes_of
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.distributed.drawing import Drawn, drawn
from tests.distributed.tasks import CPU, KEPT, SEED, known, planned, relative
from tests.distributed.tasks_alltoall import without
from tests.kept import kept

RATE = OptimizerSettings(learning_rate=3e-2)
STEPS = 3


@cache
def traced(model: str) -> OperatorGraph:
    """The graph of a model in which nothing is computed in float32."""
    return kept(f"in float64 {model}", lambda: _traced(model))


def _traced(model: str) -> OperatorGraph:
    with InFloat64():
        return discover(trace(plans.build(model).double(), plans.inputs(model)))


def compared(which: int | Drawn) -> tuple[float, float]:
    """The worst errors over some steps: of losses, in training and evaluation, and of weights and histories."""
    one = drawn(which) if isinstance(which, int) else which
    plan = _plan(one)
    step = _step(one, plan)
    graph = prepare(traced(one.model), fp8=plan.training.fp8)[0]
    plain = UnshardedStep(
        plans.build(one.model).double(),
        plan.training,
        RATE,
        frozenset(range(len(plans.inputs(one.model)))),
        dropping=dropping(graph),
        recipes=recipes_of(graph.operators),
        seed=SEED,
    )
    losses = 0.0
    for number in range(STEPS):
        for call, wanted in ((step, lambda batch: plain(batch, {})), (step.evaluate, lambda b: plain.evaluate(b, {}))):
            batch = plans.inputs(one.model, seed=number, samples=plan.training.global_batch)
            with InFloat64():
                expected = wanted(batch)
            losses = max(losses, abs(call(*batch) - expected) / abs(expected))
    kept, found = plain.kept(), step.full_parameters()
    errors = [relative(whole, kept[name]) for name, whole in found.items() if name in kept]
    errors += [relative(step.rank.scales.history_of(name), kept[f"fp8/{name}"]) for name in step.rank.scales.names]
    return losses, max(errors)


def _plan(one: Drawn) -> Plan:
    mesh = without(plans.mesh_of(*one.sizes), one.lacking)
    settings = {"kept": KEPT, "optimizer": "sgd", **one.settings, "graph": traced(one.model)}
    plan = planned(one.model, mesh, one.kind, **settings)
    update = Update(buckets="none", gathers=one.gathers, clip_norm=one.clip_norm)
    return replace(plan, training=replace(plan.training, update=update, tokens_once=one.once))


def _step(one: Drawn, plan: Plan) -> TrainingStep:
    return parallelize(
        plans.build(one.model).double(),
        plan,
        optimizer=RATE,
        traced=traced(one.model),
        device=CPU,
        known=known(),
        seed=SEED,
        lowered=one.lowered,
    )
