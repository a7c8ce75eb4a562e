"""Which model a plan is for, and who may say so.

A plan file may come from anyone, and building a model runs code: a factory is imported and called. So nothing that a
file names is imported, called or opened. The graph of a plan comes, in this order,

    from the person       --model NAME, path/to/config.json or package.module:factory, on the command line
    from the zoo          where the plan names one of its models, perhaps with changed dimensions
    from the plan itself  the graph that it carries, which is data (`planner.plan.carried`)

and must have the fingerprint of the plan in any case (`planner.plan.binding.bind`). Executing the model, or operators
of it, needs a model that is built: from the person or the zoo.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.errors import ModelError, PlanFileError, did_you_mean
from planner.models.adapters import with_adapters_of
from planner.models.overrides import split_reference
from planner.plan.carried import carried_graph
from planner.plan.plan import PRECISIONS, ModelReference, Plan

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel

_SHOWN = 80  # characters of a name out of a file


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """The graph of a plan's model, whose example inputs have `batch` samples, and the model itself. The model is None
    if the graph is the one that the plan carries."""

    graph: "OperatorGraph"
    batch: int
    built: "BuiltModel | None"


def carried_model(plan: Plan) -> PlannedModel | None:
    """The graph that a plan carries, if it carries one and its model is not in the zoo. Raises PlanFileError."""
    from planner.models.zoo import is_of_zoo

    if plan.model.graph is None or is_of_zoo(plan.model.reference):
        return None
    found, length = carried_graph(plan.model.graph), plan.model.sequence_length
    if found.sequence_length != length:
        raise PlanFileError(
            f"model.sequence_length: the graph in the file is of {found.sequence_length}, the file says {length}; undo"
            " the edit or plan again"
        )
    return PlannedModel(graph=found.graph, batch=found.batch, built=None)


def buildable(model: ModelReference, given: str | None, why: str = "") -> str:
    """What the model of a plan may be built from: what the person has `given`, else a name of the zoo. Raises
    ModelError where the plan has another model; `why` says what it is needed for."""
    from planner.models.zoo import ZOO, is_of_zoo

    if given is not None:
        return with_adapters_of(given, model.reference)
    if is_of_zoo(model.reference):
        return model.reference
    name = ascii(model.reference[:_SHOWN]) + ("..." if len(model.reference) > _SHOWN else "")
    near = did_you_mean(split_reference(model.reference)[0], ZOO)
    meant = f" ({near})" if near else ""
    raise ModelError(
        f"the plan is for the model {name}, which is none of the zoo{meant}, and what a file names is never imported or"
        f" opened{why}; say which model it is: --model package.module:factory, or --model path/to/config.json"
    )


def build_planned(
    plan: Plan, given: str | None, *, device: str = "meta", why: str = "", dtype: str | None = None
) -> "BuiltModel":
    """The model of a plan, as `buildable` says, in the precision (or another `dtype`) and for the sequences of the
    plan."""
    from planner.models.zoo import build_model

    reference, length = buildable(plan.model, given, why), plan.model.sequence_length
    own = ":" in reference.partition("+")[0]  # a factory, which fixes its shapes
    built = build_model(
        reference,
        dtype=dtype or PRECISIONS[plan.training.precision],
        device=device,
        sequence_length=None if own else length,
    )
    if not own and built.sequence_length != length and (given is None or length is not None):
        raise PlanFileError(
            f"model.sequence_length: {reference} has {built.sequence_length}, the file says {length}; undo the edit or"
            " plan again"
        )
    return built
