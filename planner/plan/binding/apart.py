"""Which graph of a model a plan is for: as it was traced, or with weights that hold several matrices apart."""

from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.fused_weights import PART, with_fused_weights_apart
from planner.plan.plan import Plan


def graph_of(plan: Plan, traced: OperatorGraph) -> OperatorGraph:
    """The graph of the traced model that has the plan's fingerprint; where none has it, the one that the plan means."""
    if plan.model.fingerprint == traced.fingerprint():
        return traced
    apart = with_fused_weights_apart(traced)
    known = plan.model.outline
    meant = known is not None and any(PART.search(name) for name, _ in known.parameters)
    return apart if meant or plan.model.fingerprint == apart.fingerprint() else traced
