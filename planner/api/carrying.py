"""Converts between plans and engine descriptions: the priced plan of a description, and what converting a plan
costs."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from planner.errors import RequestError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hardware_profiles import Machine
    from planner.engines.space import EngineSpace
    from planner.export.describe import Difference
    from planner.export.description import Description
    from planner.export.target import Loss, Target
    from planner.graph.fp8 import Fp8
    from planner.graph.operator_graph import OperatorGraph
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import ModelReference, Training
    from planner.sharding.update import Update
    from planner.strategy_search.request.request import SearchRequest


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the machine: a traced graph whose example inputs have `batch` samples, and a machine."""

    model: "ModelReference"
    graph: "OperatorGraph"
    batch: int
    cluster: "Machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that an engine cannot say, and the price of the plan without it."""

    what: str
    here: str
    there: str
    step_seconds: float
    peak_bytes: float


def plan_of(subject: Subject, description: "Description") -> "BoundPlan":
    """The plan of a description, priced on the subject's machine. It may not fit."""
    from planner.strategy_search.fixed.megatron_layout import Usual, usual_plan
    from planner.strategy_search.request.offload import Offload
    from planner.strategy_search.request.space import Pinned

    context_by = "heads" if description.ring == 1 else "ring" if description.heads == 1 else "hybrid"
    experts = description.expert is not None
    request = asked_like(subject, description, description.update)
    pinned = Pinned(
        pipeline=description.pipeline,
        data=description.data,
        context=description.context,
        context_by=context_by,  # type: ignore[arg-type]  # one of three words
        ulysses=description.heads if context_by == "hybrid" else None,
        zigzag=description.zigzag if description.ring > 1 else None,
        tensor=description.tensor,
        expert=description.expert,
        whole_experts=description.whole_experts if experts and description.tensor > 1 else None,
        zero=description.zero,
        replicas=description.replicas if description.replicas > 1 else None,
        sequence_parallel=description.sequence_parallel,
        micro_batches=description.micro_batches,
        offload=Offload(optimizer=(description.states_at,), weights=(description.weights_at,)),
    )
    return usual_plan(
        request,
        Usual(
            pinned=pinned,
            stages=description.layers,
            virtual_stages=description.virtual_stages,
            schedule=description.schedule,
            interleave=description.interleave,
            slices=description.slices,
            vocabulary=description.vocabulary_parallel,
            full=description.full,
            selective=description.selective,
            kept=description.kept,
        ),
    )


def asked_like(
    subject: Subject,
    trained: "Training | Description",
    update: "Update | None" = None,
    space: "EngineSpace | None" = None,
    time_limit: float | None = None,
) -> "SearchRequest":
    """A request for plans that train like another one, in the space of an engine if one is given, with fp8 as the
    engine has it (`engine_fp8`). Without `update`, gradient settings are open, except those that would change the
    training."""
    from planner.plan.binding.machine import computing_in
    from planner.sharding.update import DEFAULT
    from planner.strategy_search.request.request import SearchRequest

    kept = ("gradients", "clip_norm", "local_parameters", "placed", "per_replica", "replicas")
    opened = replace(DEFAULT, **{name: getattr(trained.update, name) for name in kept})
    return SearchRequest(
        graph=subject.graph,
        batch=subject.batch,
        model=subject.model,
        cluster=computing_in(subject.cluster, trained.precision),
        global_batch=trained.global_batch,
        precision=trained.precision,
        optimizer=trained.optimizer,
        update=opened if update is None else update,
        imbalance=trained.imbalance,
        tokens_once=getattr(trained, "tokens_once", False),  # the description of an engine has no such setting
        fp8=trained.fp8 if space is None else engine_fp8(trained.fp8, space),
        space=space,
        time_limit=time_limit,
    )


def engine_fp8(fp8: "Fp8", space: "EngineSpace") -> "Fp8":
    """The fp8 settings of a plan as an engine has them: how weights are gathered is searched, and an engine that cannot
    leave a layer out has all layers in fp8, like the nearest plan."""
    return replace(fp8, gathered=False, left_out=fp8.left_out if space.leaves_out else ())


def priced_losses(
    subject: Subject,
    bound: "BoundPlan",
    usual: "BoundPlan",
    found: "Sequence[Difference]",
    losses: "Sequence[Loss]",
) -> "tuple[tuple[Step, ...], BoundPlan]":
    """What is lost when a plan is converted for an engine, in the order in which it is left out, with the price of the
    plan after each; and the plan that the engine will run."""
    steps, last = [], usual
    if found:
        figures = usual.plan.prediction
        steps += [
            Step(
                what=one.what + (f" ({one.count} times)" if one.count > 1 else ""),
                here=one.here,
                there=one.usual,
                step_seconds=figures.step_seconds,
                peak_bytes=figures.peak_bytes,
            )
            for one in found
        ]
    for loss in losses:
        made = plan_of(subject, loss.description)
        if _decided(made) == _decided(last):  # the same in other words, as for a vocabulary that devices do not divide
            continue
        last, figures = made, made.plan.prediction
        steps.append(
            Step(
                what=loss.what,
                here=loss.here,
                there=loss.there,
                step_seconds=figures.step_seconds,
                peak_bytes=figures.peak_bytes,
            )
        )
    return tuple(steps), last if steps else bound


def _decided(bound: "BoundPlan") -> tuple[object, ...]:
    """All decisions of a plan."""
    plan = bound.plan
    turns = (plan.stages, plan.virtual_stages, plan.schedule, plan.slices)
    return plan.mesh, plan.training, plan.groups, *turns


def target_named(name: str) -> "Target":
    """The engine of that name. Raises RequestError for a name that is not known."""
    from planner.export.targets import OPERATOR_TARGETS, TARGETS

    if name not in TARGETS:
        raise RequestError(unknown_name("engine", name, {**TARGETS, **OPERATOR_TARGETS}))
    return TARGETS[name]
