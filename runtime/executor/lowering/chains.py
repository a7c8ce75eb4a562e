"""Which operators of a block become one function that `torch.compile` fuses: chains of elementwise operators.

    q  ─ view ─ mul ─ add ─┐                q, k, v are products, and no part of a chain. What lies between them and
    k  ─ view ─ mul ─ add ─┼─▶ attention    attention is put aside until that reads it. Then both `mul` and both `add`
    v  ─ view ─────────────┘                are one chain; the view of v is no work, and stays outside.

One pass over the instructions. Those that can be fused are put aside; one that cannot be, and reads anything that was
put aside, ends it, and so does an operand that is moved between two of them, as a collective lies there. What was put
aside is taken apart into what hangs together; a part in which fewer than two operators work on elements saves no trip
through memory and stays where it was, operator by operator. The others are one call, in the place of their first
reader. Nothing that runs earlier reads of it, so that the order is right.

Whether an operator can be fused is said by its rule: the class of its cost, and whether it sends anything inside.
Left out are those around which more goes on than their call (`special`): results that are kept, weights that are
gathered, deferred gradients, numbers that are drawn; and what `torch.compile` cannot look into.

Not good for: what crosses the end of a block, as programs are shared by equal blocks; and operators with a Python
function of ours in their place, but for those in `TRACED`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import STARTING
from planner.graph.trace import resolve
from planner.plan.binding.bind import BoundPlan
from planner.sharding.rule import Rule
from runtime.executor.instruction import Instruction
from runtime.executor.lowering.calls import shaped, special, traced_form

WORKING = frozenset(("elementwise", "normalisation", "copy"))
"""Classes of operators that read and write elements, and can be fused."""
FUSED = WORKING | {"view"}
FEWEST = 2
"""Operators that work on elements, of which a chain has so many at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Instructions that run together, by their places among those of the program, in order: one, or a chain. `last`
    are the values that nothing after it reads."""

    places: tuple[int, ...]
    last: tuple[str, ...]

    @property
    def fused(self) -> bool:
        """Whether it is a chain."""
        return len(self.places) > 1


def one_by_one(instructions: Sequence[Instruction]) -> tuple[Unit, ...]:
    """Every instruction by itself."""
    return tuple(Unit(places=(place,), last=instruction.last) for place, instruction in enumerate(instructions))


def in_chains(
    bound: BoundPlan, instructions: Sequence[Instruction], *, recomputed: bool, border: int | None
) -> tuple[Unit, ...]:
    """Instructions with their chains. None goes across the operator `border` of the graph: a recomputation that ends
    there computes what the whole would."""
    chains: list[tuple[int, tuple[int, ...]]] = []  # the place before which each runs, and its instructions
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
    """One chain of all that hangs together and has enough work in it, or none."""
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
    """How many operators of PyTorch that work on elements one is run as."""
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
    """Each value ends with the last unit that reads or makes it, as units are not in the order of the graph."""
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
