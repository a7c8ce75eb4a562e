"""A model as its user may write it: two towers that share all their weights, and several inputs of different shapes."""

import torch
import torch.nn.functional as F
from torch import nn


class Towers(nn.Module):
    """Questions and answers, each with its own length, come to lie near each other where they belong together; the
    answers' words are predicted besides, by the embedding that they were read with."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, 16)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(16), "up": nn.Linear(16, 32), "down": nn.Linear(32, 16)})
            for _ in range(2)
        )
        self.head = nn.Linear(16, vocabulary, bias=False)
        self.head.weight = self.words.weight
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(
        self,
        questions: tuple[torch.Tensor, torch.Tensor],
        answers: tuple[torch.Tensor, torch.Tensor],
        importance_B: torch.Tensor,
    ) -> torch.Tensor:
        (asked_BH, _), (given_BH, given_BSH) = self.tower(*questions), self.tower(*answers)
        near_B = (F.normalize(asked_BH, dim=-1) * F.normalize(given_BH, dim=-1)).sum(-1) * self.temperature.exp()
        apart = -(F.logsigmoid(near_B) * importance_B).sum() / importance_B.sum()
        return apart + 0.5 * F.cross_entropy(self.head(given_BSH).flatten(0, 1), answers[0].flatten())

    def tower(self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean of the tokens that the mask has, and all tokens."""
        x_BSH = self.words(tokens_BS)
        for block in self.blocks:
            x_BSH = x_BSH + block["down"](F.gelu(block["up"](block["norm"](x_BSH))))
        weight_BS1 = mask_BS.unsqueeze(-1).to(x_BSH.dtype)
        return (x_BSH * weight_BS1).sum(1) / weight_BS1.sum(1).clamp(min=1.0), x_BSH


def pairs(samples: int, length: int, vocabulary: int, generator: torch.Generator) -> tuple[object, ...]:
    """Questions half as long as answers, each with its mask, and a weight for every pair."""

    def texts(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(vocabulary, (samples, tokens), generator=generator)
        return words, torch.rand(samples, tokens, generator=generator) < 0.7

    return texts(length // 2), texts(length), torch.rand(samples, generator=generator) + 0.5
