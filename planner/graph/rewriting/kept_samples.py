"""Stochastic depth: a residual branch that is left out for some samples (Huang et al. 2016, arXiv 1603.09382), as
vision models write it:

    r = rand(b, 1, 1)    floor(r + keep)    x / keep * that         0 or 1 for each sample
    empty(b, 1, 1).bernoulli_(keep)         x / keep * that         the same, as timm and torchvision have it

and random choices, such as labels or words that diffusion models leave out (Ho and Salimans 2022, arXiv 2207.12598):

    rand(b) < p                             where(that, none, y)    true or false for each element

The random numbers must not depend on how samples are divided. So they are made by dropout of ones, which decides by the
place of an element under every plan:

    ones(b, 1, 1) ─ dropout(1 - keep) ─ not 0 ─> 0 or 1             kept with the probability `keep`, too
    ones(b) ─ dropout(p) ─ 0 ─> true or false                       below p where dropped

`bernoulli` may draw any shape, and so may `rand` where its numbers are compared. Every other call of `rand` is refused.
"""

from collections.abc import Callable
from dataclasses import replace

from planner.errors import ModelError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, TorchConstant, ValueRef

RAND, RAND_LIKE, BERNOULLI = "aten.rand.default", "aten.rand_like.default", "aten.bernoulli.p"
DRAWN = frozenset({RAND, RAND_LIKE, BERNOULLI})
_ADD, _FLOOR = "aten.add.Tensor", "aten.floor.default"
_OF_DROPPED = {
    "aten.lt.Scalar": "aten.eq.Scalar",
    "aten.le.Scalar": "aten.eq.Scalar",
    "aten.gt.Scalar": "aten.ne.Scalar",
    "aten.ge.Scalar": "aten.ne.Scalar",
}
"""How elements compare to 0 after dropout, for each way to compare random numbers to the probability of dropping."""


def with_kept_samples(graph: OperatorGraph, refused: Callable[[Operator], ModelError]) -> OperatorGraph:
    """`graph` without calls of `rand` and `bernoulli`. Raises the error of `refused` for any other use of them."""
    if not any(op.op in DRAWN for op in graph.operators):
        return graph
    types, left = dict(graph.types), set[int]()
    made: dict[int, tuple[Operator, ...]] = {}
    for at, op in enumerate(graph.operators):
        if op.op in (RAND, RAND_LIKE):
            places, dropped = _compared(graph, op) or _kept(graph, op)
            if dropped is None:
                raise refused(op)
            made[at], left = _dropping(types, op, graph.operators[places[-1]], dropped), left | set(places)
        elif op.op == BERNOULLI:
            keep = op.arguments[1] if len(op.arguments) > 1 else 0.5
            if not isinstance(keep, int | float) or not 0.0 < keep < 1.0:
                raise refused(op)
            made[at] = _dropping(types, op, op, 1.0 - keep)
    operators = [
        each
        for at, op in enumerate(graph.operators)
        for each in made.get(at, () if at in left else (op,))
    ]  # fmt: skip
    gone = {str(name) for at in left for name in graph.operators[at].results} | {
        str(graph.operators[at].results[0]) for at in made
    }
    read = {name for op in operators for name in (*op.operands, *(each or "" for each in op.results))}
    kept = {name: each for name, each in types.items() if name not in gone or name in read}
    return replace(graph, types=kept, operators=tuple(operators))


def _compared(graph: OperatorGraph, op: Operator) -> tuple[tuple[int, ...], float] | None:
    """The only operator behind a call of `rand`, which compares its numbers with a probability, and the probability."""
    result = str(op.results[0])
    (at, *more) = graph.consumers.get(result, (-1,))
    if more or at < 0 or graph.operators[at].op not in _OF_DROPPED:
        return None
    (_, bound) = graph.operators[at].arguments
    return ((at,), bound) if isinstance(bound, float) and 0.0 < bound < 1.0 else None


def _kept(graph: OperatorGraph, op: Operator) -> tuple[tuple[int, ...], float | None]:
    """The operators behind a call of `rand` that make 0 or 1 of it, and the probability of 0; None where none do."""
    result = str(op.results[0])
    (added, *more), shape = graph.consumers.get(result, (-1,)), graph.types[result].shape
    if more or added < 0 or any(extent != 1 for extent in shape[1:]):
        return (), None
    sum_ = graph.operators[added]
    terms = [term for term in sum_.arguments if term != ValueRef(result)]
    (floored, *more) = graph.consumers.get(str(sum_.results[0]), (-1,))
    if sum_.op != _ADD or sum_.keywords or len(terms) != 1 or more or graph.operators[floored].op != _FLOOR:
        return (), None
    (keep,) = terms
    return (added, floored), 1.0 - keep if isinstance(keep, float) and 0.0 < keep < 1.0 else None


def _dropping(types: dict[str, TensorType], op: Operator, last: Operator, dropped: float) -> tuple[Operator, ...]:
    """Operators that make the result of the operator `last`."""
    drawn, result = str(op.results[0]), str(last.results[0])
    whole = types[drawn]
    names = [f"{drawn} {what}" for what in ("whole", "dropped", "kept")]
    types |= dict.fromkeys(names[:2], whole)
    if op.op == BERNOULLI:
        ones = _called(op, "aten.ones_like.default", op.arguments[:1], names[0])
    else:  # of the same dtype, whatever tensor the call takes it from
        call = {RAND: "aten.ones.default", RAND_LIKE: "aten.ones_like.default"}[op.op]
        ones = replace(op, name=names[0], op=call, results=(names[0],))
    dropping = _called(op, "aten.dropout.default", (ValueRef(names[0]), dropped, True), names[1])
    if last.op in _OF_DROPPED:
        return ones, dropping, _called(op, _OF_DROPPED[last.op], (ValueRef(names[1]), 0), result)
    types[names[2]] = replace(whole, dtype="bool")
    return (
        ones,
        dropping,
        _called(op, "aten.ne.Scalar", (ValueRef(names[1]), 0), names[2]),
        _called(op, "aten.to.dtype", (ValueRef(names[2]), TorchConstant("dtype", whole.dtype)), result),
    )


def _called(op: Operator, call: str, arguments: tuple[Argument, ...], name: str) -> Operator:
    """A call in the place of an operator, named by its result."""
    return replace(op, name=name, op=call, arguments=arguments, keywords=(), results=(name,))
