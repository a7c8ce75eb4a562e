"""Attention of more or fewer than four dims is called with four, and computes what PyTorch computes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.graph.trace import trace
from planner.graph.tracing.attention_dims import AttentionOfFourDims
from planner.sharding.rules import rule_of
from runtime.ops.attention.with_dropout import attention_with_dropout
from runtime.ops.randomness import FIRST, dropping, keep_mask, operator_code, whole_region
from runtime.step.same_dropout import SameDropout

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, dict[str, Any]]] = {
    "matrices": ((5, 4), (6, 4), None, {}),
    "batch and heads in one": ((3, 5, 4), (3, 6, 4), None, {}),
    "mask for each": ((3, 5, 4), (3, 6, 4), (3, 5, 6), {}),
    "mask for all": ((3, 5, 4), (3, 6, 4), (1, 5, 6), {}),
    "causal": ((3, 5, 4), (3, 5, 4), None, {"is_causal": True}),
    "groups": ((6, 5, 4), (2, 6, 4), None, {"enable_gqa": True}),
    "windows": ((2, 3, 2, 5, 4), (2, 3, 2, 6, 4), None, {}),
    "windows, mask of heads": ((2, 3, 2, 5, 4), (2, 3, 2, 6, 4), (2, 5, 6), {}),
    "windows, mask of windows": ((2, 3, 2, 5, 4), (2, 3, 2, 6, 4), (3, 1, 5, 6), {}),
    "windows, groups": ((2, 3, 4, 5, 4), (2, 3, 2, 6, 4), None, {"enable_gqa": True}),
    "keys for all": ((2, 3, 2, 5, 4), (1, 1, 2, 6, 4), None, {}),
    "four": ((2, 2, 5, 4), (2, 2, 6, 4), (5, 6), {}),
}


class Attention(nn.Module):
    """One attention of parameters, so that gradients are those of all operands."""

    def __init__(
        self, query: tuple[int, ...], key: tuple[int, ...], mask: tuple[int, ...] | None, how: dict[str, Any]
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value = (nn.Parameter(torch.randn(shape)) for shape in (query, key, key))
        self.mask = None if mask is None else nn.Parameter(torch.randn(mask))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = F.scaled_dot_product_attention(
            x * self.query, self.key, value=self.value, attn_mask=self.mask, **self.how
        )
        return mixed.square().mean()


@pytest.mark.parametrize("case", CASES)
def test_it_is_what_pytorch_computes(case: str) -> None:
    module = Attention(*CASES[case]).double()
    found = []
    for mode in (torch.enable_grad(), AttentionOfFourDims()):
        with mode:
            loss = module(torch.ones(1, dtype=torch.float64))
        found.append((loss.detach(), torch.autograd.grad(loss, list(module.parameters()))))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_it_has_a_rule(case: str) -> None:
    graph = trace(Attention(*CASES[case]), (torch.ones(1),))
    (attention,) = [op for op in graph.operators if "scaled_dot_product" in op.op]
    assert [len(graph.types[name].shape) for name in attention.operands[:3]] == [4, 4, 4]
    assert rule_of(graph, attention).op_class == "attention"


def test_the_unsharded_model_drops_what_the_graph_drops() -> None:
    module = Attention((3, 5, 4), (3, 6, 4), None, {"dropout_p": 0.5})
    graph = trace(module, (torch.ones(1),))
    (attention,) = dropping(graph)
    with SameDropout([attention], FIRST):
        loss = module(torch.ones(1))
    keep = keep_mask(FIRST.key(operator_code(attention.name)), whole_region((3, 1, 5, 6)), 0.5, loss.device)
    mixed = attention_with_dropout(*(each[:, None] for each in (module.query, module.key, module.value)), keep, 0.5)
    torch.testing.assert_close(loss, mixed.square().mean())
