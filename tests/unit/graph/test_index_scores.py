"""Scores of indexers are one operator, which computes the same."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.graph.operators import index_scores as scores
from planner.graph.rewriting.indexers import INDEX_SCORES
from planner.graph.trace import trace

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _wanted(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.matmul(query.float(), key.transpose(-1, -2).float().unsqueeze(1))


def _deepseek(query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(weight.float().unsqueeze(-2), torch.relu(_wanted(query, key) * 0.5)).squeeze(-2)


def _scaled_behind(query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return ((torch.relu(_wanted(query, key)) * 0.5) * weight.float().unsqueeze(-1)).sum(dim=2)


def _negative(query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(weight.float().unsqueeze(-2), torch.relu(_wanted(query, key) * -0.5)).squeeze(-2)


def _without_relu(query: torch.Tensor, key: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.matmul(weight.float().unsqueeze(-2), _wanted(query, key) * 0.5).squeeze(-2)


class _Indexer(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.queries, self.keys, self.weights = (nn.Linear(8, width) for width in (6 * 4, 4, 6))

    def operands(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.queries(x).unflatten(-1, (6, 4)), self.keys(x), self.weights(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.form(*self.operands(x)).sin().mean()


@pytest.mark.parametrize(
    ("form", "known"), [(_deepseek, True), (_scaled_behind, True), (_negative, False), (_without_relu, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_an_indexer_are_one_operator(form: Form, known: bool, dtype: torch.dtype) -> None:
    """It reads what was there before casts; nothing with heads, queries and keys is made."""
    graph = trace(_Indexer(form).to(dtype), (torch.randn(2, 5, 8, dtype=dtype),))
    found = [op for op in graph.operators if op.op == INDEX_SCORES]
    assert len(found) == known
    assert any(tensor.shape == (2, 5, 6, 5) for tensor in graph.types.values()) == (not known)
    if known:
        query, key, weight = (graph.types[name] for name in found[0].operands)
        assert (query.shape, key.shape, weight.shape) == ((2, 5, 6, 4), (2, 5, 4), (2, 5, 6))
        assert query.dtype == key.dtype == str(dtype).removeprefix("torch.")
        assert found[0].arguments[3] == 0.5


@pytest.mark.parametrize("block", [1, 2 * 5 * 6 * 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_computes_what_is_spelled_out(block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of one query, and of all, with the gradients."""
    monkeypatch.setattr(scores, "BLOCK", block)
    model, x = _Indexer(_deepseek).to(dtype), torch.randn(2, 5, 8, dtype=dtype)
    given = [one.detach().requires_grad_() for one in model.operands(x)]
    found = []
    for made in (_deepseek(*given), scores.index_scores(given[0], given[1], given[2].float(), 0.5)):
        assert made.dtype == torch.float32
        found.append((made.detach(), *torch.autograd.grad(made.sin().sum(), given)))
    torch.testing.assert_close(*found, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-5)
