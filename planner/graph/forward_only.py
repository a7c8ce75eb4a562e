"""The graph of a model that is evaluated, and of one that is only ever evaluated.

    trained             dropout ─> ... ─> batch norm (statistics of the batch) ─> update of running statistics ─> loss
    evaluating          nothing is dropped, batch norm takes its running statistics, no buffer changes
    without_updates     the same, without the operators that made new contents of buffers
    frozen              no parameter is trainable: nothing has a gradient

This is what `model.eval()` under `torch.no_grad()` computes, derived from the graph that was traced for training. A
model that reads `self.training` itself was traced where that is true: such a branch stays as it was traced. A batch
norm without running statistics uses those of the batch in both modes. Routers of the zoo have no loss in evaluation.

Everything derived from a graph follows: no operator of a frozen graph has a backward pass or saves anything, and no
parameter has a gradient to reduce, or optimizer states.
"""

from collections.abc import Mapping
from dataclasses import replace

from planner.graph.operator_graph import Argument, Operator, OperatorGraph
from planner.graph.per_replica import called
from planner.graph.random_ops import CHANCES
from planner.graph.rewriting.gradient_starts import without_gradient_starts
from planner.graph.rewriting.updates import UPDATE

_COUNTS = "planner.expert_loads.default"
"""Counts choices for the loss and the bias of a router, only in training (`planner.models.experts.router`)."""

_TRAINS: Mapping[str, int] = {"aten._native_batch_norm_legit_functional.default": 5}
"""Operators that take running statistics where they do not train, by the position of the argument that says so."""


def evaluating(graph: OperatorGraph) -> OperatorGraph:
    """The graph of a model in evaluation; the same object where that makes no difference. Operators keep
    their names and places, also those that would make new contents of buffers, which nothing reads then."""
    operators = tuple(map(_evaluated, graph.operators))
    if not graph.updates and all(new is old for new, old in zip(operators, graph.operators, strict=True)):
        return graph
    return replace(graph, operators=operators, updates=())


def without_updates(graph: OperatorGraph) -> OperatorGraph:
    """The graph of a model that is never trained: as `evaluating`, and without operators for contents of buffers."""
    found = evaluating(graph)
    made = {name for op in found.operators if op.op == UPDATE for name in op.results if name is not None}
    if not made:
        return found
    return replace(
        found,
        operators=tuple(op for op in found.operators if op.op != UPDATE),
        types={name: tensor for name, tensor in found.types.items() if name not in made},
    )


def frozen(graph: OperatorGraph) -> OperatorGraph:
    """The graph in which no parameter, and no row of a table elsewhere, is trained."""
    graph = without_gradient_starts(graph)
    return replace(
        graph,
        operators=tuple(
            _with_argument(op, len(op.arguments), "trainable", False) if op.trains_rows else op
            for op in graph.operators
        ),
        parameters=tuple(replace(parameter, trainable=False) for parameter in graph.parameters),
    )


def _evaluated(op: Operator) -> Operator:
    """An operator as it is where the model is evaluated."""
    chance, trains = CHANCES.get(op.op), _TRAINS.get(called(op))
    if chance is not None and chance.of(op.arguments, dict(op.keywords)) > 0:
        return _with_argument(op, *chance.probability, 0.0)
    if trains is not None and op.arguments[trains] is True:
        return _with_argument(op, trains, "", False)
    if called(op) == _COUNTS and "counts" not in dict(op.keywords):
        return replace(op, keywords=(*op.keywords, ("counts", False)))
    return op


def _with_argument(op: Operator, position: int, name: str, value: Argument) -> Operator:
    if position < len(op.arguments):
        return replace(op, arguments=(*op.arguments[:position], value, *op.arguments[position + 1 :]))
    return replace(op, keywords=tuple((key, value if key == name else given) for key, given in op.keywords))
