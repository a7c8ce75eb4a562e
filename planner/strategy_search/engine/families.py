"""The engine of a request, its configurations, and their families: configurations that differ only in their
micro-batches."""

from dataclasses import dataclass, replace

from hardware_profiles import parts_of
from planner.errors import RequestError
from planner.faults import refuse
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import prepare
from planner.sharding.padded_batch import weighted_of
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.family import Family
from planner.strategy_search.request.bounds import Bounds, bounds
from planner.strategy_search.request.constraints import NothingAgreesError
from planner.strategy_search.request.folding import fold
from planner.strategy_search.request.fp8_layers import open_layers
from planner.strategy_search.request.gathering import gathers_in_fp8_fault
from planner.strategy_search.request.refusals import space_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.request.template import Template


def all_configurations(engine: Engine) -> list[Configuration]:
    """All configurations of the request of an engine."""
    return list(space_of(engine.request, engine.template))


def families_of(space: list[Configuration]) -> list[tuple[Configuration, ...]]:
    """The configurations, grouped by family."""
    families: dict[object, list[Configuration]] = {}
    for configuration in space:
        families.setdefault(configuration.family, []).append(configuration)
    return [tuple(members) for members in families.values()]


def family_of(engine: Engine, members: tuple[Configuration, ...]) -> Family | None:
    """The lower bounds that the largest micro-batch proves for all members; None if it cannot be cut into the
    others."""
    largest = min(members, key=lambda c: c.micro_batches)
    if any(c.micro_batches % largest.micro_batches for c in members):
        return None
    try:
        return engine.family(largest, scales=any(c.micro_batches > largest.micro_batches for c in members))
    except NothingAgreesError:
        return None


@dataclass(kw_only=True)
class Shared:
    """What several searches build once if their requests differ only in the memory of devices, the global batch, and
    the number of plans; empty before the first search. `alone` is that of the same requests without offload: tables of
    operators and of what is sent between them do not depend on offload."""

    made: tuple[Engine, OperatorGraph] | None = None
    alone: "Shared | None" = None


def engine_of(request: SearchRequest, shared: Shared | None = None) -> tuple[Engine, OperatorGraph]:
    """The engine of a request, and its prepared graph. Raises RequestError if the request offloads what a model without
    blocks cannot offload."""
    if shared is not None and shared.made is not None:
        engine, prepared = shared.made
        return replace(engine, request=request), prepared
    alone = None if shared is None or shared.alone is None else shared.alone.made
    made = _engine_of(request) if alone is None else _offloading_engine(request, *alone)
    if shared is not None:
        shared.made = made
    return made


def _engine_of(request: SearchRequest) -> tuple[Engine, OperatorGraph]:
    trains, update = not request.pinned.forward_only, request.update
    prepared, blocks = prepare(
        request.graph,
        request.imbalance,
        update.placed,
        request.fp8,
        update.padded,
        trains=trains,
        once=request.tokens_once,
        weighted=weighted_of(update, request.batch),
        replicated=update,
        batch=request.batch,
    )
    never_kept = frozenset(request.pinned.never_kept)
    template = fold(prepared, blocks, request.cluster.software, never_kept)
    template = replace(template, either=open_layers(template, prepared, request.fp8_layers))
    _check(request, template)
    return Engine(request=request, template=template, limits=_limits(request, template)), prepared


def _offloading_engine(request: SearchRequest, alone: Engine, prepared: OperatorGraph) -> tuple[Engine, OperatorGraph]:
    """`_engine_of` for the request of another engine with offload."""
    _check(request, alone.template)
    limits, built = _limits(request, alone.template), alone.built.with_other_offload
    return replace(alone, request=request, limits=limits, built=built), prepared


def _limits(request: SearchRequest, template: Template) -> tuple[Bounds, ...]:
    """What bounds the plans of a request, for every group of devices."""
    asked = (request.precision, request.optimizer, request.update, request.offload)
    return tuple(bounds(template, request.prepared_batch, group, *asked) for group in parts_of(request.cluster))


def _check(request: SearchRequest, template: Template) -> None:
    """Raise RequestError if a model without blocks cannot have the offload, the recomputation, or the gathers in fp8
    that a request asks for."""
    if "device" not in request.offload.weights and not template.every_own_parameter:
        raise RequestError(
            "offload: the weights of repeated blocks are offloaded, and this model has no blocks of which each is"
            " like the one before; leave weights out of --offload"
        )
    if "device" not in request.offload.saved and not template.blocks.count:
        raise RequestError(
            "offload: what repeated blocks save is offloaded, and this model has no blocks of which each is like the"
            " one before; leave saved out of --offload"
        )
    if "device" not in request.offload.activations and not template.blocks.count:
        raise RequestError(
            "offload: inputs of recomputed blocks are offloaded, and this model has no blocks of which each is like the"
            " one before; leave activations out of --offload"
        )
    if request.pinned.recompute not in (None, "none") and not template.blocks.count:
        raise RequestError(
            f"recompute = {request.pinned.recompute}: repeated blocks are recomputed, and this model has no blocks of"
            " which each is like the one before; leave it out"
        )
    refuse(gathers_in_fp8_fault(request, template.blocks.count), RequestError)
