"""Which layers are in fp8: what is decided by name, and what the search makes of the others."""

import math
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from torch import nn

import planner
from hardware_profiles import load_profile, load_software
from planner.engines.spaces import SPACES
from planner.errors import LimitError, RequestError
from planner.export.pytorch import torchtitan_writing
from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import ALL_LAYERS, GATHERED, NO_FP8, Fp8, experts_of, experts_recipe, recipe_of
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.binding.bind import bind, prepare
from planner.plan.compare.verify import verify
from planner.plan.plan import ModelReference
from planner.report.command import command_of
from planner.sharding.mesh import build_mesh
from planner.sharding.update import PLAIN
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.refinement import fp8_ends
from planner.strategy_search.refinement.fp8_ends import ends_of, with_fp8_ends
from planner.strategy_search.request.folding import fold
from planner.strategy_search.request.fp8_layers import with_fp8_layers
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.result import SearchResult
from planner.strategy_search.search import least_work, search
from planner.strategy_search.tables.cost_table import OperatorTable
from planner.strategy_search.tables.table_builder import TableBuilder
from planner.strategy_search.within import best_plans, within
from tests.refusals import refused
from tests.unit.plan.plans import plan_named
from tests.unit.search.cases import BATCH, cluster_of, request_of, traced

WITH_FP8 = (
    "b200-180gb", "b300-288gb", "gb200-186gb", "gb300-288gb", "gh200-96gb", "h100-80gb", "h100-94gb", "h100-96gb",
    "h200-141gb", "h800-80gb",
)  # fmt: skip
TENSORWISE = Fp8(recipe="tensorwise")
ROWS = 4096


class Uneven(nn.Module):
    """Wide and narrow products; all may be in fp8 but the last, and the first, through which no gradient flows."""

    def __init__(self) -> None:
        super().__init__()
        widths = (4096, 4096, 8192, 256, 8192, 256)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(widths))

    def forward(self, x_BI: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x_BI = torch.relu(layer(x_BI))
        return x_BI.sum()


ONCE = Pinned(pipeline=1, micro_batches=1, recompute="none")


@cache
def uneven() -> OperatorGraph:
    with torch.device("meta"):
        return trace(Uneven().to(torch.bfloat16), (torch.zeros(ROWS, 4096, dtype=torch.bfloat16),))


def of_uneven(devices: int, **options: object) -> SearchRequest:
    graph = uneven()
    reference = ModelReference(
        reference="uneven",
        sequence_length=None,
        parameters=graph.parameter_count(),
        fingerprint=graph.fingerprint(),
    )
    return SearchRequest(
        graph=graph, batch=ROWS, model=reference, cluster=cluster_of("h100-80gb", devices), global_batch=8 * ROWS,
        precision="bf16", **options,  # type: ignore[arg-type]
    )  # fmt: skip


def seconds(result: SearchResult) -> float:
    return result.plan.prediction.step_seconds


def opened(request: SearchRequest) -> SearchRequest:
    return with_fp8_layers(replace(request, fp8_layers=()))


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("devices", [1, 2, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_search_finds_the_best_of_all_subsets(devices: int, recipe: str) -> None:
    """Brute force: each subset of the three layers that could be in fp8, decided by name."""
    graph, fp8 = uneven(), Fp8(recipe=recipe)
    names = [parameter.name for parameter in graph.parameters][1:-1]
    subsets = chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))
    decided = [NO_FP8 if set(some) == set(names) else replace(fp8, left_out=some) for some in subsets]
    best = min(seconds(search(of_uneven(devices, fp8=one))) for one in decided)
    free = search(of_uneven(devices, fp8=fp8, fp8_layers=()))  # without its ends
    assert seconds(free) == pytest.approx(best, rel=1e-9)
    assert free.bound_seconds <= best * (1 + 1e-9)
    of_plan = free.plan.training.fp8
    assert of_plan in decided
    if devices == 1 and recipe == "tensorwise":
        assert of_plan.left_out == ("layers.2.weight", "layers.3.weight")  # 256 columns, or as many inputs, do not pay


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("profile", "pinned"),
    [
        *(pytest.param(profile, FREE, marks=pytest.mark.slow) for profile in WITH_FP8),
        *(
            pytest.param("h100-80gb", pinned, marks=pytest.mark.slow)
            for pinned in (Pinned(tensor=4), Pinned(tensor=2, pipeline=2), Pinned(recompute="full"))
        ),
    ],
)
def test_a_free_search_is_as_good_as_all_layers_in_fp8_and_as_none(profile: str, pinned: Pinned) -> None:
    asked = request_of("llama70b-4-layers", cluster_of(profile, 8), 16, precision="bf16", fp8=TENSORWISE, pinned=pinned)
    free = opened(asked)
    found = best_plans(free)
    ends = [search(end) for end in ends_of(free)]
    assert seconds(found) <= min(map(seconds, ends)) * (1 + 1e-9)
    assert found.bound_seconds <= min(end.plans[0].bounded for end in ends) * (1 + 1e-9)
    plan = found.plan
    assert not verify(plan, asked.graph, BATCH, asked.cluster).remarks


