"""Which operators of a block become one function that `torch.compile` fuses: chains of elementwise operators.

    q  ─ view ─ mul ─ add ─┐                q, k, v are products and not part of a chain. The operators between them and
    k  ─ view ─ mul ─ add ─┼─▶ attention    attention are set aside until attention reads them. Then both `mul` and both
    v  ─ view ─────────────┘                `add` are one chain; the view of v does no work, and stays outside.

One pass over the instructions. Operators that can be fused are set aside. The chain ends at an operator that cannot be
fused and reads a value that was set aside; it also ends where an operand is redistributed between two of them, because
a collective runs there. The operators set aside are divided into connected parts. A part with fewer than two
elementwise operators saves no memory traffic, and its operators run separately at their old places. Every other part
becomes one call, at the place of its first reader. Nothing that runs earlier reads its results, so the order is valid.

The rule of an operator says whether it can be fused: by the class of its cost, and whether it sends anything itself.
Operators that need more than their call (`special`) are left out: kept results, gathered weights, deferred gradients,
random numbers; and so are operators that `torch.compile` cannot trace.

Not good for: chains across the end of a block, because equal blocks share programs; and operators that run as a Python
function of ours, except those in `TRACED`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import STARTING
from planner.graph.torch_operators import resolve
from planner.plan.binding.bind import BoundPlan
from planner.sharding.rule import Rule
from runtime.executor.instruction import Instruction
from runtime.executor.lowering.calls import shaped, special, traced_form

WORKING = frozenset(("elementwise", "normalisation", "copy"))
"""Classes of elementwise operators, which can be fused."""
FUSED = WORKING | {"view"}
FEWEST = 2
"""The minimum number of elementwise operators in a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Instructions that run together, by their positions in the program, in order: a single one, or a chain. `last` are
    the values that nothing after it reads."""

    places: tuple[int, ...]
    last: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether it is a chain."""
        return len(self.places) > 1


def one_by_one(instructions: Sequence[Instruction]) -> tuple[Unit, ...]:
    """Every instruction as its own unit."""
    return tuple(Unit(places=(place,), last=instruction.last) for place, instruction in enumerate(instructions))


def in_chains(
    bound: BoundPlan, instructions: Sequence[Instruction], *, recomputed: bool, border: int | None
) -> tuple[Unit, ...]:
    """Instructions with their chains. No chain goes across the operator `border` of the graph, so that a recomputation
    that ends there computes the same as the whole program."""
    chains: list[tuple[int, tuple[int, ...]]] = []  # the position before which each runs, and its instructions
    aside: dict[int, Instruction] = {}
    made: set[str] = set()

    def end(before: int) -> None:
        chains.extend((before, part) for part in _kept(aside))
        aside.clear()
        made.clear()

    for place, instruction in enumerate(instructions):
        can = _can_be_fused(bound, instruction, recomputed=recomputed)
        meets = any(o.name in made and (o.transfer is not None or not can) for o in instruction.operands)
        if meets or instruction.index == border:
            end(place)
        if can:
            aside[place] = instruction
            made |= set(_made(instruction))
    end(len(instructions))
    return _with_ends(instructions, _ordered(len(instructions), chains))


def _can_be_fused(bound: BoundPlan, instruction: Instruction, *, recomputed: bool) -> bool:
    operator, rule = instruction.bound.operator, instruction.bound.rule
    if operator.rule is not None or rule.op_class not in FUSED or rule.inner or rule.outside is not None:
        return False
    if special(bound, instruction, recomputed=recomputed) or operator.op == STARTING:
        return False
    if operator.op == IDENTITY or shaped(instruction) is not None:
        return True
    if traced_form(instruction) is None:
        return False
    known = resolve(operator.op)
    assert isinstance(known, torch._ops.OpOverload), operator.op
    return not known._schema.is_mutable and torch.Tag.nondeterministic_seeded not in known.tags


def _kept(aside: dict[int, Instruction]) -> Iterable[tuple[int, ...]]:
    """A chain for each connected part with enough work in it."""
    parts: list[tuple[set[str], list[int]]] = []  # results, and instructions
    for place, instruction in aside.items():
        read = {operand.name for operand in instruction.operands}
        joined = [part for part in parts if part[0] & read]
        parts = [part for part in parts if not part[0] & read]
        names = set(_made(instruction)).union(*(part[0] for part in joined))
        parts.append((names, [*(at for part in joined for at in part[1]), place]))
    worth = [places for _, places in parts if sum(_works(aside[at].bound.rule) for at in places) >= FEWEST]
    return [tuple(sorted(at for places in worth for at in places))] if worth else []


def _works(rule: Rule) -> int:
    """As how many elementwise operators of PyTorch an operator runs."""
    if rule.composed:
        return sum(one.operators[0] for one in rule.composed)
    return int(rule.op_class in WORKING)


def _ordered(count: int, chains: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    before = dict(chains)
    assert len(before) == len(chains), "one chain ends at a place"
    fused = {place for _, places in chains for place in places}
    units: list[tuple[int, ...]] = []
    for place in range(count + 1):
        if place in before:
            units.append(before[place])
        if place < count and place not in fused:
            units.append((place,))
    return units


def _with_ends(instructions: Sequence[Instruction], units: Sequence[tuple[int, ...]]) -> tuple[Unit, ...]:
    """The units with their `last` values: each value ends with the last unit that reads or makes it, because units are
    not in the order of the graph."""
    ending = {name for instruction in instructions for name in instruction.last}
    used: dict[str, int] = {}
    for number, places in enumerate(units):
        for place in places:
            named = (*(o.name for o in instructions[place].operands), *_made(instructions[place]))
            used.update(dict.fromkeys(ending.intersection(named), number))
    ends: list[list[str]] = [[] for _ in units]
    for name, number in sorted(used.items()):
        ends[number].append(name)
    return tuple(Unit(places=places, last=tuple(last)) for places, last in zip(units, ends, strict=True))


def _made(instruction: Instruction) -> list[str]:
    return [promise[0] for promise in instruction.results if promise is not None]
