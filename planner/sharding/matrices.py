"""Which parameters Muon updates: the matrices of hidden layers. AdamW updates all others.

Muon makes the update of a matrix orthogonal, which means something for weights that turn one vector of activations into
another (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, "Muon is scalable for LLM
training", arXiv 2502.16982, section 2.2): weights of linear layers and of experts. Embeddings, the output layer,
vectors, convolutions and what is read in any other way are for AdamW. Weights of several matrices, as of experts, have
them in their last two dims.
"""

from collections.abc import Iterator

from planner.graph.operator_graph import OperatorGraph
from planner.sharding.rules import rule_of

MUON, ADAMW = "muon", "adamw"

_PASSED = frozenset({"copy", "elementwise", "view"})
"""Classes of operators behind which a value still is the same, or the same element by element."""

_VIEWS = frozenset({"copy", "view"})

_KEY = "parameters that Muon updates"


def optimizer_of(graph: OperatorGraph, optimizer: str, name: str) -> str:
    """What updates a parameter where a plan asks for this optimizer."""
    if optimizer != MUON:
        return optimizer
    return MUON if name in matrices_of(graph) else ADAMW


def matrices_of(graph: OperatorGraph) -> frozenset[str]:
    """The parameters of a graph that Muon updates."""
    if _KEY not in graph.derived:
        graph.derived[_KEY] = frozenset(name for name in _trained(graph) if _is_hidden(graph, name))
    found: frozenset[str] = graph.derived[_KEY]
    return found


def _trained(graph: OperatorGraph) -> Iterator[str]:
    for parameter in graph.parameters:
        if parameter.name in graph.differentiable and len(graph.types[parameter.name].shape) >= 2:
            yield parameter.name


def _is_hidden(graph: OperatorGraph, name: str) -> bool:
    """Whether only linear layers and experts read a parameter, and none of them makes logits."""
    readers = set(_readers(graph, name, _VIEWS))
    return bool(readers) and all(_multiplies(graph, at) and not _makes_logits(graph, at) for at in readers)


def _multiplies(graph: OperatorGraph, at: int) -> bool:
    """Whether an operator is a product with matrices, or experts; a convolution is another product."""
    operator = graph.operators[at]
    return rule_of(graph, operator).op_class in ("matmul", "experts") and "conv" not in operator.op


def _makes_logits(graph: OperatorGraph, at: int) -> bool:
    """Whether the cross entropy reads what an operator makes, perhaps element by element."""
    return any(
        rule_of(graph, graph.operators[reader]).op_class == "cross_entropy"
        for result in graph.operators[at].results
        if result is not None
        for reader in _readers(graph, result, _PASSED)
    )


def _readers(graph: OperatorGraph, name: str, passed: frozenset[str]) -> Iterator[int]:
    """The operators that read a value, or what others of the classes `passed` make of it."""
    waiting, seen = [name], {name}
    while waiting:
        for at in graph.consumers.get(waiting.pop(), ()):
            operator = graph.operators[at]
            if rule_of(graph, operator).op_class not in passed:
                yield at
                continue
            for result in operator.results:
                if result is not None and result not in seen:
                    seen.add(result)
                    waiting.append(result)
