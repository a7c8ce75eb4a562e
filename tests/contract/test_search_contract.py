"""What every search promises: the best choice for a rank, within the memory, and a plan that costs what it says."""

import math
import random
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest

from planner.errors import InfeasibleError, LimitError, RequestError
from planner.limits import limited
from planner.plan.compare.verify import verify
from planner.plan.file import dump_plan
from planner.sharding.update import PLAIN
from planner.strategy_search.analysis.advice import changes
from planner.strategy_search.engine.contenders import CONTENDERS, NEAR
from planner.strategy_search.engine.evaluation import Evaluation
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.engine.outcome import Outcome
from planner.strategy_search.finalists import plan_maker
from planner.strategy_search.finalists.plan_maker import PlanMaker
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.finalists.settle import rank_problem
from planner.strategy_search.request.bounds import bounds
from planner.strategy_search.request.configurations import configurations, mesh_shapes
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Configuration, Pinned
from planner.strategy_search.result import Progress, SearchResult
from planner.strategy_search.search import find_fitting, search
from planner.strategy_search.solvers import SOLVERS
from planner.strategy_search.solvers.problem import Edge, Problem, Solution, Variable
from tests.refusals import refused
from tests.unit.search.cases import (
    BATCH,
    cluster_of,
    launched_at_once,
    make_case,
    request_of,
    small_memory,
    template_of,
    traced,
    with_own_network,
)

CASES = (
    ("llama-4", "h100-80gb", Configuration(pipeline=1, mesh=(2, 4), micro_batches=2)),
    ("llama-4", "h100-80gb", Configuration(pipeline=2, mesh=(4,), micro_batches=4)),
    ("gpt-4-tied", "h100-80gb", Configuration(pipeline=4, mesh=(2, 2), micro_batches=4)),
    ("residual", "cpu", Configuration(pipeline=1, mesh=(2, 2), micro_batches=1)),
    ("residual-first", "cpu", Configuration(pipeline=1, mesh=(4,), micro_batches=1)),
    ("perceptron", "cpu", Configuration(pipeline=1, mesh=(4,), micro_batches=2)),
    ("chain", "h100-80gb", Configuration(pipeline=2, mesh=(2, 2), micro_batches=2)),
)
FREE_VARIABLES = 9
FEW = 3


def restricted(problem: Problem, draw: random.Random) -> Problem:
    """The same problem where most variables are decided and a few have three candidates: small enough to enumerate."""
    free = set(draw.sample(range(len(problem.variables)), min(FREE_VARIABLES, len(problem.variables))))
    allowed = [np.flatnonzero(np.isfinite(variable.time)).tolist() for variable in problem.variables]
    kept = [
        sorted(draw.sample(candidates, min(len(candidates), FEW if at in free else 1)))
        for at, candidates in enumerate(allowed)
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


def problems_of(model: str, profile: str, configuration: Configuration) -> list[Problem]:
    """The problems of the first and the last rank of the plan that is found with plenty of memory."""
    case = make_case(model, profile, configuration, 8)
    outcome = Evaluation(case.chain, case.setting).run()
    return [
        rank_problem(case.chain, case.setting, rank, outcome.ranks[rank], outcome.state).problem
        for rank in sorted({0, configuration.pipeline - 1})
    ]


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("model", "profile", "configuration"), CASES)
def test_a_rank_is_solved_as_well_as_by_looking_at_everything(
    solver: str, model: str, profile: str, configuration: Configuration
) -> None:
    draw = random.Random(f"{model} {configuration.pipeline}")
    bound = False
    for whole in problems_of(model, profile, configuration):
        problem = replace(restricted(whole, draw), memory_limit=math.inf)
        free = SOLVERS["exhaustive"](problem)
        assert free.evaluation is not None
        least = least_peak(problem)
        for share in (1.0, 0.6, 0.2, 0.0):
            limited = replace(problem, memory_limit=least + share * (free.evaluation.peak - least))
            expected, found = SOLVERS["exhaustive"](limited), SOLVERS[solver](limited)
            assert found.status == expected.status == "optimal"
            assert math.isclose(time_of(found), time_of(expected), rel_tol=1e-8)
            assert found.evaluation is not None
            assert found.evaluation.feasible
            bound |= time_of(expected) > free.evaluation.time * (1 + 1e-9)
        none = SOLVERS[solver](replace(problem, memory_limit=least * 0.999))
        assert none.status == "infeasible"
        assert none.least_memory is not None
        assert math.isclose(none.least_memory, least, rel_tol=1e-9)
    assert bound, "no limit cost any time: the test says nothing about limits"


