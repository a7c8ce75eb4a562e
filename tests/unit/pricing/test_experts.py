"""What expert parallelism saves and what it costs."""

from dataclasses import replace

import numpy as np
import pytest

from costmodels import collective_time, matmul_time, operator_time
from hardware_profiles import PYTORCH, Software, load_profile, load_software
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.pricing import OperatorPrices, keeping_fault, price_operator
from planner.pricing.inner_messages import inner_messages
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import Rule, Strategy, named_strategy, splittable
from planner.sharding.rules import RULES

CLUSTER = load_profile("h100-80gb").with_devices(64)
MESH = build_mesh(CLUSTER, (8, 8))
BATCH, TOKENS, HIDDEN, CHOSEN, COUNT, WIDTH = 64, 4096, 4096, 2, 8, 14336


def typed(*shape: int, dtype: str = "bfloat16") -> TensorType:
    return TensorType(shape=shape, dtype=dtype)


OPERANDS = (
    typed(BATCH, TOKENS, HIDDEN),
    typed(BATCH, TOKENS, CHOSEN),
    typed(BATCH, TOKENS, CHOSEN, dtype="int64"),
    typed(COUNT, WIDTH, HIDDEN),
    typed(COUNT, WIDTH, HIDDEN),
    typed(COUNT, HIDDEN, WIDTH),
)
CALL = Call(op="planner.experts.default", arguments=OPERANDS, keywords=(), results=OPERANDS[:1])
RULE: Rule = RULES[CALL.op].build(CALL)


def strategy(*names: str | None) -> Strategy:
    return named_strategy(RULE, names, "experts")


def priced(
    *names: str | None, capacity: int = 0, imbalance: float = 1.0, software: Software | None = None
) -> OperatorPrices:
    rule = RULES[CALL.op].build(replace(CALL, arguments=(*OPERANDS, capacity, imbalance)))
    graded = [tensor.floating for tensor in OPERANDS]
    chosen = named_strategy(rule, names, "experts")
    cluster = CLUSTER if software is None else CLUSTER.with_software(software)
    return price_operator(rule, [chosen], OPERANDS, OPERANDS[:1], graded, MESH, cluster)


def test_only_experts_that_are_chosen_count_as_work() -> None:
    whole = priced(None, None)
    assert whole.flops[0] == 3 * 6 * BATCH * TOKENS * CHOSEN * WIDTH * HIDDEN
    for names in (("b", "b"), ("b", "e@b"), ("s", "e@s"), ("f", "b"), ("e", "b"), ("e@b", "f")):
        assert priced(*names).flops[0] == whole.flops[0] / 64


@pytest.mark.parametrize(("graded", "share"), [((0, 3, 4, 5), 1), ((0, 1), 2 / 3), ((3, 4, 5), 2 / 3)])
def test_gradients_of_tokens_and_of_matrices_take_a_product_of_each_matrix(
    graded: tuple[int, ...], share: float
) -> None:
    """Forward three products; those of weights take none, as where a model weighs what goes into experts (Llama 4)."""
    needed = [at in graded for at in range(6)]
    found = price_operator(RULE, [strategy(None, None)], OPERANDS, OPERANDS[:1], needed, MESH, CLUSTER)
    assert found.flops[0] == pytest.approx(share * priced(None, None).flops[0], rel=1e-12)


def test_gradients_of_weights_come_back_where_weights_have_one() -> None:
    for graded, back in (((0, 1, 3, 4, 5), 1), ((0, 3, 4, 5), 0)):
        (weights,) = inner_messages(RULE, strategy("b", "e@b"), MESH, graded)[-1:]
        assert (weights.forward, weights.backward) == (1, back)


UNGATED = (*OPERANDS[:3], *OPERANDS[4:])


