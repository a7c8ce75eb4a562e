"""What the rules of operators that keep only their operands share (`planner.graph.operators.recomputed`)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from planner.sharding.rule import Rule, Work

Living: TypeAlias = Sequence[tuple[float, str]]
"""Bytes for each point, and the factors that count the points."""


def keeping_operands(rule: Rule, living: Living, of_kernels: Living | None = None) -> Rule:
    """`rule` of an operator whose backward pass computes it once more, and then the gradients of all operands at once,
    at twice the forward work. `living` is the memory while it runs; `of_kernels` that of fused kernels, where it
    differs."""
    every = tuple(range(len(rule.operands)))

    def works(terms: Living) -> tuple[Work, ...]:
        factors = [tuple(rule.index[name] for name in names.split() if name in rule.index) for _, names in terms]
        return tuple(Work(coefficient=one, factors=own) for (one, _), own in zip(terms, factors, strict=True))

    return replace(
        rule,
        gradient_work=2 / len(every),
        repeated_work=1.0,
        saves=tuple((operand, every) for operand in every),
        scratch=works(living),
        kernel_scratch=None if of_kernels is None else works(of_kernels),
    )
