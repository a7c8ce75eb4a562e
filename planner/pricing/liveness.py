"""What autograd keeps alive between forward and backward, counted once.

An operator keeps operands for the gradients of other operands. The operand is the very tensor that its producer made,
unless a redistribution lies between them, in which case it is a copy of its own:

    norm ──> identity ──> q, k, v        all three keep their operand: one tensor, kept with the identity
                     └──(all-gather)──> gate    keeps a copy in another layout: one more, kept with the edge

Values that are the same in every step (masks, rotary tables) and parameters exist once anyway and cost nothing here; a
parameter that is gathered for a use is gathered again where the backward pass reads it.

A block that is recomputed is computed again only until all that its backward pass needs is there (torch's checkpoint
stops early): what comes after the last operator that keeps something is left out, and so is that operator's own work
where it keeps nothing but operands. Other software runs the whole block again (`Software.whole_blocks`).

    ... ─> silu · up ──(moved)──> down projection ─> residual sum        kept last: the operand of the projection
    └────── done again ─────────┘└────────── left out ──────────┘
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from hardware_profiles import PYTORCH, Bytes, Software
from planner.graph.blocks import IDENTITY, Blocks
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.pricing.kept_shares import copied_shares, keeps_heads_once, kept_by, kept_shares
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """For each operator the positions of the operands that autograd keeps for its backward pass, activations and
    weights apart, and the values that are kept in the layout in which they are made: by their own operator, or as the
    shared value of several uses. `piecewise` has the operators of a loss that is computed a piece at a time, the
    projection to logits first: what they make never stands in memory as a whole. `overwritten` has the operators of a
    loss, after the projection, whose results and gradients stand where the cross entropy keeps its probabilities.
    Of a graph that never `trains` nothing is kept for a backward pass: `kept` are the values that outlive an operator
    which does not read them, each until its last use.
    `shares` are of values that are kept otherwise than as they are (`planner.pricing.kept_shares`), of their bytes;
    the `products` among operators keep the share `copies` of what is moved for them.
    """

    saved: tuple[frozenset[int], ...]
    weights: tuple[frozenset[int], ...]
    kept: frozenset[str]
    piecewise: frozenset[int] = frozenset()
    overwritten: frozenset[int] = frozenset()
    trains: bool = True
    shares: Mapping[str, float] = field(default_factory=dict)
    copies: Mapping[int, float] = field(default_factory=dict)

    def share(self, name: str) -> float:
        """Of the bytes of a value those that are kept of it."""
        return self.shares.get(name, 1.0)

    def copied(self, at: int) -> float:
        """Of the bytes of what is moved for an operator those that it keeps."""
        return self.copies.get(at, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How much of a block is recomputed, by position in the block: `moves` operators get their operands once more,
    the first `works` of them are computed once more."""

    moves: int
    works: int

    def runs(self, place: int, joined: Bytes) -> bool:
        """Whether an operator is computed once more: one that joins so many bytes to its operand, and keeps them
        for its backward pass, is where it gets its operands."""
        return place < (self.moves if joined else self.works)


def liveness(graph: OperatorGraph, software: Software = PYTORCH) -> Liveness:
    """What autograd keeps of a graph whose shared values have identities, run by some software. It does not depend on
    the batch.

    `Software.fused`: what an elementwise operator makes of operands that are kept anyway is made again in the backward
    pass. `Software.loss`: what of logits stands in memory. `Software.keeps_fp8`, `Software.copies_inputs` and
    norms among `Software.remakes`: what is kept of values otherwise than as they are.
    """
    remakes = "normalisation" in software.remakes
    of_shares = software.keeps_fp8, remakes, software.copies_inputs, keeps_heads_once(software)
    key = ("liveness", software.fused, software.loss, *of_shares)
    if key not in graph.derived:
        graph.derived[key] = _liveness(graph, software)
    return cast("Liveness", graph.derived[key])


