"""Which parameters an operator reads, where casts and views stand between."""

import torch
from torch import nn

from planner.graph.trace import trace


class _Routed(nn.Module):
    """A product in fp32 with a weight in bf16, then one with half of a weight, then with the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(8, 8, dtype=torch.bfloat16))
        self.pair = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.pair.chunk(2, dim=1)
        return (((x @ self.router.float()) @ gate) @ up).square().mean()


def test_a_product_reads_the_parameter_behind_a_cast_or_a_chunk() -> None:
    graph = trace(_Routed(), (torch.randn(4, 8),))
    products = [operator for operator in graph.operators if operator.op == "aten.matmul.default"]
    assert [graph.parameters_of(operator) for operator in products] == [("router",), ("pair",), ("pair",)]
    assert graph.parameters_of(graph.operators[-1]) == ()
