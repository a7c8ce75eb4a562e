"""Local forms, run for every rank of a mesh in one process: the pieces recombine to what the whole operator gives."""

import itertools
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from planner.graph.operator_graph import OperatorGraph
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.models.experts.mixture import experts
from planner.plan.binding.bind import BoundOperator
from planner.sharding.layout import PARTIAL, REPLICATE
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rule import derive_layouts, named_strategy, strategy_names
from planner.sharding.rules import rule_of
from runtime.comm.device_mesh import Communicators, RankMesh
from runtime.comm.redistribute import local_piece
from runtime.ops.local.local_channels import functional_batch_norm
from runtime.ops.local.local_ops import local_call
from runtime.ops.local.local_shapes import gradient_start
from runtime.ops.shard import Shard
from tests.refusals import refused

MESH = Mesh(
    axes=(
        MeshAxis(name="axis0", size=2, stride=2, bandwidth=1e9),
        MeshAxis(name="axis1", size=2, stride=1, bandwidth=1e9),
    )
)
RANKS = [
    RankMesh(
        mesh=MESH, rank=rank, device=torch.device("cpu"), groups=(None, None), stage=0, stages=1, known=Communicators()
    )
    for rank in range(MESH.size)
]  # no process group: local forms that communicate would fail


class Calls(nn.Module):
    """A module whose forward is one function of its input and a weight, made a scalar."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, self.weight).float().sum()


def traced(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> OperatorGraph:
    return trace(Calls(function, weight), (x,))


def check_every_strategy(graph: OperatorGraph, name: str, operands: list[torch.Tensor]) -> set[tuple[str | None, ...]]:
    """Run operator `name` under every legal strategy on all ranks; returns the strategies."""
    op = next(op for op in graph.operators if op.op == name)
    rule = rule_of(graph, op)
    whole = local_call(graph, _bound(graph, op, rule, (None, None)), RANKS[0])(operands)
    seen = set()
    for strategy in legal_strategies(rule, MESH):
        bound = _bound(graph, op, rule, strategy)
        pieces = []
        for place in RANKS:
            local = [
                _operand(tensor, duplex.forward, place)
                for tensor, duplex in zip(operands, bound.layouts.operands, strict=True)
            ]
            pieces.append(local_call(graph, bound, place)(local))
        for index, duplex in enumerate(bound.layouts.results):
            _check([piece[index] for piece in pieces], whole[index], duplex.forward)
        seen.add(strategy_names(rule, strategy))
    return seen


def _bound(graph, op, rule, strategy) -> BoundOperator:
    return BoundOperator(operator=op, rule=rule, strategy=strategy, layouts=derive_layouts(rule, strategy))


def _operand(tensor: torch.Tensor, layout, place: RankMesh) -> torch.Tensor:
    return local_piece(tensor, layout, place)


def _check(pieces: list[torch.Tensor], whole: torch.Tensor, layout) -> None:
    """Pieces of the ranks along partial axes sum to the slice of the whole."""
    cut = tuple(p if p.is_shard else REPLICATE for p in layout)
    for coordinate in itertools.product(*(range(size) for size in MESH.sizes)):
        place = next(p for p in RANKS if p.coordinate == coordinate)
        terms = [
            pieces[p.rank]
            for p in RANKS
            if all(q == PARTIAL or a == b for q, a, b in zip(layout, p.coordinate, coordinate, strict=True))
        ]
        total = terms[0] if len(terms) == 1 else sum(terms)
        torch.testing.assert_close(total, local_piece(whole, cut, place))


def test_embedding_looks_up_its_own_rows() -> None:
    weight, tokens = torch.randn(8, 4), torch.tensor([[0, 7, 3, 4], [5, 1, 2, 6]])
    graph = traced(lambda x, w: nn.functional.embedding(x, w), tokens, weight)
    strategies = check_every_strategy(graph, "aten.embedding.default", [weight, tokens])
    assert {("v", "v"), ("v", "b"), ("h", "v")} <= strategies


@pytest.mark.parametrize("split", ["v", None])
@pytest.mark.parametrize("stranger", [8, -1])
def test_a_row_that_no_rank_has_is_refused_by_name(stranger: int, split: str | None) -> None:
    weight, tokens = torch.randn(8, 4), torch.tensor([[0, 7, 3, 4], [5, 1, 2, stranger]])
    graph = traced(lambda x, w: nn.functional.embedding(x, w), tokens.clamp(0, 7), weight)
    op = next(op for op in graph.operators if op.op == "aten.embedding.default")
    rule = rule_of(graph, op)
    bound = _bound(graph, op, rule, named_strategy(rule, (split, split), op.name))
    for place in RANKS:
        piece = _operand(weight, bound.layouts.operands[0].forward, place)
        with refused(RuntimeError, "embedding", 0, 7):
            local_call(graph, bound, place)([piece, tokens])


def test_a_split_mean_is_a_sum_of_scaled_terms() -> None:
    x = torch.randn(4, 8)
    graph = traced(lambda x, w: (x * w).mean(dim=1), x, torch.ones(8))
    assert ("d1", "d1") in check_every_strategy(graph, "aten.mean.dim", [x])


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, w: (x * w).reshape(4, 4, 2), "aten.reshape.default"),
        (lambda x, w: (x * w).unflatten(1, (2, -1)), "aten.unflatten.int"),
        (lambda x, w: (x * w).unsqueeze(0).expand(3, 4, 8), "aten.unsqueeze.default"),
        (lambda x, w: (x * w).narrow(0, 0, 4), "aten.narrow.default"),
        (lambda x, w: (x * w).narrow(1, 2, 4), "aten.narrow.default"),
        (lambda x, w: (x * w).split_with_sizes([4, 4], 1)[0], "aten.split_with_sizes.default"),
        (lambda x, w: (x * w).split_with_sizes([8], 1)[0], "aten.split_with_sizes.default"),
        (lambda x, w: (x * w).sum(dim=0, keepdim=True), "aten.sum.dim_IntList"),
        (lambda x, w: torch.softmax(x * w, -1), "aten.softmax.int"),
        (lambda x, w: (x * w).transpose(0, 1), "aten.transpose.int"),
    ],
)
def test_operators_that_spell_out_extents(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], name: str
) -> None:
    x = torch.randn(4, 8)
    graph = traced(function, x, torch.ones(8))
    assert len(check_every_strategy(graph, name, [x])) > 1


def test_factories_run_on_the_device_of_the_runtime_not_on_that_of_the_trace() -> None:
    module = Calls(lambda x, w: torch.arange(8, device=x.device) * w, torch.ones(8)).to("meta")
    graph = trace(module, (torch.empty(2, device="meta"),))
    op = next(op for op in graph.operators if op.op.startswith("aten.arange"))
    (made,) = local_call(graph, _bound(graph, op, rule_of(graph, op), (None, None)), RANKS[0])([])
    assert made.device.type == "cpu"


def test_experts_compute_the_rows_of_their_device() -> None:
    """Where rows are exchanged it takes processes: tests/distributed/test_experts.py."""
    tokens, weights = torch.randn(4, 4, 8), torch.rand(4, 4, 2)
    chosen = torch.randint(4, (4, 4, 2), generator=torch.Generator().manual_seed(0))
    matrices = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    graph = traced(lambda x, w: experts(x, weights, chosen, w, *matrices[1:]), tokens, matrices[0])
    op = next(op for op in graph.operators if op.op == "planner.experts.default")
    rule = rule_of(graph, op)
    for strategy in legal_strategies(rule, MESH):
        names = strategy_names(rule, strategy)
        bound = _bound(graph, op, rule, strategy)
        if {"e@b", "e@s"} & set(names):
            continue
        operands = (tokens, weights, chosen, *matrices)
        pieces = []
        for place in RANKS:
            layouts = bound.layouts.operands
            local = [_operand(t, duplex.forward, place) for t, duplex in zip(operands, layouts, strict=True)]
            pieces.append(local_call(graph, bound, place)(local)[0])
        _check(pieces, experts(*operands), bound.layouts.results[0].forward)


@pytest.mark.parametrize(
    ("function", "name", "fewest"),
    [
        (lambda x, w: nn.functional.dropout(x * w, 0.4), "aten.dropout.default", 16),
        (lambda x, w: torch.native_dropout(x * w, 0.4, True)[0], "aten.native_dropout.default", 16),
        (lambda x, w: nn.functional.dropout1d(x * w, 0.4), "aten.feature_dropout.default", 16),
        (lambda x, w: nn.functional.dropout(x * w, 1.0), "aten.dropout.default", 16),
        (lambda x, w: nn.functional.dropout(x * w, 0.4, training=False), "aten.dropout.default", 16),
    ],
)
def test_shards_drop_what_the_whole_drops(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], name: str, fewest: int
) -> None:
    x = torch.randn(4, 8, 4)
    graph = traced(function, x, torch.ones(8, 4))
    assert len(check_every_strategy(graph, name, [x])) >= fewest


@pytest.mark.parametrize("causal", [False, True])
def test_shards_of_attention_drop_the_probabilities_that_the_whole_drops(causal: bool) -> None:
    query, key = torch.randn(4, 4, 8, 4), torch.randn(4, 2, 8, 4)
    graph = traced(
        lambda q, k: nn.functional.scaled_dot_product_attention(
            q, k, k, dropout_p=0.4, is_causal=causal, enable_gqa=True
        ),
        query,
        key,
    )
    name = "aten.scaled_dot_product_attention.default"
    strategies = check_every_strategy(graph, name, [query, key, key])
    assert {("b", "g"), ("g", "r"), ("b", "b")} <= strategies
    assert not any("@" in str(factor) for strategy in strategies for factor in strategy), (
        "rings are for fused attention"
    )


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_halves_are_wide_as_the_graph_has_them(training: bool) -> None:
    """Without data PyTorch says float32, and with data it returns what it was given."""
    op, half = "aten._native_batch_norm_legit_functional.default", torch.bfloat16
    x, ones = torch.randn(4, 3, 2, 2, dtype=half), torch.ones(3, dtype=half)
    promised = resolve(op)(*(t.to("meta") for t in (x, ones, ones, ones, ones)), training, 0.1, 1e-5)
    shard: Any = SimpleNamespace(axes=lambda factor: (), bound=SimpleNamespace(operator=SimpleNamespace(op=op)))
    made = functional_batch_norm(shard, x, ones, ones, ones, ones, training, 0.1, 1e-5)
    assert [tensor.dtype for tensor in made[3:]] == [tensor.dtype for tensor in promised[3:]] == [torch.float32] * 2


def test_where_gradients_start_autograd_holds_nothing() -> None:
    """Neither what they start at nor the gradient that arrives there, for as long as the graph lives."""
    weight = torch.ones(4, requires_grad=True)
    start = gradient_start(cast(Shard, None), torch.arange(4.0))
    assert start.requires_grad
    assert not start.is_leaf
    alive = weakref.ref(start.untyped_storage())
    total = (start + weight).sum()
    del start
    assert alive() is None
    total.backward()
    assert torch.equal(torch.ones(4), cast(torch.Tensor, weight.grad))
    with torch.no_grad():
        assert not gradient_start(cast(Shard, None), torch.arange(4.0)).requires_grad
