"""Whether a plan may give a model another batch than that of its example."""

from collections.abc import Callable

from planner.errors import ModelError, RequestError
from planner.graph.constant_batch import check_numbers
from planner.graph.operator_graph import OperatorGraph
from planner.sharding.rescale import rescale_batch


def batch_fault(graph: OperatorGraph, batch: int, retrace: Callable[[int], OperatorGraph]) -> str | None:
    """Why the model cannot compute with any micro-batch but one of `batch` samples; None where it can.

    The graph at twice the batch must be what tracing the model there gives, `retrace(samples)`: the comparison that a
    run makes at the batch of its plan, made before the search.
    """
    other = 2 * batch
    try:
        check_numbers(rescale_batch(graph, batch, other), retrace(other))
    except (ModelError, RequestError) as error:
        return str(error)
    return None
