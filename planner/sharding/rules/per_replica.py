"""The rule of an operator that every replica computes by itself: that of one replica, and a loop over the replicas.

    batch norm               n c h w, c, c -> n c h w, c                n joins samples: sums over its pieces
    of every replica         (r n) c h w, c, c -> (r n) c h w, r c      r is parallel: nothing is sent along it

So an axis that is given r has whole replicas, whose statistics no other device needs. The gradient of a tensor that all
replicas share, which lacks r, is partial, as everywhere. A further axis may take n, the samples of one
replica, once r is cut completely: then values are combined as the rule of one replica says.
"""

from dataclasses import replace

from planner.graph.call import Call, Typed
from planner.graph.operator_graph import TensorType
from planner.graph.per_replica import OWN, Places, of_one, own_keywords, replicas_in
from planner.sharding.rule import Dims, Factor, FactorKind, Rule, Work

REPLICA = "replica"
"""The name of the loop over replicas."""

FORM = "per_replica"
"""What an operator of replicas is on shards (`Rule.local_form`)."""


def call_of_one(call: Call) -> Call:
    """The call that one replica makes."""
    replicas = replicas_in(call.keywords)
    left = iter(replicas.operands)

    def inner(value: Typed) -> Typed:
        if isinstance(value, TensorType):
            return of_one(value, next(left), replicas.count)
        return tuple(map(inner, value)) if isinstance(value, tuple) else value

    arguments = tuple(map(inner, call.arguments))
    keywords = tuple((key, inner(value)) for key, value in own_keywords(call.keywords))
    results = tuple(of_one(t, at, replicas.count) for t, at in zip(call.results, replicas.results, strict=True))
    return Call(op=replicas.called, arguments=arguments, keywords=keywords, results=results)


def rule_of_replicas(call: Call, one: Rule) -> Rule:
    """The rule of the call of all replicas, from the rule of one; the factors of one keep their numbers."""
    replicas, loop = replicas_in(call.keywords), len(one.factors)
    factor = Factor(name=REPLICA, extent=replicas.count, kind=FactorKind.PARALLEL)

    def more(terms: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(replace(term, factors=(*term.factors, loop)) for term in terms)

    return replace(
        one,
        op=call.op,
        factors=(*one.factors, factor),
        operands=_with(one.operands, replicas.operands, loop),
        results=_with(one.results, replicas.results, loop),
        work=more(one.work),
        saved_extra=more(one.saved_extra),
        scratch=more(one.scratch),
        kernel_scratch=None if one.kernel_scratch is None else more(one.kernel_scratch),
        gradient_scratch=tuple((at, more((term,))[0]) for at, term in one.gradient_scratch),
        inner=tuple(replace(sent, factors=(*sent.factors, loop)) for sent in one.inner),
        inner_scratch=more(one.inner_scratch),
        local_form=FORM,
        one=one,
    )


def _with(tensors: tuple[Dims, ...], places: Places, loop: int) -> tuple[Dims, ...]:
    return tuple(_placed(dims, place, loop) for dims, place in zip(tensors, places, strict=True))


def _placed(dims: Dims, place: int | None, loop: int) -> Dims:
    if place is None:
        return dims
    if place == OWN:
        return ((loop,), *dims)
    return tuple((loop, *factors) if dim == place else factors for dim, factors in enumerate(dims))