def test_products_overlap_with_tensor_parallelism_or_are_in_fp8() -> None:
    """Layers in fp8 cover no collectives; on tensor parallel devices with fast links that decides."""
    graph = traced("llama70b-4-layers")
    cluster, pinned = cluster_of("h100-80gb", 8), Pinned(tensor=8, interleave=1)
    asked = request_of("llama70b-4-layers", cluster, 16, precision="bf16", fp8=TENSORWISE, pinned=pinned, update=PLAIN)
    found = best_plans(opened(asked))
    products = [op for op in bind(found.plan, graph, BATCH).graph.operators if recipe_of(op) is not None]
    assert seconds(found) < 0.9 * seconds(search(asked))
    assert len(products) < 4 * 7


@pytest.mark.thorough
@pytest.mark.slow
def test_blocks_of_a_kind_are_alike() -> None:
    asked = request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 16, precision="bf16", fp8=TENSORWISE)
    plan = best_plans(opened(asked)).plan
    assert plan.training.fp8.left_out
    assert all(pattern.startswith("model.layers.*.") for pattern in plan.training.fp8.left_out)


@pytest.mark.thorough
def test_where_fp8_pays_nowhere_the_plan_has_none() -> None:
    asked = request_of("llama-4", cluster_of("h100-80gb", 2), 4, precision="bf16", fp8=TENSORWISE)
    assert best_plans(opened(asked)).plan.training.fp8 == NO_FP8


def test_layers_that_are_meant_are_in_fp8_whatever_it_takes() -> None:
    asked = request_of("llama-4", cluster_of("h100-80gb", 2), 4, precision="bf16", fp8=TENSORWISE, update=PLAIN)
    asked = replace(asked, pinned=ONCE)
    found = best_plans(with_fp8_layers(replace(asked, fp8_layers=("*.up_proj.weight",)))).plan.training.fp8
    assert found.left_out
    assert not any("up_proj" in pattern for pattern in found.left_out)


@pytest.mark.thorough
def test_layers_of_delayed_scales_that_are_left_out_have_no_histories() -> None:
    asked = request_of("llama-4", cluster_of("h100-80gb", 2), 4, precision="bf16", fp8=Fp8(recipe="delayed"))
    layers = ("*.up_proj.weight", "*.q_proj.weight")
    plan = best_plans(with_fp8_layers(replace(asked, fp8_layers=layers))).plan
    found = bind(plan, asked.graph, BATCH)
    assert {op.operands[1].rsplit(".", 2)[1] for op in found.graph.operators if recipe_of(op)} == {"up_proj", "q_proj"}
    assert not verify(plan, asked.graph, BATCH, asked.cluster).remarks


@pytest.mark.parametrize(
    ("layers", "left_out", "said"),
    [
        (("*.nothing",), (), ("fp8_layers", "*.nothing")),
        (("*.up_proj.weight",), ("*.0.mlp.*",), ("fp8_layers and fp8_left_out", "model.layers.0.mlp.up_proj.weight")),
    ],
)
def test_layers_are_refused(layers: tuple[str, ...], left_out: tuple[str, ...], said: tuple[str, ...]) -> None:
    fp8 = replace(TENSORWISE, left_out=left_out)
    asked = request_of("llama-4", cluster_of("h100-80gb", 2), 4, precision="bf16", fp8=fp8)
    with refused(RequestError, *said):
        with_fp8_layers(replace(asked, fp8_layers=layers))


@pytest.mark.parametrize("layers", [ALL_LAYERS, ("*.mlp.*",)])
def test_layers_in_fp8_without_a_recipe_are_refused(layers: tuple[str, ...]) -> None:
    with refused(RequestError, "fp8_layers", layers[0], "name a recipe"):
        planner.search("llama-tiny", devices=2, fp8_layers=layers)


def test_lines_of_32_are_refused_where_products_in_fp8_have_none() -> None:
    asked = request_of("llama-4", load_profile("h100-80gb").with_devices(2), 4, fp8=Fp8(recipe="mxfp8"))
    with pytest.raises(RequestError, match=r"mxfp8: NVIDIA H100.*Blackwell.*take tensorwise, rowwise.*blockwise"):
        opened(asked)


