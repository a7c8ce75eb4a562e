"""Exports a plan to an engine: what the engine cannot express, and what it runs instead."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from planner.api.carrying import Step, Subject, asked_like, plan_of, priced_losses, target_named
from planner.errors import InfeasibleError, RequestError

if TYPE_CHECKING:
    from hardware_profiles import Machine
    from planner.export.architecture import Architecture
    from planner.export.description import Description
    from planner.export.target import Job, OperatorTarget, Target
    from planner.graph.operator_graph import OperatorGraph
    from planner.plan.binding.bind import BoundPlan
    from planner.plan.plan import ModelReference, Plan, Prediction

_TOLD = 4  # maximum number of losses that a refusal names

_NEGLIGIBLE = 5e-4  # of a step, or of its memory


_LEAVE_THE_MODEL = ("deepspeed", "accelerate")
"""Engines whose settings do not describe the model: it comes from the user's code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts with one of several kinds of devices, counted from 0 as engines count nodes."""

    profile: str
    first: int
    count: int

    @property
    def words(self) -> str:
        """`0 to 3 of h100-80gb`."""
        last = f" to {self.first + self.count - 1}" if self.count > 1 else ""
        return f"{self.first}{last} of {self.profile}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What to do with a plan outside of the engine's space: take the nearest one if it is at most a share `most`
    slower, or `nearest` in any case; else search again."""

    nearest: bool = False
    most: float = 0.01


@dataclass(frozen=True, kw_only=True)
class Export:
    """A plan on its way to an engine.

    Attributes:
        steps: what the engine cannot say, with the price of the plan after each; empty where the plan was `searched`.
        prediction: of the plan that the engine will run.
        searched: whether it is the best in the space of the engine, found in place of one that lies outside.
        why: what the engine cannot say of the plan that lies outside, where it was `searched`; else empty.
        software: the training stack that it is priced for.
        hosts: in which order hosts are to be started, where they have different devices; else empty.
    """

    target: "Target"
    plan: "Plan"
    job: "Job"
    steps: tuple[Step, ...]
    prediction: "Prediction"
    software: str
    searched: bool = False
    why: tuple[str, ...] = ()
    hosts: tuple[Hosts, ...] = ()

    @property
    def fits(self) -> bool:
        return self.prediction.peak_bytes <= self.prediction.capacity_bytes

    @property
    def change(self) -> str:
        return change_words(self.plan.prediction, self.prediction)


def change_words(here: "Prediction", there: "Prediction") -> str:
    """`39.2 s a step instead of 34.7 s (13% more), 74.4 GiB instead of 79.8 GiB`."""
    from planner.report.units import bytes_text, percent_text, seconds_text

    share = there.step_seconds / here.step_seconds - 1
    words = f"{percent_text(abs(share))} {'more' if share > 0 else 'less'}" if abs(share) > _NEGLIGIBLE else "as much"
    fits = there.peak_bytes <= there.capacity_bytes
    fault = "" if fits else f", more than the {bytes_text(there.capacity_bytes)} there are"
    return (
        f"{seconds_text(there.step_seconds)} a step instead of {seconds_text(here.step_seconds)} ({words}), and"
        f" {bytes_text(there.peak_bytes)} per device instead of {bytes_text(here.peak_bytes)}{fault}"
    )


def export_of(plan: "Plan", to: str, machine: "Machine", graph: "OperatorGraph", batch: int, way: Way) -> Export:
    """The plan that an engine will run for a plan whose model is `graph` on `batch` samples.

    Raises RequestError for an engine that is not known, or that cannot be told the plan and has no space to search,
    and for a plan that never trains.
    """
    from planner.export.description import ExportError
    from planner.export.target import Job
    from planner.plan.binding.bind import bind
    from planner.sharding.discover import with_rules

    target = target_named(to)
    if not plan.schedule_kind.trains:
        raise RequestError(
            f"the plan is forward only, and the settings of {target.name} are those of training; run it with plan run,"
            " or export a plan that trains"
        )
    refuse_adapters(target.name, target.name, plan.model)
    bound = bind(plan, graph, batch)
    subject = Subject(model=plan.model, graph=with_rules(graph, plan.rules), batch=batch, cluster=machine)
    steps: tuple[Step, ...] = ()
    last, why = bound, ""
    try:
        steps, last, description = _nearest(subject, bound, target)
    except ExportError as error:
        if way.nearest or not searchable(target, plan, machine):
            raise
        why = str(error)
    outside = bool(why) or not _close(plan, last.plan.prediction, way)
    searched = bool(steps or why) and outside and not way.nearest
    unsaid = (why,) if why else tuple(f"{step.what}: {step.here}, there {step.there}" for step in steps)
    if searched:
        if not searchable(target, plan, machine):
            raise RequestError(_refusal(target, plan, steps, last.plan.prediction))
        last, description = _searched(subject, bound, target)
        steps = ()
    job = Job(
        model=plan.model.reference,
        description=description,
        architecture=_architecture(target, subject, description),
        per_node=per_node_of(machine),
        overlapped=_overlapped(last.plan.cluster.software),
        dispatcher=_dispatcher(last.plan.cluster.software, machine),
        unsaid=_unsaid(last.plan.cluster.software),
        gave_up=why.partition(";")[0],
        resource=_resource_of(machine),
    )
    return Export(
        target=target,
        plan=plan,
        job=job,
        steps=steps,
        prediction=last.plan.prediction,
        software=last.plan.cluster.software,
        searched=searched,
        why=unsaid if searched else (),
        hosts=tuple(hosts_of(machine, job.per_node)),
    )


def _architecture(target: "Target", subject: Subject, description: "Description") -> "Architecture | None":
    """The architecture in the engine's settings; None if there is none, or if the config that the plan names now
    describes another model."""
    found = target.architecture_of(subject.model.reference, subject.model.sequence_length)
    if found is None:
        return None
    shapes = {subject.graph.types[parameter.name].shape for parameter in subject.graph.parameters}
    mixer = () if found.latent or found.family == "gpt" else ((found.heads * found.head_size, found.hidden),)
    told = {(found.vocabulary, found.hidden), *mixer}
    return found if told <= shapes and sum(description.layers) == found.layers else None


def operators_of(
    plan: "Plan", target: "OperatorTarget", graph: "OperatorGraph", batch: int
) -> "tuple[Mapping[str, str], dict[str, Any]]":
    """The strategies of a plan unchanged, for an engine that takes them per operator: files by name, and the rest as in
    export.json. Raises ExportError for a strategy that it cannot express."""
    from planner.export.mindspore.sidecar import sidecar_content
    from planner.plan.binding.bind import bind

    content: dict[str, Any] = {"engine": target.name, "about": target.about}
    content |= {"model": plan.model.reference, "devices": plan.cluster.devices, **sidecar_content(plan)}
    return target.write(bind(plan, graph, batch)), content


def check_told(engine: str | None, model: "ModelReference") -> None:
    """Raise RequestError before a search if an engine needs all dimensions of a model and they are not known, or if it
    cannot be told of adapters."""
    from planner.engines.spaces import SPACES
    from planner.export.targets import TARGETS

    if engine is not None:
        refuse_adapters(engine, SPACES[engine].title, model)
    if engine is None or not (TARGETS[engine].needs_architecture or TARGETS[engine].writes_model):
        return
    if TARGETS[engine].architecture_of(model.reference, model.sequence_length) is None:
        raise RequestError(
            f"--for {engine}: {SPACES[engine].title} is told all dimensions of a model, and those of {model.reference}"
            " are none that it is told here; take --for megatron, deepspeed or accelerate, which leave the model to you"
        )


def refuse_adapters(engine: str, title: str, model: "ModelReference") -> None:
    """Raise RequestError for a model with adapters, unless the user's code makes the engine's model."""
    from planner.models.adapters import adapters_of

    if engine not in _LEAVE_THE_MODEL and adapters_of(model.reference) is not None:
        raise RequestError(
            f"{title} is told of no adapters here, and would train all weights of {model.reference}; take"
            f" {' or '.join(_LEAVE_THE_MODEL)}, which train the model of your code (as peft makes it)"
        )


def check_fits(found: Export, name: str) -> None:
    """Raise InfeasibleError, naming the plan, if the engine would run out of memory."""
    there = found.prediction
    if not found.fits:
        again = _other_optimizer(found.target, found.plan)
        advice = "Plan again" if again else "Leave out --nearest, or plan again"
        raise InfeasibleError(
            f"{name}: as {found.target.name} runs it, it takes {found.change}; nothing was written. {advice} with plan"
            f" --for {found.target.name}{again and f' {again}'}",
            needed=there.peak_bytes,
            missing=there.peak_bytes - there.capacity_bytes,
        )


def check_own_fit(plan: "Plan", engine: str, name: str) -> None:
    """Raise InfeasibleError, naming the plan, if an engine that takes it unchanged would run out of memory."""
    from planner.report.units import bytes_text

    needed, there = plan.prediction.peak_bytes, plan.prediction.capacity_bytes
    if needed > there:
        raise InfeasibleError(
            f"{name}: {engine} takes it as it is, and it needs {bytes_text(needed)} per device, more than the"
            f" {bytes_text(there)} there are; nothing was written. Plan again",
            needed=needed,
            missing=needed - there,
        )


def _nearest(
    subject: Subject, bound: "BoundPlan", target: "Target"
) -> "tuple[tuple[Step, ...], BoundPlan, Description]":
    """What an engine cannot express of a plan, and the nearest plan that it can. Raises ExportError if none is near."""
    from planner.export.describe import describe, differences

    description = describe(bound)
    losses = target.nearest(description)
    usual = plan_of(subject, description)
    steps, last = priced_losses(subject, bound, usual, differences(bound, usual), losses)
    return steps, last, losses[-1].description if losses else description


def _overlapped(software: str) -> tuple[str, ...]:
    """The kinds of communication that a training stack overlaps, at least in part."""
    from hardware_profiles import load_software

    hidden = load_software(software).hidden
    return tuple(name for name in ("tensor", "gathers", "reductions", "exchange") if getattr(hidden, name))


def _dispatcher(software: str, machine: "Machine") -> str:
    """The library by which a stack sends a token once to each node; empty for a stack that sends a row for each expert.

    DeepEP knows Ampere, Hopper, B200 and B300, HybridEP racks of GB200 and GB300 too (Megatron Bridge 0.7,
    training/flex_dispatcher_backend.py).
    """
    from hardware_profiles import load_software, parts_of

    if load_software(software).dispatcher != "once":
        return ""
    name = parts_of(machine)[0].device.name
    return "hybridep" if any(rack in name for rack in _RACKS) else "deepep"


_RACKS = ("GB200", "GB300", "VR200")
"""In the names of devices of rack-scale systems."""


def _unsaid(software: str) -> tuple[str, ...]:
    """What a stack has and no exporter writes, in words."""
    from hardware_profiles import load_software

    stack = load_software(software)
    graphs = ("CUDA graphs",) if stack.graphs != "none" or not stack.host else ()
    return (*graphs, "one kernel for all products of experts") if stack.fused_experts else graphs


def _close(plan: "Plan", there: "Prediction", way: Way) -> bool:
    """Whether another plan fits and is at most slightly slower than this one."""
    return there.peak_bytes <= there.capacity_bytes and there.step_seconds <= plan.prediction.step_seconds * (
        1 + way.most
    )


def searchable(target: "Target", plan: "Plan", machine: "Machine") -> bool:
    """Whether plans for the training of a plan can be searched in the space of an engine."""
    from hardware_profiles import Cluster
    from planner.engines.spaces import SPACES

    space = SPACES.get(target.name)
    return space is not None and plan.training.optimizer in space.optimizers and isinstance(machine, Cluster)


def _searched(subject: Subject, bound: "BoundPlan", target: "Target") -> "tuple[BoundPlan, Description]":
    """The best plan of an engine for the training of another plan, priced by the engine's stack unless the plan has one
    that belongs to no engine."""
    from hardware_profiles import PYTORCH, load_software
    from planner.engines.spaces import SPACES
    from planner.export.describe import describe
    from planner.strategy_search.objectives import plan_for

    space, cluster = SPACES[target.name], subject.cluster
    if bound.plan.cluster.software in (PYTORCH.name, *(one.software for one in SPACES.values())):
        cluster = cluster.with_software(load_software(space.software))
    request = asked_like(replace(subject, cluster=cluster), bound.plan.training, space=space)
    found = plan_for(request, lambda _: None, lambda: False).bound
    return found, describe(found)


def _resource_of(machine: "Machine") -> str:
    """The resource name of a machine's devices in Kubernetes device plugins."""
    from hardware_profiles import parts_of
    from planner.export.target import AMD, ASCEND, NVIDIA

    device = parts_of(machine)[0].device
    if device.device_type == "npu":
        return ASCEND
    return AMD if device.name.startswith("AMD") else NVIDIA


