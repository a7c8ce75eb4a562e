"""How a mask changes the rule of attention.

    b (g r) q d, b g k d, b g k e, [b] [(g r)] [q] [k] -> b (g r) q e

A mask, boolean or of numbers, joins the scores before the softmax. So it is cut where the scores are cut, along the
batch and the heads, if it has these dims. If it has an extent of 1 instead, or no such dim, its gradient is a sum over
them, as for every operand that is broadcast: so a bias that all layers share gets its gradient. Kernels want numbers: a
boolean mask is kept together with a copy as numbers of the dtype of the queries. The mask is an addend: its gradient is
the gradient of the scores, which the backward pass computes anyway.
"""

from dataclasses import replace

from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Dims, Rule, Work
from planner.sharding.rules.spec import broadcast_dims

_QUERY, _KEY, _VALUE, _MASK = range(4)


def without_mask(call: Call, position: int, name: str) -> Call:
    """The call of attention without its mask."""
    return replace(
        call,
        arguments=tuple(None if at == position else value for at, value in enumerate(call.arguments)),
        keywords=tuple((key, value) for key, value in call.keywords if key != name),
    )


def dims_of_scores(rule: Rule) -> Dims:
    """Dims of queries x keys, of attention whose first operands are queries and keys."""
    return *rule.operands[_QUERY][:3], rule.operands[_KEY][2]


def dims_of_mask(rule: Rule, call: Call, mask: TensorType) -> Dims:
    """The dims of the scores that a mask has."""
    query, key = call.operands[_QUERY], call.operands[_KEY]
    return broadcast_dims(dims_of_scores(rule), (*query.shape[:3], key.shape[2]), mask.shape, call.op)


def masked(rule: Rule, call: Call, position: int, name: str) -> Rule:
    """`rule`, that of the call without its mask, with the mask as the last operand."""
    mask, query = call.tensor(position, name), call.operands[_QUERY]
    dims = dims_of_mask(rule, call, mask)
    everything = (_QUERY, _KEY, _VALUE, _MASK) if mask.floating else (_QUERY, _KEY, _VALUE)
    numbers = Work(coefficient=float(query.element_bytes), factors=tuple(f for indexed in dims for f in indexed))
    return replace(
        rule,
        operands=(*rule.operands, dims),
        addends=(_MASK,),
        saves=tuple((operand, everything) for operand in everything),
        saved_extra=rule.saved_extra if mask.floating else (*rule.saved_extra, numbers),
    )
