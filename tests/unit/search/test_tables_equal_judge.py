"""The folded tables of the search and the judge, which walks the whole graph, must price every choice alike.

Choices are drawn at random, not optimal, so that every candidate of every operator is met. Under recomputation the
first stage may be charged more by the tables: see `planner.search.stage_problem`.
"""

import math
import random
from collections.abc import Iterator

import pytest

from costmodels import step_time
from planner.plan.bind import bind
from planner.plan.predict import StageCost, predict, stage_costs
from planner.search.problem import Evaluation
from planner.search.space import FREE, Configuration, configurations
from planner.search.stages import assembled_seconds
from tests.unit.search.cases import (
    BATCH,
    MODELS,
    Case,
    evaluated,
    in_flight_of,
    make_case,
    plan_of,
    random_choices,
    template_of,
    traced,
)

GLOBAL_BATCH = 8
CLUSTERS = (("cpu", 4), ("h100-80gb", 2), ("h100-80gb", 8), ("h100-80gb", 16))
DRAWN = 3  # configurations a cluster
TOLERANCE = 1e-9


def cases(model: str, draw: random.Random) -> Iterator[Case]:
    for profile, devices in CLUSTERS:
        space = list(configurations(template_of(model), devices, GLOBAL_BATCH, FREE))
        pipelines = [c for c in space if c.stages > 1]
        chosen = draw.sample(space, min(DRAWN, len(space))) + draw.sample(pipelines, min(2, len(pipelines)))
        for configuration in chosen:
            precision, optimizer = draw.choice([("fp32", "adamw"), ("bf16", "sgd")])
            yield make_case(model, profile, configuration, GLOBAL_BATCH, precision, optimizer)


def same(first: float, second: float) -> bool:
    return math.isclose(first, second, rel_tol=TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_any_choice_costs_what_the_judge_says(model: str) -> None:
    draw = random.Random(model)
    for case in cases(model, draw):
        choices = random_choices(case, draw)
        bound = bind(plan_of(case, choices), traced(model), BATCH)
        costs = stage_costs(bound, case.cluster)
        evaluations = [evaluated(problem, choice) for problem, choice in zip(case.problems(), choices, strict=True)]
        for stage, kind in stage_and_kind(case):
            check(case, stage, evaluations[kind], costs[stage])
        seconds = assembled_seconds(case.configuration, case.tables, choices, case.cluster)
        prediction = predict(bound, case.cluster)
        assert same(seconds, prediction.step_seconds), case.configuration
        assert same(math.fsum(value for _, value in prediction.time), prediction.step_seconds)
        assert same(math.fsum(value for _, value in prediction.memory), prediction.peak_bytes)


def stage_and_kind(case: Case) -> list[tuple[int, int]]:
    """Every stage with the problem that stands for it."""
    count = case.configuration.stages
    kinds = {0: 0, count - 1: len(case.kinds) - 1}
    return [(stage, kinds.get(stage, 1)) for stage in range(count)]


def check(case: Case, stage: int, evaluation: Evaluation, cost: StageCost) -> None:
    parts = case.configuration.micro_batches
    where = f"stage {stage} of {case.configuration} on {case.cluster.name}"
    busy = parts * math.fsum(cost.micro_batch.values()) + math.fsum(cost.once.values())
    assert same(evaluation.time, busy), where
    assert same(evaluation.transient, cost.memory["transient"]), where
    judged = math.fsum(cost.memory.values())
    stands_for = 1 if 0 < stage < case.configuration.stages - 1 else stage
    if in_flight_of(case, stage) < in_flight_of(case, stands_for):
        assert evaluation.peak > judged, where  # stages in the middle are planned like the fullest of them
    elif case.configuration.recompute and stage == 0:
        assert evaluation.peak >= judged * (1 - TOLERANCE), where
        assert evaluation.peak - judged <= entering_bytes(case), where
    else:
        assert same(evaluation.peak, judged), where


def entering_bytes(case: Case) -> float:
    """Most that is charged twice: every copy of a value that the first block reads from before, whole."""
    template = case.tables.template
    return sum(template.graph.types[edge.name].nbytes for edge in template.edges if edge.kind == "enter")


def test_a_recomputed_stage_that_holds_one_block_is_priced_exactly() -> None:
    draw = random.Random(3)
    seen = 0
    for _ in range(6):
        configuration = Configuration(stages=4, mesh=(2,), micro_batches=4, recompute=True)
        case = make_case("llama-4", "h100-80gb", configuration, GLOBAL_BATCH)
        choices = random_choices(case, draw)
        costs = stage_costs(bind(plan_of(case, choices), traced("llama-4"), BATCH), case.cluster)
        for stage, kind in stage_and_kind(case):
            if stage != 2:  # planned like stage 1, which holds one micro-batch more
                evaluation = evaluated(case.problems()[kind], choices[kind])
                assert same(evaluation.peak, math.fsum(costs[stage].memory.values()))
                seen += 1
    assert seen == 18


def test_the_assembled_time_is_that_of_the_schedule() -> None:
    """Written out once more for unequal stages: sum of parts, slowest stage again and again, longest end."""
    configuration = Configuration(stages=4, mesh=(2,), micro_batches=8, recompute=False)
    case = make_case("gpt-4-tied", "h100-80gb", configuration, GLOBAL_BATCH)
    choices = random_choices(case, random.Random(0))
    costs = stage_costs(bind(plan_of(case, choices), traced("gpt-4-tied"), BATCH), case.cluster)
    per_part = [math.fsum(cost.micro_batch.values()) for cost in costs]
    once = [math.fsum(cost.once.values()) for cost in costs]
    assert len({round(seconds, 9) for seconds in per_part}) > 1
    expected = math.fsum(per_part) + 7 * max(per_part) + max(once)
    assert same(float(step_time(per_part, once, 8)), expected)
    assert same(assembled_seconds(configuration, case.tables, choices, case.cluster), expected)