def outcome(request: SearchRequest) -> SearchResult | str:
    """What a search finds, or its message where nothing fits."""
    try:
        return search(request)
    except InfeasibleError as error:
        return str(error)


@pytest.mark.cases(1, 0)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "profile", "devices"),
    [
        ("llama-1", "cpu", 4),
        ("llama-4", "h100-80gb", 8),
        ("gpt-4-tied", "h100-80gb", 16),
        ("gpt-1", "cpu", 1),
        ("perceptron", "cpu", 3),
        ("llama-6-tied", "h100-80gb", 6),
        ("residual-8", "cpu", 12),
        ("aside", "cpu", 4),
        ("chain-from-input", "cpu", 2),
        ("residual-constant", "h100-80gb", 4),
        ("residual-frozen-half", "cpu", 2),
        ("residual-mask", "cpu", 4),
        ("skips", "cpu", 2),
    ],
)
def test_the_plan_is_legal_and_costs_what_it_says(model: str, profile: str, devices: int) -> None:
    request = request_of(model, cluster_of(profile, devices), 24)
    result = search(request)
    verdict = verify(result.plan, traced(model), BATCH, request.cluster)
    assert verdict.fits
    assert verdict.as_stated, verdict.remarks
    assert verdict.prediction == result.plan.prediction
    assert 0 < result.statistics.evaluated <= result.statistics.configurations
    assert dump_plan(search(request).plan) == dump_plan(result.plan)


def test_what_is_pinned_is_kept() -> None:
    cluster = cluster_of("h100-80gb", 8)
    pinned = Pinned(pipeline=2, mesh=(2, 2), micro_batches=4, recompute="full")
    plan = search(request_of("llama-4", cluster, 8, pinned=pinned, update=PLAIN)).plan
    assert (plan.pipeline, plan.mesh.sizes) == (2, (2, 2))
    assert plan.training.micro_batches == 4
    assert {group.recomputation for group in plan.groups if group.blocks} == {"full"}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("recompute", "words"), [("none", {"none"}), ("selective", {"selective"})])
def test_blocks_are_run_as_is_pinned(recompute: str, words: set[str]) -> None:
    pinned = Pinned(recompute=recompute)  # type: ignore[arg-type]
    plan = search(request_of("llama-4", cluster_of("h100-80gb", 4), 8, pinned=pinned, update=PLAIN)).plan
    assert {group.recomputation for group in plan.groups if group.blocks} == words


@pytest.mark.thorough
def test_virtual_stages_are_dealt_in_turn() -> None:
    pinned = Pinned(pipeline=2, virtual_stages=2)
    result = search(request_of("llama-4", cluster_of("h100-80gb", 4), 8, pinned=pinned))
    assert (result.plan.virtual_stages, len(result.plan.stages), result.plan.pipeline) == (2, 4, 2)
    assert verify(result.plan, traced("llama-4"), BATCH, cluster_of("h100-80gb", 4)).as_stated
    free = search(request_of("llama-4", cluster_of("h100-80gb", 4), 8, pinned=Pinned(pipeline=2, virtual_stages=0)))
    assert free.plans[0].seconds <= result.plans[0].seconds * (1 + 1e-9)


