"""Tables of the unsharded model as a plan with tables outside of its devices trains them: sparse gradients, and torch's
own optimizers for those, which know nothing of servers."""

from collections.abc import Mapping

import torch
from torch import nn

from planner.errors import RequestError
from runtime.optimizers import OptimizerSettings


def sparse_tables(
    module: nn.Module, tables: Mapping[str, torch.Tensor], optimizer: str, settings: OptimizerSettings
) -> torch.optim.Optimizer | None:
    """The optimizer of the masters of these tables, by the names of the parameters, whose embeddings get sparse
    gradients from now on; None for no tables. Raises RequestError for a table that is not of an Embedding or
    EmbeddingBag."""
    if not tables:
        return None
    for name in tables:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            raise RequestError(
                f"table '{name}' is not of an Embedding or EmbeddingBag: its gradient is dense without the plan, so"
                f" that"
                " losses cannot be compared; run with --no-check"
            )
        owner.sparse = True
    masters = list(tables.values())
    if optimizer == "sgd":
        return torch.optim.SGD(masters, lr=settings.learning_rate)
    return torch.optim.SparseAdam(masters, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)