def without_a_gate(*names: str | None, recipe: str = "", software: Software = PYTORCH) -> OperatorPrices:
    settings = (0, 1.0, False, 1, 1, recipe, False) if recipe else ()
    arguments = (*OPERANDS[:3], None, *OPERANDS[4:], *settings)
    rule = RULES[CALL.op].build(replace(CALL, arguments=arguments, keywords=(("activation", "relu2"),)))
    graded, cluster = [tensor.floating for tensor in UNGATED], CLUSTER.with_software(software)
    return price_operator(rule, [named_strategy(rule, names, "")], UNGATED, OPERANDS[:1], graded, MESH, cluster)


def test_without_a_gate_there_is_a_product_less_in_each_pass() -> None:
    """And what it makes is not kept: 4 in the place of 6 operations of a row for each element of a matrix."""
    for names, devices in (((None, None), 1), (("b", "e@b"), 64), (("b", "f"), 64)):
        gated, plain = priced(*names), without_a_gate(*names)
        assert plain.flops[0] == gated.flops[0] * 2 / 3
        for one, other in ((plain.forward, gated.forward), (plain.backward, gated.backward)):
            assert other[0] * 0.6 < one[0] < other[0] * 0.75  # and copies, which are the same
        assert gated.saved_extra[0] - plain.saved_extra[0] == BATCH * TOKENS * CHOSEN * 2 * WIDTH / devices
    rows, tokens = BATCH / 64 * TOKENS * CHOSEN, BATCH / 64 * TOKENS
    prices = without_a_gate("b", "e@b")
    gradients = sum(prices.operands[place][0] for place in (0, 1, 3, 4))
    assert prices.transient[0] == 2 * tokens * HIDDEN + gradients + 2 * rows * (HIDDEN + WIDTH)


@pytest.mark.parametrize(("recipe", "operators"), [("tensorwise", 12), ("blockwise", 28)])
def test_in_fp8_operators_are_launched_for_each_matrix(recipe: str, operators: int) -> None:
    apart, together = (
        without_a_gate("b", "b", recipe=recipe, software=replace(PYTORCH, expert_by_expert=each))
        for each in (True, False)
    )
    for one, other in zip(apart.host, together.host, strict=True):
        assert one - other == pytest.approx(operators * COUNT * PYTORCH.host * CLUSTER.device.host_latency)


def test_what_is_kept_in_fp8_or_made_again_is_so_without_a_gate() -> None:
    rows = BATCH / 64 * TOKENS * CHOSEN
    beside = 2 + 4 * 8
    for software, kept in (
        (PYTORCH, HIDDEN * 2 + WIDTH * 4),
        (replace(PYTORCH, keeps_fp8=True), HIDDEN + WIDTH * 3),
        (replace(PYTORCH, remakes=frozenset({"experts"})), HIDDEN * 2 + WIDTH * 2),
    ):
        assert without_a_gate("b", "e@b", software=software).saved_extra[0] == rows * (kept + beside)


def test_cutting_experts_saves_weights_and_costs_an_exchange() -> None:
    copied, cut = priced("b", "b"), priced("b", "e@b")
    for matrix in (3, 4, 5):
        assert cut.operands[matrix][0] == copied.operands[matrix][0] / 8
    assert (cut.operands[0][0], cut.results[0][0]) == (copied.operands[0][0], copied.results[0][0])
    assert copied.inner_forward[0] == 0
    rows = BATCH / 64 * TOKENS * CHOSEN * HIDDEN * 2  # bytes of the rows of a device
    seconds, weights, counts = (
        collective_time("all_to_all", nbytes, CLUSTER.group(8, 1)) for nbytes in (rows, rows / HIDDEN, 8 * COUNT)
    )
    assert cut.inner_forward[0] == pytest.approx(2 * seconds + weights + counts, rel=1e-12)
    assert cut.inner_backward[0] == pytest.approx(2 * seconds + weights, rel=1e-12)
    assert cut.forward[0] < 1.02 * copied.forward[0]  # more rows for each of fewer experts


def test_a_farther_exchange_takes_longer() -> None:
    assert priced("e@b", "b").inner_forward[0] > 3 * priced("b", "e@b").inner_forward[0]


