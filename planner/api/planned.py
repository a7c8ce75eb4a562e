"""A plan that is given, as a record or as a file, and the graph of its model."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.jobs import traced_model
from planner.api.kinds import kind_of
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.models.nicknames import full_model
from planner.plan.plan import Plan

if TYPE_CHECKING:
    from planner.plan.binding.model_of import PlannedModel

PlanOrPath = Plan | str | os.PathLike[str]


def loaded(plan: PlanOrPath) -> Plan:
    """A plan unchanged, or loaded from its file."""
    from planner.plan.file import load_plan

    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | os.PathLike):
        raise RequestError(f"plan is {kind_of(plan)}: give a Plan or the path of a plan file")
    return load_plan(plan)


def planned_graph(plan: Plan, model: str | None = None) -> tuple[OperatorGraph, int]:
    """The graph of a plan's model and its samples: from the given model, the zoo, or the plan itself."""
    planned = planned_model(plan, model)
    return planned.graph, planned.batch


def planned_model(plan: Plan, model: str | None = None) -> "PlannedModel":
    """The same, with the model where it was built."""
    from planner.plan.binding.model_of import carried_model

    carried = carried_model(plan) if model is None else None
    return carried or built_model(plan, model)


def built_model(plan: Plan, model: str | None = None, *, why: str = "") -> "PlannedModel":
    """The model of a plan, built and traced: the given one, or one of the zoo. `why` says what it is needed for."""
    from planner.plan.binding.model_of import PlannedModel, build_planned

    built = build_planned(plan, None if model is None else full_model(model), why=why)
    return PlannedModel(graph=traced_model(built), batch=built.batch, built=built)


def is_plan_file(text: str) -> bool:
    """Whether a text names a plan file: JSON that is not a model config."""
    return text.endswith(".json") and Path(text).name != "config.json" and Path(text).is_file()
