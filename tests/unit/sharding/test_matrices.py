"""Which parameters Muon updates: weights of linear layers and of experts within a model."""

import pytest
import torch
from torch import nn

import planner
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.plan.binding.bind import prepare
from planner.sharding.matrices import matrices_of, optimizer_of
from planner.strategy_search.request.folding import fold

OTHERS = {
    "llama-tiny": ["lm_head.weight", "model.embed_tokens.weight"],
    "mixtral-tiny": ["lm_head.weight", "model.embed_tokens.weight"],
    "gpt-tiny": ["wpe.weight", "wte.weight"],
    "t5-tiny": ["decoder_bias.bias.weight", "encoder_bias.bias.weight", "shared.weight"],
    "vit-tiny": ["class_token", "head.weight", "patches.weight", "positions"],
}
"""Of the weights with two dims and more those that AdamW updates."""


@pytest.mark.parametrize("model", OTHERS)
def test_embeddings_and_what_makes_logits_are_for_adamw(model: str) -> None:
    graph = planner.trace(model).graph
    several = {one.name for one in graph.parameters if len(graph.types[one.name].shape) > 1}
    assert sorted(several - matrices_of(graph)) == OTHERS[model]


def test_vectors_and_convolutions_are_for_adamw() -> None:
    assert matrices_of(planner.trace("resnet-tiny").graph) == frozenset()
    assert not any("norm" in name for name in matrices_of(planner.trace("llama-tiny").graph))


LOSSES = {
    "cross_entropy": nn.functional.cross_entropy,
    "log_softmax": lambda logits, labels: nn.functional.nll_loss(logits.log_softmax(-1), labels),
    "gathered": lambda logits, labels: -logits.log_softmax(-1).gather(-1, labels[:, None]).mean(),
    "squares": lambda logits, labels: (logits - 1).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_an_output_layer_is_for_adamw_under_any_loss(loss: str) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            hidden = x + self.second(self.first(x).relu())  # nothing but the head is behind this sum
            return LOSSES[loss](self.head(hidden), labels)

    graph = trace(Classifier(), (torch.randn(16, 8), torch.randint(4, (16,))))
    assert matrices_of(graph) == {"first.weight", "second.weight"}


class Encoder(nn.Module):
    """Blocks that all read what entered the first, with no output layer behind them, but an extra layer if asked."""

    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.leave = nn.Linear(8, 8) if extra else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.enter(x)
        for block in self.blocks:
            x = x + block(x * first)
        return self.leave(x).square().mean()


@pytest.mark.parametrize("extra", [False, True])
def test_the_last_of_equal_blocks_is_no_output_layer(extra: bool) -> None:
    """Also in the graph of plans, whose shared values have identities, and in the template of the search."""
    graph = trace(Encoder(extra=extra), (torch.randn(4, 8),))
    hidden = {"enter.weight", *(f"blocks.{block}.{layer}.weight" for block in range(3) for layer in (0, 2))}
    prepared, blocks = prepare(graph)
    template = fold(prepared, blocks)
    assert matrices_of(graph) == matrices_of(prepared) == hidden
    assert blocks.count == 3
    own = [one.name for one in template.graph.parameters]
    assert {name for name in own if template.optimizer_of("muon", name) == "muon"} == hidden.intersection(own)


class Own(nn.Module):
    """A frozen matrix, a transposed one, a stack of matrices, and one that is multiplied and added."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(8, 8))
        self.stack = nn.Parameter(torch.randn(4, 8, 8))
        self.both, self.last = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.frozen @ self.turned.t() @ self.both + self.both[0]
        return self.last(torch.bmm(x.reshape(4, -1, 8), self.stack)).square().mean()


def own() -> OperatorGraph:
    return trace(Own(), (torch.randn(16, 8),))


def test_only_what_is_trained_and_only_multiplied_is_a_matrix() -> None:
    assert matrices_of(own()) == {"turned", "stack"}


def test_other_optimizers_update_everything() -> None:
    graph = own()
    assert {optimizer_of(graph, "sgd", name) for name in ("turned", "both")} == {"sgd"}
    assert [optimizer_of(graph, "muon", name) for name in ("turned", "both")] == ["muon", "adamw"]
