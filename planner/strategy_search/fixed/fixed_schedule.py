"""Plans with fixed blocks, stages and schedule: a search without a memory limit finds the strategies, and the rest is
set by hand.

    decided operators ─▶ search, unlimited memory ─▶ strategies of everything else ─▶ blocks, stages, schedule ─▶ priced

Memory is unlimited in the search, so that no block runs in a leaner way than its twins; recomputation is part of the
fixed order. With several kinds of devices, the first kind stands for all during the search.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hardware_profiles import parts_of
from planner.graph.blocks import block_parameters
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.binding.machine import cluster_reference, placed
from planner.plan.plan import Group, Plan, Stage
from planner.plan.prediction.predict import predict
from planner.plan.schedule_checks import tensor_overlap_fault
from planner.sharding.mesh import build_mesh
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.search import search

_ENDLESS = 1e18  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How a model is run: the number of blocks of every stage, virtual ones included, in the order of the model; and
    the schedule, slices and interleave of a `Plan`."""

    stages: tuple[int, ...]
    virtual_stages: int = 1
    schedule: str = "1f1b"
    slices: int = 1
    interleave: int = 1


def without_limits(request: SearchRequest) -> BoundPlan:
    """The fastest plan for the decisions of a request with unlimited memory, without recomputation, and with stages one
    after the other. Only its strategies are needed; `arranged` gives them another order."""
    machine = request.cluster
    cluster = parts_of(machine)[0].with_devices(machine.devices)
    endless = replace(cluster, device=replace(cluster.device, memory=_ENDLESS))
    pinned = replace(
        request.pinned, recompute="none", even=True, schedule="1f1b", virtual_stages=1, slices=1, interleave=1
    )
    asked = replace(
        request, cluster=endless, pinned=pinned, algorithm="dynamic_programming", objective="time", top=1,
        memory_limit=None, time_limit=None, certify=False,
    )  # fmt: skip
    return search(asked).bound


def arranged(request: SearchRequest, plan: Plan, order: Order, groups: tuple[Group, ...]) -> BoundPlan:
    """The plan with these groups in that order, on the machine of the request, priced. It may not fit in memory."""
    machine, first, stages = request.cluster, 0, []
    for blocks in order.stages:
        stages.append(Stage(first_block=first, blocks=blocks))
        first += blocks
    changed = replace(
        plan,
        cluster=cluster_reference(machine),
        mesh=build_mesh(
            machine, plan.mesh.sizes, zigzag=plan.mesh.zigzag, alltoall=[axis.alltoall for axis in plan.mesh.axes]
        ),
        stages=placed(stages, len(stages) // order.virtual_stages, machine, order.schedule),
        virtual_stages=order.virtual_stages,
        schedule=order.schedule,
        slices=order.slices,
        training=replace(plan.training, interleave=order.interleave, tensor_overlap=_overlap(request, plan, order)),
        groups=groups,
        provenance=replace(plan.provenance, search="by hand", status="feasible", gap=1.0),
    )
    bound = bind(changed, request.graph, request.batch)
    return replace(bound, plan=replace(changed, prediction=predict(bound, machine)))


def _overlap(request: SearchRequest, plan: Plan, order: Order) -> tuple[tuple[str, int, int, int], ...]:
    """The tensor-parallel overlap of the plan that was found, if the order allows it."""
    found = plan.training.tensor_overlap
    clash = tensor_overlap_fault(bool(found), order.schedule, order.interleave, order.slices)
    return found if clash is None or request.pinned.tensor_overlap else ()


def blocks_like(found: BoundPlan, first: int, count: int, recomputation: str, kept: Iterable[int] = ()) -> Group:
    """`count` blocks from `first` on, with the strategies of the first block of their kind in a plan. `kept` has places
    in the block of operators whose results are kept."""
    graph, blocks = found.graph, found.blocks
    known = blocks.firsts[blocks.kinds[first]]
    source = next(g for g in found.plan.groups if g.first_block <= known < g.first_block + g.blocks)
    strategies = [strategy for _, strategy in source.operators]
    names = [graph.operators[at].name for at in blocks.operators(first)]
    stored = [parameter for _, parameter in source.parameters]
    return Group(
        name=f"block {first}" if count == 1 else f"blocks {first} to {first + count - 1}",
        first_block=first,
        blocks=count,
        recomputation=recomputation,
        kept=tuple(names[place] for place in kept),
        operators=tuple(zip(names, strategies, strict=True)),
        parameters=tuple(zip(block_parameters(graph, blocks, first), stored, strict=True)),
    )


def around(found: BoundPlan, inside: Sequence[Group]) -> tuple[Group, ...]:
    """The given groups of blocks, between a plan's groups before and after its blocks."""
    outside = [group for group in found.plan.groups if not group.blocks]
    last = [group for group in outside if group.name == "after the blocks"]
    return (*(group for group in outside if group not in last), *inside, *last)
