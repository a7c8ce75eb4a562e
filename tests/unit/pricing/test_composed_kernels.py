"""What software computes by kernels of its own where other software has one, by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from costmodels import operator_time
from hardware_profiles import PYTORCH, Software
from hardware_profiles.software import ComposedLoss
from planner.graph.call import Call
from planner.graph.operator_graph import CASTS, TensorType
from planner.graph.trace import trace
from planner.pricing import OperatorPrices, price_operator
from planner.sharding.mesh import build_mesh
from planner.sharding.rules import RULES, rule_of
from tests.unit.search.cases import cluster_of

A100 = cluster_of("a100-80gb", 16)
QUIET = replace(A100, device=replace(A100.device, host_latency=0.0))
TOKENS, WORDS, WIDTH = 4096, 50304, 2048
HEADS, KEY_HEADS, SIZE = 32, 8, 128


def priced(op: str, operands: list[TensorType], result: TensorType, software: Software) -> OperatorPrices:
    """Prices of an operator that is not cut; all operands but integers have gradients."""
    keywords = (("enable_gqa", True),) if "attention" in op else ()
    given = (*operands, None, 0.0, True) if "attention" in op else tuple(operands)
    call = Call(op=op, arguments=given, keywords=keywords, results=(result,))  # type: ignore[arg-type]
    graded = [one.dtype != "int64" for one in operands]
    cluster = QUIET.with_software(software)
    mesh = build_mesh(cluster, (2, 8))
    return price_operator(RULES[op].build(call), [(None, None)], operands, [result], graded, mesh, cluster)


def moved(nbytes: float) -> float:
    """Seconds of an elementwise kernel that moves so many bytes."""
    return float(operator_time(op_class="elementwise", flops=0, bytes_moved=nbytes, dtype="bf16", device=QUIET.device))


def loss(software: Software) -> OperatorPrices:
    logits = TensorType(shape=(TOKENS, WORDS), dtype="float32")
    operands = [logits, TensorType(shape=(TOKENS,), dtype="int64")]
    return priced("aten.cross_entropy_loss.default", operands, TensorType(shape=(), dtype="float32"), software)


def test_a_loss_moves_the_bytes_of_its_kernels() -> None:
    fused = loss(PYTORCH)
    megatron, pytorch = (loss(replace(PYTORCH, composed_loss=whose)) for whose in ("megatron", "pytorch"))
    logits = TOKENS * WORDS
    assert megatron.forward[0] == pytest.approx(moved(32 * logits))
    assert megatron.backward[0] == fused.backward[0]
    assert (pytorch.forward[0], pytorch.backward[0]) == pytest.approx((moved(16 * logits), moved(20 * logits)))
    assert pytorch.backward[0] > 2 * fused.backward[0]


class Headed(torch.nn.Module):
    """A head and its loss: of logits that are cast for it, of logits as they are, or of a cast that is returned."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.head = torch.nn.Linear(64, 256, bias=False, dtype=torch.bfloat16)

    def forward(self, x_BH: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        logits_BV = self.head(x_BH)
        if self.way == "short":
            return F.cross_entropy(logits_BV, labels_B)
        long_BV = logits_BV.float()
        loss = F.cross_entropy(long_BV.view(-1, 256), labels_B)
        return loss + long_BV.mean() if self.way == "read twice" else loss


def prices_of_head(way: str, composed_loss: ComposedLoss) -> dict[str, OperatorPrices]:
    """Prices of the operators of a head and its loss, in one of PyTorch's ways to compute it."""
    graph = trace(Headed(way), (torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.int64)))
    cluster = QUIET.with_software(replace(PYTORCH, composed_loss=composed_loss))
    mesh, found = build_mesh(cluster, (2, 8)), dict[str, OperatorPrices]()
    for op in graph.operators:
        types = [graph.types[name] for name in op.operands]
        made = [graph.types[name] for name in op.results if name is not None]
        graded = [one.dtype != "int64" for one in types]
        rule = rule_of(graph, op)
        strategy = [(None, None)]
        found[op.op] = price_operator(rule, strategy, types, made, graded, mesh, cluster)
    return found


