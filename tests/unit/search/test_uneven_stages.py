"""Virtual stages of unequal blocks: cut behind the search, with what it has found for every rank."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.strategy_search.decomposition.pieces import Amounts, Column
from planner.strategy_search.engine.uneven_stages import _best_sizes, _dealt, _levelled, _Memory, _sizes, _waiting
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.space import Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import search
from tests.unit.search import cases
from tests.unit.search.cases import cluster_of, request_of, template_of


def column(seconds: float = 1.0, kind: int = 0) -> Column:
    return Column(recompute=False, candidates={}, kept=frozenset(), amounts=Amounts(part=seconds), kind=kind)


def found(model: str, **pinned: Any) -> SearchResult:
    return search(request_of(model, cluster_of("h100-80gb", 2), 8, precision="bf16", pinned=Pinned(**pinned)))


@pytest.mark.parametrize(
    ("blocks", "ends", "expected"),
    [
        # two ranks of two stages: a block more in the later stage, on the last rank in the earlier one
        ((3, 3), (0.0, 0.0), [1, 2, 2, 1]),
        ((5, 2), (0.0, 0.0), [2, 1, 3, 1]),
        # what stands at the ends counts: the last stage may hold nothing else
        ((4, 2), (0.0, 2.1), [2, 2, 2, 0]),
        ((3, 3), (4.0, 0.0), [0, 2, 3, 1]),
    ],
)
def test_stages_of_a_rank_are_as_equal_as_blocks_are(
    blocks: Sequence[int], ends: tuple[float, float], expected: list[int]
) -> None:
    assert _sizes(blocks, [ends[0], 0.0, 0.0, ends[1]], 1.0, [1, 0]) == expected


def test_blocks_of_several_kinds_go_where_they_make_the_busiest_rank_less_busy() -> None:
    """The first three take three times as long: the first rank, which had them all, gives others away."""
    seconds, ends = [3.0] * 3 + [1.0] * 9, [0.0] * 4
    before = [3, 3, 3, 3]
    levelled = _levelled(before, seconds, ends, 2, None)

    def busy(sizes: Sequence[int]) -> list[float]:
        stages, start = [], 0
        for size in sizes:
            stages.append(sum(seconds[start : start + size]))
            start += size
        return [stages[0] + stages[2], stages[1] + stages[3]]

    assert sum(levelled) == 12
    assert min(levelled[1:3]) >= 1
    assert max(busy(before)) == 12.0
    assert max(busy(levelled)) == sum(seconds) / 2 == 9.0


def test_blocks_of_several_kinds_are_moved_where_there_is_memory_for_them() -> None:
    """All blocks take equally long, but the first four take less than half of the memory of others. By time alone each
    rank has six blocks, and the second one, with few of the small ones, lacks memory."""
    kinds, seconds, ends = (0,) * 4 + (1,) * 8, [1.0] * 12, [0.0] * 4
    memory = _Memory(each=((0.07, 0.18),) * 4, beside=(0.05, 0.05), kinds=kinds)
    by_time, by_both = [_levelled([4, 2, 2, 4], seconds, ends, 2, known) for known in (None, memory)]

    def lacking(sizes: Sequence[int]) -> float:
        return float(memory.lacking(np.array([[0, *itertools.accumulate(sizes)]]))[0])

    assert lacking(by_time) > 0.01
    assert sum(by_both) == 12
    assert lacking(by_both) == 0.0


def test_ways_to_run_blocks_are_dealt_out_to_the_stages_of_a_rank() -> None:
    """Lean ones first, as many in each stage as in the others; kinds that a rank did not have are run as elsewhere."""
    lean, fast, other = column(), column(), column(kind=1)
    dealt = _dealt([lean, lean, fast, fast, fast], [lean, fast, other], [[0, 0], [0, 0, 0]])
    assert [[one is lean for one in stage] for stage in dealt] == [[True, False], [True, False, False]]
    dealt = _dealt([lean, fast], [lean, fast, other], [[0, 1], [0, 1]])
    assert [stage[1] is other for stage in dealt] == [True, True]
    assert [dealt[0][0] is lean, dealt[1][0] is fast] == [True, True]


def waiting(sizes: Sequence[int], ranks: int, micro_batches: int) -> float:
    """Of the time that the busiest rank works, where every block takes one second forward and two back."""
    busy = max(3 * micro_batches * sum(sizes[rank::ranks]) for rank in range(ranks))
    return _waiting([(1.0 * size, 2.0 * size) for size in sizes], ranks, micro_batches) / busy


def test_ranks_wait_for_each_other_where_their_stages_take_unequally_long() -> None:
    """All ranks are equally busy. Where each has its larger stage last they wait with every micro-batch, for less where
    larger stages follow each other from one rank to the next, and back to the first."""
    assert waiting([2] * 8, 4, 32) == 0.0
    last, around = [1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 2, 1, 1]
    assert waiting(last, 4, 32) > 0.08
    assert waiting(around, 4, 32) < 0.03
    assert _best_sizes((3,) * 4, ((1.0, 2.0),) * 12, ((0.0, 0.0),) * 8, 1, None) == tuple(around)


def test_of_78_blocks_on_16_ranks_the_larger_stages_follow_each_other() -> None:
    """Fourteen ranks have five blocks in four stages, and two have four."""
    sizes = _best_sizes((5,) * 14 + (4,) * 2, ((1.0, 2.0),) * 78, ((0.0, 0.0),) * 64, 1, None)
    assert [sum(sizes[rank::16]) for rank in range(16)] == [5] * 14 + [4] * 2
    last = [1] * 48 + [2] * 14 + [1] * 2
    assert waiting(sizes, 16, 64) < 0.6 * waiting(last, 16, 64)


def test_unequal_stages_are_searched_where_equal_ones_are_not_possible() -> None:
    def stages(model: str = "llama-6-tied", **pinned: Any) -> set[tuple[int, int, bool]]:
        every = configurations(template_of(model), 4, 8, Pinned(**pinned))
        return {(c.pipeline, c.virtual_stages, c.uneven) for c in every if c.virtual_stages > 1}

    assert stages(pipeline=2) == {(2, 3, False)}
    assert stages(pipeline=4) == set()
    assert stages(pipeline=4, virtual_stages=2) == {(4, 2, True)}  # the first and the last may hold no block
    assert (2, 2, True) in stages(pipeline=2, virtual_stages=2)
    assert stages(pipeline=2, virtual_stages=2, even=True) == set()
    # eight blocks of two kinds in turn: in four stages the kinds are alike, in eight they are not
    assert {(2, 2, False), (2, 4, True)} <= stages("kinds-in-turn", pipeline=2)
    assert (2, 4, True) not in stages("kinds-in-turn", pipeline=2, even=True)


@pytest.mark.parametrize("model", ["llama-6-tied", "kinds-in-turn"])
def test_unequal_stages_are_found_where_they_are_asked_for(model: str) -> None:
    result = found(model, pipeline=2, virtual_stages=4, micro_batches=4)
    plan = result.plan
    assert (plan.schedule, plan.virtual_stages, len(plan.stages)) == ("interleaved_1f1b", 4, 8)
    assert sum(stage.blocks for stage in plan.stages) == {"llama-6-tied": 6, "kinds-in-turn": 8}[model]
    assert all(stage.blocks for stage in plan.stages[1:-1])
    (best, *_) = result.plans
    assert result.bound_seconds <= best.bounded * (1 + 1e-9)


@pytest.mark.thorough
def test_what_is_proved_of_equal_stages_is_not_proved_of_unequal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families are looked at by what is proved of their other members."""
    monkeypatch.setitem(cases.LARGE, "llama8b-18-layers", cases.large("llama8b", 18))  # type: ignore[arg-type]
    request = request_of("llama8b-18-layers", cluster_of("h200-141gb", 4), 4, precision="bf16", top=2)
    asked = {"pipeline": 4, "micro_batches": 4}
    bounds = search(replace(request, pinned=Pinned(**asked))).bounds
    unequal = {c: bound for c, bound in bounds.items() if c.uneven}
    assert {c.virtual_stages for c in unequal} == {2, 4}
    for c, bound in unequal.items():
        (ranked, *_) = search(replace(request, pinned=Pinned(virtual_stages=c.virtual_stages, **asked))).plans
        assert ranked.found is not None
        assert bound <= ranked.found.objective * (1 + 1e-9)


@pytest.mark.thorough
def test_a_large_vocabulary_leaves_the_last_stage_fewer_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal stages leave the last rank busier by the head and the loss."""
    monkeypatch.setitem(cases.LARGE, "llama8b-4-layers", cases.large("llama8b", 4))  # type: ignore[arg-type]
    asked = {"pipeline": 2, "micro_batches": 8, "virtual_stages": 2}
    free, equal = found("llama8b-4-layers", **asked), found("llama8b-4-layers", **asked, even=True)
    assert [stage.blocks for stage in equal.plan.stages] == [1, 1, 1, 1]
    assert free.plan.stages[-1].blocks == 0
    assert free.plan.prediction.step_seconds < 0.9 * equal.plan.prediction.step_seconds


def test_propagation_knows_which_stages_cannot_be_equal() -> None:
    """The first block reads something else than the others, so two stages on each of two ranks are not of equal
    blocks."""
    request = request_of("residual-first", cluster_of("h100-80gb", 2), 8, algorithm="sharding_propagation")
    assert search(replace(request, pinned=Pinned(pipeline=2))).plan.virtual_stages == 1
