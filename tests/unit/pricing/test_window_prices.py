"""What windows leave of attention: work, time, and how evenly a ring shares it out."""

from dataclasses import replace

import pytest
import torch

from costmodels import AttentionShape, attention_time
from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.rewriting.masks import MASKED_ATTENTION
from planner.graph.tracing.exported import tensor_type
from planner.plan.binding.slices import earlier_keys, work_of_slices
from planner.pricing.operator_price import price_operator, uneven
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import Rule
from planner.sharding.rules import RULES
from planner.sharding.window import Window
from tests.contract.rule_calls import Example
from tests.distributed.plans import mesh_of
from tests.unit.search.cases import cluster_of

LENGTH = 64


def rule(**says: int | None) -> Rule:
    pieces = [torch.zeros(2, 4, LENGTH, 8) for _ in range(3)]
    kinds = {"back": None, "ahead": 0, "prefix": 0, **says}
    return Example(MASKED_ATTENTION, (*pieces, None, None), kinds).rule()


def causal() -> Rule:
    pieces = [torch.zeros(2, 4, LENGTH, 8) for _ in range(3)]
    return Example("aten.scaled_dot_product_attention.default", (*pieces, None, 0.0, True), {}).rule()


def test_a_mask_that_is_causal_alone_costs_what_causal_attention_does_but_for_the_diagonal() -> None:
    for one, other in zip(rule().work, causal().work, strict=True):
        assert one.coefficient == pytest.approx(other.coefficient * (LENGTH + 1) / LENGTH)
    assert rule().seen == pytest.approx((LENGTH + 1) / LENGTH)
    assert RULES[MASKED_ATTENTION] is not RULES[causal().op]


def test_a_window_leaves_its_share() -> None:
    wide, narrow = rule(back=31), rule(back=7)
    assert 1 > wide.seen > narrow.seen > 0.2
    assert narrow.seen == pytest.approx((8 * LENGTH - 28) * 2 / LENGTH**2)


def test_chunks_leave_their_share() -> None:
    assert rule(chunk=16).seen == pytest.approx(17 / LENGTH)
    with pytest.raises(RuleError, match="'chunk' is how many positions a chunk has"):
        rule(chunk=16, prefix=3)


def test_a_narrow_window_takes_no_less_than_its_tensors_need_to_pass_memory() -> None:
    """As in gpt-oss: 64 heads of 64, 8 of keys, and windows of 128 of 8,192 keys."""
    device = cluster_of("h100-80gb", 8).device
    whole = AttentionShape(
        batch=1, heads=64, key_heads=8, queries=8192, keys=8192, head_dim=64, value_dim=64, causal=True
    )
    share = 2 * 128 / 8192 - (128 / 8192) ** 2
    window = replace(whole, seen=share, reach=128)
    time, passed = attention_time(window, "bf16", device), 2 * whole.elements / device.memory_bandwidth
    assert share * attention_time(whole, "bf16", device) < passed < time < 0.2 * attention_time(whole, "bf16", device)
    assert attention_time(replace(whole, seen=1.0), "bf16", device) == attention_time(whole, "bf16", device)


def test_a_window_shows_a_query_so_many_keys() -> None:
    assert Window(back=127, ahead=0).reach(8192) == 128
    assert Window(back=127, ahead=0).reach(64) == 64
    assert Window(back=127, ahead=3, prefix=20).reach(8192) == 151
    assert Window(ahead=0, chunk=256).reach(8192) == 256
    assert Window(ahead=0).reach(8192) == 8192


def test_sinks_have_no_gradient_of_scores() -> None:
    """A number for each head is no mask, whose gradient is as large as the scores."""
    pieces = [torch.zeros(1, 8, 4096, 64, device="meta") for _ in range(3)]
    documents, sinks = torch.zeros(1, 4096, dtype=torch.int64, device="meta"), torch.zeros(8, device="meta")
    cluster, prices = cluster_of("h100-80gb", 8), []
    for further in ((None, None), (None, None, sinks), (documents, None, sinks)):
        call = Call(
            op=MASKED_ATTENTION,
            arguments=tuple(None if one is None else tensor_type(one) for one in (*pieces, *further)),
            keywords=(("back", 1023), ("ahead", 0), ("prefix", 0)),
            results=(tensor_type(pieces[0]),),
        )
        rule = RULES[MASKED_ATTENTION].build(call)
        graded = [tensor.floating for tensor in call.operands]
        one = price_operator(rule, [(None,)], call.operands, call.results, graded, build_mesh(cluster, (8,)), cluster)
        prices.append((one.forward[0], one.backward[0]))
    assert prices[1:] == [prices[0]] * 2


@pytest.mark.parametrize("says", [{}, {"back": 9}, {"back": 9, "ahead": 3}, {"prefix": 20}])
def test_devices_of_a_ring_share_out_the_pairs_of_a_window(says: dict[str, int]) -> None:
    of_window, mesh = rule(**says), mesh_of(4)
    zigzag = replace(mesh, axes=(replace(mesh.axes[0], order="zigzag"),))
    strategy = (of_window.index["k@q"],)
    for order in (mesh, zigzag):
        shares = [uneven(of_window, strategy, order, place) for place in range(4)]
        assert sum(shares) == pytest.approx(4.0)
    if not says:
        assert shares == pytest.approx([1.0] * 4, abs=0.01)


def test_slices_together_do_the_work_of_the_whole() -> None:
    slices, own = 4, rule(back=9)
    before = earlier_keys(own, slices)
    per_pair = own.work[0].coefficient / own.seen * 2
    whole = own.window.pairs(0, slices * LENGTH, slices * LENGTH) if own.window is not None else 0
    assert work_of_slices(own, slices) == pytest.approx(whole / slices / (own.seen / 2 * LENGTH**2))
    done = slices * own.work[0].coefficient + slices * (slices - 1) / 2 * before.work[0].coefficient
    assert done * LENGTH**2 == pytest.approx(per_pair * whole)
