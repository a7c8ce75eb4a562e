"""Attention along a split sequence: keys and values come round to the queries."""

from dataclasses import replace
from typing import Any

import pytest

import planner
from costmodels import AttentionShape, attention_time
from planner.errors import InfeasibleError, RequestError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.plan.layout.roles import roles
from planner.pricing import price_operator
from planner.pricing.inner_messages import inner_messages
from planner.pricing.message import message_seconds
from planner.sharding.legality import legal_strategies, strategy_fault
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import Rule, derive_layouts, named_strategy, strategy_names
from planner.sharding.rules import RULES
from planner.strategy_search.request.configurations import configurations
from planner.strategy_search.request.space import ContextBy, Pinned
from planner.strategy_search.search import search
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, request_of, template_of

OP = "aten.scaled_dot_product_attention.default"
CLUSTER = cluster_of("h100-80gb", 8)
MESH = build_mesh(CLUSTER, (8,), zigzag=(0,))
QUERIES, KEYS = (
    TensorType(shape=(1, 32, 65536, 128), dtype="bfloat16"),
    TensorType(shape=(1, 8, 65536, 128), dtype="bfloat16"),
)


def attention() -> Rule:
    arguments = (QUERIES, KEYS, KEYS, None, 0.0, True)
    return RULES[OP].build(Call(op=OP, arguments=arguments, keywords=(), results=(QUERIES,)))


def test_a_ring_cuts_everything_along_the_sequence_and_divides_the_work() -> None:
    rule = attention()
    ring = named_strategy(rule, ("k@q",), OP)
    layouts = derive_layouts(rule, ring)
    assert {str(duplex.forward[0]) for duplex in (*layouts.operands, *layouts.results)} == {
        str(layouts.results[0].forward[0])
    }
    assert layouts.results[0].forward[0].dim == 2
    prices = price_operator(rule, [ring], [QUERIES, KEYS, KEYS], [QUERIES], [True] * 3, MESH, CLUSTER)
    shape = AttentionShape(
        batch=1, heads=32, key_heads=8, queries=65536 / 8, keys=65536, head_dim=128, value_dim=128, causal=True
    )
    alone = attention_time(shape, "bf16", CLUSTER.device)
    alone *= CLUSTER.device.attention_slowdown(CLUSTER.software.attention)
    assert alone < prices.forward[0] < 1.2 * alone  # seven more hops are launched, and joined to the result
    assert prices.operands[1][0] == KEYS.nbytes / 8
    whole = price_operator(rule, [(None,)], [QUERIES, KEYS, KEYS], [QUERIES], [True] * 3, MESH, CLUSTER)
    assert prices.flops[0] == pytest.approx(whole.flops[0] / 8)


def test_pieces_of_keys_and_values_come_round_and_their_gradients_come_home_in_float32() -> None:
    rule = attention()
    messages = inner_messages(rule, named_strategy(rule, ("k@q",), OP), MESH)
    piece = KEYS.nbytes / 8
    expected = [(piece, 7, 7), (2 * piece, 0, 8)] * 2
    assert [(one.message.nbytes, one.forward, one.backward) for one in messages] == expected
    assert {(one.message.kind, one.message.axis) for one in messages} == {("send_recv", 0)}


def test_the_last_device_of_a_contiguous_causal_ring_does_almost_twice_the_work() -> None:
    rule, contiguous = attention(), build_mesh(CLUSTER, (8,))
    ring, tensors = named_strategy(rule, ("k@q",), OP), ([QUERIES, KEYS, KEYS], [QUERIES], [True] * 3)
    balanced, uneven = (price_operator(rule, [ring], *tensors, mesh, CLUSTER) for mesh in (MESH, contiguous))
    assert 1.6 < uneven.forward[0] / balanced.forward[0] < 15 / 8
    assert 1.6 < uneven.backward[0] / balanced.backward[0] < 15 / 8


def test_a_hop_takes_the_longer_of_its_work_and_its_transfer() -> None:
    rule, slow = attention(), replace(CLUSTER, levels=tuple(replace(v, bandwidth=1e9) for v in CLUSTER.levels))
    ring, tensors = named_strategy(rule, ("k@q",), OP), ([QUERIES, KEYS, KEYS], [QUERIES], [True] * 3)
    quick = price_operator(rule, [ring], *tensors, MESH, CLUSTER)
    assert quick.inner_forward[0] == 0.0  # at 64k tokens links of a node are quick enough
    late = price_operator(rule, [ring], *tensors, MESH, slow)
    hop = 2 * message_seconds(inner_messages(rule, ring, MESH)[0].message, MESH, slow)  # keys and values
    assert late.forward[0] == quick.forward[0]
    assert late.inner_forward[0] == pytest.approx(7 * (hop - late.forward[0] / 8))
    assert late.inner_forward[0] > 0.0