def _liveness(graph: OperatorGraph, software: Software) -> Liveness:
    fused, loss = software.fused, software.loss
    needed = tuple(_needed_operands(graph, op, rule_of(graph, op)) for op in graph.operators)
    saved = tuple(
        frozenset(index for index in positions if _is_activation(graph, op.operands[index]))
        for op, positions in zip(graph.operators, needed, strict=True)
    )
    weights = tuple(
        frozenset(index for index in positions if op.operands[index] in graph.parameter_names)
        for op, positions in zip(graph.operators, needed, strict=True)
    )
    if fused:
        saved = _without_remade(graph, saved)
    kept: set[str] = set()
    shared: set[str] = set()
    for op, positions in zip(graph.operators, saved, strict=True):
        results = [name for name in op.results if name is not None]
        if any(name in graph.differentiable for name in results):
            kept.update(results[index] for index in rule_of(graph, op).saved_results)
        if op.op == IDENTITY:
            shared.update(results)
        kept.update(op.operands[index] for index in positions if op.operands[index] in shared)
    of_loss = _loss_operators(graph) if loss != "whole" else frozenset()
    after = frozenset(at for at in of_loss if rule_of(graph, graph.operators[at]).op_class != "matmul")
    if not graph.trains:
        kept = set(passing(graph)) - {name for at in of_loss for name in graph.operators[at].results}
    return Liveness(
        saved=saved,
        weights=weights,
        kept=frozenset(kept),
        piecewise=of_loss if loss == "pieces" else frozenset(),
        overwritten=after if loss == "in place" else frozenset(),
        trains=graph.trains,
        shares=kept_shares(graph, kept_by(graph, saved), software),
        copies=copied_shares(graph, software),
    )


def passing(graph: OperatorGraph) -> frozenset[str]:
    """Values that are there while an operator runs which neither makes nor reads them."""
    found = set()
    for at, op in enumerate(graph.operators):
        for name in op.results:
            uses = set(graph.consumers.get(name or "", ()))
            if name is not None and name in graph.data_dependent and uses and len(uses) < max(uses) - at:
                found.add(name)
    return frozenset(found)


def replay(graph: OperatorGraph, start: int, stop: int, whole: bool = False) -> Replay:
    """What the recomputation of the block of operators start ... stop - 1 does again; all of it if `whole`."""
    if whole:
        return Replay(moves=stop - start, works=stop - start)
    for at in reversed(range(start, stop)):
        op = graph.operators[at]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        makes = any(results[index] in graph.differentiable for index in rule.saved_results)
        makes = makes or (bool(rule.saved_extra) and any(name in graph.differentiable for name in op.operands))
        if makes or _needed_operands(graph, op, rule):
            return Replay(moves=at - start + 1, works=at - start + int(makes))
    return Replay(moves=0, works=0)


def replays(graph: OperatorGraph, blocks: Blocks, whole: bool = False) -> tuple[Replay, ...]:
    """What the recomputation of a block of each kind does again; all of it if `whole`."""
    firsts = tuple(blocks.operators(block) for block in blocks.firsts)
    key = ("replays", firsts, whole)
    if key not in graph.derived:
        graph.derived[key] = tuple(replay(graph, first.start, first.stop, whole) for first in firsts)
    return cast("tuple[Replay, ...]", graph.derived[key])


def _loss_operators(graph: OperatorGraph) -> frozenset[int]:
    """The cross entropies and what makes their logits, back to the projection."""
    classes = [rule_of(graph, op).op_class for op in graph.operators]
    found: set[int] = set()
    waiting = [at for at, classed in enumerate(classes) if classed == "cross_entropy"]
    while waiting:
        at = waiting.pop()
        found.add(at)
        makers = (graph.producer[n] for n in graph.operators[at].operands if n in graph.producer)
        waiting += [] if classes[at] == "matmul" else [maker for maker in makers if maker not in found]
    return frozenset(found)


def _without_remade(graph: OperatorGraph, saved: tuple[frozenset[int], ...]) -> tuple[frozenset[int], ...]:
    """Saved operands less those that an elementwise operator makes for another one out of what it keeps itself."""
    elementwise = [rule_of(graph, op).op_class == "elementwise" for op in graph.operators]

    def remade(name: str) -> bool:
        at = graph.producer[name]
        made_of = {i for i, n in enumerate(graph.operators[at].operands) if n in graph.data_dependent}
        return elementwise[at] and made_of == saved[at] and not rule_of(graph, graph.operators[at]).saved_results

    return tuple(
        frozenset(i for i in positions if not (elementwise[at] and remade(op.operands[i])))
        for at, (op, positions) in enumerate(zip(graph.operators, saved, strict=True))
    )


def _needed_operands(graph: OperatorGraph, op: Operator, rule: Rule) -> frozenset[int]:
    graded = {index for index, name in enumerate(op.operands) if name in graph.differentiable}
    return frozenset(index for index, needed_by in rule.saves if graded.intersection(needed_by))


def _is_activation(graph: OperatorGraph, name: str) -> bool:
    return name in graph.producer and name in graph.data_dependent
