"""What every search promises: the best choice of the stage, within the memory, and a plan that costs what it says."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import InfeasibleError, RequestError
from planner.plan.file import dump_plan
from planner.plan.verify import verify
from planner.search.advice import changes
from planner.search.problem import Edge, Problem, Solution, Variable
from planner.search.request import ALGORITHMS, SearchRequest
from planner.search.search import SearchResult, find_fitting, search
from planner.search.solvers import SOLVERS
from planner.search.space import Configuration, Pinned, configurations, mesh_shapes
from tests.unit.search.cases import (
    BATCH,
    Case,
    cluster_of,
    make_case,
    request_of,
    small_memory,
    template_of,
    traced,
)

CASES = (
    ("llama-4", "h100-80gb", Configuration(stages=1, mesh=(2, 4), micro_batches=2, recompute=False)),
    ("llama-4", "h100-80gb", Configuration(stages=2, mesh=(4,), micro_batches=4, recompute=True)),
    ("gpt-4-tied", "h100-80gb", Configuration(stages=4, mesh=(2, 2), micro_batches=4, recompute=False)),
    ("residual", "cpu", Configuration(stages=1, mesh=(2, 2), micro_batches=1, recompute=True)),
    ("residual-first", "cpu", Configuration(stages=1, mesh=(4,), micro_batches=1, recompute=False)),
    ("perceptron", "cpu", Configuration(stages=1, mesh=(4,), micro_batches=2, recompute=False)),
    ("chain", "h100-80gb", Configuration(stages=2, mesh=(2, 2), micro_batches=2, recompute=False)),
)
FREE_VARIABLES = 9
FEW = 3


def restricted(problem: Problem, draw: random.Random) -> Problem:
    """The same problem where most variables are decided and a few have three candidates: small enough to enumerate."""
    free = set(draw.sample(range(len(problem.variables)), min(FREE_VARIABLES, len(problem.variables))))
    kept = [
        sorted(draw.sample(range(variable.size), min(variable.size, FEW if at in free else 1)))
        for at, variable in enumerate(problem.variables)
    ]
    variables = tuple(
        Variable(name=v.name, time=v.time[k], memory=v.memory[k], transient=v.transient[k])
        for v, k in zip(problem.variables, kept, strict=True)
    )
    edges = tuple(
        Edge(
            first=edge.first,
            second=edge.second,
            time=edge.time[np.ix_(kept[edge.first], kept[edge.second])],
            memory=edge.memory[np.ix_(kept[edge.first], kept[edge.second])],
        )
        for edge in problem.edges
    )
    return Problem(variables=variables, edges=edges, memory_limit=problem.memory_limit)


def least_peak(problem: Problem) -> float:
    solution = SOLVERS["exhaustive"](replace(problem, memory_limit=0.0))
    assert solution.least_memory is not None
    return solution.least_memory


def time_of(solution: Solution) -> float:
    return math.inf if solution.evaluation is None else solution.evaluation.time


def stage_problems(model: str, profile: str, configuration: Configuration) -> tuple[Case, list[Problem]]:
    case = make_case(model, profile, configuration, 8)
    return case, [problem.problem for problem in case.problems()]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("model", "profile", "configuration"), CASES)
def test_a_stage_is_solved_as_well_as_by_looking_at_everything(
    algorithm: str, model: str, profile: str, configuration: Configuration
) -> None:
    draw = random.Random(model)
    bound = False
    _, problems = stage_problems(model, profile, configuration)
    for whole in problems:
        problem = restricted(whole, draw)
        free = SOLVERS["exhaustive"](problem)
        assert free.evaluation is not None
        least = least_peak(problem)
        for share in (1.0, 0.6, 0.2, 0.0):
            limited = replace(problem, memory_limit=least + share * (free.evaluation.peak - least))
            expected, found = SOLVERS["exhaustive"](limited), SOLVERS[algorithm](limited)
            assert found.status == expected.status == "optimal"
            assert math.isclose(time_of(found), time_of(expected), rel_tol=1e-9)
            assert found.evaluation is not None
            assert found.evaluation.feasible
            bound |= time_of(expected) > free.evaluation.time * (1 + 1e-9)
        none = SOLVERS[algorithm](replace(problem, memory_limit=least * 0.999))
        assert none.status == "infeasible"
        assert none.least_memory is not None
        assert math.isclose(none.least_memory, least, rel_tol=1e-9)
    assert bound, "no limit cost any time: the test says nothing about limits"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("model", "profile", "configuration"), CASES)
def test_no_random_choice_beats_the_answer(
    algorithm: str, model: str, profile: str, configuration: Configuration
) -> None:
    draw = random.Random(7)
    _, problems = stage_problems(model, profile, configuration)
    for problem in problems:
        answer = SOLVERS[algorithm](problem)
        assert answer.status == "optimal"
        assert answer.evaluation is not None
        for _ in range(50):
            choice = list(answer.choice or ())
            for at in draw.sample(range(len(choice)), draw.randint(1, 4)):
                choice[at] = draw.randrange(problem.variables[at].size)
            other = problem.evaluate(choice)
            assert other.time >= answer.evaluation.time * (1 - 1e-9)


def outcome(request: SearchRequest) -> SearchResult | str:
    """What a search finds, or its message where nothing fits."""
    try:
        return search(request)
    except InfeasibleError as error:
        return str(error)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("model", "devices"), [("single", 4), ("single-2", 2)])
@pytest.mark.parametrize("profile", ["cpu", "h100-80gb"])
def test_a_whole_search_equals_looking_at_everything(algorithm: str, model: str, devices: int, profile: str) -> None:
    roomy = cluster_of(profile, devices)
    unlimited = search(request_of(model, roomy, 8, algorithm="exhaustive", prune=False)).plan.prediction
    slower = 0
    for share in (1.0, 0.8, 0.6, 0.45):
        memory = unlimited.peak_bytes - roomy.device.reserved
        cluster = small_memory(roomy, memory / (1 + roomy.device.allocator_slack) * share)
        request = request_of(model, cluster, 8, algorithm=algorithm)
        expected, found = outcome(replace(request, algorithm="exhaustive", prune=False)), outcome(request)
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected
            continue
        best = expected.plan.prediction
        assert math.isclose(found.plan.prediction.step_seconds, best.step_seconds, rel_tol=1e-9)
        assert found.plan.prediction.peak_bytes <= cluster.device.memory * (1 + 1e-9)
        assert found.plan.provenance.status == "optimal"
        slower += best.step_seconds > unlimited.step_seconds * (1 + 1e-9)
    assert slower or devices == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("model", "profile", "devices"),
    [
        ("llama-1", "cpu", 4),
        ("llama-4", "h100-80gb", 8),
        ("gpt-4-tied", "h100-80gb", 16),
        ("gpt-1", "cpu", 1),
        ("perceptron", "cpu", 3),
        ("chain-from-input", "cpu", 2),
        ("residual-constant", "h100-80gb", 4),
        ("residual-frozen-half", "cpu", 2),
        ("residual-mask", "cpu", 4),
        ("skips", "cpu", 2),
    ],
)
def test_the_plan_is_legal_and_costs_what_it_says(algorithm: str, model: str, profile: str, devices: int) -> None:
    request = request_of(model, cluster_of(profile, devices), 24, algorithm=algorithm)
    result = search(request)
    verdict = verify(result.plan, traced(model), BATCH, request.cluster)
    assert verdict.fits
    assert verdict.as_stated, verdict.remarks
    assert verdict.prediction == result.plan.prediction
    assert 0 < result.tried <= result.configurations
    assert dump_plan(search(request).plan) == dump_plan(result.plan)


def test_what_is_pinned_is_kept() -> None:
    cluster = cluster_of("h100-80gb", 8)
    pinned = Pinned(stages=2, mesh=(2, 2), micro_batches=4, recompute=True)
    plan = search(request_of("llama-4", cluster, 8, pinned=pinned)).plan
    assert (len(plan.stages), plan.mesh.sizes) == (2, (2, 2))
    assert plan.training.micro_batches == 4
    assert {group.recomputation for group in plan.groups if group.blocks} == {"full"}


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        (Pinned(stages=3), ("4 blocks", "stages = 3")),
        (Pinned(mesh=(3,)), ("8 devices", "mesh = (3,)")),
        (Pinned(micro_batches=5), ("global batch 8", "micro_batches = 5")),
    ],
)
def test_what_does_not_divide_is_named(pinned: Pinned, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        search(request_of("llama-4", cluster_of("h100-80gb", 8), 8, pinned=pinned))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_an_infeasible_request_says_what_is_missing_and_what_would_help() -> None:
    roomy = cluster_of("cpu", 2)
    fitting = search(request_of("llama-4", roomy, 4))
    cluster = small_memory(roomy, fitting.plan.prediction.peak_bytes / 40000)
    request = request_of("llama-4", cluster, 4)
    assert not find_fitting(request)
    with pytest.raises(InfeasibleError, match=r"llama-4 does not fit on 2 x cpu: .* GiB more than"):
        search(request)


def test_advice_is_taken_from_searches_that_found_something() -> None:
    """Each change that is named makes the request fit, and half of the devices it names do not."""
    roomy = cluster_of("cpu", 2)
    least = min(
        peak
        for peak in (usable_peak(recompute, micro_batches) for recompute in (False, True) for micro_batches in (1, 4))
    )
    request = request_of("llama-4", small_memory(roomy, 0.8 * least), 4)
    texts = [change.text for change in changes(request)]
    assert any("devices" in text for text in texts), texts
    wanted = next(int(text.split()[0]) for text in texts if "devices" in text)
    assert wanted > 2
    for devices, fits in ((wanted, True), (wanted // 2, False)):
        cluster = request.cluster.with_devices(devices)
        assert find_fitting(replace(request, cluster=cluster, global_batch=max(4, devices))) is fits


def usable_peak(recompute: bool, micro_batches: int) -> float:
    configuration = Configuration(stages=1, mesh=(2,), micro_batches=micro_batches, recompute=recompute)
    problem = make_case("llama-4", "cpu", configuration, 4).problems()[0].problem
    solution = SOLVERS["dynamic_programming"](replace(problem, memory_limit=0.0))
    assert solution.least_memory is not None
    return solution.least_memory


def test_the_space_covers_every_even_division_once() -> None:
    template = template_of("llama-4")
    found = list(configurations(template, 8, 6, Pinned()))
    assert len(found) == len(set(found))
    expected = {
        (stages, mesh, micro_batches, recompute)
        for stages in (1, 2, 4)
        for mesh in mesh_shapes(8 // stages)
        for micro_batches in (1, 2, 3, 6)
        for recompute in (False, True)
    }
    assert {(c.stages, c.mesh, c.micro_batches, c.recompute) for c in found} == expected
    assert mesh_shapes(8) == ((8,), (2, 4), (4, 2))
    assert mesh_shapes(1) == ((),)


def test_requests_are_not_changed_by_progress() -> None:
    seen = []
    request: SearchRequest = request_of("chain", cluster_of("cpu", 2), 4)
    result = search(request, seen.append)
    assert [progress.done for progress in seen] == list(range(1, result.tried + 1))
    assert seen[-1].best_seconds == pytest.approx(result.plan.prediction.step_seconds, rel=1e-9)