def test_a_loss_of_16_bits_has_no_cast() -> None:
    found = prices_of_head("cast", "pytorch-16")
    loss = found["aten.cross_entropy_loss.default"]
    assert (loss.forward[0], loss.backward[0]) == pytest.approx((moved(8 * 8 * 256), moved(10 * 8 * 256)))
    assert [float(prices.forward[0]) for op, prices in found.items() if op in CASTS] == [0.0]


def test_the_loss_of_llm_c_reads_logits_of_16_bits_and_leaves_their_gradient() -> None:
    found = prices_of_head("cast", "llm.c")
    loss = found["aten.cross_entropy_loss.default"]
    assert (loss.forward[0], loss.backward[0]) == pytest.approx((moved(4 * 8 * 256), moved(0)))
    casts = [prices for op, prices in found.items() if op in CASTS]
    assert [(float(one.forward[0]), float(one.backward[0])) for one in casts] == [(0.0, 0.0)]


@pytest.mark.parametrize(("way", "within"), [("cast", True), ("short", False), ("read twice", False)])
def test_a_compiler_reads_logits_within_the_loss(way: str, within: bool) -> None:
    found = prices_of_head(way, "inductor")
    loss = found["aten.cross_entropy_loss.default"]
    read = moved((8 if way == "read twice" else 4) * 8 * 256)
    assert (loss.forward[0], loss.backward[0]) == pytest.approx((read, read))
    casts = [prices for op, prices in found.items() if op in CASTS]
    assert [float(prices.forward[0]) == 0.0 for prices in casts] == ([] if way == "short" else [within])


@pytest.mark.parametrize("bias", [True, False])
def test_the_gradient_of_a_bias_reads_the_gradient_of_the_result(bias: bool) -> None:
    rows, weight = (TensorType(shape=(extent, WIDTH), dtype="bfloat16") for extent in (TOKENS, 3 * WIDTH))
    own = [TensorType(shape=(3 * WIDTH,), dtype="bfloat16")] if bias else []
    result = TensorType(shape=(TOKENS, 3 * WIDTH), dtype="bfloat16")
    plain, summed = (
        priced("aten.linear.default", [rows, weight, *own], result, replace(PYTORCH, sums_biases=told))
        for told in (False, True)
    )
    assert summed.forward[0] == plain.forward[0]
    read = moved(2 * TOKENS * 3 * WIDTH) if bias else 0.0
    assert summed.backward[0] - plain.backward[0] == pytest.approx(read)


@pytest.mark.parametrize("key_heads", [KEY_HEADS, HEADS])
def test_keys_and_values_are_copied_for_every_query_head(key_heads: int) -> None:
    queries, keys = (TensorType(shape=(1, heads, TOKENS, SIZE), dtype="bfloat16") for heads in (HEADS, key_heads))
    plain, copied = (
        priced(
            "aten.scaled_dot_product_attention.default",
            [queries, keys, keys],
            queries,
            replace(PYTORCH, repeats_keys=told),
        )
        for told in (False, True)
    )
    more = moved(2 * 2 * TOKENS * SIZE * (HEADS + key_heads)) if key_heads < HEADS else 0.0
    assert copied.forward[0] - plain.forward[0] == pytest.approx(more)
    assert copied.backward[0] - plain.backward[0] == pytest.approx(more)


def test_a_bias_of_scores_is_written_read_and_kept_and_hides_nothing() -> None:
    queries = TensorType(shape=(1, HEADS, TOKENS, SIZE), dtype="bfloat16")
    plain, biased = (
        priced("aten.scaled_dot_product_attention.default", [queries] * 3, queries, replace(PYTORCH, biased=told))
        for told in (False, True)
    )
    scores = 2 * HEADS * TOKENS**2
    assert biased.saved_extra[0] - plain.saved_extra[0] == scores
    forward, backward = biased.forward[0] - moved(2 * scores), biased.backward[0] - moved(scores)
    assert 1.7 < forward / plain.forward[0] <= 2  # tiles on the diagonal are whole in either
    assert 1.7 < backward / plain.backward[0] <= 2


