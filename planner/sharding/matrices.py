"""Which parameters Muon updates: the matrices of hidden layers. AdamW updates all others.

Muon makes the update of a matrix orthogonal. That has a meaning for weights that map one vector of activations to
another (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025, "Muon is scalable for LLM
training", arXiv 2502.16982, section 2.2): weights of linear layers and of experts. AdamW updates embeddings, output
layers (which have no other such weight behind them), vectors, convolutions and weights that are read in any other way.
Equal weights of repeated blocks are alike: in a model without an output layer, the last block is a hidden layer as all
others are. A weight that holds several matrices, as those of experts, has them in its last two dims.
"""

from collections.abc import Iterator, Set
from dataclasses import replace

from planner.graph.blocks import IDENTITY, block_parameters
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.sharding.rules import rule_of

MUON, ADAMW = "muon", "adamw"

_VIEWS = frozenset({"copy", "view"})

_KEY = "parameters that Muon updates"


def optimizer_of(graph: OperatorGraph, optimizer: str, name: str) -> str:
    """The optimizer that updates a parameter where a plan asks for `optimizer`."""
    if optimizer != MUON:
        return optimizer
    return MUON if name in matrices_of(graph) else ADAMW


def matrices_of(graph: OperatorGraph) -> frozenset[str]:
    """The parameters of a graph that Muon updates."""
    if _KEY not in graph.derived:
        graph.derived[_KEY] = _hidden(graph)
    found: frozenset[str] = graph.derived[_KEY]
    return found


def _hidden(graph: OperatorGraph) -> frozenset[str]:
    """Weights that only products and experts read, with more of such weights behind each of them or of its equals in
    other blocks, which the output layer does not have."""
    readers = {
        one.name: set(_readers(graph, one.name)) for one in graph.parameters if len(graph.types[one.name].shape) >= 2
    }
    layers = {at for own in readers.values() for at in own if _multiplies(graph, at)}
    followed = set[int]()
    for at in reversed(range(len(graph.operators))):
        after = {use for name in graph.operators[at].results if name for use in graph.consumers.get(name, ())}
        if not after.isdisjoint(layers) or not after.isdisjoint(followed):
            followed.add(at)
    multiplied = {name for name, own in readers.items() if name in graph.differentiable and own and own <= layers}
    hidden = {name for name in multiplied if readers[name] <= followed}
    return frozenset(hidden if hidden == multiplied else hidden | (multiplied & _equals(graph, hidden)))


def _equals(graph: OperatorGraph, names: Set[str]) -> set[str]:
    """The parameters that stand in a block where any of these stands in an equal one."""
    graph = _bare(graph)
    blocks = find_blocks(graph)
    every = [
        (name, (kind, place))
        for block, kind in enumerate(blocks.kinds)
        for place, name in enumerate(block_parameters(graph, blocks, block))
    ]
    known = {place for name, place in every if name in names}
    return {name for name, place in every if place in known}


def _bare(graph: OperatorGraph) -> OperatorGraph:
    """The graph without the identities of shared values (`planner.graph.blocks.share_values`), which hide blocks."""
    shared = {name: op.operands[0] for op in graph.operators if op.op == IDENTITY for name in op.results if name}
    return replace(graph, operators=tuple(op.reading(shared) for op in graph.operators if op.op != IDENTITY))


def _multiplies(graph: OperatorGraph, at: int) -> bool:
    """Whether an operator is a product with matrices, or experts; a convolution is another product."""
    operator = graph.operators[at]
    return rule_of(graph, operator).op_class in ("matmul", "experts") and "conv" not in operator.op


def _readers(graph: OperatorGraph, name: str) -> Iterator[int]:
    """The operators that read a parameter, or views of it."""
    waiting, seen = [name], {name}
    while waiting:
        for at in graph.consumers.get(waiting.pop(), ()):
            operator = graph.operators[at]
            if rule_of(graph, operator).op_class not in _VIEWS:
                yield at
                continue
            for result in operator.results:
                if result is not None and result not in seen:
                    seen.add(result)
                    waiting.append(result)
