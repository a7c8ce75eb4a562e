"""Weights that hold several matrices are whole or apart, whichever is better."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.graph.fp8 import is_meant
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.graph.trace import trace
from planner.plan.binding.apart import graph_of
from planner.plan.binding.bind import bind
from planner.sharding.buckets import bucket_place
from planner.strategy_search import objectives
from planner.strategy_search.finalists.proofs import Ranked
from planner.strategy_search.job import given_job, machine_from
from planner.strategy_search.refinement.unequal import with_unequal_stages
from planner.strategy_search.request.shards_from import listed_strategies
from planner.strategy_search.result import SearchResult
from planner.strategy_search.variants import variants_of
from planner.strategy_search.within import best_plans

WIDE, NARROW, SAMPLES = 4096, 256, 2


class Gated(nn.Module):
    """MLPs with gate and up in one layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.both = nn.ModuleList(nn.Linear(hidden, 8 * hidden, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * hidden, hidden, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for both, down in zip(self.both, self.down, strict=True):
            gate, up = both(x).chunk(2, dim=-1)
            x = x + down(F.silu(gate) * up)
        return x.mean()


def example(hidden: int) -> tuple[nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Gated(hidden).bfloat16(), (torch.randn(SAMPLES, 512, hidden).bfloat16(),)


MODULE, ARGS = example(WIDE)
GRAPH = trace(MODULE, ARGS)
APART = with_fused_weights_apart(GRAPH)


def plan_of(hidden: int, degree: str) -> planner.Plan:
    module, args = example(hidden)
    return planner.search(module, "h100-80gb", args=args, devices=4, global_batch=8, pinned={degree: 4}).plan


@pytest.fixture(scope="module")
def divided() -> planner.Plan:
    return plan_of(WIDE, "tensor")


def test_tensor_parallelism_takes_weights_apart(divided: planner.Plan) -> None:
    assert divided.model.fingerprint == APART.fingerprint()
    assert bind(divided, GRAPH, SAMPLES).whole.cuts == APART.cuts  # whoever traced the model knows which graph is meant


def test_small_products_stay_one_where_nothing_divides_them() -> None:
    plan, graph = plan_of(NARROW, "data"), trace(*example(NARROW))
    assert plan.model.fingerprint == graph.fingerprint()
    assert graph_of(plan, graph) is graph


def test_both_are_tried_with_a_fingerprint_of_their_own() -> None:
    request = given_job(MODULE, machine_from("h100-80gb", devices=4), args=ARGS, global_batch=8).request()
    whole, apart = variants_of(request)
    assert whole is request
    assert apart.graph.cuts
    assert apart.model.fingerprint == apart.graph.fingerprint() != whole.model.fingerprint
    assert [*variants_of(apart)] == [apart]


def test_apart_is_searched_for_plans_that_beat_whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are none, nothing is refined around the plan that is known."""
    rivals, refined = list[Ranked | None](), list[SearchResult]()

    def noted(*asked: Any) -> SearchResult:
        rivals.append(asked[-1])
        return best_plans(*asked)

    def refining(request: Any, found: SearchResult, *others: Any) -> SearchResult:
        refined.append(found)
        return with_unequal_stages(request, found, *others)

    monkeypatch.setattr(objectives, "best_plans", noted)
    monkeypatch.setattr(objectives, "with_unequal_stages", refining)
    plan = plan_of(NARROW, "data")
    assert len(rivals) == 2
    assert rivals[0] is None
    assert rivals[1] is not None
    assert [one.plan.model.fingerprint for one in refined] == [plan.model.fingerprint]
    rivals.clear()
    refined.clear()
    plan = plan_of(WIDE, "tensor")
    assert rivals[1] is not None
    assert [one.plan.model.fingerprint for one in refined] == [GRAPH.fingerprint(), plan.model.fingerprint]


def test_names_of_weights_mean_their_parts() -> None:
    """What is decided for a weight holds whether a plan has it whole or apart."""
    buckets = (("both.0.weight", 0), ("both.1.weight", 1))
    update = planner.Update(local_parameters=("both.*.weight",), buckets=buckets)
    job = given_job(MODULE, machine_from("h100-80gb", devices=4), args=ARGS, global_batch=8)
    _, apart = variants_of(replace(job.request(), update=update))
    parts = sorted(apart.graph.cuts)
    assert [name for name in sorted(apart.graph.parameter_names) if apart.update.is_local(name)] == parts
    assert [bucket_place(name, buckets, 0) for name in parts] == [0, 0, 1, 1]
    products = [apart.graph.operators[apart.graph.consumers[name][0]] for name in parts]
    assert [is_meant(op, ["both.0.weight"]) for op in products] == [True, True, False, False]


def test_a_plan_of_a_changed_model_is_compared_with_the_graph_that_it_means(divided: planner.Plan) -> None:
    changed = replace(divided, model=replace(divided.model, fingerprint="sha256:" + "0" * 64))
    assert graph_of(changed, GRAPH) is APART


def test_strategies_of_parts_are_taken_from_a_plan(divided: planner.Plan) -> None:
    taken = listed_strategies(divided, "both.0/*", GRAPH)
    assert len(taken) == 2
    assert {APART.operators[at].name for name in APART.cuts for at in APART.consumers[name]} >= taken.keys()


class Latent(nn.Module):
    """A layer whose parts are normalised, as the latent of MLA is, before others split what they make."""

    def __init__(self, normed: tuple[bool, bool]) -> None:
        super().__init__()
        self.both, self.out, self.normed = nn.Linear(64, 128, bias=False), nn.Linear(64, 64), normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.both(x).chunk(2, dim=-1)
        first, second = (
            F.rms_norm(part, (64,)) if normed else part for part, normed in zip(parts, self.normed, strict=True)
        )
        return self.out(F.silu(first) * second).mean()


@pytest.mark.parametrize("normed", [(True, True), (True, False), (False, False)])
def test_weights_that_no_operator_splits_further_are_not_tried_apart(normed: tuple[bool, bool]) -> None:
    args = (torch.randn(8, 64),)
    request = given_job(Latent(normed), machine_from("h100-80gb", devices=4), args=args, global_batch=8).request()
    assert with_fused_weights_apart(request.graph).cuts
    assert len([*variants_of(request)]) == (1 if all(normed) else 2)
