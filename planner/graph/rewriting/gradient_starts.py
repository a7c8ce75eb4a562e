"""Where a gradient starts to flow in a model whose first weights are frozen: at the input of its blocks.

    tokens ─> embedding (frozen) ─> start ─┬─> block 0 ─> block 1 ─> ...     adapters (LoRA) in every block
                                           `── requires a gradient from here on

The result of a frozen embedding needs no gradient, so the first of many equal blocks would differ from the others, and
no pipeline could divide the rest of them evenly. Therefore the gradient of its input is computed as in the others, and
nothing reads it, as with `enable_input_require_grads` of transformers; Megatron's linear layers always compute it.
"""

from dataclasses import replace

from planner.graph.blocks import find_run, operand_sources
from planner.graph.operator_graph import STARTING, Operator, OperatorGraph, ValueRef

_FEWEST = 3
"""From this number of blocks on the first costs little beside the others."""


def with_gradient_starts(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with gradients from the first of its equal blocks on, where they flow into the second."""
    if all(parameter.trainable for parameter in graph.parameters):
        return graph
    run = find_run(graph)
    if run.count < _FEWEST:
        return graph
    second, third = run.start + run.period, run.start + 2 * run.period
    entering = operand_sources(graph, run.start, second, run.start)
    following = operand_sources(graph, second, third, run.start)
    operands = [name for op in graph.operators[run.start : second] for name in op.operands]
    handed = [name for op in graph.operators[second:third] for name in op.operands]
    starting = {
        name
        for name, given, (here, _), (there, _) in zip(operands, handed, entering, following, strict=True)
        if (here, there) == ("outside", "before")
        and given in graph.differentiable
        and name not in graph.differentiable
        and graph.types[name].has_gradient
    }
    return _started(graph, sorted(starting), run.start) if starting else graph


def without_gradient_starts(graph: OperatorGraph) -> OperatorGraph:
    """`graph` for a model of which nothing is trained."""
    names = {op.name: op.operands[0] for op in graph.operators if op.op == STARTING}
    if not names:
        return graph
    return replace(
        graph,
        operators=tuple(op.reading(names) for op in graph.operators if op.op != STARTING),
        types={name: tensor for name, tensor in graph.types.items() if name not in names},
    )


def _started(graph: OperatorGraph, starting: list[str], at: int) -> OperatorGraph:
    """The graph with an operator for each of these values before the block that begins at `at`; earlier operators read
    the values themselves."""
    names = {name: f"{name} with gradient" for name in starting}
    starts = tuple(
        Operator(
            name=made,
            op=STARTING,
            arguments=(ValueRef(name),),
            results=(made,),
            module=graph.operators[graph.producer[name]].module if name in graph.producer else "",
        )
        for name, made in names.items()
    )
    return replace(
        graph,
        operators=(*graph.operators[:at], *starts, *(op.reading(names) for op in graph.operators[at:])),
        types={**graph.types, **{made: graph.types[name] for name, made in names.items()}},
    )
