"""Stochastic depth: numbers that say which samples are kept are drawn by dropping ones; others are refused."""

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import OperatorGraph, TorchConstant
from planner.graph.trace import trace
from runtime.ops.randomness import Draw, dropping
from runtime.step.same_dropout import SameDropout
from tests.refusals import refused


class Branch(nn.Module):
    def __init__(self, shape: str, turned: bool = False) -> None:
        super().__init__()
        self.linear, self.shape, self.turned = nn.Linear(8, 8), shape, turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, keep = self.linear(x), 0.75
        shape = {"samples": (x.shape[0], 1, 1), "elements": x.shape}[self.shape]
        drawn = torch.rand(shape, dtype=x.dtype, device=x.device)
        kept = keep + drawn if self.turned else drawn + keep
        kept = kept.floor_() if self.turned else torch.floor(kept)
        return (x + found.div(keep) * kept).square().mean()


def check_same_dropout(module: nn.Module, x: torch.Tensor, graph: OperatorGraph) -> None:
    """A quarter is dropped, the same in every run of a micro-batch, and other elements in another one."""
    (drops,) = dropping(graph)
    assert drops.arguments[1] == 0.25
    losses = []
    for micro_batch in (0, 0, 1):
        with SameDropout([drops], Draw(seed=3, step=0, micro_batch=micro_batch)):
            losses.append(float(module(x).detach()))
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.parametrize("turned", [False, True])
def test_samples_are_kept_by_dropping_ones(turned: bool) -> None:
    module, x = Branch("samples", turned), torch.randn(64, 3, 8)
    graph = trace(module, (x,))
    calls = [op.op for op in graph.operators]
    assert not {"aten.rand.default", "aten.floor.default"} & set(calls)
    check_same_dropout(module, x, graph)


class Bernoulli(nn.Module):
    """As timm and torchvision write it, and a dropout by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, keep = self.linear(x), 0.75
        if self.how == "timm":
            kept = found.new_empty((x.shape[0], 1, 1)).bernoulli_(keep)
        elif self.how == "torchvision":
            kept = torch.empty((x.shape[0], 1, 1), dtype=x.dtype, device=x.device).bernoulli_(p=keep)
        else:
            kept = torch.bernoulli(torch.ones_like(found), p=keep)
        kept.div_(keep)
        return (x + found * kept).square().mean()


@pytest.mark.parametrize("how", ["timm", "torchvision", "by hand"])
def test_bernoulli_keeps_by_dropping_ones(how: str) -> None:
    module, x = Bernoulli(how), torch.randn(64, 3, 8)
    graph = trace(module, (x,))
    assert "aten.bernoulli.p" not in [op.op for op in graph.operators]
    check_same_dropout(module, x, graph)


class Compared(nn.Module):
    """Labels that are left out by chance, as diffusion transformers do it, and words."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(8, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left_out = {
            "below": lambda: torch.rand(x.shape[0], device=x.device)[:, None, None] < 0.25,
            "at most": lambda: torch.rand((x.shape[0], 1, 1)) <= 0.25,
            "above": lambda: ~(torch.rand(x.shape[:2]) > 0.25)[..., None],
            "like": lambda: ~torch.ge(torch.rand_like(x), 0.25),
            "like words": lambda: torch.rand_like(x.long(), dtype=torch.float32) < 0.25,
        }[self.how]()
        return torch.where(left_out, 0.0, self.linear(x)).square().mean()


@pytest.mark.parametrize("how", ["at most", "above", "like", "like words"])
def test_what_is_compared_with_a_probability_is_drawn_by_dropping_ones(how: str) -> None:
    module, x = Compared(how), torch.randn(64, 3, 8)
    graph = trace(module, (x,))
    assert not {"aten.rand.default", "aten.rand_like.default"} & {op.op for op in graph.operators}
    (ones,) = (op for op in graph.operators if op.op in ("aten.ones.default", "aten.ones_like.default"))
    given = dict(ones.keywords).get("dtype", TorchConstant("dtype", "float32"))
    assert given == TorchConstant("dtype", "float32")
    assert how != "like words" or "dtype" in dict(ones.keywords)
    check_same_dropout(module, x, graph)


def test_numbers_that_are_read_before_they_are_compared_are_refused() -> None:
    with refused(ModelError, "aten.rand.default", "rand(...) < p"):
        trace(Compared("below"), (torch.randn(64, 3, 8),))


class Chances(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.bernoulli(x.sigmoid())).mean()


def test_chances_of_each_element_are_refused() -> None:
    with refused(ModelError, "aten.bernoulli.default", "aten.dropout.default"):
        trace(Chances(), (torch.randn(4, 8),))


def test_other_numbers_are_refused() -> None:
    with refused(ModelError, "aten.rand.default", "aten.dropout.default"):
        trace(Branch("elements"), (torch.randn(4, 3, 8),))
