"""What a selectively recomputed block keeps, in the words of engines, and the operators that those words mean.

    but = mlp       norm ─> q, k, v ─> rope ─> attention ─> o ─> + ─> norm ─> gate, up ─> silu · ─> down
                     kept     kept              kept       kept kept   kept  └────── done again ──────┘

Outside of `but` the block keeps what autograd would keep: products, attention and norms keep their results,
elementwise operators (rotations, sums, copies) only if a backward pass in the block reads them. Other results are
recomputed, which takes next to no time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout.parts import parts_of
from planner.plan.layout.roles import call_word
from planner.pricing.keeping import keeping_fault
from planner.pricing.liveness import liveness
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a selectively recomputed block keeps: results of the calls `calls` (`planner.plan.layout.roles.call_word`),
    or results of all calls except those in `but`: of classes (`hardware_profiles.OP_CLASSES`), of parts of a block as
    Megatron-LM names them (`planner.plan.layout.parts.PARTS`), and `EVERY_SECOND_PRODUCT`. One of the two is empty."""

    calls: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


NOTHING_KEPT = Kept()
EVERY_SECOND_PRODUCT = "every second matmul"
"""The second, fourth, ... matrix product of a block, which torchtitan's selective policy recomputes."""
_LIKE = {"copy": "elementwise"}  # classes that have no word of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """An operator of a block in the words of `Kept`: its class and parts, its call, and whether its result is kept if
    nothing excludes it: not where it is elementwise and no backward pass in the block reads its results."""

    names: frozenset[str]
    call: str
    needed: bool


def block_words(graph: OperatorGraph, operators: Sequence[int]) -> dict[int, Words]:
    """The operators of a block whose results can be kept, by their places in it."""
    rules = [rule_of(graph, graph.operators[at]) for at in operators]
    sparse = any(rule.op_class == "experts" for rule in rules)
    read = _read_backward(graph, operators)
    products = [place for place, rule in enumerate(rules) if rule.op_class == "matmul"]
    found = {}
    for place, (at, rule) in enumerate(zip(operators, rules, strict=True)):
        if keeping_fault(rule) is None:
            op, op_class = graph.operators[at], _LIKE.get(rule.op_class, rule.op_class)
            second = [EVERY_SECOND_PRODUCT] if place in products[1::2] else []
            found[place] = Words(
                names=frozenset((op_class, *parts_of(op.name, sparse), *second)),
                call=call_word(op.name, rule.op_class),
                needed=op_class != "elementwise" or not read.isdisjoint(op.results),
            )
    return found


def kept_places(words: dict[int, Words], kept: Kept) -> list[int]:
    """Places in a block of the operators whose results are kept."""
    if kept.but:
        return [place for place, word in words.items() if word.needed and word.names.isdisjoint(kept.but)]
    return [place for place, word in words.items() if word.call in kept.calls]


def replayed_places(graph: OperatorGraph, operators: Sequence[int], kept: frozenset[int]) -> frozenset[int]:
    """Places in a block of the operators that software which recomputes modules (`Software.modules`) runs again, if it
    keeps the results of those at `kept`: operators whose results a backward pass needs, operators that feed them from
    kept values, and operators that read only their results. An operator whose results cannot be kept goes with those
    that feed it."""
    key = ("replayed", operators[0], len(operators), kept)
    if key not in graph.derived:
        graph.derived[key] = frozenset(_replayed(graph, operators, kept))
    return cast("frozenset[int]", graph.derived[key])


def _replayed(graph: OperatorGraph, operators: Sequence[int], kept: frozenset[int]) -> set[int]:
    words, places = block_words(graph, operators), {at: place for place, at in enumerate(operators)}
    made_by = [
        {places[graph.producer[name]] for name in graph.operators[at].operands if graph.producer.get(name) in places}
        for at in operators
    ]
    found = {place for place, word in words.items() if word.needed and place not in kept}
    for place, at in enumerate(operators):  # operators that read only their results, or whose results cannot be kept
        alone = bool(made_by[place]) and made_by[place] <= found
        view = _is_view(rule_of(graph, graph.operators[at]))
        if place not in kept and (alone or (place not in words and not view and made_by[place] & found)):
            found.add(place)
    for place in reversed(range(len(operators))):  # operators that feed them
        if place in found:
            found |= {before for before in made_by[place] if before not in kept and not _needed(words, before)}
    return found


def _needed(words: dict[int, Words], place: int) -> bool:
    return place in words and words[place].needed


def _read_backward(graph: OperatorGraph, operators: Sequence[int]) -> set[str]:
    """Values that operators of a block keep for their backward passes, by the names that views are made of."""
    saved, found = liveness(graph).saved, set[str]()
    for at in operators:
        for index in saved[at]:
            name = graph.operators[at].operands[index]
            while (maker := graph.producer.get(name)) is not None and _is_view(rule_of(graph, graph.operators[maker])):
                name = graph.operators[maker].operands[0]
            found.add(name)
    return found


def _is_view(rule: Rule) -> bool:
    return rule.op_class == "view" or rule.local_form == "reshape"
