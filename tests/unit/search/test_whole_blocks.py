"""Whole blocks on the ranks of a pipeline: no division takes less than what they prove, and more is proved than by
prices of memory."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from planner.engines.spaces import SPACES
from planner.strategy_search.engine.block_times import BlockTimes
from planner.strategy_search.engine.engine import Engine
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.within import within
from tests.property.test_engine_spaces import request_for


def least(times: BlockTimes, ranks: int, micro_batches: int) -> float:
    """Seconds of the best division of the blocks of one state, in the order of the model, one at least on each rank."""
    kinds = [kind for kind, count in enumerate(times.counts) for _ in range(count)]
    best = math.inf
    for cuts in itertools.combinations(range(1, len(kinds)), ranks - 1):
        ends = (0, *cuts, len(kinds))
        held = [sum(float(times.blocks[kind, 0]) for kind in kinds[a:b]) for a, b in itertools.pairwise(ends)]
        held[0] += float(times.head[0])
        held[-1] += float(times.tail[0])
        each = [ranks * seconds / micro_batches for seconds in held]
        best = min(best, (micro_batches - 1) * max(each) + sum(each))
    return best


def configuration(ranks: int, micro_batches: int) -> Configuration:
    return Configuration(pipeline=ranks, mesh=(1,), micro_batches=micro_batches)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("counts", [(7,), (2, 6)], ids=str)
def test_no_division_of_whole_blocks_takes_less(ranks: int, counts: tuple[int, ...]) -> None:
    draw = np.random.default_rng(ranks)
    gaps = []
    for _ in range(20):
        blocks = draw.uniform(0.5, 2, (len(counts), 1))
        head, tail = draw.uniform(0, 3, (2, 1))
        times = BlockTimes(head=head, blocks=blocks, tail=tail, counts=counts, in_head=0, in_tail=0, places={})
        found, proved = least(times, ranks, 8), times.step_seconds([configuration(ranks, 8)])
        mean = float(head[0] + tail[0] + blocks[:, 0] @ np.array(counts)) * (1 + (ranks - 1) / 8)
        assert mean * (1 - 1e-6) <= proved <= found * (1 + 1e-9)
        gaps.append(found / proved)
    assert max(gaps) < (1.0001 if len(counts) == 1 else 1.35)


def test_experts_stand_in_the_blocks_that_have_them() -> None:
    one = BlockTimes(
        head=np.ones(1), blocks=np.ones((2, 1)), tail=np.ones(1), counts=(1, 2), in_head=0, in_tail=1,
        places={5: (1, -2)},
    )  # fmt: skip
    more = one.with_experts({5: 3.0, 6: 9.0})
    assert (more.head[0], more.blocks[:, 0].tolist(), more.tail[0]) == (1.0, [1.0, 4.0], 4.0)
    assert more.times(2).step_seconds([configuration(1, 1)]) == pytest.approx(2 * (1 + 1 + 2 * 4 + 4))


def pipelines(name: str) -> tuple[Engine, list[Configuration]]:
    """A toy model for an engine, and some of its configurations with a pipeline in which stages may be recomputed."""
    engine, _ = engine_of(within(SPACES[name], request_for(name)))
    found = [c for c in all_configurations(engine) if c.pipeline == 2 and c.virtual_stages == 1]
    found = [c for c in found if c.decided and c.decided.recompute is None]
    return engine, found[:: len(found) // 4]


def outcome_of(engine: Engine, c: Configuration, room: float = math.inf, *, patterned: bool = True) -> Outcome:
    """What is found and proved of a configuration with so many bytes on a device."""
    pieces, setting = engine.store.pieces(c, engine.gathers[0]), engine.setting(c)
    capacity = min(room, setting.capacity)
    pieces, setting = replace(pieces, capacities=(capacity,)), replace(setting, capacity=capacity)
    return Evaluation(pieces, setting, patterned=patterned).run()


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "mindformers"])
def test_whole_blocks_prove_no_less_than_prices_and_no_more_than_is_found(name: str) -> None:
    """Megatron-LM recomputes equally many blocks of every stage, MindFormers any number."""
    engine, some = pipelines(name)
    better = 0
    for c in some:
        fullest = max(rank.peak for rank in outcome_of(engine, c).ranks)
        for share in (1.0, 0.95, 0.85):
            plain, whole = (outcome_of(engine, c, share * fullest, patterned=own) for own in (False, True))
            assert whole.seconds == pytest.approx(plain.seconds, rel=1e-9)
            assert whole.bound <= whole.seconds
            assert whole.bound >= plain.bound * (1 - 1e-9)
            better += whole.bound > plain.bound * (1 + 1e-6)
            if name == "megatron" and whole.ranks:
                assert whole.bound >= whole.seconds * 0.97, "little is left open"
    assert better, "some are proved to take longer"
