"""Tensors that autograd keeps alive between forward and backward pass, each counted once.

An operator keeps operands for the gradients of other operands. The operand is the very tensor that its producer made,
unless a redistribution is between them: then it is a separate copy:

    norm ──> identity ──> q, k, v        all three keep their operand: one tensor, kept with the identity
                     └──(all-gather)──> gate    keeps a copy in another layout: one more, kept with the edge

Values that are the same in every step (masks, rotary tables) and parameters exist anyway and cost nothing here. A
parameter that is gathered for a use is gathered again if the backward pass reads it.

A block is recomputed only until everything that its backward pass needs exists (torch's checkpoint stops early). So the
operators after the last one that keeps something are left out. If that one keeps nothing but operands, it is not
computed again either. Other software recomputes the whole block (`Software.whole_blocks`).

    ... ─> silu · up ──(moved)──> down projection ─> residual sum        kept last: the operand of the projection
    └────── recomputed ─────────┘└────────── left out ──────────┘
"""

from collections.abc import Mapping, Sequence
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
    """What autograd keeps for backward passes.

    Attributes:
        saved: for each operator the positions of the activations among its operands that it keeps.
        weights: the same for weights.
        kept: values kept in the layout in which they are made: by their own operator, or as the shared value of several
            uses. If the graph does not train: values that outlive an operator which does not read them, until their
            last use.
        piecewise: operators of a loss that is computed a piece at a time, beginning with the projection to logits.
            Their results never exist as a whole.
        overwritten: operators of a loss, after the projection, whose results and gradients overwrite the probabilities
            that the cross entropy keeps.
        trains: whether the graph is trained; else nothing is kept for a backward pass.
        shares: the share of their bytes for values that are not kept as they are (`planner.pricing.kept_shares`).
        copies: for matrix products, the share that they keep of the operands moved for them.
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
        """The share of a value's bytes that is kept."""
        return self.shares.get(name, 1.0)

    def copied(self, at: int) -> float:
        """The share that an operator keeps of the bytes moved for it."""
        return self.copies.get(at, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How much of a block is recomputed, by position in the block: the operands of the first `moves` operators are
    moved again, the first `works` operators are computed again."""

    moves: int
    works: int

    def runs(self, place: int, joined: Bytes) -> bool:
        """Whether an operator is computed again. One that joins `joined` bytes to its operand, and keeps them for its
        backward pass, is computed again if its operands are moved again."""
        return place < (self.moves if joined else self.works)


def liveness(graph: OperatorGraph, software: Software = PYTORCH) -> Liveness:
    """What autograd keeps of a graph whose shared values have identities, in some training software. It does not depend
    on the batch.

    `Software.fused`: results of an elementwise operator whose operands are kept anyway are recomputed in the backward
    pass. `Software.loss`: how much of the logits is in memory. `Software.keeps_fp8`, `Software.copies_inputs`, and
    norms in `Software.remakes`: values that are not kept as they are.
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
    """Values that are alive while an operator runs that neither makes nor reads them."""
    found = set()
    for at, op in enumerate(graph.operators):
        for name in op.results:
            uses = set(graph.consumers.get(name or "", ()))
            if name is not None and name in graph.data_dependent and uses and len(uses) < max(uses) - at:
                found.add(name)
    return frozenset(found)


def replay(graph: OperatorGraph, operators: Sequence[int], whole: bool = False) -> Replay:
    """How much of a block of these operators is recomputed; all of it if `whole`."""
    if whole:
        return Replay(moves=len(operators), works=len(operators))
    for place, at in reversed([*enumerate(operators)]):
        op = graph.operators[at]
        rule = rule_of(graph, op)
        results = [name for name in op.results if name is not None]
        makes = any(results[index] in graph.differentiable for index in rule.saved_results)
        makes = makes or (bool(rule.saved_extra) and any(graph.graded(op)))
        if makes or _needed_operands(graph, op, rule):
            return Replay(moves=place + 1, works=place + int(makes))
    return Replay(moves=0, works=0)


def replays(graph: OperatorGraph, blocks: Blocks, whole: bool = False) -> tuple[Replay, ...]:
    """How much of a block of each kind is recomputed; all of it if `whole`."""
    firsts = tuple(blocks.operators(block) for block in blocks.firsts)
    key = ("replays", firsts, whole)
    if key not in graph.derived:
        graph.derived[key] = tuple(replay(graph, first, whole) for first in firsts)
    return cast("tuple[Replay, ...]", graph.derived[key])


def _loss_operators(graph: OperatorGraph) -> frozenset[int]:
    """The cross entropies and the operators that make their logits, back to the projection."""
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
    """The saved operands, without those that an elementwise operator makes for another one from operands that it keeps
    itself."""
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
    graded = frozenset(graph.graded_places(op))
    return frozenset(index for index, needed_by in rule.saves if graded.intersection(needed_by))


def _is_activation(graph: OperatorGraph, name: str) -> bool:
    return name in graph.producer and name in graph.data_dependent
