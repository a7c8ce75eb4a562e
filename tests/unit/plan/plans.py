"""Plans that searches wrote for small models, and edits of their files."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from planner.plan.binding.bind import bind
from planner.plan.compare.verify import Verdict, verify
from planner.plan.file import dump_plan
from planner.plan.plan import Plan
from planner.plan.prediction.predict import predict
from planner.sharding.update import DEFAULT, PLAIN
from planner.strategy_search.request.space import FREE, Configuration, Pinned
from planner.strategy_search.search import search
from tests.kept import kept
from tests.unit.search.by_hand import UPDATE_CUT, by_hand
from tests.unit.search.cases import BATCH, cluster_of, make_case, plan_of, request_of, traced

Content = Any  # of a JSON file
Edit = Callable[[Content], object]

LEAST_FREE = Pinned(schedule="1f1b", virtual_stages=1, interleave=1, slices=1, tensor_overlap=1)
"""One order of passes, nothing under products: blocks differ by what memory they need, and the search is short."""

NAMES: dict[str, tuple[str, str, int, Pinned]] = {
    "no axes": ("chain", "cpu", 1, FREE),
    "one axis": ("perceptron", "cpu", 4, Pinned(mesh=(4,))),
    "two axes": ("llama-4", "h100-80gb", 16, Pinned(mesh=(2, 8), pipeline=1, micro_batches=2)),
    "pipeline": ("gpt-4-tied", "h100-80gb", 8, Pinned(pipeline=4, mesh=(2,), micro_batches=4, recompute="full")),
    "several groups": ("llama-4", "h100-80gb", 4, replace(LEAST_FREE, pipeline=2, mesh=(2,), micro_batches=4)),
    "only stages": ("residual", "cpu", 2, Pinned(pipeline=2, micro_batches=2)),
    "no blocks": ("skips", "cpu", 2, FREE),
}

MEMORY = {"several groups": 2.6847e9}
"""Bytes of a device that a plan may use, where not all that there are: some blocks are recomputed then."""

BY_HAND = "by hand"


@cache
def plan_named(name: str) -> Plan:
    """One of `NAMES`, or Megatron's plan for a small Llama."""
    return kept(f"plan {name}", _by_hand if name == BY_HAND else partial(_found, name))


def _found(name: str) -> Plan:
    model, profile, devices, pinned = NAMES[name]
    cluster = cluster_of(profile, devices)
    update = PLAIN if name in MEMORY else DEFAULT
    return search(request_of(model, cluster, 8, pinned=pinned, memory_limit=MEMORY.get(name), update=update)).plan


def _by_hand() -> Plan:
    configuration = Configuration(pipeline=1, mesh=(2, 4), micro_batches=2)
    case = make_case("llama-4", "h100-80gb", configuration, 8)
    plan = plan_of(case, by_hand(case, ("data", "tensor"), UPDATE_CUT))
    plan = replace(plan, model=replace(plan.model, parameters=traced("llama-4").parameter_count()))
    return replace(plan, prediction=predict(bind(plan, traced("llama-4"), BATCH), case.cluster))


def verdict_of(plan: Plan) -> Verdict:
    return verify(plan, traced(plan.model.reference), BATCH, cluster_of(plan.cluster.profile, plan.cluster.devices))


def content_of(name: str) -> Content:
    return json.loads(dump_plan(plan_named(name)))


def edited(name: str, edit: Edit) -> str:
    """The text of a plan file after an edit of its content."""
    content = copy.deepcopy(content_of(name))
    edit(content)
    return json.dumps(content)


def put(*path: str | int, value: object) -> Edit:
    """An edit that puts a value at a place."""

    def edit(content: Content) -> None:
        for step in path[:-1]:
            content = content[step]
        content[path[-1]] = value

    return edit


def drop(*path: str | int) -> Edit:
    """An edit that takes a place away."""

    def edit(content: Content) -> None:
        for step in path[:-1]:
            content = content[step]
        del content[path[-1]]

    return edit