def test_blocks_of_128_are_refused_where_torch_would_multiply_them_in_fp32() -> None:
    """On Blackwell, by this runtime: stacks have kernels of their own."""
    b200 = load_profile("b200-180gb").with_devices(2)
    with pytest.raises(RequestError, match=r"blockwise: torch has.*Hopper alone; on NVIDIA B200.*fp32; take mxfp8"):
        opened(request_of("llama-4", b200, 4, fp8=Fp8(recipe="blockwise")))
    assert opened(request_of("llama-4", b200.with_software(load_software("hai-llm")), 4, fp8=Fp8(recipe="blockwise")))


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize("profile", ["cpu", "a100-80gb"])
@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_devices_without_products_in_fp8_take_all_layers(profile: str, recipe: str) -> None:
    """Who asks for fp8 there wants its numerics."""
    asked = request_of("llama-4", load_profile(profile).with_devices(2), 4, fp8=Fp8(recipe=recipe))
    assert opened(asked) == replace(asked, fp8_layers=ALL_LAYERS)


@pytest.mark.cases(0, 1)
@pytest.mark.slow
@pytest.mark.parametrize("recipe", GATHERED)
def test_weights_are_gathered_in_fp8_where_that_pays(recipe: str) -> None:
    """Layers of which nobody said how they gather: cast once on every piece, half as many bytes are sent."""
    fp8 = Fp8(recipe=recipe)
    asked = request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 16, precision="bf16", fp8=fp8)
    found = best_plans(opened(asked))
    assert found.plan.training.fp8.gathered
    without = best_plans(replace(opened(asked), update=replace(asked.update, gathers="each")))
    assert seconds(found) < seconds(without)
    assert not without.plan.training.fp8.gathered
    assert not verify(found.plan, asked.graph, BATCH, asked.cluster).remarks


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("blockwise", marks=pytest.mark.thorough)])
def test_weights_in_fp8_leave_tables_as_the_prediction_has_them(recipe: str) -> None:
    fp8 = Fp8(recipe=recipe, gathered=True)
    asked = request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 16, precision="bf16", fp8=fp8)
    for recompute in ("none", "full"):
        found = search(replace(asked, pinned=Pinned(pipeline=1, recompute=recompute, interleave=1)))
        assert found.gap < 0.02
        assert found.bound_seconds <= found.plans[0].bounded * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fp8": Fp8(recipe="rowwise", gathered=True)}, ("fp8_gathered", "fp8 = tensorwise or delayed or blockwise")),
        ({"fp8": Fp8(recipe="mxfp8", gathered=True)}, ("fp8_gathered", "fp8 = tensorwise")),
        ({"fp8": Fp8(recipe="delayed", gathered=True), "gathers": "each"}, ("fp8_gathered", "gathers = each")),
    ],
)
def test_weights_that_cannot_be_gathered_in_fp8_are_refused(
    changes: dict[str, Fp8 | str], said: tuple[str, ...]
) -> None:
    with refused(RequestError, *said):
        asked = request_of("llama-4", cluster_of("h100-80gb", 2), 4, fp8=changes["fp8"])
        search(replace(asked, update=replace(asked.update, gathers=str(changes.get("gathers", "auto")))))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_engine_gathers_weights_in_fp8_where_that_pays_and_it_can() -> None:
    """torchtitan does under scales of tensors (`enable_fsdp_float8_all_gather`), and no other engine is told of it."""
    space = SPACES["torchtitan"]
    asked = request_of("llama70b-4-layers", cluster_of("h100-80gb", 8), 16, precision="bf16", fp8=TENSORWISE)
    found = best_plans(replace(opened(asked), space=space))
    assert (found.plan.training.fp8.gathered, found.plan.training.update.gathers) == (True, "block")
    never = best_plans(replace(opened(asked), space=replace(space, gathers=())))
    assert not never.plan.training.fp8.gathered
    assert seconds(found) < seconds(never)
    assert space.gathers == torchtitan_writing.GATHERED
    with refused(RequestError, "--for megatron", "fp8_gathered", "Megatron-LM is not told of that"):
        within(SPACES["megatron"], replace(asked, fp8=replace(TENSORWISE, gathered=True)))


def test_interleaved_micro_batches_gather_no_weights_in_fp8() -> None:
    """Operators take turns there, and what the search may do is as without; asked for, it is refused."""
    fp8 = Fp8(recipe="delayed")
    asked = opened(
        request_of("llama-4", cluster_of("h100-80gb", 2), 4, fp8=fp8, pinned=Pinned(pipeline=1, interleave=2))
    )
    assert not best_plans(asked).plan.training.fp8.gathered
    with refused(RequestError, "fp8_gathered", "2 micro-batches take turns", "set interleave to 1"):
        best_plans(replace(asked, fp8=replace(fp8, gathered=True)))


