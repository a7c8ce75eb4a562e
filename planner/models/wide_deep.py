"""Wide & Deep: a linear model of crossed features and an MLP over embeddings, added (Cheng et al. 2016).

Shape legend: B batch, D dense features, X crossed features of a sample, H width of the tables.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import blank_embedding, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class WideDeepConfig:
    """Dimensions: one table for each field, and one of weights for all crossed features."""

    table_rows: tuple[int, ...]
    table_width: int
    dense_features: int
    hidden_sizes: tuple[int, ...]
    crossed_features: int
    crossed_rows: int


class WideDeep(nn.Module):
    """Called on dense features (B D), the value of each field (B, integers), the crossed features that a sample has (B
    X, integers) and whether there was a click (B, integers) it returns the mean loss."""

    def __init__(self, config: WideDeepConfig) -> None:
        super().__init__()
        self.tables = nn.ModuleList(blank_embedding(rows, config.table_width) for rows in config.table_rows)
        self.wide = blank_embedding(config.crossed_rows, 1)
        width = len(config.table_rows) * config.table_width + config.dense_features
        sizes = (width, *config.hidden_sizes)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))
        self.last = nn.Linear(sizes[-1], 1)
        initialise(self)

    def forward(
        self, dense_BD: torch.Tensor, fields: Sequence[torch.Tensor], crossed_BX: torch.Tensor, clicks_B: torch.Tensor
    ) -> torch.Tensor:
        found = [table(field_B) for table, field_B in zip(self.tables, fields, strict=True)]
        x = torch.cat((*found, dense_BD), dim=1)
        for layer in self.hidden:
            x = F.relu(layer(x))
        logits_B = self.last(x).squeeze(1) + self.wide(crossed_BX).sum(dim=(1, 2))
        return F.binary_cross_entropy_with_logits(logits_B.float(), clicks_B.float())
