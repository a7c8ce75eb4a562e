"""What rules share of operators that keep their operands alone (`planner.graph.recomputed`)."""

from collections.abc import Sequence
from dataclasses import replace

from planner.sharding.rule import Rule, Work


def keeping_operands(rule: Rule, living: Sequence[tuple[float, str]]) -> Rule:
    """`rule` of an operator whose backward pass computes it once more, and then the gradients of all operands at once,
    at twice the forward work. `living`: bytes, and the factors of what has so many of them, that live while it runs."""
    every = tuple(range(len(rule.operands)))
    return replace(
        rule,
        gradient_work=2 / len(every),
        repeated_work=1.0,
        saves=tuple((operand, every) for operand in every),
        scratch=tuple(
            Work(coefficient=nbytes, factors=tuple(rule.index[name] for name in names.split() if name in rule.index))
            for nbytes, names in living
        ),
    )
