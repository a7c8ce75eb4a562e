"""What is said of a request that divides into nothing: what was asked, the numbers that clash, and the nearest that do
not.

Which numbers clash is found rule by rule, in the words of each. Which ones are legal is asked of the space itself: of
each option that has to do with it the values are tried, with all else as it is, so that whatever is named can be had.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from hardware_profiles import MixedCluster
from planner.errors import RequestError
from planner.faults import Fault, assigned, said
from planner.nearest import divisors, multiples, nearest_of, nearest_words
from planner.plan.plan import INTERLEAVED
from planner.plan.samples import parts_fault
from planner.sharding.rules import rule_of
from planner.strategy_search.request.attention_degrees import heads_of, key_heads_of
from planner.strategy_search.request.checks import pinned_fault, turns_fault
from planner.strategy_search.request.configurations import (
    EMPTY,
    configurations,
    decided_apart,
    may_be_uneven,
    shares_configurations,
)
from planner.strategy_search.request.model_checks import expert_counts, model_fault
from planner.strategy_search.request.orders import groups_fault, in_orders
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.request.template import Template

_DEGREES = ("pipeline", "data", "context", "tensor")
_NUMBERS = (*_DEGREES, "expert", "replicas", "micro_batches", "micro_batch", "interleave", "virtual_stages", "slices")
_MOST_TRIED = 4096  # numbers that are tried of an option


def check_request(request: SearchRequest, template: Template) -> None:
    """Raise RequestError where choices contradict each other, or the model cannot be split so."""
    fault = _fault(request, template)
    if fault is not None:
        raise RequestError(_text(fault, request, template))


def _fault(request: SearchRequest, template: Template) -> Fault | None:
    """What contradicts itself or the model; None where nothing does."""
    return pinned_fault(request.pinned) or turns_fault(request) or model_fault(request, template)


def space_of(request: SearchRequest, template: Template) -> Iterator[Configuration]:
    """All configurations of a request, as far as it contradicts neither itself nor the model."""
    check_request(request, template)
    yield from _configurations(request, template)


def _configurations(request: SearchRequest, template: Template) -> Iterator[Configuration]:
    if request.alternatives:
        return in_orders(_among(request, template), request.cluster)
    return in_orders(_of_pinned(request, template, request.pinned), request.cluster)


def _of_pinned(request: SearchRequest, template: Template, pinned: Pinned) -> Iterator[Configuration]:
    update = request.update
    samples = (request.padded_batch, pinned, update.padding_samples, update.replicas if update.per_replica else 1)
    return configurations(template, request.cluster.devices, *samples)


def _among(request: SearchRequest, template: Template) -> Iterator[Configuration]:
    """Those of the alternatives of a request, each once; the first alternative that cannot be had is refused where none
    can."""
    known, fault = set[tuple[int, Configuration]](), None
    bare: dict[Pinned, list[Configuration]] = {}
    apart: dict[Pinned, tuple[int, Pinned]] = {}  # what is decided apart, by number: many configurations share it
    for pinned in request.alternatives:
        own = replace(request, pinned=pinned, alternatives=())
        found = _fault(own, template)
        if found is not None:
            fault = fault or (found, own)
            continue
        shared = shares_configurations(pinned)
        if shared not in bare:
            bare[shared] = list(_of_pinned(request, template, shared))
        among: dict[object, tuple[int, Pinned]] = {}
        for configuration in bare[shared]:
            if configuration.roles not in among:
                decided = decided_apart(configuration, pinned)
                among[configuration.roles] = apart.setdefault(decided, (len(apart), decided))
            number, decided = among[configuration.roles]
            if (number, configuration) not in known:
                known.add((number, configuration))
                yield replace(configuration, decided=decided)
    if not known and fault is not None:
        raise RequestError(_text(*fault, template))


def no_configuration(request: SearchRequest, template: Template) -> str:
    """Why a request has no configuration at all."""
    rules = (
        *(_groups, _pipelines, _degrees, _whole_heads, _mesh, _replicas),
        *(_experts, _parts, _samples, _interleave, _virtual),
    )
    found = (fault for rule in rules if (fault := rule(request, template)) is not None)
    return _text(next(found, None) or _anything(request, template), request, template)


def degrees_fault(pinned: Pinned, devices: int) -> Fault | None:
    """Why degrees do not multiply to the devices, or to a part of them where some are open; None where they do."""
    given = {name: degree for name in _DEGREES if (degree := getattr(pinned, name)) is not None}
    product = math.prod(given.values())
    whole = len(given) == len(_DEGREES)
    if devices % product == 0 and (product == devices or not whole):
        return None
    words = " x ".join(f"{name} = {degree}" for name, degree in given.items())
    legal = {name: (degree, _fitting(degree, product, devices, whole)) for name, degree in given.items()}
    made = f" makes {product}," if len(given) > 1 else ""
    does = f"{made} not {devices} devices" if whole else f"{made and f'{made} which'} does not divide {devices} devices"
    return Fault(
        reason=f"{words}{does}",
        hint=nearest_of(legal),
        numbers=_DEGREES,
    )


def _fitting(degree: int, product: int, devices: int, whole: bool) -> list[int]:
    """Values of one degree with which all of them fit the devices."""
    others = product // degree
    if devices % others:
        return []
    return [devices // others] if whole else list(divisors(devices // others))


def _pipelines(request: SearchRequest, template: Template) -> Fault | None:
    blocks, pipeline, model = template.blocks.count, request.pinned.pipeline or 1, request.model.reference
    if pipeline > 1 and template.blocks.count > 1 and (late := template.late_look_up) is not None:
        return Fault(
            option="pipeline",
            value=f"{pipeline}",
            reason=f": operator '{late}' looks up rows of a table outside of the devices in or after the blocks, which"
            " takes one stage",
            hint="leave that table on the devices",
            numbers=("pipeline",),
        )
    if pipeline > 1 and not template.pipelines:
        return Fault(
            reason=f"{model} cannot be cut into {pipeline} pipeline stages: that takes blocks, one after the other, two"
            f" or more of them equal, that share nothing but what each hands to the next, and {_uncut(template)}",
            numbers=("pipeline",),
        )
    if pipeline > max(1, blocks):
        return Fault(reason=f"{model} has {blocks} blocks, too few for pipeline = {pipeline}", numbers=("pipeline",))
    return None


def _uncut(template: Template) -> str:
    """Why a graph cannot be cut between blocks."""
    if template.blocks.count < 2:
        return "here no two layers in a row compute alike, from weights of their own and the result of the one before"
    return f"here {template.shared_by_blocks} is used beyond one of them"


def _groups(request: SearchRequest, template: Template) -> Fault | None:
    """Stages lie within groups of devices."""
    cluster, pipeline = request.cluster, request.pinned.pipeline
    if not isinstance(cluster, MixedCluster):
        return None
    fewest = cluster.devices // math.gcd(*(group.devices for group in cluster.groups))
    if template.blocks.count < fewest:
        text = f"{cluster.name} needs at least {fewest} pipeline stages of equal size, each within one group, and"
        return Fault(reason=f"{text} {request.model.reference} has {template.blocks.count} blocks")
    return None if pipeline is None else groups_fault(cluster, pipeline)


def _degrees(request: SearchRequest, template: Template) -> Fault | None:
    fault = degrees_fault(request.pinned, request.cluster.devices)
    return None if fault is None else replace(fault, hint="")


def _whole_heads(request: SearchRequest, template: Template) -> Fault | None:
    """About attention under an engine, whose tensor-parallel devices hold whole heads, keys and values included."""
    tensor, rules = request.pinned.tensor or 1, (rule_of(template.graph, op) for op in template.graph.operators)
    if request.space is None:
        return None
    counts = [min(heads_of(rule), key_heads_of(rule)) for rule in rules if rule.op_class == "attention"]
    for count in counts:
        if count % tensor:
            return Fault(
                option="tensor",
                value=f"{tensor}",
                reason=f"does not divide the {count} key heads, which plans for {request.space.title} keep whole",
                hint=nearest_words(tensor, divisors(math.gcd(*counts, request.cluster.devices))),
            )
    return None


def _mesh(request: SearchRequest, template: Template) -> Fault | None:
    pinned, devices = request.pinned, request.cluster.devices
    if pinned.mesh is None:
        return None
    size, shape = math.prod(pinned.mesh), "x".join(map(str, pinned.mesh)) or "1"
    if pinned.pipeline is None and devices % size:
        reason = f"has {size} devices, which do not divide {devices}"
        return Fault(option="mesh", value=shape, reason=reason, numbers=("mesh",))
    if pinned.pipeline is not None and devices != size * pinned.pipeline:
        reason = f"has {size} devices, and pipeline = {pinned.pipeline} such stages do not make {devices}"
        return Fault(option="mesh", value=shape, reason=reason, numbers=("mesh", "pipeline"))
    return None


def _experts(request: SearchRequest, template: Template) -> Fault | None:
    pinned, devices = request.pinned, request.cluster.devices
    parts, tensor = pinned.expert or 1, pinned.tensor or 1
    if parts == 1:
        return None
    if pinned.whole_experts and parts % tensor:
        reason = f"does not divide expert = {parts}, though tensor parallel devices have whole experts"
        return Fault(option="tensor", value=f"{tensor}", reason=reason, numbers=("expert", "tensor"))
    free = replace(request, pinned=replace(pinned, expert=None, whole_experts=None))
    if not _possible(free, template):
        return None
    given = [f"{name} = {number}" for name in _DEGREES if (number := getattr(pinned, name)) is not None]
    words = ", ".join([f"{devices} devices", *given])
    product = "data x context x tensor" if pinned.whole_experts else "data x context"
    reason = f"does not divide {product}, of {words}"
    return Fault(option="expert", value=f"{parts}", reason=reason, numbers=("expert", *_DEGREES))


def _replicas(request: SearchRequest, template: Template) -> Fault | None:
    pinned, devices = request.pinned, request.cluster.devices
    if (pinned.replicas or 1) == 1:
        return None
    free = replace(request, pinned=replace(pinned, replicas=None))
    if not _possible(free, template):
        return None
    given = [f"{name} = {number}" for name in (*_DEGREES, "expert") if (number := getattr(pinned, name)) is not None]
    words = ", ".join([f"{devices} devices", *given])
    reason = f"does not divide the data parallel devices without those of experts, of {words}"
    return Fault(
        option="replicas", value=f"{pinned.replicas}", reason=reason, numbers=("replicas", *_DEGREES, "expert")
    )


def _parts(request: SearchRequest, template: Template) -> Fault | None:
    parts = request.pinned.micro_batches
    fault = None if parts is None else parts_fault(parts, request.global_batch, request.update.padding_samples)
    return None if fault is None else replace(fault, hint="")


def _samples(request: SearchRequest, template: Template) -> Fault | None:
    """What a data parallel group gets of a micro-batch."""
    pinned, batch = request.pinned, request.padded_batch
    data = pinned.data or 1
    if pinned.micro_batch is not None and batch % (pinned.micro_batch * data):
        groups = f" on each of data = {data}" if data > 1 else ""
        return Fault(
            option="micro_batch",
            value=f"{pinned.micro_batch}{groups}",
            reason=f"does not divide the global batch {batch}",
            hint=_padding(request, pinned.micro_batch * data),
            numbers=("micro_batch", "data", "global_batch"),
        )
    parts = pinned.micro_batches or 1
    if pinned.micro_batches is not None and batch // parts % data:
        each = batch // parts
        return Fault(
            option="data",
            value=f"{data}",
            reason=f"does not divide the {each} sample{'s' * (each > 1)} of each of micro_batches = {parts}, of the"
            f" global batch {batch}",
            hint=_padding(request, parts * data),
            numbers=("micro_batches", "data", "global_batch"),
        )
    if batch % data:
        reason = f"does not divide the global batch {batch}"
        hint = _padding(request, data)
        return Fault(option="data", value=f"{data}", reason=reason, hint=hint, numbers=("data", "global_batch"))
    return None


def _padding(request: SearchRequest, multiple: int) -> str:
    """What pads the global batch so that it divides; empty where an engine is told the plan, where the update takes no
    padding (`update_fault`), or where that leaves a micro-batch without a sample."""
    added, update = -request.global_batch % multiple, request.update
    parts = request.pinned.micro_batches or 1
    takes_none = request.space is not None or update.gradients == "sum" or bool(update.per_replica)
    if takes_none or added * parts >= request.global_batch + added:
        return ""
    return f"pad it with samples of weight zero: --pad batch={multiple}"


def _interleave(request: SearchRequest, template: Template) -> Fault | None:
    pinned, batch = request.pinned, request.padded_batch
    interleave, data = pinned.interleave or 1, pinned.data or 1
    if interleave == 1:
        return None
    if pinned.micro_batch is not None:
        parts = batch // (pinned.micro_batch * data)
        if parts % interleave:
            return Fault(
                option="interleave",
                value=f"{interleave}",
                reason=f"does not divide the number of micro-batches, {parts}, that micro_batch = {pinned.micro_batch}"
                f" makes of the global batch {batch}",
                numbers=("interleave", "micro_batch", "global_batch"),
            )
    if batch // data % interleave:
        groups = f" for each of data = {data}" if data > 1 else ""
        reason = f"divides no number of micro-batches of the global batch {batch}{groups}"
        numbers = ("interleave", "data", "global_batch")
        return Fault(option="interleave", value=f"{interleave}", reason=reason, numbers=numbers)
    return None


def _virtual(request: SearchRequest, template: Template) -> Fault | None:
    """About stages, of which ranks hold several."""
    pinned, kinds = request.pinned, template.blocks.kinds
    pipeline, virtual, blocks = pinned.pipeline, pinned.virtual_stages, len(kinds)
    if pinned.in_a_v:
        if 2 * (pipeline or 2) <= blocks or request.cluster.devices == 1:
            return None
        reason = f": {2 * (pipeline or 2)} stages in a V are too many for {blocks} blocks"
        numbers: tuple[str, ...] = ("pipeline",)
        return Fault(option="schedule", value=f"{pinned.schedule}", reason=reason, numbers=numbers)
    interleaved = pinned.schedule == INTERLEAVED and virtual in (None, 0)
    if (virtual in (None, 0, 1) and not interleaved) or request.cluster.devices == 1:
        return None
    ranks = f"on pipeline = {pipeline} ranks" if pipeline is not None else "on any number of ranks"
    option, value = ("schedule", pinned.schedule) if interleaved else ("virtual_stages", virtual)
    least = (pipeline or 2) * (2 if interleaved else virtual or 2)
    equal = not any(map(may_be_uneven, request.alternatives or (pinned,)))
    if least > blocks + (0 if equal else EMPTY) or (
        equal and pipeline is not None and not interleaved and blocks % least
    ):
        does = "are too many for" if least > blocks else "do not divide"
        reason = f"{least} stages {does} {blocks} blocks"
    elif equal and pipeline is not None and not interleaved and kinds != kinds[: blocks // least] * least:
        reason = (
            f"virtual stages hold equal blocks here, and {least} stages of {blocks} blocks hold different kinds of them"
        )
    else:
        divide = f"the number of stages must divide the {blocks} blocks, and " if equal else ""
        reason = (
            f"{divide}the number of ranks must divide the number of micro-batches of the global batch"
            f" {request.global_batch}"
        )
    numbers = ("virtual_stages", "pipeline", "micro_batches", "global_batch")
    return Fault(option=option, value=f"{value} {ranks}", reason=f": {reason}", numbers=numbers)


def _anything(request: SearchRequest, template: Template) -> Fault:
    """Nothing divides, and no rule above says why."""
    pinned = request.pinned
    names = ("mesh", "schedule", *_NUMBERS)
    wanted = [f"{name} = {value}" for name in names if (value := getattr(pinned, name)) is not None]
    text = (
        f"nothing divides evenly: {request.cluster.devices} devices, global batch {request.global_batch},"
        f" {template.blocks.count} blocks, with {', '.join(wanted) or 'no option pinned'}"
    )
    return Fault(reason=text, numbers=(*_NUMBERS, "global_batch"))


def _text(fault: Fault, request: SearchRequest, template: Template) -> str:
    """A fault with the nearest legal values of each option that is given, while the others stay as they are."""
    found = {}
    for name in fault.numbers:
        wanted, tried = _tried(request, template, name)
        if tried:
            found[name] = (wanted, [number for number, other in tried if _possible(other, template)])
    if not found:
        return said(fault, assigned)
    near = f"no other value of {' or '.join(found)} helps by itself"
    if any(legal for _, legal in found.values()):
        near = nearest_of(found)
    return said(replace(fault, hint=f"{near}{', or ' * bool(fault.hint)}{fault.hint}"), assigned)


def _tried(request: SearchRequest, template: Template, name: str) -> tuple[int, list[tuple[int, SearchRequest]]]:
    """The value of an option, and the same request with others; none where it is not given."""
    pinned, devices, batch = request.pinned, request.cluster.devices, request.global_batch
    if name == "global_batch":
        rounds = (pinned.interleave or 1) * (pinned.pipeline or 1 if pinned.virtual_stages else 1)
        step = (pinned.data or 1) * (pinned.micro_batch or 1) * (pinned.micro_batches or rounds)
        even = replace(request, update=replace(request.update, padding_samples=0))
        return batch, [(number, replace(even, global_batch=number)) for number in multiples(batch, step)]
    if name == "mesh":
        shapes = [(size, replace(pinned, mesh=(size,) if size > 1 else ())) for size in divisors(devices)]
        return math.prod(pinned.mesh or ()), [(size, replace(request, pinned=other)) for size, other in shapes]
    value = getattr(pinned, name)
    if not value:
        return 0, []
    numbers: tuple[int, ...] = ()
    if name in ("micro_batches", "micro_batch", "interleave"):
        numbers = divisors(request.padded_batch)
    elif name in _DEGREES:
        numbers = divisors(devices)
    elif name == "replicas":
        numbers = divisors(pinned.data or devices)
    elif name == "expert":
        numbers = divisors(math.gcd(*expert_counts(template)))
    elif name == "slices":
        numbers = divisors(request.model.sequence_length or 1)
    elif name == "virtual_stages":
        numbers = tuple(range(1, template.blocks.count + 1))
    found = []
    for number in numbers[:_MOST_TRIED]:
        other = replace(pinned, **{name: number})  # type: ignore[arg-type]  # the name of a number
        found.append((number, replace(request, pinned=other)))
    return value, found


def _possible(request: SearchRequest, template: Template) -> bool:
    """Whether a request has a configuration."""
    return _fault(request, template) is None and next(_configurations(request, template), None) is not None
