"""The bound by work alone holds: for plans of searches, and for every strategy of every operator of small models."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hardware_profiles import Cluster
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.plan.binding.bind import prepare
from planner.plan.compare.least_work import OPTIMIZER, LeastWork, least_work
from planner.pricing.operator_price import price_operator
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rule import Strategy
from planner.sharding.rules import rule_of
from tests.long_lists import first
from tests.unit.plan.plans import BY_HAND, NAMES, plan_named
from tests.unit.search.cases import BATCH, cluster_of, traced


def bound_of(name: str) -> LeastWork:
    plan = plan_named(name)
    found = least_work(
        plan, traced(plan.model.reference), BATCH, cluster_of(plan.cluster.profile, plan.cluster.devices)
    )
    assert isinstance(found, LeastWork)
    return found


@pytest.mark.parametrize("name", first(4, [BY_HAND, "two axes", "pipeline", "no blocks", *sorted(NAMES)[2:]]))
def test_no_plan_of_a_search_is_below_it(name: str) -> None:
    plan, found = plan_named(name), bound_of(name)
    step = plan.prediction.step_seconds
    assert 0 < found.seconds <= min(step, plan.prediction.objective_seconds) * (1 + 1e-9)
    assert found.seconds == math.fsum(seconds for _, seconds in found.terms)
    assert OPTIMIZER in dict(found.terms)
    assert not found.contradicts(step)
    assert found.gap(step) == 1 - found.seconds / step >= 0
    assert found.contradicts(found.seconds * 0.999)


def test_it_reads_nothing_of_a_plan_but_its_job() -> None:
    """The same for every plan of a job, whatever it says of itself."""
    plan, cluster = plan_named("two axes"), cluster_of("h100-80gb", 16)
    other = replace(
        plan,
        mesh=build_mesh(cluster, (4, 4)),
        groups=(),
        stages=(),
        prediction=replace(plan.prediction, step_seconds=0.0),
    )
    found = [least_work(one, traced("llama-4"), BATCH, cluster) for one in (plan, other)]
    assert found[0] == found[1]


MODELS = ("llama-2", "mixture", "gpt-1", "chain", "wide", "llama70b-4-layers")


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize("profile", ["h100-80gb", "ascend-910b-64gb"])
@pytest.mark.parametrize("model", first(2, list(MODELS)))
def test_no_split_of_an_operator_is_more_than_as_many_times_as_fast(model: str, profile: str) -> None:
    """n pieces take no less than the whole, with the batch whole or in parts: what the bound stands on."""
    whole, _ = prepare(traced(model))
    whole = rescale_batch(whole, BATCH, 32)
    for sizes in ((2,), (8,), (2, 4), (2, 2, 2)):
        for parts in (1, 4, 16):
            check_pieces(whole, rescale_batch(whole, 32, 32 // parts), sizes, parts, profile)


def check_pieces(whole: OperatorGraph, part: OperatorGraph, sizes: tuple[int, ...], parts: int, profile: str) -> None:
    cluster = cluster_of(profile, 8)
    alone, cut = build_mesh(cluster, ()), build_mesh(cluster, sizes)
    seen = set[tuple[int, int]]()
    for op, piece in zip(whole.operators, part.operators, strict=True):
        pair = id(rule_of(whole, op)), id(rule_of(part, piece))
        if pair not in seen:
            seen.add(pair)
            split = legal_strategies(rule_of(part, piece), cut, rings=True)
            pieces = math.prod(sizes) * parts * least_seconds(part, piece, split, cut, cluster)
            together = least_seconds(whole, op, ((),), alone, cluster)
            assert pieces >= together * (1 - 1e-9), (op.name, sizes, parts, pieces, together)


def least_seconds(
    graph: OperatorGraph, op: Operator, strategies: Sequence[Strategy], mesh: Mesh, cluster: Cluster
) -> float:
    """The least that the kernels of an operator take under any of some strategies, forward and backward."""
    types = (
        [graph.types[name] for name in op.operands],
        [graph.types[name] for name in op.results if name is not None],
    )
    graded = [name in graph.differentiable for name in op.operands]
    found = price_operator(rule_of(graph, op), strategies, *types, graded, mesh, cluster)
    backward = found.backward - found.late[1] if any(graded) else 0.0
    return float((found.forward - found.late[0] + backward).min())