def per_node_of(machine: "Machine") -> int:
    """Number of devices in use on every host. Raises RequestError if groups differ: one launch starts equally many
    processes on all hosts."""
    from hardware_profiles import parts_of

    found = {part.name: min(part.devices_per_node or part.devices, part.devices) for part in parts_of(machine)}
    if len(set(found.values())) > 1:
        words = ", ".join(f"{count} on {name}" for name, count in found.items())
        raise RequestError(
            f"hosts have different numbers of devices ({words}), and engines start equally many processes on each;"
            " plan for groups with equal hosts, as in h100-80gb[node=4,cluster@25]:32"
        )
    return next(iter(found.values()))


def hosts_of(machine: "Machine", per_node: int) -> "Iterator[Hosts]":
    """The hosts (of `per_node` devices) of each kind of device, if there are several kinds; a group uses whole
    hosts."""
    from hardware_profiles import Cluster

    if isinstance(machine, Cluster):
        return
    first = 0
    for group in machine.groups:
        count, rest = divmod(group.devices, per_node)
        assert not rest
        yield Hosts(profile=group.name, first=first, count=count)
        first += count


def _refusal(target: "Target", plan: "Plan", steps: Sequence[Step], there: "Prediction") -> str:
    again = _other_optimizer(target, plan)
    fits = there.peak_bytes <= there.capacity_bytes
    advice = "write that one with --nearest" if fits or not again else f"plan again with {again}"
    return (
        f"{target.name} cannot say {_listed(steps)}; the nearest plan that it can takes"
        f" {change_words(plan.prediction, there)}: {advice}"
    )


def _other_optimizer(target: "Target", plan: "Plan") -> str:
    """The option that brings a plan into the space of an engine, where its optimizer keeps it out; else empty."""
    from planner.engines.spaces import SPACES

    known = SPACES[target.name].optimizers if target.name in SPACES else ()
    return f"--optimizer {known[0]}" if known and plan.training.optimizer not in known else ""


def _listed(steps: Sequence[Step]) -> str:
    words = [f"{step.what}: {step.here}, but {step.there}" for step in steps]
    more = [f"{len(words) - _TOLD} more"] if len(words) > _TOLD else []
    return "; ".join(words[:_TOLD] + more)
