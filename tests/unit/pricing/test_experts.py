"""What expert parallelism saves and what it costs."""

import pytest

from costmodels import collective_time
from hardware_profiles import load_profile
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.pricing import OperatorPrices, keeping_fault, price_operator
from planner.pricing.operator_price import inner_messages
from planner.sharding.mesh import build_mesh
from planner.sharding.rule import Rule, Strategy, named_strategy
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


def priced(*names: str | None) -> OperatorPrices:
    graded = [tensor.floating for tensor in OPERANDS]
    return price_operator(RULE, [strategy(*names)], OPERANDS, OPERANDS[:1], graded, MESH, CLUSTER)


def test_only_experts_that_are_chosen_count_as_work() -> None:
    whole = priced(None, None)
    assert whole.flops[0] == 3 * 6 * BATCH * TOKENS * CHOSEN * WIDTH * HIDDEN
    for names in (("b", "b"), ("b", "e@b"), ("s", "e@s"), ("f", "b")):
        assert priced(*names).flops[0] == whole.flops[0] / 64


def test_cutting_experts_saves_weights_and_costs_an_exchange() -> None:
    copied, cut = priced("b", "b"), priced("b", "e@b")
    for matrix in (3, 4, 5):
        assert cut.operands[matrix][0] == copied.operands[matrix][0] / 8
    assert (cut.operands[0][0], cut.results[0][0]) == (copied.operands[0][0], copied.results[0][0])
    assert copied.inner_forward[0] == 0
    rows = BATCH / 64 * TOKENS * CHOSEN * HIDDEN * 2  # bytes of the rows of a device
    seconds = collective_time("all_to_all", rows, CLUSTER.group(8, 1))
    assert cut.inner_forward[0] == pytest.approx(2 * seconds, rel=1e-12)
    assert cut.inner_backward[0] == pytest.approx(2 * seconds, rel=1e-12)
    assert cut.forward[0] < 1.02 * copied.forward[0]  # more rows for each of fewer experts


def test_a_farther_exchange_takes_longer() -> None:
    assert priced("e@b", "b").inner_forward[0] > 3 * priced("b", "e@b").inner_forward[0]


def test_the_rows_of_a_token_are_kept_with_their_activations() -> None:
    rows = BATCH / 64 * TOKENS * CHOSEN
    assert priced("b", "e@b").saved_extra[0] == 2 * rows * (HIDDEN + 3 * WIDTH)
    assert priced("b", "f").saved_extra[0] == 2 * 8 * rows * (HIDDEN + 3 * WIDTH / 8)


def test_their_gradients_live_while_they_are_computed() -> None:
    rows, tokens = BATCH / 64 * TOKENS * CHOSEN, BATCH / 64 * TOKENS
    prices = priced("b", "e@b")
    gradients = sum(prices.operands[place][0] for place in (0, 1, 3, 4, 5))
    assert prices.transient[0] == 2 * tokens * HIDDEN + gradients + 2 * rows * (2 * HIDDEN + 3 * WIDTH)


def test_what_is_sent() -> None:
    (message,) = inner_messages(RULE, strategy("b", "e@b"), MESH)
    assert (message.message.kind, message.message.axis) == ("all_to_all", 1)
    assert (message.forward, message.backward) == (2, 2)
    assert inner_messages(RULE, strategy("b", "f"), MESH) == ()
    assert "communicates inside" in (keeping_fault(RULE) or "")
