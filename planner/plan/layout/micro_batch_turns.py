"""Where interleaved micro-batches yield to each other, and how each continues.

    product, product ─scatter─ add, norm ─gather─ product, product ─scatter─ ..      sequence parallelism
    work    (pause)  work      brief              work    (pause)  work

A micro-batch yields where it sends something forward. If it sends twice without a product in between, the other
micro-batches yield in the middle of their products: they pause at the product before which half of their work is done,
or at several products if several such stretches follow each other. So an addition and a normalisation never have to
overlap a collective alone (`costmodels.take_turns`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate, takewhile

from costmodels import Then
from hardware_profiles import Flops
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.segments import Segment
from planner.plan.layout.stage_tensors import move_of
from planner.sharding.rule import loop_extents

PRODUCTS = frozenset(
    {
        "matmul",
        "attention",
        "convolution",
        "experts",
        "recurrent",
        "delta_rule",
        "state_space",
        "selective_scan",
        "index_scores",
    }
)
"""Classes of operators that multiply."""


def turns_of_stages(bound: BoundPlan, stages: Iterable[Iterable[Segment]]) -> Mapping[int, Then]:
    """How interleaved micro-batches continue at the operators at which they yield; none where micro-batches are not
    interleaved."""
    if bound.plan.training.interleave == 1:
        return {}
    return {at: then for segments in stages for one in segments for at, then in _turns_of(bound, one).items()}


def _turns_of(bound: BoundPlan, segment: Segment) -> dict[int, Then]:
    stretches: list[list[int]] = [[]]
    gathered = segment.gathered
    yielding = {at for at in segment.operators if _yields(bound, at, gathered)}
    for at in segment.operators:
        if at in yielding:
            stretches.append([])
        stretches[-1].append(at)
    work = [{at: flops for at in stretch if (flops := _work(bound, at))} for stretch in stretches]
    brief = [bool(number) and not products for number, products in enumerate(work)]
    found: dict[int, Then] = {stretch[0]: "work" for stretch in stretches[1:]}
    for number, products in enumerate(work):
        beside = max(_in_a_row(brief[number + 1 :]), _in_a_row(brief[:number][::-1]))
        found |= dict.fromkeys(_cuts(products, beside), "pause")
    if "pause" in found.values():
        found |= {stretch[0]: "brief" for stretch, one in zip(stretches, brief, strict=True) if one}
    return found


def _yields(bound: BoundPlan, at: int, together: Collection[str]) -> bool:
    for place, name in enumerate(bound.operators[at].operator.operands):
        move = move_of(bound, at, place) if name not in together else None
        if move is not None and move.yields(move.there, weight=name in bound.parameters):
            return True
    return False


def _work(bound: BoundPlan, at: int) -> Flops:
    """Work of the products of an operator on a device."""
    op = bound.operators[at]
    if op.rule.op_class not in PRODUCTS:
        return 0.0
    return op.rule.flops_of(loop_extents(op.rule, op.strategy, bound.plan.mesh))


def _in_a_row(brief: Sequence[bool]) -> int:
    return len([*takewhile(bool, brief)])


def _cuts(products: Mapping[int, Flops], count: int) -> set[int]:
    """The products before which equal parts of the work end, `count` products for `count` + 1 parts; fewer where there
    are not as many products."""
    before = dict(zip([*products][1:], accumulate(products.values()), strict=False))
    parts = [sum(products.values()) * (part + 1) / (count + 1) for part in range(count)]
    return {min(before, key=lambda at: abs(before[at] - part)) for part in parts} if before else set()
