"""Weights with rows of zeros at their end, so that devices divide a number of rows that they would not divide.

    vocabulary 50257 over 4      lm_head  50257 x h  ->  50260 x h       logits of 3 classes that do not exist
    1365 hidden elements over 4  gate, up 1365 x h -> 1368 x h           down    h x 1365 -> h x 1368

A plan names weights and a number of which their rows become a multiple (`Update.padded`). The loop of these rows is
followed through the rules of the operators, and everything else that has this loop grows too: other weights with zeros,
and activations. The model computes the same as before, because added elements meet zeros wherever they are summed:

- a sum over a padded loop has a padded weight in it, whose zeros are multiplied with whatever is there;
- the cross entropy is told how many classes there are, and leaves out the others;
- gradients of added elements are set to zero, so that they stay zero.

Any other operator that looks at a padded loop as a whole (a norm, a softmax, a mean, dropout, whose masks depend on
the place of an element) is refused; the message names the weight. Padded weights take memory and matrix products of
their padded size, which are priced; checkpoints hold weights without the padding.

Heads are padded like any other loop: with zeros for queries, keys and values their results are zeros. 12 heads of 64
elements over 8 devices are 768 rows padded to a multiple of 8 * 64. The last devices may have nothing but zeros.

Source: the vocabulary as in Shoeybi et al. 2019 (Megatron-LM, `--make-vocab-size-divisible-by`).
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from planner.errors import RequestError, did_you_mean
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType
from planner.graph.random_ops import CHANCES
from planner.matching import matches
from planner.sharding.layout import PaddedShape
from planner.sharding.rescale import Growth, rescale_weights
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.sharding.rules.einsum import FEW

Padded = tuple[tuple[str, int], ...]
"""Patterns of weights, and the number of which their rows become a multiple; the first pattern that matches counts."""

CLASSES = "classes"
"""The keyword of a cross entropy that says how many of its classes there are."""
_LOSS = "aten.cross_entropy_loss.default"


def with_padding(graph: OperatorGraph, padded: Padded) -> OperatorGraph:
    """`graph` with the rows of the weights that match padded, and whatever has to grow with them.

    Raises RequestError for a pattern that no weight matches, and where an operator does not allow it.
    """
    grown = _grown_weights(graph, padded)
    if not grown:
        return graph
    try:
        larger = rescale_weights(graph, grown)
    except RequestError as error:
        raise RequestError(f"pad: {error}; pad other weights, or choose dims that divide") from error
    operators = tuple(_checked(graph, larger, op) for op in larger.operators)
    unpadded = (
        (name, dim, extent)
        for name, tensor in graph.types.items()
        for dim, extent in enumerate(tensor.shape)
        if larger.types[name].shape[dim] != extent
    )
    return replace(larger, operators=operators, unpadded=tuple(unpadded))


def with_padded_shards(graph: OperatorGraph) -> OperatorGraph:
    """`graph` with parameters whose shards are padded where devices do not divide them. Equal types become one object:
    prices and buckets of equal tensors are found by it."""
    types, known = dict[str, TensorType](), dict[TensorType, TensorType]()
    for name, tensor in graph.types.items():
        padded = replace(tensor, shape=PaddedShape(tensor.shape)) if name in graph.parameter_names else tensor
        types[name] = known.setdefault(padded, padded)
    return replace(graph, types=types)


def _grown_weights(graph: OperatorGraph, padded: Padded) -> Mapping[str, Growth]:
    """The weights whose rows do not divide, and by how much they grow."""
    found: dict[str, Growth] = {}
    names = [parameter.name for parameter in graph.parameters]
    for pattern, _ in padded:
        if not any(matches(name, pattern) for name in names):
            meant = did_you_mean(pattern, names)
            hint = f"; {meant}" if meant else ""
            raise RequestError(f"pad: no weight of the model matches '{pattern}'{hint}")
    for name in names:
        multiple = next((number for pattern, number in padded if matches(name, pattern)), 1)
        shape = graph.types[name].shape
        if shape and shape[0] % multiple:
            rows = -(-shape[0] // multiple) * multiple
            found[name] = Growth(scale=Fraction(rows, shape[0]))
    return found


def _checked(graph: OperatorGraph, larger: OperatorGraph, op: Operator) -> Operator:
    """An operator of the padded graph. Raises RequestError where added elements would change what it computes."""
    before, after = rule_of(graph, op), rule_of(larger, op)
    grown = {at for at, factor in enumerate(before.factors) if factor.extent != after.factors[at].extent}
    if not grown:
        return op
    summed = grown - {factor for dims in before.results for factors in dims for factor in factors}
    if op.op == _LOSS and summed == {before.index["v"]}:
        classes = before.factors[before.index["v"]].extent
        return replace(op, keywords=(*op.keywords, (CLASSES, classes)))
    if before.op_class == "attention" and FEW in before.index:
        summed -= {before.index[FEW]}  # added heads of keys are read by added heads of queries alone
    weighted = {factor for at, dims in _weights(graph, before, op) for factors in dims for factor in factors}
    if not summed <= weighted:
        raise RequestError(
            f"pad: operator '{op.name}' ({op.op}){op.at} looks at all of a dim that would be padded, and what is"
            " added would count; pad other weights, or choose dims that divide"
        )
    chance = CHANCES.get(op.op)
    if chance is not None and chance.of(op.arguments, dict(op.keywords)) > 0:
        raise RequestError(
            f"pad: operator '{op.name}'{op.at} drops elements by their place in the whole tensor, which padding"
            " changes; leave out dropout, or choose dims that divide"
        )
    return op


def _weights(graph: OperatorGraph, rule: Rule, op: Operator) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """The operands of an operator that are weights, whose added elements are zero, and the factors of their dims."""
    return [(n, dims) for n, dims in zip(op.operands, rule.operands, strict=True) if n in graph.parameter_names]
