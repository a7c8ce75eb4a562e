"""Losses that are traced as others that say the same are what PyTorch computes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.graph.trace import trace
from planner.graph.tracing.whole_losses import WholeLosses
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of

CLASSES = 5
SHAPES = ((3, CLASSES), (3, CLASSES, 4), (2, CLASSES, 3, 4), (CLASSES,))


def _rows_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape[:1] + shape[2:] if len(shape) > 1 else ()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", ["classes", "ignored", "probabilities"])
def test_they_are_what_pytorch_computes(
    shape: tuple[int, ...], smoothing: float, weighted: bool, reduction: str, targets: str
) -> None:
    drawn = torch.Generator().manual_seed(len(shape))
    logits = torch.randn(shape, generator=drawn, dtype=torch.float64)
    weight = torch.rand(CLASSES, generator=drawn, dtype=torch.float64) + 0.5 if weighted else None
    target = torch.randint(0, CLASSES, _rows_of(shape), generator=drawn)
    settings: dict[str, Any] = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
    if targets == "ignored" and len(shape) > 1:
        target.view(-1)[0], settings["ignore_index"] = 2, 2
        target.view(-1)[1] = 3  # one that counts
    if targets == "probabilities":
        target = torch.rand(shape, generator=drawn, dtype=torch.float64)
    found = []
    for whole in (False, True):
        leaf = logits.clone().requires_grad_()
        if whole:
            with WholeLosses():
                loss = F.cross_entropy(leaf, target, **settings)
        else:
            loss = F.cross_entropy(leaf, target, **settings)
        (gradient,) = torch.autograd.grad(loss.square().sum(), leaf)
        found.append((loss.detach(), gradient))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("how", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"size_average": False}])
def test_negative_log_likelihoods_are_what_pytorch_computes(
    shape: tuple[int, ...], weighted: bool, how: dict[str, Any]
) -> None:
    drawn = torch.Generator().manual_seed(len(shape))
    likelihoods = torch.randn(shape, generator=drawn, dtype=torch.float64)
    weight = torch.rand(CLASSES, generator=drawn, dtype=torch.float64) + 0.5 if weighted else None
    target = torch.randint(0, CLASSES, _rows_of(shape), generator=drawn)
    with WholeLosses():
        found = F.nll_loss(likelihoods, target, weight, **how)
    torch.testing.assert_close(found, F.nll_loss(likelihoods, target, weight, **how), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4), (3,), (3, 1)])
@pytest.mark.parametrize("how", [{}, {"full": True, "reduction": "sum"}, {"eps": 0.5, "reduction": "none"}])
def test_gaussian_likelihoods_are_what_pytorch_computes(shape: tuple[int, ...], how: dict[str, Any]) -> None:
    drawn = torch.Generator().manual_seed(len(shape))
    mean, target = torch.randn(2, 3, 4, generator=drawn, dtype=torch.float64)
    variance = torch.rand(shape, generator=drawn, dtype=torch.float64).requires_grad_()
    found = []
    for whole in (False, True):
        with WholeLosses() if whole else nullcontext():
            loss = F.gaussian_nll_loss(mean, target, variance, **how)
        found.append((loss, *torch.autograd.grad(loss.sum(), variance)))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Uncertain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.variance = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.GaussianNLLLoss()(self.mean(x), x, self.variance(x).exp())


def test_no_value_is_asked_for_by_a_gaussian_likelihood() -> None:
    graph = trace(Uncertain(), (torch.randn(3, 4),))
    assert all(rule_of(graph, op) for op in graph.operators)


class Classifies(nn.Module):
    def __init__(self, classes_behind: bool, **settings: Any) -> None:
        super().__init__()
        self.linear, self.behind = nn.Linear(8, CLASSES), classes_behind
        self.loss = nn.CrossEntropyLoss(**settings)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x)
        loss: torch.Tensor = self.loss(logits if self.behind else logits.transpose(1, 2), target)
        return loss.mean()


X, TARGET = torch.zeros(2, 6, 8), torch.zeros(2, 6, dtype=torch.long)


@pytest.mark.parametrize(
    ("behind", "settings", "x", "target"),
    [
        (False, {"label_smoothing": 0.1}, X, TARGET),
        (False, {"weight": torch.ones(CLASSES)}, X, TARGET),
        (True, {"reduction": "none"}, X[:, 0], TARGET[:, 0]),
        (True, {}, X[:, 0], torch.zeros(2, CLASSES)),
    ],
)
def test_all_of_their_operators_have_rules(
    behind: bool, settings: dict[str, Any], x: torch.Tensor, target: torch.Tensor
) -> None:
    graph = trace(Classifies(behind, **settings), (x, target))
    rules = [rule_of(graph, op) for op in graph.operators]
    assert rules
    whole = "weight" in settings or "reduction" in settings or target.is_floating_point()
    assert any(rule.op == "aten.cross_entropy_loss.default" for rule in rules) is not whole
    assert rescale_batch(graph, 2, 6).types[graph.operators[0].results[0] or ""].shape[0] == 6


def test_what_pytorch_refuses_is_refused_as_by_pytorch() -> None:
    with (
        pytest.raises(ValueError, match=r"Expected input batch_size \(3\) to match target batch_size \(2\)"),
        WholeLosses(),
    ):
        F.cross_entropy(torch.zeros(3, CLASSES), torch.zeros(2, dtype=torch.long))
