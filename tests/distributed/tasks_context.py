"""What the worker processes do in the tests of sequences that are split: plans that the search finds for a context."""

from dataclasses import replace
from functools import cache

import tasks

from planner.plan.plan import Plan
from planner.search.space import Pinned
from planner.sharding.rule import strategy_names
from tests.distributed.searched import searched_plan


@cache
def context_plan(model: str, devices: int, pinned: Pinned, order: str | None) -> Plan:
    """The best plan, with every axis that cuts sequences in zigzag order in another one where `order` says so."""
    plan = searched_plan(model, devices, memory=1e9, pinned=pinned)
    if order is None:
        return plan
    axes = tuple(replace(axis, order=order if axis.order == "zigzag" else axis.order) for axis in plan.mesh.axes)
    return replace(plan, mesh=replace(plan.mesh, axes=axes))


def parity(model: str, devices: int, pinned: Pinned, order: str | None = None) -> tuple[float, set[str], list[str]]:
    """The worst error of loss and gradients, the factors that attention is split by, and the orders of the axes."""
    plan = context_plan(model, devices, pinned, order)
    step = tasks.build_step(model, plan)
    error = tasks.worst_error(step, model, plan.training.micro_batches)
    split = {
        name
        for bound in step.rank.bound.operators
        if bound.rule.op_class == "attention"
        for name in strategy_names(bound.rule, bound.strategy)
        if name is not None
    }
    return error, split, [axis.order for axis in plan.mesh.axes]
