"""Models that are hard to plan, as factories for `--model hard_models:NAME`: see bench_limits.py."""

import random
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...]] | tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
_CALLS = (torch.relu, torch.tanh, torch.sigmoid, torch.exp, torch.sin)


class Skips(nn.Module):
    """Each layer reads the sum of all before."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = [x]
        for layer in self.layers:
            held.append(torch.relu(layer(torch.stack(held).sum(0))))
        return torch.stack(held).sum()


class Row(nn.Module):
    """Operators in a row, drawn by chance, so that no block repeats."""

    def __init__(self, operators: int) -> None:
        super().__init__()
        self.operators, self.weight = operators, nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw, x = random.Random(0), x * self.weight
        for _ in range(self.operators):
            x = draw.choice(_CALLS)(x)
        return x.sum()


class Dims(nn.Module):
    """Tensors of eight dims that are turned again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((8,) * 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.tanh(x * self.weight) + x.transpose(2, 3)
        return x.sum()


class Endless(nn.Module):
    """A forward pass without end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x * self.weight


def _mamba(layers: int, tokens: int) -> Built:
    """Mamba of transformers without its kernels: a loop over tokens, with operators for each of them."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=256, hidden_size=64, state_size=16, num_hidden_layers=layers, use_cache=False)
    with torch.device("meta"):
        ids = torch.zeros(2, tokens, dtype=torch.long)
        return MambaForCausalLM(config), (), {"input_ids": ids, "labels": ids}


def mamba_short() -> Built:
    return _mamba(1, 8)


def mamba() -> Built:
    return _mamba(2, 64)


def mamba_long() -> Built:
    return _mamba(4, 512)


def dense() -> Built:
    return Skips(60), (torch.zeros(4, 16),)


def chain() -> Built:
    return Row(5_000), (torch.zeros(4, 16),)


def long_chain() -> Built:
    return Row(20_000), (torch.zeros(4, 16),)


def dims() -> Built:
    return Dims(), (torch.zeros((8,) * 8, device="meta"),)


def endless() -> Built:
    return Endless(), (torch.zeros(4, 16),)