def test_a_mask_of_padding_is_read_by_every_head_and_hides_nothing() -> None:
    queries = TensorType(shape=(1, HEADS, TOKENS, SIZE), dtype="bfloat16")
    plain, masked = (
        priced("aten.scaled_dot_product_attention.default", [queries] * 3, queries, replace(PYTORCH, masked=told))
        for told in (False, True)
    )
    assert masked.saved_extra[0] == plain.saved_extra[0]  # one mask for all layers
    read = moved(2 * HEADS * TOKENS**2)
    assert 1.7 < (masked.forward[0] - read) / plain.forward[0] <= 2  # tiles on the diagonal are whole in either
    assert 1.7 < (masked.backward[0] - read) / plain.backward[0] <= 2


def test_chains_of_one_kernel_read_and_write_once() -> None:
    """A rotation spelled out passes memory ten times."""
    heads, table = (TensorType(shape=shape, dtype="bfloat16") for shape in ((1, HEADS, TOKENS, SIZE), (TOKENS, SIZE)))
    for software, passes in ((PYTORCH, 10), (replace(PYTORCH, fuses_chains=True), 2)):
        rotation = Call(
            op="planner.rotary.default",
            arguments=(heads, table, table, False, False, 0, SIZE, False, None),
            keywords=(),
            results=(heads,),
        )
        cluster = QUIET.with_software(software)
        graded, operands = [True, False, False], [heads, table, table]
        rule, mesh = RULES[rotation.op].build(rotation), build_mesh(cluster, (2, 8))
        found = price_operator(rule, [(None, None)], operands, [heads], graded, mesh, cluster)
        nbytes = 2 * HEADS * TOKENS * SIZE
        assert passes * moved(nbytes) <= found.forward[0] * 1.1 < (passes + 1) * moved(nbytes) * 1.1


class Activated(torch.nn.Module):
    """A model of one activation: of a gate, of parts of one product, of a table that is as wide as one token, of
    nothing that is multiplied, or of what something else reads, too."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.second = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        opened_BSH = F.silu(self.first(x_BSH))
        if self.way == "parts":
            gate, up = self.first(x_BSH).chunk(2, dim=-1)
            return (F.silu(gate.float()).to(x_BSH.dtype) * up).sum()
        if self.way == "narrow":
            return (opened_BSH * self.second(x_BSH).mean(-1, keepdim=True)).sum()
        if self.way == "ungated":
            return self.second(opened_BSH).sum()
        product_BSH = opened_BSH * self.second(x_BSH)
        return (product_BSH + opened_BSH if self.way == "read twice" else product_BSH).sum()


@pytest.mark.parametrize(
    ("way", "free"), [("gate", True), ("parts", True), ("narrow", False), ("ungated", False), ("read twice", False)]
)
def test_the_activation_of_a_gate_runs_within_the_product_behind_it(way: str, free: bool) -> None:
    graph = trace(Activated(way), (torch.zeros(2, 8, 64),))
    silu = [op for op in graph.operators if op.op == "aten.silu.default" and graph.consumers.get(op.results[0] or "")]
    for software, nothing in ((PYTORCH, False), (replace(PYTORCH, fuses_chains=True), free)):
        cluster = QUIET.with_software(software)
        rule, x = rule_of(graph, silu[-1]), graph.types[silu[-1].operands[0]]
        mesh = build_mesh(cluster, (2, 8))
        found = price_operator(rule, [(None, None)], [x], [x], [True], mesh, cluster)
        assert (float(found.forward[0]) == 0.0, float(found.backward[0]) == 0.0) == (nothing, nothing)


def test_a_gelu_of_operators_reads_and_writes_for_each() -> None:
    rows = TensorType(shape=(TOKENS, 4 * WIDTH), dtype="bfloat16")
    plain, chain = (
        priced("aten.gelu.default", [rows], rows, replace(PYTORCH, composed_gelu=told)) for told in (False, True)
    )
    moved_once = 2 * TOKENS * 4 * WIDTH
    assert plain.forward[0] == pytest.approx(moved(2 * moved_once), rel=0.01)
    assert (chain.forward[0], chain.backward[0]) == pytest.approx((moved(18 * moved_once), moved(28 * moved_once)))
    assert chain.saved_extra[0] - plain.saved_extra[0] == 3 * moved_once
