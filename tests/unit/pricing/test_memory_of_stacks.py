"""What training stacks keep, by hand."""

from dataclasses import replace

import pytest

from costmodels import parameter_bytes
from hardware_profiles import PYTORCH, LossMemory, load_profile, load_software
from planner.graph.operator_graph import TensorType
from planner.pricing import Pricers, price_operator, price_parameter
from planner.pricing.liveness import liveness
from planner.pricing.operator_price import transient_bytes
from planner.sharding.layout import PaddedShape, parse_layout
from planner.sharding.mesh import build_mesh
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter
from planner.sharding.update import DEFAULT
from tests.unit.search.cases import prepare, traced

CLUSTER = load_profile("h100-80gb").with_devices(8)


@pytest.mark.parametrize(
    ("stack", "precision", "weight", "gradient", "state"),
    [
        ("pytorch", "bf16", 2, 4, 12),
        ("megatron", "bf16", 2, 4, 12),
        ("megatron", "fp16", 2, 2, 12),
        ("deepspeed", "fp16", 2, 2, 18),
        ("deepspeed", "bf16", 2, 6, 12),
        ("fsdp", "bf16", 4, 4, 8),
        ("fsdp", "fp32", 4, 4, 8),
    ],
)
def test_bytes_of_a_parameter(stack: str, precision: str, weight: float, gradient: float, state: float) -> None:
    found = parameter_bytes(precision, "adamw", load_software(stack))
    assert (found.weight, found.gradient, found.state) == (weight, gradient, state)


def test_what_is_on_the_host_takes_no_memory() -> None:
    found = parameter_bytes("bf16", "adamw", replace(PYTORCH, offloaded=True))
    assert (found.weight, found.gradient, found.state) == (2, 0, 0)


def test_fused_gates_are_made_again() -> None:
    graph = prepare(traced("llama-4"))[0]
    at = {op.name: index for index, op in enumerate(graph.operators)}
    gate = at["model.layers.1.mlp/mul"]
    assert liveness(graph).saved[gate] == {0, 1}
    assert liveness(graph, replace(PYTORCH, fused=True)).saved[gate] == {1}  # silu keeps what it was made of
    assert liveness(graph, replace(PYTORCH, fused=True)).saved[at["model.layers.1.mlp.down_proj/linear"]] == {0}


def test_heads_that_are_no_copy_are_kept_once() -> None:
    graph = prepare(traced("llama-4"))[0]
    behind = [at for at, op in enumerate(graph.operators) if op.name.endswith("self_attn.o_proj/linear")]
    views = replace(PYTORCH, views_heads=True)
    assert behind
    assert liveness(graph, views).copies == dict.fromkeys(behind, 0.0)
    assert not liveness(graph, replace(views, attention="unfused")).copies


@pytest.mark.parametrize(("loss", "copies"), [("whole", 2), ("in place", 1), ("pieces", 0)])
def test_copies_of_logits(loss: LossMemory, copies: int) -> None:
    """What lives while the cast to fp32 runs, here from fp32: both, the operand alone, or nothing."""
    graph = prepare(traced("llama-4"))[0]
    alive = liveness(graph, replace(PYTORCH, loss=loss))
    at = next(i for i, op in enumerate(graph.operators) if op.op == "aten.cross_entropy_loss.default")
    logits = graph.operators[at].operands[0]
    while graph.operators[at].op != "aten.linear.default":
        made, at = at, graph.producer[graph.operators[at].operands[0]]
    op, rule = graph.operators[made], rule_of(graph, graph.operators[made])
    types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
    prices = price_operator(rule, [(None,)], *types, (True,), build_mesh(CLUSTER, (8,)), CLUSTER)
    if rule.op_class != "view":
        assert transient_bytes(alive, graph, made, rule, prices)[0] == copies * graph.types[logits].nbytes


def test_padding_of_shards_is_priced() -> None:
    """Eight devices do not divide 62: each has a shard of 8 of weight, gradient and state, and a use gathers 64."""
    padded = TensorType(shape=PaddedShape((62, 3)), dtype="bfloat16")
    cut, whole = parse_layout("S0"), parse_layout("R")
    stored = StoredParameter(weight=cut, gradient=cut, state=cut)
    mesh = build_mesh(CLUSTER, (8,))
    pricers = Pricers.of(mesh, CLUSTER)
    prices = price_parameter(padded, True, [stored], "bf16", "adamw", pricers)
    assert (prices.weight[0], prices.gradient[0], prices.state[0]) == pytest.approx((2 * 24, 4 * 24, 12 * 24))
    (message,) = pricers.parameters.route(padded, cut, whole).messages
    assert (message.kind, message.nbytes) == ("all_gather", pytest.approx(2 * 64 * 3))


@pytest.mark.parametrize(("layout", "nbytes"), [("R", 2 * 64 + 4 * 8), ("S0", 4 * 8)])
def test_of_an_fp32_weight_in_pieces_the_whole_is_a_copy_of_16_bits(layout: str, nbytes: float) -> None:
    """FSDP2 that does not reshard, and that does."""
    tensor, cluster = TensorType(shape=(64,), dtype="bfloat16"), CLUSTER.with_software(load_software("fsdp"))
    state = parse_layout("S0")
    one = StoredParameter(weight=parse_layout(layout), gradient=state, state=state)
    prices = price_parameter(tensor, True, [one], "bf16", "adamw", Pricers.of(build_mesh(cluster, (8,)), cluster))
    assert prices.weight[0] == nbytes
    narrow = replace(cluster.software, stored=replace(cluster.software.stored, weight=2.0, master=0.0))
    found = []
    for software in (narrow, replace(narrow, copies_out=False)):  # without fp32 the shard is no part of the state
        pricers = Pricers.of(build_mesh(cluster, (8,)), cluster.with_software(software))
        update = replace(DEFAULT, master_weights=False)
        found.append(price_parameter(tensor, True, [one], "bf16", "adamw", pricers, update=update).state[0])
    assert found[0] - found[1] == (2 * 8 if layout == "R" else 0)


def test_attention_that_is_done_again_keeps_nothing_of_its_own() -> None:
    graph = prepare(traced("llama-4"))[0]
    op = next(op for op in graph.operators if "scaled_dot_product" in op.op)
    types = ([graph.types[n] for n in op.operands], [graph.types[n] for n in op.results if n is not None])
    rule, mesh, graded = rule_of(graph, op), build_mesh(CLUSTER, (8,)), (True,) * len(op.operands)
    plain = price_operator(rule, [(None,)], *types, graded, mesh, CLUSTER)
    repeats = CLUSTER.with_software(replace(PYTORCH, recomputed_in_backward=("attention",)))
    again = price_operator(rule, [(None,)], *types, graded, mesh, repeats)
    assert again.saved_extra[0] == 0 < plain.saved_extra[0]
    assert again.transient[0] == plain.transient[0] + plain.saved_extra[0]
    assert again.backward[0] == pytest.approx(plain.backward[0] + plain.forward[0])
