"""Tables of the unsharded model as a plan with tables outside of its devices trains them: sparse gradients, and torch's
own optimizers for those, which know nothing of servers."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from planner.errors import RequestError
from runtime.checkpoint.state_names import kept_name, saved_name
from runtime.optimizers.optimizers import MOMENTS, OptimizerSettings


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


def start_sparse(
    optimizer: torch.optim.Optimizer,
    tables: Mapping[str, torch.Tensor],
    read: Callable[[str], torch.Tensor | None],
    updates: int,
) -> None:
    """Give the optimizer of `sparse_tables` the state of its masters after so many updates: `read` gives a whole tensor
    by its name in a checkpoint."""
    optimizer.state.clear()
    if not updates or not isinstance(optimizer, torch.optim.SparseAdam):
        return
    for name, master in tables.items():
        moments = {kind: read(kept_name(kind, saved_name(name))) for kind in MOMENTS["adamw"]}
        known = {kind: torch.zeros_like(master) if found is None else found for kind, found in moments.items()}
        optimizer.state[master] = {"step": updates, **{kind: one.to(master) for kind, one in known.items()}}