def test_virtual_stages_of_equal_blocks_are_refused_where_an_end_holds_one() -> None:
    """The first block of this chain is cut together with what comes before it, so there is none to deal."""
    request = request_of("chain", cluster_of("cpu", 2), 8, pinned=Pinned(pipeline=2, virtual_stages=2))
    with refused(RequestError, "virtual_stages = 2", 1):
        search(replace(request, pinned=Pinned(pipeline=2, virtual_stages=2, even=True)))
    plan = search(request).plan  # unequal ones
    assert (plan.virtual_stages, sum(stage.blocks for stage in plan.stages)) == (2, 4)


@pytest.mark.parametrize(
    ("pinned", "words"),
    [
        (Pinned(pipeline=8), ("4 blocks, too few for pipeline = 8", "the nearest legal value is pipeline = 4")),
        (Pinned(micro_batch=1, micro_batches=2), ("micro_batch (samples)", "give one of them")),
        (Pinned(mesh=(8,), tensor=8), ("a mesh and degrees", "either")),
        (Pinned(zero=4), ("zero = 4", "0, 1, 2 and 3")),
        (Pinned(expert=2), ("expert = 2", "leave it at 1")),
        (Pinned(tensor=0), ("tensor = 0", "1 or more")),
    ],
)
def test_what_does_not_divide_is_named(pinned: Pinned, words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError) as caught:
        search(request_of("llama-4", cluster_of("h100-80gb", 8), 8, pinned=pinned))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_cannot_be_cut_is_named() -> None:
    with refused(RequestError, "residual-shared", 2, "pipeline = 1"):
        search(request_of("residual-shared", cluster_of("cpu", 2), 8, pinned=Pinned(pipeline=2)))


@pytest.mark.thorough
def test_an_infeasible_request_says_what_is_missing() -> None:
    roomy = cluster_of("cpu", 2)
    fitting = search(request_of("llama-4", roomy, 4))
    request = request_of("llama-4", small_memory(roomy, fitting.plan.prediction.peak_bytes / 40000), 4)
    assert not find_fitting(request)
    for asked in (request, replace(request, prune=False)):
        with refused(InfeasibleError, "llama-4", "2 x cpu", "KiB", "KiB", "KiB"):
            search(asked)