def test_the_command_of_a_plan_asks_for_its_scales() -> None:
    plan = plan_named("two axes")
    fp8 = Fp8(recipe="delayed", history=16, margin=1)
    command = command_of(replace(plan, training=replace(plan.training, fp8=fp8)))
    assert "--fp8 delayed --fp8-history 16 --fp8-margin 1" in command
    left_out = command_of(replace(plan, training=replace(plan.training, fp8=replace(fp8, left_out=("*.mlp.*",)))))
    assert "--fp8-layers '*' --fp8-left-out '*.mlp.*'" in left_out
    assert "--fp8-history" not in command_of(replace(plan, training=replace(plan.training, fp8=TENSORWISE)))


@pytest.mark.thorough
@pytest.mark.slow
def test_the_fastest_plans_are_of_different_configurations() -> None:
    """All ways to have layers in fp8 are searched, and a configuration may be the best of each."""
    asked = request_of("llama-4", cluster_of("h100-80gb", 2), 8, precision="bf16", fp8=Fp8(recipe="delayed"), top=3)
    plans = best_plans(opened(asked)).plans
    assert len({one.configuration for one in plans}) == len(plans) == 3
    assert [one.seconds for one in plans] == sorted(one.seconds for one in plans)


def test_where_the_time_ends_before_a_plan_in_a_v_is_bounded_another_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is known of such plans then, which is no reason to end without any."""
    asked = opened(request_of("llama-4", cluster_of("h100-80gb", 2), 8, precision="bf16", fp8=TENSORWISE, top=2))
    found = search(replace(asked, fp8_layers=()))
    slower, faster = sorted(found.plans, key=lambda one: -one.seconds)
    assert slower.configuration != faster.configuration

    def solve(one: SearchRequest, *_: object) -> SearchResult:
        return replace(found, plans=(faster,) if one in ends_of(replace(asked, top=one.top)) else (slower,))

    def ended(*_: object) -> float:
        raise LimitError("no time is left")

    for top in (1, 2):
        whole = with_fp8_ends(replace(asked, top=top), solve, math.inf)
        assert [one.seconds for one in whole.plans] == [faster.seconds, slower.seconds][:top]
        assert not whole.statistics.stopped
    monkeypatch.setattr(fp8_ends, "in_a_v", lambda ranked: ranked is faster)
    monkeypatch.setattr(fp8_ends, "bound_of_like", ended)
    cut = with_fp8_ends(asked, solve, math.inf)
    assert [one.seconds for one in cut.plans] == [slower.seconds]
    assert cut.bound_seconds == found.bound_seconds
    assert cut.statistics.stopped


def test_a_search_that_the_time_left_out_is_said_and_bounds_no_plan() -> None:
    """Weights gathered in fp8 are part of what is asked for: of plans with them only the work is known then."""
    asked = opened(request_of("llama-4", cluster_of("h100-80gb", 2), 8, precision="bf16", fp8=TENSORWISE))
    found = search(replace(asked, fp8_layers=()))

    def without(*left_out: bool) -> SearchResult:
        def solve(one: SearchRequest, *_: object) -> SearchResult:
            if (one in ends_of(asked), one.fp8.gathered) == left_out:
                raise LimitError("no time is left")
            return found

        return with_fp8_ends(asked, solve, math.inf)

    gathered, end = without(False, True), without(True, False)
    assert gathered.statistics.stopped
    assert end.statistics.stopped
    assert gathered.bound_seconds == gathered.usual_seconds == least_work(asked, Shared()) < found.bound_seconds
    assert end.bound_seconds == found.bound_seconds


OF_EXPERTS = ("*.experts.*", "*.gate_proj.weight", "*.down_proj.weight", "*.q_proj.weight")
"""Patterns of what may be in fp8 in the test below, of a model with experts beside a shared one."""
EXCHANGED = Pinned(pipeline=1, context=1, tensor=1, expert=4)


@pytest.mark.cases(1, 2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "pinned"), [(1, ONCE), (2, Pinned()), (4, EXCHANGED)], ids=["alone", "pair", "exchanged"]
)
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts_are_in_fp8_where_that_pays(devices: int, pinned: Pinned, recipe: str) -> None:
    """Brute force: experts and three linear layers, each in fp8 and without, decided by name; also where the exchange
    of experts travels under other work."""
    left = ("*.k_proj.weight", "*.v_proj.weight", "*.o_proj.weight", "*.up_proj.weight")

    def asked(fp8: Fp8, **options: object) -> SearchRequest:
        cluster = cluster_of("h100-80gb", devices)
        return request_of("few-experts", cluster, 4 * devices, precision="bf16", fp8=fp8, pinned=pinned, **options)

    subsets = chain.from_iterable(combinations(OF_EXPERTS, count) for count in range(len(OF_EXPERTS) + 1))
    best, ways = math.inf, 0
    for some in subsets:
        experts = OF_EXPERTS[0] not in some
        out = tuple(pattern for pattern in some if pattern != OF_EXPERTS[0])
        fp8 = Fp8(recipe=recipe, left_out=(*left, *out), experts=experts)
        best, ways = min(best, seconds(search(asked(NO_FP8 if some == OF_EXPERTS else fp8)))), ways + 1
    assert ways == 16
    free = search(asked(Fp8(recipe=recipe, left_out=left, experts=True), fp8_layers=()))
    assert seconds(free) == pytest.approx(best, rel=1e-9)
    assert free.bound_seconds <= best * (1 + 1e-9)
    assert not verify(free.plan, traced("few-experts"), BATCH, asked(NO_FP8).cluster).remarks


@pytest.mark.cases(1)
@pytest.mark.parametrize("left_out", [("*.experts.*",), ("*.mlp.*",)])
def test_experts_that_are_left_out_by_name_are_not_in_fp8(left_out: tuple[str, ...]) -> None:
    fp8 = Fp8(recipe="tensorwise", left_out=left_out, experts=True)
    asked = request_of("few-experts", cluster_of("h100-80gb", 1), 4, precision="bf16", fp8=fp8, pinned=ONCE)
    for layers in ((), ALL_LAYERS):
        plan = best_plans(with_fp8_layers(replace(asked, fp8_layers=layers))).plan
        graph = bind(plan, traced("few-experts"), BATCH).graph
        assert not any(experts_recipe(graph.operators[at]) for at in experts_of(graph))
        assert not verify(plan, traced("few-experts"), BATCH, asked.cluster).remarks
        assert layers == () or any(recipe_of(op) for op in graph.operators)


def test_experts_that_are_meant_are_in_fp8_whatever_it_takes() -> None:
    fp8 = Fp8(recipe="tensorwise", experts=True)
    asked = request_of("few-experts", cluster_of("h100-80gb", 1), 4, precision="bf16", fp8=fp8, pinned=ONCE)
    free, meant = (
        best_plans(with_fp8_layers(replace(asked, fp8_layers=layers))).plan for layers in ((), ("*.experts.*",))
    )
    assert not free.training.fp8.experts
    assert meant.training.fp8.experts
    assert free.prediction.step_seconds < meant.prediction.step_seconds


def test_where_nothing_is_left_in_fp8_that_is_said() -> None:
    fp8 = Fp8(recipe="tensorwise", left_out=("*_proj.weight", "*.experts.*"), experts=True)
    with refused(RequestError, "fp8_left_out", "no linear layer and no experts"):
        prepare(traced("few-experts"), fp8=fp8)
    graph, _ = prepare(traced("few-experts"), fp8=replace(fp8, left_out=("*_proj.weight",)))
    assert all(experts_recipe(graph.operators[at]) for at in experts_of(graph))


def test_experts_cover_their_exchange_as_they_compute() -> None:
    """Candidates of experts in fp8 have the prices of these, the others behind them those of experts without it, also
    of the gradients of matrices that the exchange travels under."""
    fp8 = Fp8(recipe="tensorwise", left_out=("*_proj.weight",), experts=True)
    cluster = cluster_of("h100-80gb", 32)
    building = TableBuilder(
        mesh=build_mesh(cluster, (4, 8)),
        cluster=cluster,
        precision="bf16",
        optimizer="adamw",
        exchanged=True,
        alike=True,
    )

    def table(fp8: Fp8, *, either: bool = False) -> OperatorTable:
        template = fold(*prepare(traced("few-experts"), fp8=fp8))
        (at,) = experts_of(template.graph)
        return building.build(replace(template, either=frozenset({at} if either else ()))).operators[at]

    both, narrow, wide = table(fp8, either=True), table(fp8), table(NO_FP8)
    assert both.candidates.narrow == len(narrow.candidates.strategies)
    for name in ("forward", "backward", "inner_forward", "inner_backward"):
        prices = [getattr(one.prices, name) for one in (narrow, wide)]
        np.testing.assert_array_equal(getattr(both.prices, name), np.concatenate(prices), name)
    assert (narrow.prices.inner_backward != wide.prices.inner_backward).any()