def test_a_ring_goes_round_one_axis() -> None:
    rule, mesh = attention(), build_mesh(CLUSTER, (2, 4))
    ring = named_strategy(rule, ("k@q", "k@q"), OP)
    assert "a ring goes round one axis" in str(strategy_fault(rule, ring, mesh))
    assert ring not in legal_strategies(rule, mesh, rings=True)


def test_nobody_splits_by_a_ring_unless_it_is_asked_for() -> None:
    rule = attention()
    ring = named_strategy(rule, ("k@q",), OP)
    assert ring not in legal_strategies(rule, MESH)
    assert ring in legal_strategies(rule, MESH, rings=True)


@pytest.mark.parametrize(("by", "rings"), [("heads", 0), ("ring", 2)])
def test_a_context_axis_splits_attention_as_it_is_told(by: ContextBy, rings: int) -> None:
    request = request_of("llama-2", CLUSTER, 8, pinned=Pinned(context=8, context_by=by))
    found = search(request).bound
    attention_of = [bound for bound in found.operators if bound.rule.op_class == "attention"]
    chosen = [strategy_names(bound.rule, bound.strategy) for bound in attention_of]
    assert sum("k@q" in names for names in chosen) == rings
    assert ("by a ring in attention" in roles(found).axes[0].detail) == (by == "ring")
    assert found.plan.prediction.step_seconds > 0


def test_a_request_for_something_else_is_refused() -> None:
    pinned = replace(Pinned(context=2), context_by="spiral")  # type: ignore[arg-type]
    with refused(RequestError, "spiral", "ring"):
        search(request_of("llama-2", CLUSTER, 8, pinned=pinned))


def test_a_ring_without_an_axis_for_it_is_refused() -> None:
    """Nobody splits by a ring where axes have no purpose: the wish would be lost in silence."""
    with refused(RequestError, "context_by = ring"):
        search(request_of("llama-2", CLUSTER, 8, pinned=Pinned(context_by="ring")))


JOB = {"devices": 16, "seq_len": 131072, "global_batch": 1}


@pytest.mark.thorough
@pytest.mark.slow
def test_rings_are_tried_around_the_best_plan_where_that_splits_sequences() -> None:
    """Keys and values go over the slow links of two nodes under attention; by heads, all-to-alls are waited for."""
    heads = planner.search("llama-tiny", "a100-80gb", pinned={"context_by": "heads"}, **JOB)
    free = planner.search("llama-tiny", "a100-80gb", **JOB)
    assert roles(heads.bound).context > 1
    assert any("by a ring in attention" in axis.detail for axis in roles(free.bound).axes)
    assert free.plans[0].seconds < heads.plans[0].seconds * 0.99
    assert not free.covered
    assert heads.plan.slices > free.plan.slices == 1  # of sequences in slices less is proved
    assert free.bound_seconds > heads.bound_seconds
    assert free.statistics.evaluated > heads.statistics.evaluated
    assert {(way.ring, way.heads) for way in free.contexts} >= {(16, 1), (2, 8)}


def test_rings_around_the_best_plan_keep_a_pipeline_that_is_decided() -> None:
    """A ring over all four devices takes 50 ms, and a pipeline of two, which was asked for, 54 ms."""
    job: dict[str, Any] = {"devices": 4, "seq_len": 32768, "global_batch": 2}
    found = planner.search(
        "llama-tiny", "a100-80gb", pinned={"pipeline": 2, "micro_batches": 2, "recompute": "none"}, **job
    )
    assert roles(found.bound).context > 1
    assert found.plan.pipeline == 2


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "job",
    [
        pytest.param({**JOB, "seq_len": 512, "global_batch": 16}, marks=pytest.mark.exhaustive),
        {**JOB, "pinned": {"context": 4, "tensor": 2, "data": 1, "pipeline": 2, "recompute": "none"}},
    ],
)
def test_no_ring_is_tried_where_sequences_are_whole_or_degrees_are_decided(job: dict[str, Any]) -> None:
    job = {**job, "update": {"gathers": "each"}}
    free = planner.search("llama-tiny", "a100-80gb", **job)
    heads = planner.search(
        "llama-tiny", "a100-80gb", **{**job, "pinned": {**job.get("pinned", {}), "context_by": "heads"}}
    )
    assert free.statistics.evaluated == heads.statistics.evaluated
    assert free.plans[0].seconds == heads.plans[0].seconds