@pytest.mark.thorough
@pytest.mark.slow
def test_about_as_many_bytes_as_the_message_says_are_enough() -> None:
    cluster = cluster_of("h100-80gb", 8)
    request = request_of("llama8b", cluster, 16, precision="bf16", memory_limit=12e9, pinned=Pinned(mesh=(8,)))
    with pytest.raises(InfeasibleError) as caught:
        search(request)
    found = re.search(r"the leanest plan evaluated needs ([\d.]+) GiB", str(caught.value))
    assert found is not None
    needed = float(found[1]) * 2**30
    assert find_fitting(replace(request, memory_limit=1.1 * needed))
    assert not find_fitting(replace(request, memory_limit=0.9 * needed))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_advice_is_taken_from_searches_that_found_something() -> None:
    """Each change that is named makes the request fit, and half of the devices it names do not."""
    roomy = cluster_of("cpu", 2)
    request = request_of("llama-4", small_memory(roomy, 0.8 * least_bytes(2)), 4)
    assert not find_fitting(request)
    texts = [change.text for change in changes(request)]
    assert any("devices" in text for text in texts), texts
    wanted = next(int(text.split()[0]) for text in texts if "devices" in text)
    assert wanted > 2
    for devices, fits in ((wanted, True), (wanted // 2, False)):
        cluster = request.cluster.with_devices(devices)
        assert find_fitting(replace(request, cluster=cluster, global_batch=max(4, devices))) is fits


def least_bytes(devices: int) -> float:
    """The least that any configuration of a small Llama needs on so many devices."""
    found = []
    for configuration in configurations(template_of("llama-4"), devices, 4, Pinned()):
        case = make_case("llama-4", "cpu", configuration, 4)
        found.append(Evaluation(case.chain, replace(case.setting, capacity=1.0)).run().least)
    return min(found)


def test_the_space_covers_every_even_division_once() -> None:
    template = template_of("llama-4")
    found = list(configurations(template, 8, 6, Pinned(virtual_stages=0)))
    assert len(found) == len(set(found))
    expected = {
        (pipeline, 1, mesh, micro_batches)
        for pipeline in (1, 2, 4)
        for mesh in mesh_shapes(8 // pipeline)
        for micro_batches in (1, 2, 3, 6)
    }
    expected |= {(2, 2, mesh, micro_batches) for mesh in mesh_shapes(4) for micro_batches in (2, 6)}
    assert {(c.pipeline, c.virtual_stages, c.mesh, c.micro_batches) for c in found} == expected
    assert mesh_shapes(8) == ((8,), (2, 4), (4, 2))
    assert mesh_shapes(1) == ((),)


def test_progress_counts_what_was_evaluated() -> None:
    told: list[Progress] = []
    result = search(request_of("chain", cluster_of("cpu", 2), 4), told.append)
    assert [progress.done for progress in told] == sorted(progress.done for progress in told)
    seen = [progress for progress in told if progress.phase == "searching" and progress.done]
    assert [progress.done for progress in seen] == list(range(1, result.statistics.evaluated + 1))
    assert {progress.total for progress in told} == {result.statistics.configurations}
    assert seen[-1].best_seconds == pytest.approx(result.plan.prediction.objective_seconds, rel=1e-9)
    assert all(progress.bound_seconds <= progress.best_seconds for progress in seen)
    assert [p.best_seconds for p in seen] == sorted((p.best_seconds for p in seen), reverse=True)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_best_plans_come_in_order_and_differ() -> None:
    request = request_of("llama-4", cluster_of("h100-80gb", 4), 8, top=5)
    result = search(request)
    seconds = [ranked.seconds for ranked in result.plans]
    assert len(result.plans) == 5 == len({ranked.configuration for ranked in result.plans})
    assert seconds == sorted(seconds)
    every = search(replace(request, prune=False))
    assert every.statistics.evaluated == every.statistics.configurations
    for one, other in zip(seconds, (ranked.seconds for ranked in every.plans), strict=True):
        assert one <= other * (1 + 1e-9)  # a price that mattered elsewhere may lead to a better plan
    for ranked in result.plans:
        assert verify(ranked.plan, request.graph, request.batch, request.cluster).as_stated
        assert (ranked.plan.provenance.status == "optimal") == (result.bound_seconds >= ranked.bounded * (1 - 1e-9))
        gap = max(0.0, 1 - result.bound_seconds / ranked.seconds)
        assert ranked.plan.provenance.gap == pytest.approx(gap if gap > 1e-9 else 0.0, rel=0.01)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "batch"), [("llama-4", 8, 8), ("gpt-4-tied", 8, 32), ("residual-8", 4, 16)]
)
def test_the_fastest_by_its_schedule_of_what_is_close_is_found(model: str, devices: int, batch: int) -> None:
    """Every configuration planned alone, and ranked by hand."""
    request = request_of(model, cluster_of("h100-80gb", devices), batch, pinned=Pinned(schedule="1f1b"))
    alone = []
    for point in configurations(template_of(model), devices, batch, Pinned()):
        pinned = Pinned(pipeline=point.pipeline, mesh=point.mesh, micro_batches=point.micro_batches, schedule="1f1b")
        with suppress(InfeasibleError):
            alone.append(search(replace(request, pinned=pinned)).plans[0])
    alone.sort(key=lambda ranked: ranked.objective)
    close = [ranked for ranked in alone[:CONTENDERS] if ranked.objective < alone[0].objective * (1 + NEAR)]
    found = search(request)
    assert found.plans[0].seconds <= min(ranked.seconds for ranked in close) * (1 + 1e-9)
    assert found.plans[0].objective <= alone[0].objective * (1 + NEAR)
    assert found.bound_seconds <= alone[0].objective * (1 + 1e-9)


def at_least(count: int, seen: list[Progress]) -> bool:
    return bool(seen) and seen[-1].done >= count


@pytest.mark.slow
@pytest.mark.thorough
def test_a_stopped_search_returns_what_it_has() -> None:
    request = request_of("llama-4", cluster_of("h100-80gb", 8), 8, prune=False)
    whole = search(request)
    for allowed in (1, 2, 5):
        done: list[Progress] = []
        result = search(request, done.append, cancelled=partial(at_least, allowed, done))
        assert result.statistics.evaluated == allowed
        assert result.statistics.stopped
        assert result.bound_seconds <= whole.plans[0].objective * (1 + 1e-9)
        assert result.plans[0].seconds >= whole.plans[0].seconds * (1 - 1e-9)
    assert not whole.statistics.stopped


def test_a_search_without_time_finds_nothing_and_says_so() -> None:
    """On a clock that goes on by a second whenever it is read."""
    ticks = count()
    request = request_of("llama-4", cluster_of("h100-80gb", 8), 8, time_limit=0.0)
    with limited(clock=lambda: float(next(ticks))), refused(LimitError, "--time-limit", "llama-4", "0 s"):
        search(request)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["dynamic_programming", "recursive_programming"])
