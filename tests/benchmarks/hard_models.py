"""Models that are hard to plan, as factories for `--model hard_models:NAME`: see bench_limits.py."""

import random
from typing import Any

import torch
import torch.nn.functional as F
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


class Loops(nn.Module):
    """Layers like those of Mamba, by a scan as transformers writes it out: a loop over tokens, with operators for each
    of them."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(256, 64), nn.Linear(64, 256)
        self.layers = nn.ModuleList(Loop(64, 128, 16) for _ in range(layers))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.rows(ids)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Loop(nn.Module):
    def __init__(self, hidden: int, width: int, state: int) -> None:
        super().__init__()
        self.sizes = (width, width, width, state, state)
        self.into, self.out = nn.Linear(hidden, sum(self.sizes)), nn.Linear(width, hidden)
        self.decays = nn.Parameter(torch.ones(width, state))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan

        scanned, steps, gates, *read = self.into(x).transpose(1, 2).split(self.sizes, 1)
        scanned = mamba_selective_scan(scanned, steps, -self.decays, *read, z=gates, delta_softplus=True)
        return self.out(scanned.transpose(1, 2))


def _mamba(layers: int, tokens: int) -> Built:
    with torch.device("meta"):
        ids = torch.zeros(2, tokens, dtype=torch.long)
        return Loops(layers), (ids, ids)


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
