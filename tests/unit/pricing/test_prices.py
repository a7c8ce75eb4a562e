"""Prices of single choices against numbers worked out by hand from the profile."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from costmodels import (
    AttentionShape,
    attention_backward_time,
    attention_time,
    collective_time,
    matmul_time,
    operator_time,
)
from hardware_profiles import AttentionKernels
from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.graph.rewriting.rotations import ROTARY
from planner.plan.binding.bind import prepare
from planner.pricing import OperatorPrices, Pricers, RedistributionPricer, price_operator, price_parameter
from planner.pricing.liveness import liveness, replays
from planner.sharding.layout import PARTIAL, REPLICATE, PaddedShape, divides, parse_layout, shard
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, build_mesh
from planner.sharding.redistribute import COLLECTIVES, redistribution
from planner.sharding.rule import named_strategy
from planner.sharding.rules import RULES, rule_of
from planner.sharding.stored import StoredParameter
from planner.sharding.update import Update
from tests.contract.rule_calls import Example
from tests.refusals import refused
from tests.unit.search.cases import cluster_of, traced

HOSTED = cluster_of("h100-80gb", 16)
CLUSTER = replace(HOSTED, device=replace(HOSTED.device, host_latency=0.0))
MESH = build_mesh(CLUSTER, (2, 8))
LINEAR = "model.layers.0.mlp.up_proj/linear"
ATTENTION = "model.layers.0.self_attn/scaled_dot_product_attention"


def graph_and_operator(name: str) -> tuple[OperatorGraph, int]:
    graph = prepare(traced("llama-4"))[0]
    return graph, next(at for at, op in enumerate(graph.operators) if op.name == name)


def priced(name: str, *strategies: tuple[str | None, ...], mesh: Mesh = MESH) -> OperatorPrices:
    graph, at = graph_and_operator(name)
    op = graph.operators[at]
    rule = rule_of(graph, op)
    types = [graph.types[operand] for operand in op.operands], [graph.types[result] for result in op.results if result]
    graded = [operand in graph.differentiable for operand in op.operands]
    chosen = [named_strategy(rule, strategy, name) for strategy in strategies]
    return price_operator(rule, chosen, *types, graded, mesh, CLUSTER)


def test_a_linear_layer_by_hand() -> None:
    """b s i, o i -> b s o with 2 x 16 tokens, 32 -> 64, fp32: whole, and o split over 8."""
    prices = priced(LINEAR, (None, None), (None, "o"))
    device, efficiency = CLUSTER.device, CLUSTER.device.efficiency("matmul")
    for at, outputs in enumerate((64, 8)):
        flops = 2 * 32 * 32 * outputs
        operand, weight, result = 4 * 32 * 32, 4 * 32 * outputs, 4 * 32 * outputs
        rate, bandwidth = device.peak("fp32") * efficiency.compute, device.memory_bandwidth * efficiency.bandwidth
        forward = device.launch_latency + max(flops / rate, (operand + weight + result) / bandwidth)
        backward = 2 * forward  # two products of the same work and operands: one for each gradient
        assert prices.forward[at] == pytest.approx(forward, rel=1e-12)
        assert prices.backward[at] == pytest.approx(backward, rel=1e-12)
        assert (prices.operands[0][at], prices.operands[1][at], prices.results[0][at]) == (operand, weight, result)
        assert prices.transient[at] == result + operand + weight
        assert prices.flops[at] == 3 * flops


def products(
    op: str, shapes: list[tuple[int, ...]], names: tuple[str | None, ...], graded: list[bool]
) -> OperatorPrices:
    """Prices of a product of bf16 tensors under one strategy."""
    types = [TensorType(shape=shape, dtype="bfloat16") for shape in shapes]
    rule = RULES[op].build(Call(op=op, arguments=tuple(types[:-1]), keywords=(), results=(types[-1],)))
    return price_operator(rule, [named_strategy(rule, names, op)], types[:-1], types[-1:], graded, MESH, CLUSTER)


@pytest.mark.parametrize(
    ("op", "shapes", "names", "shape"),
    [
        ("aten.linear.default", [(4, 512, 1024), (4096, 1024), (4, 512, 4096)], (None, "o"), (2048, 512, 1024, 1)),
        ("aten.linear.default", [(4, 512, 1024), (4096, 1024), (4, 512, 4096)], ("b", "i"), (1024, 4096, 128, 1)),
        ("aten.addmm.default", [(768,), (512, 256), (256, 768), (512, 768)], ("b", None), (256, 768, 256, 1)),
        ("aten.bmm.default", [(16, 256, 512), (16, 512, 128), (16, 256, 128)], (None, "b0"), (256, 128, 512, 2)),
        ("aten.matmul.default", [(16, 256, 512), (512, 128), (16, 256, 128)], ("b0", "n"), (2048, 16, 512, 1)),
    ],
)
def test_products_are_priced_by_their_local_shape(
    op: str, shapes: list[tuple[int, ...]], names: tuple[str | None, ...], shape: tuple[int, int, int, int]
) -> None:
    """Forward m n k, the gradient of the first operand m k n, of the second n k m; the gradient of an addend is a sum
    over all rows."""
    m, n, k, batch = shape
    device = CLUSTER.device
    prices = products(op, shapes, names, [True] * (len(shapes) - 1))
    assert prices.forward[0] == pytest.approx(matmul_time(m, n, k, batch, "bf16", device))
    gradients = matmul_time(m, k, n, batch, "bf16", device) + matmul_time(n, k, m, batch, "bf16", device)
    summed = operator_time(op_class="elementwise", flops=0.0, bytes_moved=2.0 * m * n, dtype="bf16", device=device)
    gradients += float(summed) if op == "aten.addmm.default" else 0.0
    assert prices.backward[0] == pytest.approx(gradients)
    frozen = products(op, shapes, names, [*[False] * (len(shapes) - 2), True])
    assert frozen.backward[0] == pytest.approx(matmul_time(n, k, m, batch, "bf16", device))
    assert not products(op, shapes, names, [False] * (len(shapes) - 1)).backward.any()


def test_attention_is_priced_by_its_local_shape() -> None:
    """Eight query heads on two key heads, split over the key heads."""
    query, key = (2, 8, 512, 64), (2, 2, 512, 64)
    types = [TensorType(shape=shape, dtype="bfloat16") for shape in (query, key, key, query)]
    op = "aten.scaled_dot_product_attention.default"
    rule = RULES[op].build(Call(op=op, arguments=(*types[:3], None, 0.0, True), keywords=(), results=(types[3],)))
    prices = price_operator(
        rule, [named_strategy(rule, ("g", None), "attention")], types[:3], types[3:], [True] * 3, MESH, CLUSTER
    )
    shape = AttentionShape(batch=2, heads=4, key_heads=1, queries=512, keys=512, head_dim=64, value_dim=64, causal=True)
    slower = CLUSTER.device.attention_slowdown("cudnn", narrow=True)
    assert prices.forward[0] == pytest.approx(slower * attention_time(shape, "bf16", CLUSTER.device))
    assert prices.backward[0] == pytest.approx(slower * attention_backward_time(shape, "bf16", CLUSTER.device))


@pytest.mark.parametrize("head", [32, 64, 96, 128, 256])
@pytest.mark.parametrize(
    ("kernels", "narrow", "wide"),
    [("flash1", 2.43, 3.76), ("flash2", 1.34, 1.59), ("sdpa", 1.34, 1.59), ("cudnn", 0.80, 1.08)],
)
def test_older_attention_goes_by_the_size_of_heads(
    kernels: AttentionKernels, narrow: float, wide: float, head: int
) -> None:
    """FlashAttention on H100 by its authors' figure, with heads of 64 and 128 elements; a line between. PyTorch called
    FlashAttention-2, and calls cuDNN since."""
    slower = narrow if head <= 64 else wide if head >= 128 else (narrow + wide) / 2
    types = [TensorType(shape=(2, 8, 2048, head), dtype="bfloat16")] * 4
    op = "aten.scaled_dot_product_attention.default"
    rule = RULES[op].build(Call(op=op, arguments=(*types[:3], None, 0.0, True), keywords=(), results=(types[3],)))
    strategies = [named_strategy(rule, (None, None), "attention")]

    def seconds(attention: AttentionKernels) -> tuple[float, float]:
        cluster = CLUSTER.with_software(replace(CLUSTER.software, attention=attention, host=0.0))
        prices = price_operator(rule, strategies, types[:3], types[3:], [True] * 3, MESH, cluster)
        return float(prices.forward[0]), float(prices.backward[0])

    for older, best in zip(seconds(kernels), seconds("best"), strict=True):
        assert older == pytest.approx(slower * best)


@pytest.mark.parametrize("name", [LINEAR, ATTENTION, "cross_entropy_loss"])
def test_a_table_is_its_rows(name: str) -> None:
    """Pricing many strategies at once gives what each gives alone."""
    graph, at = graph_and_operator(name)
    op = graph.operators[at]
    rule = rule_of(graph, op)
    types = [graph.types[operand] for operand in op.operands], [graph.types[result] for result in op.results if result]
    graded = [operand in graph.differentiable for operand in op.operands]
    strategies = legal_strategies(rule, MESH)
    together = price_operator(rule, strategies, *types, graded, MESH, CLUSTER)
    assert len(strategies) > 2
    for row, strategy in enumerate(strategies):
        alone = price_operator(rule, [strategy], *types, graded, MESH, CLUSTER)
        for field in ("forward", "backward", "inner_forward", "inner_backward", "saved_extra", "transient", "flops"):
            assert getattr(together, field)[row] == getattr(alone, field)[0], (field, strategy)


def test_a_vocabulary_parallel_loss_pays_for_its_own_sums() -> None:
    prices = priced("cross_entropy_loss", (None, None), (None, "v"), ("n", None), ("n", "v"))
    fast, slow = CLUSTER.group(8, 1), CLUSTER.group(2, 8)
    rows = 4.0 * 32  # bytes of one number a token
    expected = [
        0.0,
        3 * collective_time("all_reduce", rows, fast),
        collective_time("all_reduce", 4.0, slow),
        3 * collective_time("all_reduce", rows / 2, fast) + collective_time("all_reduce", 4.0, slow),
    ]
    assert prices.inner_forward == pytest.approx(expected, rel=1e-12)
    assert not prices.inner_backward.any()


@pytest.mark.parametrize("once", [False, True])
def test_rotary_positions_are_priced_as_what_they_are_spelled_out_in(once: bool) -> None:
    """Of PyTorch, where each of these passes over memory by itself; with heads that have a part that passes."""
    whole, heads, half = (4, 8, 1024, 192), (4, 8, 1024, 128), (4, 8, 1024, 64)
    table = (1024, 64 if once else 128)
    if once:
        made = [("mul.Tensor", (half, table), half)] * 4
        made += [(name, (half, half), half) for name in ("sub.Tensor", "add.Tensor")]
    else:
        made = [("mul.Tensor", (heads, table), heads)] * 2
        made += [("neg.default", (half,), half), ("add.Tensor", (heads, heads), heads)]
    made += [("cat.default", (half, half), heads), ("cat.default", (half, heads), whole)]
    parts = []
    for name, shapes, result in made:
        operands, results = ([TensorType(shape=one, dtype="bfloat16") for one in each] for each in (shapes, (result,)))
        arguments = (tuple(operands), -1) if name == "cat.default" else tuple(operands)
        rule = RULES[f"aten.{name}"].build(
            Call(op=f"aten.{name}", arguments=arguments, keywords=(), results=tuple(results))
        )
        graded = [shape != table for shape in shapes]
        parts.append(price_operator(rule, [(None, None)], operands, results, graded, MESH, HOSTED))
    types = [TensorType(shape=shape, dtype="bfloat16") for shape in (whole, table, table)]
    call = Call(op=ROTARY, arguments=(*types, False, False, 64, 128, once, None), keywords=(), results=(types[0],))
    found = price_operator(
        RULES[ROTARY].build(call), [(None, None)], types, types[:1], [True, False, False], MESH, HOSTED
    )

    def seconds(prices: OperatorPrices) -> list[float]:
        """Of kernels and of their launches: forward, then of kernels backward."""
        kernels = prices.forward - prices.late[0], prices.backward - prices.late[1]
        return [float(one[0]) for one in (*kernels, prices.host[0])]

    assert seconds(found) == pytest.approx([sum(each) for each in zip(*map(seconds, parts), strict=True)], rel=1e-9)
    assert not found.saved_extra.any()


def test_views_are_free() -> None:
    prices = priced("model.layers.0.self_attn/unflatten", (None, None), (None, "d2"))
    assert not prices.forward.any()
    assert not prices.backward.any()
    assert not prices.transient.any()


def test_a_dtype_without_a_peak_is_refused() -> None:
    graph, at = graph_and_operator(LINEAR)
    rule = rule_of(graph, graph.operators[at])
    wide = TensorType(shape=(2, 16, 32), dtype="float64")
    with refused(RuleError, "aten.linear.default", "float64"):
        price_operator(rule, [(None, None)], [wide, wide], [wide], [True, True], MESH, CLUSTER)


def test_a_pass_in_float64_moves_twice_the_bytes_of_one_in_fp32() -> None:
    tensors = [TensorType(shape=(1 << 10, 1 << 18), dtype=dtype) for dtype in ("float32", "float64")]
    narrow, wide = (
        price_operator(
            RULES["aten.silu.default"].build(
                Call(op="aten.silu.default", arguments=(tensor,), keywords=(), results=(tensor,))
            ),
            [(None, None)], [tensor], [tensor], [True], MESH, CLUSTER,
        )
        for tensor in tensors
    )  # fmt: skip
    assert wide.forward == pytest.approx(2 * narrow.forward, rel=0.05)


@pytest.mark.parametrize("shape", [(16, 16), (16, 6, 8), (3,), PaddedShape((31, 47)), PaddedShape((33, 16))])
def test_a_redistribution_costs_the_sum_of_its_steps(shape: tuple[int, ...]) -> None:
    """The matrix against the steps that the runtime takes, for every pair of layouts."""
    tensor = TensorType(shape=shape, dtype="bfloat16")
    pricer = RedistributionPricer(mesh=MESH, cluster=CLUSTER)
    placements = [REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(shape)))]
    every = itertools.product(placements, repeat=len(MESH.axes))
    layouts = tuple(layout for layout in every if divides(shape, layout, MESH.sizes))
    matrix = pricer.matrix(tensor, layouts, layouts[::-1])
    pairs = pricer.pairs(tensor, layouts, layouts[::-1])
    bandwidth = CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency("copy").bandwidth
    paid = 0
    for row, source in enumerate(layouts):
        for column, target in enumerate(layouts[::-1]):
            expected = 0.0
            for step in redistribution(shape, MESH, source, target):
                message = step.fraction * tensor.nbytes
                axis = MESH.axes[step.axis]
                if step.kind in COLLECTIVES:
                    expected += float(collective_time(step.kind, message, CLUSTER.group(axis.size, axis.stride)))
                elif step.kind != "slice":
                    expected += CLUSTER.device.launch_latency + 2 * message / bandwidth
            assert math.isclose(matrix.seconds[row, column], expected, rel_tol=1e-12), (source, target)
            assert matrix.sends[row, column] == pricer.sends(tensor, source, target)
            if row == column:
                assert pairs.seconds[row] == matrix.seconds[row, column]
                assert pairs.sends[row] == matrix.sends[row, column]
            assert (pricer.seconds(tensor, source, target) == 0) == (expected == 0)
            paid += expected > 0
    assert paid > len(layouts) // 2


def stored(weight: str, gradient: str, state: str) -> StoredParameter:
    return StoredParameter(weight=parse_layout(weight), gradient=parse_layout(gradient), state=parse_layout(state))


@pytest.mark.parametrize("zero_by", ["parameters", "servers"])
def test_an_update_by_one_owner_counts_for_the_mean_device(zero_by: str) -> None:
    """One of eight copies updates the parameter, and launches what that takes; the others do nothing."""
    cluster = replace(HOSTED, software=replace(HOSTED.software, counts_gradients=True))
    update, tensor = Update(zero_by=zero_by), TensorType(shape=PaddedShape((64, 32)), dtype="bfloat16")
    pricers = Pricers.of(build_mesh(cluster, (2, 8)), cluster, update)
    one, whole = stored("S0,R", "S0,P", "S0,R"), stored("S0,R", "S0,R", "S0,R")

    def updated(share: float | None, way: StoredParameter) -> float:
        return float(price_parameter(tensor, True, [way], "bf16", "adamw", pricers, update, share=share).update[0])

    assert updated(0.0, one) == 0.0
    assert updated(None, one) == pytest.approx(updated(1.0, one) / 8)
    assert updated(None, whole) == updated(0.0, whole) > 0
    assert zero_by == "servers" or updated(None, whole) == updated(1.0, one)


def test_parameters_by_hand() -> None:
    """64 x 32 in bf16 with AdamW: full copies, ZeRO-1 over 8, ZeRO-3 over 8."""
    tensor = TensorType(shape=(64, 32), dtype="bfloat16")
    numel, pricer = 64 * 32, RedistributionPricer(mesh=build_mesh(CLUSTER, (8,)), cluster=CLUSTER)
    rows = [stored("R", "P", "R"), stored("R", "P", "S0"), stored("S0", "S0", "S0")]
    prices = price_parameter(tensor, True, rows, "bf16", "adamw", Pricers.of(pricer.mesh, CLUSTER))
    group = CLUSTER.group(8, 1)
    assert list(prices.weight) == [2 * numel, 2 * numel, 2 * numel / 8]
    assert list(prices.gradient) == [4 * numel, 4 * numel, 4 * numel / 8]
    assert list(prices.state) == [12 * numel, 12 * numel / 8, 12 * numel / 8]
    assert prices.synchronisation == pytest.approx(
        [collective_time("all_reduce", 4.0 * numel, group), collective_time("reduce_scatter", 4.0 * numel, group), 0.0]
    )
    assert prices.gather == pytest.approx([0.0, collective_time("all_gather", 2.0 * numel, group), 0.0])
    whole = CLUSTER.with_software(replace(CLUSTER.software, reduces_whole=True))
    reduced = price_parameter(tensor, True, rows, "bf16", "adamw", Pricers.of(pricer.mesh, whole)).synchronisation
    assert reduced[0] == reduced[1] == prices.synchronisation[0]
    copying = CLUSTER.with_software(replace(CLUSTER.software, copies_gradients=3))
    copied = price_parameter(tensor, True, rows, "bf16", "adamw", Pricers.of(pricer.mesh, copying))
    bandwidth = CLUSTER.device.memory_bandwidth * CLUSTER.device.efficiency("copy").bandwidth
    once = CLUSTER.device.launch_latency + 2 * 4.0 * numel / bandwidth
    assert copied.synchronisation - prices.synchronisation == pytest.approx([0.0, 3 * once, 0.0])
    assert list(copied.gather) == list(prices.gather)
    assert prices.update[0] > prices.update[1] == prices.update[2] > 0


def test_copies_beside_a_weight_are_sharded_as_it_is() -> None:
    """Two bytes of fp8 copies beside two of the weight, whole under ZeRO-1, whatever becomes of the state."""
    tensor, stack = TensorType(shape=(64, 32), dtype="bfloat16"), CLUSTER.software
    cluster = CLUSTER.with_software(replace(stack, stored=replace(stack.stored, beside=2.0)))
    rows = [stored("R", "P", "R"), stored("R", "P", "S0"), stored("S0", "S0", "S0")]
    prices = price_parameter(tensor, True, rows, "bf16", "adamw", Pricers.of(build_mesh(cluster, (8,)), cluster))
    assert list(prices.weight) == [4 * 64 * 32, 4 * 64 * 32, 4 * 64 * 32 / 8]


def test_a_frozen_parameter_costs_its_weight() -> None:
    tensor = TensorType(shape=(64, 32), dtype="float32")
    pricer = RedistributionPricer(mesh=MESH, cluster=CLUSTER)
    rows = [stored("R,R", "R,R", "R,R"), stored("R,S0", "R,S0", "R,S0")]
    prices = price_parameter(tensor, False, rows, "fp32", "adamw", Pricers.of(pricer.mesh, CLUSTER))
    assert list(prices.weight) == [4.0 * 64 * 32, 4.0 * 64 * 4]
    for field in ("synchronisation", "update", "gather", "gradient", "state"):
        assert not np.any(getattr(prices, field)), field


@pytest.mark.parametrize(
    ("dtype", "precision", "nbytes"),
    [("float32", "bf16", (4, 4, 8)), ("bfloat16", "fp32", (2, 4, 12)), ("float32", "tf32", (4, 4, 8))],
)
def test_a_parameter_is_kept_as_its_own_dtype_is(dtype: str, precision: str, nbytes: tuple[float, ...]) -> None:
    """Of a model with several dtypes: an fp32 router in a 16-bit model is its own master."""
    pricers = Pricers.of(build_mesh(CLUSTER, (8,)), CLUSTER)
    tensor, rows = TensorType(shape=(64,), dtype=dtype), [stored("R", "P", "R"), stored("R", "P", "S0")]
    prices = price_parameter(tensor, True, rows, precision, "adamw", pricers)
    weight, gradient, state = nbytes
    assert list(prices.weight) == [64 * weight] * 2
    assert list(prices.gradient) == [64 * gradient] * 2
    assert list(prices.state) == [64 * state, 8 * state]


@pytest.mark.parametrize(("dtype", "each"), [("float32", 4), ("int8", 1), ("bfloat16", 2)])
def test_a_frozen_weight_has_its_own_bytes(dtype: str, each: int) -> None:
    pricers = Pricers.of(build_mesh(CLUSTER, (8,)), CLUSTER)
    tensor, rows = TensorType(shape=(64,), dtype=dtype), [stored("R", "R", "R"), stored("S0", "S0", "S0")]
    assert list(price_parameter(tensor, False, rows, "bf16", "adamw", pricers).weight) == [64 * each, 8 * each]


def test_what_autograd_keeps_of_a_llama() -> None:
    graph = prepare(traced("llama-4"))[0]
    alive = liveness(graph)
    at = {op.name: index for index, op in enumerate(graph.operators)}
    block = "model.layers.1"
    assert alive.saved[at[f"{block}.mlp.gate_proj/linear"]] == {0}  # weights exist anyway
    assert alive.saved[at[f"{block}.self_attn/scaled_dot_product_attention"]] == {0, 1, 2}
    assert alive.saved[at[f"{block}.mlp/mul"]] == {0, 1}
    assert alive.saved[at[f"{block}/add"]] == frozenset()
    assert alive.saved[at[f"{block}.self_attn/rotary"]] == frozenset()  # a rotary table is no activation
    assert f"{block}.self_attn/scaled_dot_product_attention" in alive.kept  # its own backward needs its result
    assert f"{block}.input_layernorm/rms_norm/shared" in alive.kept  # once for q, k and v
    assert f"{block}.mlp.up_proj/linear" not in alive.kept  # its one reader keeps it


def test_frozen_weights_keep_less() -> None:
    graph = prepare(traced("residual-frozen-half"))[0]
    frozen = liveness(graph)
    ups = [
        at for at, op in enumerate(graph.operators) if op.module.startswith("ups.") and op.op.endswith("linear.default")
    ]
    assert [bool(frozen.saved[at]) for at in ups] == [False] * 3 + [True] * 3


def test_the_backward_pass_reads_weights_but_neither_biases_nor_lookup_tables() -> None:
    graph = prepare(traced("gpt-4-tied"))[0]
    alive = liveness(graph)
    at = {op.name: index for index, op in enumerate(graph.operators)}
    assert alive.weights[at["h.1.c_fc/linear"]] == {1}
    assert alive.weights[at["h.1.ln_1/layer_norm"]] == {1, 2}  # autograd keeps the bias of a norm without using it
    assert alive.weights[at["wte/embedding"]] == frozenset()


@pytest.mark.parametrize(
    ("model", "last"), [("llama-4", "model.layers.0.mlp.down_proj/linear"), ("gpt-4-tied", "h.0.mlp_proj/linear")]
)
def test_recomputation_stops_where_the_last_operand_is_there(model: str, last: str) -> None:
    """The operand of the last projection is brought to it once more; its product and the residual sum are not."""
    graph, blocks = prepare(traced(model))
    names = [op.name for op in graph.operators]
    again = replays(graph, blocks)[0]
    assert blocks.start + again.works == names.index(last)
    assert again.moves == again.works + 1 < len(blocks.operators(0))


def test_recomputation_goes_on_where_a_result_is_kept() -> None:
    graph, blocks = prepare(traced("chain"))
    again = replays(graph, blocks)[0]
    assert graph.operators[blocks.start + again.works - 1].op == "aten.relu.default"
    assert again.moves == again.works


def test_the_steps_of_a_redistribution_and_the_messages_they_send() -> None:
    """S0 on a slow axis to S1 on a fast one: one gather, one slice that sends nothing."""
    tensor = TensorType(shape=(16, 16), dtype="bfloat16")
    pricer = RedistributionPricer(mesh=MESH, cluster=CLUSTER)
    source, target = parse_layout("S0,R"), parse_layout("R,S1")
    route = pricer.route(tensor, source, target)
    assert math.isclose(route.seconds, pricer.seconds(tensor, source, target), rel_tol=1e-12)
    assert [(message.kind, message.axis) for message in route.messages] == [("all_gather", 0)]
    assert pricer.sends(tensor, source, target)
    assert not pricer.sends(tensor, parse_layout("R,R"), parse_layout("S0,S1"))


def test_a_state_that_is_no_slice_of_its_weight_needs_a_master_copy() -> None:
    tensor = TensorType(shape=(32, 64), dtype="float32")
    pricer = RedistributionPricer(mesh=MESH, cluster=CLUSTER)
    rows = [stored("R,R", "P,P", "S0,S0"), stored("R,S0", "P,S0", "S0,S0")]
    prices = price_parameter(tensor, True, rows, "fp32", "adamw", Pricers.of(pricer.mesh, CLUSTER))
    assert list(prices.state) == [8 * 32 * 64 / 16, 12 * 32 * 64 / 16]


def test_model_flops_leave_out_what_attention_does_twice() -> None:
    """Forward 4 b h q k d, halved by the causal mask; the model's backward is twice, the kernel's 2.5 times that."""
    prices = priced(ATTENTION, (None, None))
    forward = 4 * 2 * 8 * 16 * 16 * 4 / 2
    assert prices.flops[0] == pytest.approx(3.5 * forward)
    graph, at = graph_and_operator(ATTENTION)
    rule = rule_of(graph, graph.operators[at])
    assert 3 * rule.gradient_work == pytest.approx(2.0)


def test_values_narrower_than_keys_make_the_backward_pass_longer() -> None:
    """Latent attention of DeepSeek-V3: 3 d + 2 e backward for d + e forward (d 192, e 128), of which the model's own
    are 2 d + 2 e. Equal widths take 2.5 times as much."""
    wide, narrow = torch.zeros(1, 4, 16, 192, device="meta"), torch.zeros(1, 4, 16, 128, device="meta")
    of_values = Example("aten.scaled_dot_product_attention.default", (wide, wide, narrow, None, 0.0, True), {}).rule()
    equal = Example("aten.scaled_dot_product_attention.default", (wide, wide, wide, None, 0.0, True), {}).rule()
    assert of_values.backward_work((0, 1, 2)) == pytest.approx((3 * 192 + 2 * 128) / (192 + 128))
    assert of_values.backward_work((0, 1, 2), repeated=False) == pytest.approx(2.0)
    assert equal.backward_work((0, 1, 2)) == 2.5
