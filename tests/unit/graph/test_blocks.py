"""Repeated blocks are found from the operators alone, and shared values get an identity."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from planner.graph.blocks import IDENTITY, NO_BLOCKS, Blocks, block_parameters, share_values
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.gpt import GPT, GPTConfig
from planner.models.llama import Llama, LlamaConfig

WIDTH = 4


class Stack(nn.Module):
    """Layers of the given kinds, called in a plain loop; `wide` layers have a matrix of their own for each
    direction."""

    def __init__(self, kinds: str, call: Callable[[Any, str, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.kinds = kinds
        self.call = call or Stack.layer
        for i, kind in enumerate(kinds):
            setattr(self, f"part{i}", nn.Linear(WIDTH, WIDTH, bias=kind != "c"))
        self.head = nn.Linear(WIDTH, 1)

    @staticmethod
    def layer(part: nn.Linear, kind: str, x: torch.Tensor) -> torch.Tensor:
        if kind == "a":
            return x + part(x).relu()
        if kind == "b":
            return part(x.tanh()) * 2
        return part(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, kind in enumerate(self.kinds):
            x = self.call(getattr(self, f"part{i}"), kind, x)
        return self.head(x).sigmoid().log().mean()


def graph_of(kinds: str, call: Callable[..., torch.Tensor] | None = None) -> OperatorGraph:
    return trace(Stack(kinds, call), (torch.ones(2, WIDTH),))


def zoo(family: str, layers: int) -> OperatorGraph:
    with torch.device("meta"):
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        common = {"num_layers": layers, "hidden_size": 16, "num_heads": 4, "vocab_size": 32, "sequence_length": 8}
        module: nn.Module = (
            Llama(LlamaConfig(ffn_size=32, num_kv_heads=2, **common)) if family == "llama" else GPT(GPTConfig(**common))
        )
        return trace(module, (tokens, tokens))


def modules_of(graph: OperatorGraph, blocks: Blocks, block: int) -> set[str]:
    return {".".join(graph.operators[at].module.split(".")[:3]) for at in blocks.operators(block)}


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("layers", [2, 3, 6])
def test_zoo(family: str, layers: int) -> None:
    graph = zoo(family, layers)
    blocks = find_blocks(graph)
    assert blocks.count == layers
    own = block_parameters(graph, blocks, 0)
    assert len(own) == (9 if family == "llama" else 12)
    stem = "model.layers" if family == "llama" else "h"
    for block in range(layers):
        names = block_parameters(graph, blocks, block)
        assert [name.replace(f"{stem}.{block}.", "") for name in names] == [n.replace(f"{stem}.0.", "") for n in own]
    counted = sum(1 for op in graph.operators if f"{op.module}.".startswith(f"{stem}.1."))
    assert len(blocks.operators(0)) == counted


def test_one_layer_is_no_block() -> None:
    assert find_blocks(zoo("llama", 1)) == NO_BLOCKS


@pytest.mark.parametrize(
    ("kinds", "period", "count"),
    [
        ("aaaa", 3, 4),  # linear, relu, add
        ("ababab", 6, 3),  # and tanh, linear, mul
        ("aaaab", 3, 4),
        ("baaaa", 3, 4),
        ("abbabb", 9, 2),
        ("aa", 3, 2),
        ("ab", None, 0),
        ("a", None, 0),
    ],
)
def test_plain_loops(kinds: str, period: int | None, count: int) -> None:
    blocks = find_blocks(graph_of(kinds))
    assert blocks.count == count
    if period is None:
        assert blocks == NO_BLOCKS
    else:
        assert len(blocks.operators(0)) == period


def test_half_a_pattern_at_the_end_is_outside() -> None:
    graph = graph_of("ababa")
    blocks = find_blocks(graph)
    assert (len(blocks.operators(0)), blocks.count) == (6, 2)
    assert [op.module for op in graph.operators[blocks.stop :] if op.module] == ["part4", "head"]


def test_template_and_block_of() -> None:
    blocks = Blocks.alike(2, 3, 2)
    assert blocks.stop == 8
    assert [blocks.block_of(i) for i in range(9)] == [None, None, 0, 0, 0, 1, 1, 1, None]
    assert [blocks.template(i) for i in range(9)] == [0, 1, 2, 3, 4, 2, 3, 4, 8]


def test_dataflow_decides_and_not_the_operators_alone() -> None:
    """Six equal linears, of which each block of two reads the one before; from the fourth on they all read the
    input."""

    class Forked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, beside = x, torch.zeros_like(x)
            for i in range(6):
                made = getattr(self, f"part{i}")(y if i < 4 else x).relu()
                y, beside = (made, beside) if i < 4 else (y, beside + made)
            return self.head(y + beside).mean()

    graph = trace(Forked("cccccc"), (torch.ones(2, WIDTH),))
    blocks = find_blocks(graph)
    assert (len(blocks.operators(0)), blocks.count) == (2, 4)


def test_branches_side_by_side_are_no_blocks() -> None:
    class Branches(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [getattr(self, f"part{i}")(x).relu() for i in range(4)]
            return self.head(torch.cat(parts, dim=0)).mean()

    assert find_blocks(trace(Branches("aaaa"), (torch.ones(2, WIDTH),))) == NO_BLOCKS


def test_chains_of_blocks_win_over_longer_rows_of_branches() -> None:
    class Both(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(2):
                x = x + getattr(self, f"part{i}")(x).relu()
            parts = [getattr(self, f"part{i}")(x).tanh() for i in range(2, 10)]
            return self.head(torch.cat(parts, dim=0)).mean()

    blocks = find_blocks(trace(Both("a" * 10), (torch.ones(2, WIDTH),)))
    assert (blocks.start, len(blocks.operators(0)), blocks.count) == (0, 3, 2)


def test_frozen_blocks_are_not_those_that_train() -> None:
    module = Stack("aaaaa")
    module.part0.requires_grad_(False)
    module.part1.requires_grad_(False)
    blocks = find_blocks(trace(module, (torch.ones(2, WIDTH),)))
    assert (blocks.start, len(blocks.operators(0)), blocks.count) == (0, 3, 2)


def test_buffers_of_their_own() -> None:
    class Buffered(Stack):
        def __init__(self) -> None:
            super().__init__("aaaa")
            for i in range(4):
                self.register_buffer(f"scale{i}", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(4):
                x = x + getattr(self, f"part{i}")(x) * getattr(self, f"scale{i}")
            return self.head(x).mean()

    blocks = find_blocks(trace(Buffered(), (torch.ones(2, WIDTH),)))
    assert (blocks.start, len(blocks.operators(0)), blocks.count) == (0, 3, 4)


def test_tied_weights_end_the_run() -> None:
    """A block that shares its weight with another is no copy of it."""

    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__("cccc")
            self.part3.weight = self.part0.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for i in range(4):
                x = getattr(self, f"part{i}")(x).relu()
            return self.head(x).mean()

    graph = trace(Tied(), (torch.ones(2, WIDTH),))
    blocks = find_blocks(graph)
    for block in range(blocks.count):
        assert len(block_parameters(graph, blocks, block)) == 1


def test_all_blocks_sharing_one_weight() -> None:
    class Universal(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(5):
                x = x + self.part0(x).relu()
            return self.head(x).mean()

    graph = trace(Universal("a"), (torch.ones(2, WIDTH),))
    blocks = find_blocks(graph)
    assert (len(blocks.operators(0)), blocks.count) == (3, 5)
    assert block_parameters(graph, blocks, 2) == ()


def called(graph: OperatorGraph, blocks: Blocks, block: int) -> list[str]:
    return [graph.operators[at].op for at in blocks.operators(block)]


# shared values


def shared(graph: OperatorGraph) -> tuple[OperatorGraph, Blocks]:
    return share_values(graph, find_blocks(graph))


@pytest.mark.parametrize(
    "make", [lambda: zoo("llama", 3), lambda: zoo("gpt", 4), lambda: graph_of("ababab"), lambda: graph_of("ab")]
)
def test_every_differentiable_result_has_one_use_or_an_identity(make: Callable[[], OperatorGraph]) -> None:
    before = make()
    graph, blocks = shared(before)
    for op in graph.operators:
        for name in op.results:
            if name in graph.differentiable and op.op != IDENTITY:
                assert len(graph.consumers.get(name, ())) <= 1
    plain = [op for op in graph.operators if op.op != IDENTITY]
    assert [op.name for op in plain] == [op.name for op in before.operators]
    for block in range(1, blocks.count):
        assert called(graph, blocks, block) == called(graph, blocks, 0)
    assert set(graph.types) == {*graph.inputs, *graph.buffers, *graph.parameter_names, *graph.producer}


def test_identities_of_a_llama_block() -> None:
    graph, blocks = shared(zoo("llama", 3))
    first = [graph.operators[at] for at in blocks.operators(0)]
    identities = [op.name.removeprefix("model.layers.0.") for op in first if op.op == IDENTITY]
    assert len(identities) == len(set(identities))
    assert "input_layernorm/rms_norm/shared" in identities  # read by query, key and value
    assert "post_attention_layernorm/rms_norm/shared" in identities  # by gate and up
    users = [graph.operators[i].module for i in graph.consumers["model.layers.0.input_layernorm/rms_norm/shared"]]
    assert users == [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


def test_what_has_no_gradient_needs_no_identity() -> None:
    class Masked(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = x.tanh()
            return (self.part0(x * mask) * mask).mean()

    graph, _ = shared(trace(Masked("a"), (torch.ones(2, WIDTH),)))
    assert not [op for op in graph.operators if op.op == IDENTITY]


def test_the_result_of_the_last_block_is_shared_like_that_of_the_others() -> None:
    """Blocks stay equal: the last result has one use, the others have two."""
    graph, blocks = shared(graph_of("aaaa"))
    assert blocks.count == 4
    ops = [op.op for op in graph.operators[blocks.start : blocks.stop]]
    assert ops == ops[: len(blocks.operators(0))] * 4


def test_a_loss_with_two_uses() -> None:
    class Used(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.part0(x).mean()
            self.twice.copy_(loss * 2)
            self.thrice.copy_(loss * 3)
            return loss

    used = Used("a")
    used.twice, used.thrice = nn.Buffer(torch.zeros(())), nn.Buffer(torch.zeros(()))
    graph, _ = shared(trace(used, (torch.ones(2, WIDTH),)))
    assert graph.loss == "mean/shared"
