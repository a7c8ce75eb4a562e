"""DLRM: embeddings of fields and a bottom MLP of dense features meet in products of pairs, a top MLP follows (Naumov et
al. 2019).

Shape legend: B batch, D dense features, F fields and the dense features as one more, H width of the tables, P pairs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import blank_embedding, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig:
    """Dimensions: one table for each field; the last of the bottom sizes is the width of the tables, and a last layer
    of one unit follows the top sizes."""

    table_rows: tuple[int, ...]
    table_width: int
    dense_features: int
    bottom_sizes: tuple[int, ...]
    top_sizes: tuple[int, ...]


class DLRM(nn.Module):
    """Called on dense features (B D), the value of each field (B, integers) and whether there was a click (B, integers)
    it returns the mean loss."""

    first: torch.Tensor
    second: torch.Tensor

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        assert config.bottom_sizes[-1] == config.table_width, "dense features become one more vector of the same width"
        self.tables = nn.ModuleList(blank_embedding(rows, config.table_width) for rows in config.table_rows)
        meeting = len(config.table_rows) + 1
        pairs = meeting * (meeting - 1) // 2
        self.bottom = _layers((config.dense_features, *config.bottom_sizes))
        self.top = _layers((config.table_width + pairs, *config.top_sizes))
        self.last = nn.Linear(config.top_sizes[-1], 1)
        first, second = torch.tril_indices(meeting, meeting, offset=-1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)
        initialise(self)

    def forward(self, dense_BD: torch.Tensor, fields: Sequence[torch.Tensor], clicks_B: torch.Tensor) -> torch.Tensor:
        dense_BH = _through(self.bottom, dense_BD)
        found = [table(field_B) for table, field_B in zip(self.tables, fields, strict=True)]
        vectors_BFH = torch.stack([dense_BH, *found], dim=1)
        products_BFF = torch.bmm(vectors_BFH, vectors_BFH.transpose(1, 2))
        pairs_BP = products_BFF[:, self.first, self.second]
        logits_B = self.last(_through(self.top, torch.cat((dense_BH, pairs_BP), dim=1))).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits_B.float(), clicks_B.float())


def _layers(sizes: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))


def _through(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = F.relu(layer(x))
    return x