@pytest.mark.thorough
@pytest.mark.slow
def test_rings_are_searched_where_nothing_fits_by_heads() -> None:
    """The leanest plan by heads needs 9.2 GiB, that with a ring 8.1."""
    job = {**JOB, "seq_len": 4_194_304, "memory_limit": 9.5e9, "pinned": {"pipeline": 1, "offload": "none"}}
    with refused(InfeasibleError, "llama-tiny"):
        planner.search("llama-tiny", "a100-80gb", **{**job, "pinned": {**job["pinned"], "context_by": "heads"}})
    free = planner.search("llama-tiny", "a100-80gb", **job)
    assert free.plans[0].configuration.context[0] > 1


def test_no_configuration_is_listed_twice_where_axes_may_have_purposes_and_may_not() -> None:
    """A pipeline of single devices has neither axes nor purposes."""
    for pinned in (Pinned(context_by="auto"), Pinned(context_by="auto", data=2), Pinned()):
        listed = list(configurations(template_of("llama-6-tied"), 6, 30, pinned))
        assert len(listed) == len(set(listed))
        assert any(one.pipeline == 6 for one in listed) == (pinned.data is None)


@pytest.mark.slow
@pytest.mark.thorough
def test_auto_is_never_worse_than_what_is_searched_without_it() -> None:
    """It has the meshes on which every operator splits as it likes, too."""
    request = request_of("llama-2", cluster_of("h100-80gb", 4), 4)
    plain = search(request)
    assert plain.contexts == ()
    found = search(replace(request, pinned=Pinned(context_by="auto")))
    assert found.plans[0].seconds <= plain.plans[0].seconds * (1 + 1e-9)
    assert found.bound_seconds <= plain.bound_seconds * (1 + 1e-9)
    ways = {(way.ring, way.heads): way for way in found.contexts}
    assert {(None, None), (1, 1), (4, 1), (2, 2)} <= set(ways)
    assert ways[None, None].seconds <= found.plans[0].objective * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.thorough
def test_ways_to_split_the_sequence_are_compared_where_they_are_left_to_the_search() -> None:
    """What is left out has a bound that is no better than the best plan, and all ways are there."""
    pinned = Pinned(context=8, context_by="auto", tensor=1, pipeline=1)
    found = search(request_of("llama-2", CLUSTER, 8, pinned=pinned))
    ways = {(way.ring, way.heads): way for way in found.contexts}
    assert set(ways) == {(1, 8), (2, 4), (4, 2), (8, 1)}
    best = min(way.seconds for way in ways.values())
    assert best <= found.plans[0].objective * (1 + 1e-9)  # of two plans the one whose step is shorter is preferred
    for (ring, heads), way in ways.items():
        assert way.seconds >= best
        assert way.bound >= found.bound_seconds * (1 - 1e-9)
        alone = replace(pinned, context_by="hybrid" if min(ring, heads) > 1 else "ring" if ring > 1 else "heads")
        alone = replace(alone, ulysses=heads if alone.context_by == "hybrid" else None)
        least = search(request_of("llama-2", CLUSTER, 8, pinned=alone)).plans[0].objective
        assert least >= way.bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("pinned", "facts"),
    [
        (
            Pinned(context=8, context_by="hybrid", ulysses=3),
            ("ulysses = 3", "context = 8", 2, 4),
        ),
        (Pinned(context=2, context_by="hybrid"), ("context = 2", 2, 2)),
        (Pinned(context=2, ulysses=2), ("ulysses = 2", "hybrid", "auto")),
        (Pinned(context=3, context_by="ring"), ("2 x 3", 16, 12, 18)),
        (Pinned(context=3, context_by="ring", zigzag=False), (3, 16, 15, 18)),
    ],
)
def test_what_cannot_be_split_so_is_refused_with_the_numbers(pinned: Pinned, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        search(request_of("llama-2", cluster_of("h100-80gb", pinned.context or 1), 6, pinned=pinned))