def test_the_rows_of_a_token_are_kept_with_their_activations() -> None:
    rows = BATCH / 64 * TOKENS * CHOSEN
    indices = 2 + 4 * 8  # the weight of a row, and four indices
    assert priced("b", "e@b").saved_extra[0] == rows * (2 * (HIDDEN + 3 * WIDTH) + indices)
    assert priced("b", "f").saved_extra[0] == 8 * rows * (2 * (HIDDEN + 3 * WIDTH / 8) + indices)
    assert priced("b", "e").saved_extra[0] == rows * (2 * (HIDDEN + 3 * WIDTH) + indices)


def test_their_gradients_live_while_they_are_computed() -> None:
    rows, tokens = BATCH / 64 * TOKENS * CHOSEN, BATCH / 64 * TOKENS
    prices = priced("b", "e@b")
    gradients = sum(prices.operands[place][0] for place in (0, 1, 3, 4, 5))
    assert prices.transient[0] == 2 * tokens * HIDDEN + gradients + 2 * rows * (HIDDEN + 2 * WIDTH)


def test_what_is_sent() -> None:
    sent = inner_messages(RULE, strategy("b", "e@b"), MESH)
    rows = BATCH / 64 * TOKENS * CHOSEN * 2
    assert {(each.message.kind, each.message.axis) for each in sent} == {("all_to_all", 1)}
    assert [(each.message.nbytes, each.forward, each.backward) for each in sent] == [
        (8 * COUNT, 1, 0),  # how many rows come
        (rows * HIDDEN, 2, 2),
        (rows, 1, 1),  # their weights
    ]
    assert inner_messages(RULE, strategy("b", "f"), MESH) == ()
    assert "communicates inside" in str(keeping_fault(RULE))


def test_the_fullest_device_computes_sends_and_keeps_so_many_times_the_average() -> None:
    """Where all experts are on every device nobody has more than others."""
    even, uneven = priced("b", "e@b"), priced("b", "e@b", imbalance=1.5)
    assert uneven.flops[0] == 1.5 * even.flops[0]
    assert uneven.saved_extra[0] == 1.5 * even.saved_extra[0]
    assert uneven.forward[0] > 1.4 * even.forward[0]
    assert 1.3 * even.inner_backward[0] < uneven.inner_backward[0] < 1.5 * even.inner_backward[0]
    assert uneven.operands[3][0] == even.operands[3][0]
    for field in ("flops", "forward", "saved_extra"):
        assert getattr(priced("b", "f", imbalance=1.5), field) == getattr(priced("b", "f"), field)
    assert priced("b", "e@b", imbalance=100.0).flops[0] == 8 * even.flops[0]  # one has all


def test_a_capacity_counts_its_rows_whoever_chooses_them() -> None:
    capacity = TOKENS * CHOSEN // COUNT // 2
    half, whole = priced("b", "e@b", capacity=capacity), priced("b", "e@b")
    assert half.flops[0] == whole.flops[0] / 2
    assert half.saved_extra[0] == whole.saved_extra[0] / 2
    rule = RULES[CALL.op].build(replace(CALL, arguments=(*OPERANDS, capacity)))
    assert "e@s" not in rule.index
    assert "s" not in splittable(rule)
    counts = [each for each in inner_messages(rule, named_strategy(rule, ("b", "e@b"), ""), MESH) if not each.backward]
    assert counts == []  # nobody needs to be told


