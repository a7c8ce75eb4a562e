"""How far attention can be split: by a ring, by heads (Ulysses), and by heads over tensor-parallel devices."""

import math

from planner.faults import Fault
from planner.nearest import divisors, multiples, nearest_words
from planner.sharding.rule import FactorKind, Rule


def heads_of(rule: Rule) -> int:
    """The number of query heads."""
    return _extent(rule, "heads")


def key_heads_of(rule: Rule) -> int:
    """The number of key heads; several query heads may share one."""
    return _extent(rule, "key_heads")


def length_of(rule: Rule) -> int:
    """The number of query positions."""
    return _extent(rule, "queries")


def attention_fault(rule: Rule, ring: int, heads: int, zigzag: bool, slices: int = 1) -> Fault | None:
    """Why attention cannot be split by a ring of `ring` devices, with `heads` devices by heads inside of it, if a
    sequence is taken in `slices`; None if it can."""
    length, count = length_of(rule) // slices, heads_of(rule)
    turns = zigzag and rule.causal and ring > 1
    step = math.lcm(2 * ring if turns else ring, ring * heads)
    if ring > 1 and not any(factor.kind is FactorKind.RING for factor in rule.factors):
        return Fault(
            reason="cannot be split by a ring, which takes only masks of a known kind (causal, window, prefix,"
            " documents) and drops nothing",
            hint="set context_by to heads",
        )
    if length % step:
        parts = [f"2 x {ring} chunks of a ring in zigzag order"] if turns else [f"a ring of {ring}"] if ring > 1 else []
        parts += [f"{heads} devices by heads"] if heads > 1 else []
        whole = f" (a slice of {length * slices})" if slices > 1 else ""
        near = nearest_words(length * slices, multiples(length * slices, step * slices))
        return Fault(
            reason=f"{' and '.join(parts)} do not divide a sequence of {length}{whole}", hint=f"of its length {near}"
        )
    if count % heads:
        return Fault(
            reason=f"{heads} devices by heads do not divide its {count} heads",
            hint=nearest_words(heads, divisors(count)),
        )
    return None


def _extent(rule: Rule, wanted: str) -> int:
    return math.prod(rule.factors[f].extent for role, factors in rule.roles if role == wanted for f in factors)
