"""The stacks of equal layers on which the search of others was measured, as modules of a user.

Shape legend: B batch, S sequence, H hidden, N heads, D head dim.
"""

import torch
import torch.nn.functional as F
from torch import nn

MLP_WIDTH = 4096
MLP_BATCH = 64
GPT_HIDDEN = 1024
GPT_HEADS = 16
GPT_SEQUENCE = 1024
GPT_BATCH = 16


class MLPLayer(nn.Module):
    """relu(x W) of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x_BH: torch.Tensor) -> torch.Tensor:
        return F.relu(self.dense(x_BH))


class GPTLayer(nn.Module):
    """Attention with separate projections and a GELU MLP, each behind a layer norm and with a residual."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        normed_BSH = self.norm_1(x_BSH)
        query_BNSD, key_BNSD, value_BNSD = (
            projection(normed_BSH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, is_causal=True)
        x_BSH = x_BSH + self.out(mixed_BNSD.transpose(1, 2).flatten(2))
        result: torch.Tensor = x_BSH + self.down(F.gelu(self.up(self.norm_2(x_BSH))))
        return result


class Stack(nn.Module):
    """Layers one after the other; called on the first one's input it returns the mean of squares of the last one's."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


def mlp_stack(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """An MLP of equal widths, on the meta device, and its input."""
    with torch.device("meta"):
        stack = Stack([MLPLayer(MLP_WIDTH) for _ in range(layers)]).bfloat16()
        return stack, torch.zeros(MLP_BATCH, MLP_WIDTH, dtype=torch.bfloat16)


def gpt_stack(layers: int) -> tuple[nn.Module, torch.Tensor]:
    """The decoder blocks of a GPT, on the meta device, and their input."""
    with torch.device("meta"):
        stack = Stack([GPTLayer(GPT_HIDDEN, GPT_HEADS) for _ in range(layers)]).bfloat16()
        return stack, torch.zeros(GPT_BATCH, GPT_SEQUENCE, GPT_HIDDEN, dtype=torch.bfloat16)
