"""Overlapped expert dispatch and combine: which operators of a block run during the exchange of the experts' rows.

    x ─> router ─> depart ──────────────> compute ──────────> arrive ─> sum       rows set out, have come, results come
     └───────────────────> gate, up, silu ───────────> down ───────────┘          shared experts, or whatever is there
                              `there`                  `back`

Operators that neither make what the experts read nor read what they make are *beside* them. In a block with several
experts that exchange rows, an operator is beside one of them: the last ones before it, else the first ones behind it;
and no experts are beside others. A plan names the experts whose exchange is overlapped, by the operator in the first
block of its kind. It says how many of the operators beside them, in order, run during the dispatch to the experts; the
others run during the combine (`Training.expert_overlap`).
In the backward pass everything goes the other way round, and the gradients of the experts' own weights are computed
while the gradients of their rows are sent. So experts with nothing beside them overlap too. Over several axes, the
messages of the outermost axis, the slowest, are overlapped.

With interleaved micro-batches (`Training.interleave`) another micro-batch computes meanwhile, and no operator is moved.

Everything else follows, so that prices, audits and the runtime agree. Experts whose results a recomputed block keeps
have no overlap; in a recomputed block only operators that are computed again are beside them. Operators that run
together with a collective of tensor parallelism (`planner.plan.layout.overlapped_products`) stay with it.

Rajbhandari et al. 2022 (DeepSpeed-MoE, arXiv 2201.05596); DeepSeek-AI 2024 (arXiv 2412.19437, section 3.2.1).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.errors import PlanFileError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.layout.overlapped_products import Overlap, in_order
from planner.pricing.liveness import Replay, replay, replays
from planner.sharding.rule import FactorKind

OP_CLASS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOverlap:
    """Experts, by their operator, and the operators that run during the dispatch (`there`) and the combine (`back`)."""

    at: int
    there: tuple[int, ...] = ()
    back: tuple[int, ...] = ()

    @property
    def beside(self) -> tuple[int, ...]:
        """All operators that run during the exchange."""
        return (*self.there, *self.back)


def expert_overlaps_of(
    bound: BoundPlan, overlaps: Sequence[Overlap], operators: Iterable[int] | None = None
) -> tuple[ExpertOverlap, ...]:
    """The expert overlaps of a plan, all or those of some operators; `overlaps` are its overlaps of tensor parallelism.

    If all are asked for, raises PlanFileError for one that the plan names and cannot have.
    """
    named = dict(bound.plan.training.expert_overlap)
    if not named:
        return ()
    found, missing = list[ExpertOverlap](), set(named)
    for at, beside in possible_expert_overlaps(bound, overlaps, operators):
        name = expert_overlap_name(at, bound)
        if name in named and named[name] <= len(beside):
            missing.discard(name)
            found.append(divided(at, beside, named[name], overlaps))
    if missing and operators is None:
        name = min(missing)
        raise PlanFileError(
            f"training.expert_overlap: '{name}' has no experts whose exchange runs under other work, or fewer than"
            f" {named[name]} operators beside them; leave it out, or write 0"
        )
    return tuple(found)


def divided(at: int, beside: Sequence[int], count: int, overlaps: Iterable[Overlap]) -> ExpertOverlap:
    """The overlap of experts with the first `count` operators beside them during the dispatch, and those that run in
    one call with the last of these."""
    with_others = {product for one in overlaps for product in one.early}
    while count < len(beside) and beside[count] in with_others:
        count += 1
    return ExpertOverlap(at=at, there=tuple(beside[:count]), back=tuple(beside[count:]))


def replayed(
    bound: BoundPlan, experts: Sequence[ExpertOverlap], overlaps: Iterable[Overlap]
) -> Mapping[int, tuple[int, Replay]]:
    """What recomputed blocks compute again because operators run during their exchanges: for some operators, a place
    and how much is computed again, in place of those of the block (`planner.pricing.liveness`). Operators beside
    experts are, because the end of their experts, which keeps something, comes after them. Of those behind the last
    experts, as many are as keep something, or come before others of them that do."""
    found, blocks = dict[int, tuple[int, Replay]](), dict[int, list[ExpertOverlap]]()
    runs_with = {product: one.at for one in overlaps for product in one.early} if experts else {}
    for one in experts:
        block = bound.blocks.block_of(one.at)
        if block is not None and one.beside and bound.recompute_of(block) is not None:
            blocks.setdefault(block, []).append(one)
    for block, own in blocks.items():
        last, beside = max(one.at for one in own), {at for one in own for at in one.beside}
        behind = [at for at in bound.blocks.operators(block) if runs_with.get(at, at) > last and at not in beside]
        rest = replay(bound.graph, behind)
        found.update({at: (place, rest) for place, at in enumerate(behind)})
        found.update(dict.fromkeys(beside, (0, Replay(moves=1, works=1))))
    return found


def replay_of(
    bound: BoundPlan, at: int, block: int, again: Sequence[Replay], changed: Mapping[int, tuple[int, Replay]]
) -> tuple[int, Replay]:
    """The place of an operator among those of its recomputed block, and how much of these is computed again: as
    `changed` (see `replayed`), else as for the kind of its block (`planner.pricing.liveness.replays`)."""
    found = changed.get(at)
    return (at - bound.blocks.borders[block], again[bound.blocks.kinds[block]]) if found is None else found


def possible_expert_overlaps(
    bound: BoundPlan, overlaps: Sequence[Overlap], operators: Iterable[int] | None = None
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """All overlaps that a plan could have, or those of some operators: experts, and the operators beside them in
    order."""
    behind = {one.at: one.early for one in overlaps if one.early}
    for at in range(len(bound.operators)) if operators is None else operators:
        operator = bound.operators[at]
        if operator.rule.op_class == OP_CLASS and exchanges(operator, bound.plan.mesh.sizes) and not bound.is_kept(at):
            yield at, tuple(_beside(bound, at, behind))


def expert_overlap_name(at: int, bound: BoundPlan) -> str:
    """The name of the overlap of these experts in a plan."""
    return bound.graph.operators[bound.blocks.template(at)].name


def exchanges(operator: BoundOperator, sizes: Sequence[int]) -> bool:
    """Whether an operator has experts, and sends rows to them."""
    rule, strategy = operator.rule, operator.strategy
    return rule.op_class == OP_CLASS and any(
        choice is not None and rule.factors[choice].kind is FactorKind.EXCHANGE and size > 1
        for choice, size in zip(strategy, sizes, strict=True)
    )


def in_parts_order(operators: Sequence[int], overlaps: Iterable[ExpertOverlap]) -> tuple[int, ...]:
    """Operators in the order in which they run: those beside experts right behind the dispatch of the experts."""
    following = {one.at: one.beside for one in overlaps}
    if not following:
        return tuple(operators)
    moved = {at for beside in following.values() for at in beside}
    return tuple(one for at in operators if at not in moved for one in (at, *following.get(at, ())))


def _beside(bound: BoundPlan, at: int, behind: Mapping[int, Sequence[int]]) -> list[int]:
    """Operators of their block that can run during the exchange of these experts, in order."""
    block = bound.blocks.block_of(at)
    if block is None or bound.plan.training.interleave > 1:  # other micro-batches compute meanwhile
        return []
    inside, stop = bound.blocks.operators(block), bound.blocks.borders[block + 1]
    if bound.recompute_of(block) is not None:  # only operators that are computed again
        stop = inside.start + replays(bound.graph, bound.blocks)[bound.blocks.kinds[block]].moves
    at_once = {one: identity for identity in inside for one in behind.get(identity, ())}
    order = in_order(inside, {key: behind[key] for key in inside if key in behind})
    sizes = bound.plan.mesh.sizes
    tied = {one: tied_to(bound.graph, one, inside) for one in inside if exchanges(bound.operators[one], sizes)}

    def owner(one: int) -> int | None:
        """The experts that an operator is beside."""
        free = [experts for experts in tied if one not in tied[experts]]
        return max((experts for experts in free if experts < one), default=min(free, default=None))

    found = {one for one in order if one < stop and one not in tied and owner(at_once.get(one, one)) == at}
    return _that_can_move(bound.graph, at, order, found)


def _that_can_move(graph: OperatorGraph, at: int, order: Sequence[int], wanted: set[int]) -> list[int]:
    """Those of the `wanted` operators of a block that can run right behind operator `at`: whatever they read is made
    before, and whatever reads them runs after."""
    place, found = {one: number for number, one in enumerate(order)}, set(wanted)

    def moves(one: int) -> bool:
        op = graph.operators[one]
        if place[one] > place[at]:
            makers = (graph.producer.get(name) for name in op.operands)
            return all(maker in found or place.get(maker, -1) < place[at] for maker in makers if maker is not None)
        uses = (use for name in op.results for use in graph.consumers.get(name or "", ()))
        return all(use in found or place.get(use, len(order)) > place[at] for use in uses)

    while stuck := {one for one in found if not moves(one)}:
        found -= stuck
    return [one for one in order if one in found]


def tied_to(graph: OperatorGraph, at: int, inside: range) -> set[int]:
    """Operators `inside` of a block that make what an operator reads, or read what it makes, directly or not."""
    return _before(graph, at, inside) | _after(graph, at, inside)


def _before(graph: OperatorGraph, at: int, inside: range) -> set[int]:
    """Operators `inside` that make what an operator reads, directly or not."""
    found, waiting = set[int](), [at]
    while waiting:
        for name in graph.operators[waiting.pop()].operands:
            maker = graph.producer.get(name)
            if maker is not None and maker in inside and maker not in found:
                found.add(maker)
                waiting.append(maker)
    return found


def _after(graph: OperatorGraph, at: int, inside: range) -> set[int]:
    """Operators `inside` that read what an operator makes, directly or not."""
    found, waiting = set[int](), [at]
    while waiting:
        for name in graph.operators[waiting.pop()].results:
            for use in graph.consumers.get(name or "", ()):
                if use in inside and use not in found:
                    found.add(use)
                    waiting.append(use)
    return found
