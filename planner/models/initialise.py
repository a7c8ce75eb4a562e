"""Weights to start from: normal with a standard deviation of 0.02, biases zero, norms one (Radford et al. 2019)."""

import torch
from torch import nn

_STANDARD_DEVIATION = 0.02


def initialise(model: nn.Module) -> None:
    """Draw the weights of linear layers, embeddings and stacked experts anew. Weights on meta have none and are left
    alone."""
    for module in model.modules():
        for stacked in (p for p in module.parameters(recurse=False) if p.dim() == 3 and not p.is_meta):
            with torch.no_grad():
                stacked.normal_(std=_STANDARD_DEVIATION)
        if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
            with torch.no_grad():
                module.weight.normal_(std=_STANDARD_DEVIATION)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()


def blank_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without values, for `initialise` to fill; unlike torch's own it draws nothing on meta."""
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
