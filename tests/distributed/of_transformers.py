"""Models of transformers, built from their configs."""

from pathlib import Path

import torch
from torch import nn

from planner.models.huggingface.from_config import from_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


class OfTransformers(nn.Module):
    """A language model, called with tokens and labels, that returns its loss."""

    def __init__(self, name: str, batch: int, length: int) -> None:
        super().__init__()
        built = from_config(str(CONFIGS / name), batch=batch, device="cpu", sequence_length=length)
        self.model = built.module.train()

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens_BS, labels=labels_BS).loss