def test_wherever_a_search_is_stopped_what_it_says_holds(algorithm: str) -> None:
    """Stopped after more and more looks at the clock: first nothing is known, then a plan and a bound that are true."""
    asked = request_of("residual", cluster_of("cpu", 4), 8, update=PLAIN)
    best = search(asked).plans[0].objective
    request, looks, found = replace(asked, algorithm=algorithm), 300.0, list[SearchResult]()
    while not found or found[-1].statistics.stopped:
        ticks = count()
        with suppress(LimitError), limited(clock=lambda ticks=ticks: float(next(ticks))):  # type: ignore[misc]
            found.append(search(replace(request, time_limit=looks)))
            assert found[-1].bound_seconds <= best * (1 + 1e-9)
            assert found[-1].plans[0].objective >= best * (1 - 1e-9)
            assert verify(found[-1].plan, request.graph, request.batch, request.cluster).as_stated
        looks *= 1.5
    assert found[0].statistics.stopped
    assert found[0].statistics.evaluated < found[-1].statistics.evaluated


@pytest.mark.thorough
@pytest.mark.slow
def test_plans_slower_than_a_cutoff_are_of_no_interest() -> None:
    request = request_of("llama-4", cluster_of("h100-80gb", 4), 8)
    found = search(request)
    best = found.plans[0]
    assert search(request, cutoff=best.objective * 1.01).plans[0].seconds == best.seconds
    with pytest.raises(InfeasibleError):
        search(request, cutoff=found.bound_seconds * 0.99)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_another_process_finds_the_same() -> None:
    """Sets and dicts of another process have another order; scarce memory, so that many prices are tried."""
    script = (
        "import sys; from tests.contract.test_search_contract import scarce; from planner.plan.file import dump_plan;"
        "from planner.strategy_search.search import search; found = search(scarce(float(sys.argv[1])));"
        "sys.stdout.write(''.join(dump_plan(ranked.plan) for ranked in found.plans))"
    )
    roomy = scarce(None)
    reserved = roomy.cluster.device.reserved
    limit = reserved + 0.5 * (search(roomy).plan.prediction.peak_bytes - reserved)
    done = subprocess.run(
        [sys.executable, "-c", script, repr(limit)],
        env={"PYTHONHASHSEED": "4711", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "".join(dump_plan(ranked.plan) for ranked in search(scarce(limit)).plans)


def scarce(memory_limit: float | None) -> SearchRequest:
    return replace(request_of("llama-2", cluster_of("h100-80gb", 4), 8, top=2), memory_limit=memory_limit)


@pytest.mark.slow
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("memory", [60e3, 64e3, 68e3, 72e3])
def test_plans_settled_exactly_fit(memory: float) -> None:
    """Here prices of memory find nothing, and the exact solver has to count the interior of a recomputed block."""
    cluster = small_memory(cluster_of("h100-80gb", 8), memory)
    pinned = Pinned(recompute="selective", pipeline=1)
    try:
        found = search(request_of("residual", cluster, 4, pinned=pinned))
    except InfeasibleError:
        return
    assert found.plan.prediction.peak_bytes <= memory * (1 + 1e-9)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("model", "micro_batches"), [("llama-4", 1), ("gpt-4-tied", 1), ("residual-8", 2)])
def test_settling_the_slowest_rank_makes_no_step_longer(
    model: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where micro-batches are few, less once a step does not make up for more in each: so it is for the first of these,
    of whose slowest rank the solver finds another way to run. In the order of the objective: a plan that wins by its
    schedule may have a longer one than others could."""
    settling, settled = plan_maker.settle_and_certify, PlanMaker.settled
    offered, plans = list[bool](), list[tuple[Ranked, Ranked]]()

    def noted(request: Any, pipeline: Any, setting: Any, outcome: Outcome) -> Any:
        found = settling(request, pipeline, setting, outcome)
        offered.append(found[0] != outcome.ranks)
        return found

    def compared(self: PlanMaker, ranked: Ranked) -> Ranked:
        plans.append((ranked, settled(self, ranked)))
        return plans[-1][1]

    monkeypatch.setattr(plan_maker, "settle_and_certify", noted)
    monkeypatch.setattr(PlanMaker, "settled", compared)
    pinned = Pinned(pipeline=2, recompute="full", micro_batches=micro_batches, schedule="1f1b")
    found = search(request_of(model, launched_at_once(cluster_of("h100-80gb", 8)), 32, pinned=pinned))
    assert any(offered) or model != "llama-4"
    for before, after in plans:
        assert after.seconds <= before.seconds * (1 + 1e-9)
        assert after.objective <= before.objective * (1 + 1e-9)
    assert found.gap < 0.02
    assert found.plan.provenance.gap == pytest.approx(found.gap, rel=1e-2)


def test_a_heuristic_claims_no_bound_of_what_it_did_not_look_at() -> None:
    request = request_of("llama-4", cluster_of("cpu", 4), 64, pinned=Pinned(pipeline=4))
    limits = bounds(template_of("llama-4"), BATCH, request.cluster, request.precision, request.optimizer)
    space = configurations(template_of("llama-4"), 4, 64, request.pinned)
    least = min(limits.step_seconds(configuration, 4, 64, recompute=False) for configuration in space)
    looked: list[Progress] = []
    found = search(replace(request, algorithm="recursive_programming"), looked.append, lambda: bool(looked))
    assert found.statistics.stopped
    assert found.bound_seconds <= least * (1 + 1e-9)


@pytest.mark.thorough
def test_recursive_programming_tries_whole_batches() -> None:
    """All else is decided here, so that it must be as fast as the exact search."""
    request = request_of("llama-2", cluster_of("cpu", 4), 16, pinned=Pinned(data=4, zero=2, sequence_parallel=False))
    best = search(request).plan
    found = search(replace(request, algorithm="recursive_programming")).plan
    assert best.training.micro_batches == 1
    assert found.prediction.step_seconds <= best.prediction.step_seconds * (1 + 1e-9)


def test_virtual_stages_that_cannot_be_had_are_left_out_by_every_search() -> None:
    pinned = Pinned(pipeline=2, virtual_stages=0, micro_batches=4)
    request = request_of("aside", cluster_of("cpu", 4), 16, pinned=pinned)
    for algorithm in ("dynamic_programming", "recursive_programming"):
        assert search(replace(request, algorithm=algorithm)).plan.virtual_stages == 1


def test_a_heuristic_that_finds_nothing_proves_nothing() -> None:
    cluster = small_memory(cluster_of("h100-80gb", 2), 142000.0)
    request = request_of("llama-1", cluster, 8, algorithm="recursive_programming")
    with refused(InfeasibleError, "recursive_programming", "llama-1", "2 x h100-80gb", "dynamic_programming"):
        search(request)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"algorithm": "magic"}, ("magic",)),
        ({"objective": "speed"}, ("speed",)),
        ({"precision": "int8"}, ("int8",)),
        ({"top": 0}, ("top = 0",)),
        ({"time_limit": -1.0}, ("time_limit = -1.0",)),
        ({"memory_limit": 0.0}, ("memory_limit = 0.0",)),
        ({"pinned": Pinned(recompute="some")}, ("recompute", "some")),  # type: ignore[arg-type]
        ({"pinned": Pinned(mesh=(0,))}, ("mesh = (0,)", 1)),
        ({"pinned": Pinned(virtual_stages=-1)}, ("virtual_stages = -1",)),
    ],
)
def test_what_means_nothing_is_refused(options: dict[str, object], facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        search(request_of("llama-2", cluster_of("cpu", 2), 4, **options))


def test_no_reshape_is_kept() -> None:
    """Whether it copies depends on the device, so that a plan that kept it could be refused where it is to run."""
    for model in ("llama-4", "gpt-3"):
        found = search(request_of(model, cluster_of("cpu", 2), 8, pinned=Pinned(recompute="selective"))).plan
        kept = [name for group in found.groups for name in group.kept]
        assert kept
        assert not any(name.endswith("/flatten") for name in kept)


@pytest.mark.thorough
def test_a_certificate_is_of_the_plan_that_is_returned() -> None:
    """Of plans whose gradients go one by one: what buckets save is no part of the problem that is certified."""
    pinned = Pinned(pipeline=1, mesh=(4,), tensor_overlap=1)
    cluster = launched_at_once(cluster_of("h100-80gb", 4))
    roomy = request_of("llama-1", cluster, 16, pinned=pinned, update=PLAIN)
    reserved = roomy.cluster.device.reserved
    peak = search(roomy).plan.prediction.peak_bytes
    for share in (0.7, 0.5):
        limited = replace(roomy, algorithm="ilp", memory_limit=reserved + share * (peak - reserved))
        best = search(limited).plans[0]
        assert best.certificate is not None
        assert best.certificate.busy_seconds == pytest.approx(best.objective, rel=1e-9)


@pytest.mark.thorough
def test_a_tolerance_leaves_out_what_is_little_faster() -> None:
    """With one, no plan is faster than what is found by more than that, and less is evaluated."""
    request = request_of("residual", with_own_network(cluster_of("cpu", 2)), 16)
    fine, coarse = search(request), search(replace(request, tolerance=0.1))
    assert coarse.statistics.evaluated < fine.statistics.evaluated
    least = min(plan.objective for plan in fine.plans)
    assert coarse.plans[0].objective * (1 - 0.1) <= least
    assert coarse.bound_seconds <= least
    with pytest.raises(InfeasibleError):
        search(replace(request, tolerance=0.1), cutoff=coarse.bound_seconds)


@pytest.mark.thorough
@pytest.mark.slow
def test_searches_for_other_batches_and_memory_share_tables_and_find_the_same() -> None:
    request, shared = request_of("residual", cluster_of("cpu", 2), 16), Shared()
    search(request, shared=shared)
    roomy = request.cluster.device.memory * 2
    for other in (
        replace(request, global_batch=32),
        replace(request, cluster=replace(request.cluster, device=replace(request.cluster.device, memory=roomy))),
    ):
        assert search(other, shared=shared).plan == search(other).plan
