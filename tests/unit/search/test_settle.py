"""The problem of one rank, given to solvers that know nothing of pieces and prices, says what the search says."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest

import planner
from hardware_profiles import load_profile
from planner.plan.binding.bind import bind
from planner.plan.prediction.predict import stage_costs
from planner.strategy_search.decomposition.pieces import Column
from planner.strategy_search.engine.contenders import Contender
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.families import all_configurations, engine_of
from planner.strategy_search.engine.outcome import Outcome, RankFilling
from planner.strategy_search.finalists.settle import RankProblem, rank_problem, settled
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.solvers import SOLVERS
from planner.strategy_search.solvers.problem import Solution
from tests.unit.search.cases import BATCH, Case, cluster_of, make_case, plan_of, request_of, template_of, total, traced

ALL = 1 + 1e-9
MODELS = (
    "llama-4",
    "gpt-4-tied",
    "chain",
    "chain-from-input",
    "aside",
    "post-norm",
    "residual",
    "residual-frozen-half",
)
WHOLE = ("perceptron", "skips", "single-2", "llama-1")


def outcomes(case: Case, shares: tuple[float, ...]) -> Iterator[tuple[Case, Outcome]]:
    """The case with plenty of memory, and with less and less."""
    free = Evaluation(case.chain, case.setting).run()
    yield case, free
    peak = max(rank.peak for rank in free.ranks)
    least = Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least
    for share in shares:
        limited = replace(case, setting=replace(case.setting, capacity=least + share * (peak - least)))
        yield limited, Evaluation(limited.chain, limited.setting).run()


def problem_of(case: Case, outcome: Outcome, rank: int) -> RankProblem:
    return rank_problem(case.chain, case.setting, rank, outcome.ranks[rank], outcome.state)


def columns(held: RankFilling) -> list[Column]:
    """What a rank runs in one chunk, with its head and its tail."""
    return [column for column in (held.head, *held.inner, held.tail) if column is not None]


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("model", [*MODELS, *WHOLE])
def test_the_choice_that_was_found_costs_the_same(model: str) -> None:
    draw = random.Random(model)
    for profile, devices in (("cpu", 2), ("h100-80gb", 4)):
        space = list(configurations(template_of(model), devices, 12, Pinned()))
        for configuration in draw.sample(space, min(3, len(space))):
            for case, outcome in outcomes(make_case(model, profile, configuration, 12), (0.4, 0.05)):
                for rank, held in enumerate(outcome.ranks):
                    found = problem_of(case, outcome, rank)
                    price = found.problem.evaluate(found.choice)
                    busy = case.setting.micro_batches * total(columns(held), "part") + total(columns(held), "step")
                    assert math.isclose(price.time, busy, rel_tol=1e-9)
                    assert math.isclose(price.peak + held.beside, held.peak, rel_tol=1e-9)
                    assert price.feasible


def solved_alike(found: RankProblem, solvers: tuple[str, ...]) -> Solution:
    solutions = [SOLVERS[name](found.problem) for name in solvers]
    for solution in solutions:
        assert solution.status == "optimal"
        assert solution.evaluation is not None
        assert solutions[0].evaluation is not None
        assert math.isclose(solution.evaluation.time, solutions[0].evaluation.time, rel_tol=1e-8)
    return solutions[0]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("model", "mesh", "solvers"),
    [
        ("single", (4,), ("exhaustive", "dynamic_programming", "ilp")),
        ("single-2", (2,), ("exhaustive", "dynamic_programming", "ilp")),
        ("perceptron", (4,), ("dynamic_programming",)),
        ("skips", (2,), ("dynamic_programming",)),
        ("chain", (4,), ("dynamic_programming", "ilp")),
        ("chain-from-input", (2, 2), ("dynamic_programming",)),
        ("aside", (4,), ("dynamic_programming",)),
        ("post-norm", (2,), ("dynamic_programming",)),
        ("residual", (4,), ("dynamic_programming",)),
        ("residual-shared", (2,), ("dynamic_programming",)),
        ("llama-4", (4,), ("dynamic_programming",)),
        ("gpt-4-tied", (2, 2), ("dynamic_programming",)),
    ],
)
@pytest.mark.parametrize("profile", ["cpu", "h100-80gb"])
def test_an_exact_solver_agrees(model: str, mesh: tuple[int, ...], solvers: tuple[str, ...], profile: str) -> None:
    """One rank whose boundary is free: nothing is better where memory is plenty, nor where the search says so."""
    case = make_case(model, profile, Configuration(pipeline=1, mesh=mesh, micro_batches=2), 8)
    for limited, outcome in outcomes(case, (0.5, 0.1)):
        found = problem_of(limited, outcome, 0)
        solution = solved_alike(found, solvers)
        assert solution.evaluation is not None
        assert solution.evaluation.time <= outcome.seconds * ALL
        if limited is case or outcome.bound >= outcome.seconds / ALL:
            assert math.isclose(solution.evaluation.time, outcome.seconds, rel_tol=1e-8)
        check_plan(limited, outcome, found, solution)


def check_plan(case: Case, outcome: Outcome, found: RankProblem, solution: Solution) -> None:
    """The columns of a solution make a plan that the prediction prices as the solver did."""
    assert solution.evaluation is not None
    held, parts = outcome.ranks[0], list(settled(found, solution))
    head = parts.pop(0)
    tail = parts.pop() if held.tail is not None else None
    runs = [len(list(run)) for _, run in groupby(held.inner, key=id)]
    inner = tuple(column for column, count in zip(parts, runs, strict=True) for _ in range(count))
    ranks = (replace(held, head=head, inner=inner, tail=tail),)
    (cost,) = stage_costs(bind(plan_of(case, ranks), traced(case.model), BATCH), case.cluster)
    micro_batches = case.setting.micro_batches
    seconds = micro_batches * math.fsum(cost.micro_batch.values()) + math.fsum(cost.once.values())
    assert math.isclose(seconds, solution.evaluation.time, rel_tol=1e-9)
    replays = [column.amounts.replay for column in columns(ranks[0])]
    if replays.index(max(replays)) == counted(held):  # else another interior is the larger one than was counted
        assert math.fsum(cost.memory.values()) <= (solution.evaluation.peak + held.beside) * ALL


def counted(held: RankFilling) -> int:
    replays = [column.amounts.replay for column in columns(held)]
    return replays.index(max(replays))


@pytest.mark.cases(0, 2)
@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("model", ["llama-4", "gpt-4-tied", "post-norm", "residual"])
def test_no_rank_of_a_pipeline_is_solved_worse_than_it_was_found(model: str, pipeline: int) -> None:
    """With the layout between the ranks given; equal where memory is plenty and every rank counts by itself alone."""
    case = make_case(model, "h100-80gb", Configuration(pipeline=pipeline, mesh=(2,), micro_batches=4), 16)
    for limited, outcome in outcomes(case, (0.5, 0.1)):
        for rank in range(pipeline):
            found = problem_of(limited, outcome, rank)
            solution = SOLVERS["dynamic_programming"](found.problem)
            assert solution.status == "optimal"
            assert solution.evaluation is not None
            assert solution.evaluation.time <= found.problem.evaluate(found.choice).time * ALL


@pytest.mark.parametrize("pinned", [Pinned(pipeline=1), Pinned(pipeline=2, virtual_stages=2), Pinned(pipeline=4)])
def test_the_sum_of_ways_to_run_ranks_is_between_their_least_step_and_the_objective(pinned: Pinned) -> None:
    """So that ranks that are settled are compared with what was found; slower ones take longer by it."""
    request = request_of("residual-8", cluster_of("h100-80gb", 4), 8, pinned=pinned)
    engine, _ = engine_of(request)
    configuration = next(c for c in all_configurations(engine) if c.micro_batches == 4)
    outcome = engine.evaluate(configuration)
    pieces = engine.store.pieces(configuration, outcome.gathers)
    found = Contender(configuration=configuration, outcome=outcome, pipeline_of_kinds=pieces)
    own = found.sum_with(outcome.ranks)
    assert found.least_step() <= own * ALL
    assert own <= outcome.seconds * ALL
    slower = [
        replace(column, amounts=replace(column.amounts, part=2 * column.amounts.part))
        for column in outcome.ranks[-1].inner
    ]
    assert found.sum_with((*outcome.ranks[:-1], replace(outcome.ranks[-1], inner=tuple(slower)))) > own


@pytest.mark.thorough
@pytest.mark.slow
def test_few_blocks_that_are_far_apart_in_memory_are_not_lost() -> None:
    """Six blocks on two devices with slow links: prices of memory know ways to recompute a block that take 0.05 and
    0.66 s, and the fastest plan has one between them."""
    cluster = load_profile("a10g-24gb").with_devices(2)
    slow = replace(cluster, levels=tuple(replace(one, bandwidth=one.bandwidth / 100) for one in cluster.levels))

    def seconds(**pinned: object) -> float:
        found = planner.search(
            "llama8b+num_layers=6+lora=8",
            slow,
            seq_len=2048,
            global_batch=2,
            memory_limit=9_429_505_540,
            simplicity=0.0,
            **({"pinned": pinned} if pinned else {}),
        )
        return found.plan.prediction.step_seconds

    assert seconds() <= seconds(mesh=(2,), pipeline=1, recompute="selective") * 1.001