@pytest.mark.parametrize(("recipe", "operators"), [("tensorwise", 18), ("delayed", 18), ("blockwise", 42)])
def test_in_fp8_each_expert_is_launched_by_itself_here_and_all_at_once_elsewhere(recipe: str, operators: int) -> None:
    """So many operators in a pass for each expert that a device has, 9 kernels forward, in the place of a few for
    all."""
    rule = RULES[CALL.op].build(replace(CALL, arguments=(*OPERANDS, 0, 1.0, False, 1, 1, recipe, False)))
    graded = [tensor.floating for tensor in OPERANDS]
    chosen = [named_strategy(rule, names, "experts") for names in (("b", "b"), ("b", "e@b"))]

    def of(*, apart: bool) -> OperatorPrices:
        cluster = CLUSTER.with_software(replace(PYTORCH, expert_by_expert=apart))
        return price_operator(rule, chosen, OPERANDS, OPERANDS[:1], graded, MESH, cluster)

    apart, together, device = of(apart=True), of(apart=False), CLUSTER.device
    held = np.array([COUNT, COUNT / 8])
    for one, other in zip(apart.host, together.host, strict=True):
        assert one - other == pytest.approx(operators * held * PYTORCH.host * device.host_latency)
    for name in ("forward", "backward"):
        place = ("forward", "backward").index(name)
        one, other = (getattr(prices, name) - prices.late[place] for prices in (apart, together))
        launched = (9 if name == "forward" else 18) * held * device.launch_latency
        assert one - other == pytest.approx(launched, rel=1e-6)


def test_a_fused_router_launches_fewer_operators_where_no_graph_holds_them() -> None:
    """moe-router-fusion: 15 of softmax, choice, maps and loss in either pass."""
    rule, graded = RULES[CALL.op].build(CALL), [tensor.floating for tensor in OPERANDS]
    chosen = [named_strategy(rule, ("b", "e@b"), "experts")]
    software, seconds = load_software("megatron"), {}
    for fused, graphs in ((False, "none"), (True, "none"), (False, "attention"), (True, "attention")):
        cluster = CLUSTER.with_software(replace(software, routes_fused=fused, graphs=graphs))
        prices = price_operator(rule, chosen, OPERANDS, OPERANDS[:1], graded, MESH, cluster)
        seconds[fused, graphs] = prices.host
    each = software.host * CLUSTER.device.host_latency
    for plain, less in zip(seconds[False, "none"], seconds[True, "none"], strict=True):
        assert plain - less == pytest.approx(15 * each)
    for plain, less in zip(seconds[False, "attention"], seconds[True, "attention"], strict=True):
        assert plain == less


def test_slower_grouped_products_are_those_of_16_bits() -> None:
    def seconds(products: str, slower: float) -> float:
        software = replace(load_software("fsdp"), products=products, grouped_slower=slower)
        graded = [tensor.floating for tensor in OPERANDS]
        cluster = CLUSTER.with_software(software)
        found = price_operator(RULE, [strategy(None, None)], OPERANDS, OPERANDS[:1], graded, MESH, cluster)
        return float(found.forward[0] + found.backward[0])

    assert 1.1 * seconds("", 1.0) < seconds("", 1.2) < 1.2 * seconds("", 1.0)
    assert seconds("fp8", 1.2) == seconds("fp8", 1.0)


def test_products_with_masks_fill_buffers_of_experts() -> None:
    """Of each sequence of S tokens S k c rows are in buffers, and each product with a mask has S x S k c x h terms."""
    software = replace(PYTORCH, host=0.0)
    plain, average, larger = (
        priced("b", "b", software=replace(software, buffers_of_experts=buffers))
        for buffers in ((0, 1.0), (TOKENS, 1.0), (TOKENS, 1.25))
    )
    local, slots = BATCH // 64, TOKENS * CHOSEN

    def product(m: float, n: float, k: float) -> float:
        return float(matmul_time(m, n, k, local, "bf16", CLUSTER.device))

    def masks(rows: float) -> float:
        moved = 4 * local * TOKENS * rows  # two in 16 bits
        return float(
            operator_time(op_class="elementwise", flops=0, bytes_moved=moved, dtype="bf16", device=CLUSTER.device)
        )

    there, back = product(slots, HIDDEN, TOKENS), product(TOKENS, HIDDEN, slots)
    assert average.forward[0] - plain.forward[0] == pytest.approx(there + back + masks(slots))
    of_mask = product(TOKENS, slots, HIDDEN)
    assert average.backward[0] - plain.backward[0] == pytest.approx(there + back + of_mask + masks(slots))
    assert larger.forward[0] == pytest.approx(1.25 * average.forward[0], rel=0.02)
