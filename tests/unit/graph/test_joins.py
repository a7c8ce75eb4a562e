"""Joins with empty tensors, as caches of keys and values begin."""

import pytest
import torch
from torch import nn

from planner.graph.trace import trace
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of

MESH = Mesh(axes=(MeshAxis(name="axis0", size=2, stride=1, bandwidth=1e9),))


class _Cached(nn.Module):
    """Attention-like: keys are joined with an empty cache, values with two of them and themselves."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear, self.dtype = nn.Linear(8, 8), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        empty = torch.tensor([], dtype=self.dtype, device=x.device)
        keys = torch.cat([empty, self.linear(x)], dim=-2)
        values = torch.cat([empty, x, empty, keys], dim=-2)
        return (keys.sum() + values.square().sum()) / x.shape[-1]


def test_empty_tensors_leave_joins() -> None:
    graph = trace(_Cached(), (torch.randn(2, 3, 8),))
    (joined,) = (op for op in graph.operators if op.op == "aten.cat.default")
    assert [graph.types[name].shape for name in joined.operands] == [(2, 3, 8), (2, 3, 8)]
    assert joined.operands == (*graph.inputs, "linear/linear")
    assert not graph.buffers
    assert not graph.constants
    assert not any(0 in tensor.shape for tensor in graph.types.values())
    assert all(name in graph.types for op in graph.operators for name in op.operands)
    again = rescale_batch(graph, 2, 6)
    assert again.types[joined.results[0] or ""].shape == (6, 6, 8)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cache_of_transformers_leaves_no_trace(device: str) -> None:
    """A model of transformers keeps keys and values unless its config says otherwise."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        model = GPT2LMHeadModel(
            GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, bos_token_id=1, eos_token_id=2)
        )
        tokens = torch.zeros(2, 4, dtype=torch.long)
    graph = trace(model, (), {"input_ids": tokens, "labels": tokens})
    assert not any(op.op == "aten.cat.default" for op in graph.operators)
    assert not any(0 in tensor.shape for tensor in graph.types.values())
    (attention,) = (op for op in graph.operators if "attention" in op.op)
    assert rescale_batch(graph, 2, 6).types[attention.results[0] or ""].shape == (6, 2, 4, 4)


class _Rotated(nn.Module):
    """Code that leaves a part of a head as it is, of which nothing is left where all of it is rotated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return torch.cat([made[..., :8].neg(), made[..., 8:]], dim=-1).square().mean()


class _Compressed(nn.Module):
    """Beside the tokens something is made of every eight of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.compress = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.linear(x)
        return torch.cat([made, self.compress(made[:, : x.shape[1] // 8])], dim=1).square().mean()


def test_parts_without_elements_leave_joins() -> None:
    graph = trace(_Rotated(), (torch.randn(2, 3, 8),))
    assert not any(op.op == "aten.cat.default" for op in graph.operators)
    assert not any(0 in tensor.shape for tensor in graph.types.values())


def test_weights_of_nothing_are_not_forgotten() -> None:
    """PyTorch gives them a gradient of zeros, and so they decay. What has no elements is whole on every device."""
    graph = trace(_Compressed(), (torch.randn(2, 3, 8),))
    (op,) = (op for op in graph.operators if op.op == "aten.linear.default" and "compress.weight" in op.operands)
    rule = rule_of(graph, op)
    none = {at for at, factor in enumerate(rule.factors) if factor.extent == 0}
    assert none
    assert none.isdisjoint(choice for (choice,) in legal_strategies(rule, MESH))


def test_a_join_keeps_its_dtype() -> None:
    """In PyTorch an empty tensor of float64 makes all of a join float64, so that it stays."""
    graph = trace(_Cached(torch.float64), (torch.randn(2, 3, 8),))
    joins = [op for op in graph.operators if op.op == "aten.cat.default"]
    assert [graph.types[op.results[0] or ""].dtype for op in joins] == ["float64", "float64"]
    assert len(joins[0].operands) == 2
