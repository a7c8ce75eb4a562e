"""Tables of the unsharded model for plans with tables off the devices: sparse gradients, with torch's own optimizers
for them, independent of the servers."""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from planner.errors import RequestError
from runtime.checkpoint.state_names import kept_name, saved_name
from runtime.optimizers.optimizers import MOMENTS, OptimizerSettings


def sparse_tables(
    module: nn.Module, tables: Mapping[str, torch.Tensor], optimizer: str, settings: OptimizerSettings
) -> torch.optim.Optimizer | None:
    """The optimizer over the masters of these tables, by parameter name; their embeddings give sparse gradients from
    now on. None for no tables. Raises RequestError for a table that is not of an Embedding or EmbeddingBag."""
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
    """Load the state of the masters after `updates` updates into the optimizer of `sparse_tables`: `read` gives a whole
    tensor by its name in a checkpoint."""
    optimizer.state.clear()
    if not updates or not isinstance(optimizer, torch.optim.SparseAdam):
        return
    for name, master in tables.items():
        moments = {kind: read(kept_name(kind, saved_name(name))) for kind in MOMENTS["adamw"]}
        known = {kind: torch.zeros_like(master) if found is None else found for kind, found in moments.items()}
        optimizer.state[master] = {"step": updates, **{kind: one.to(master) for kind, one in known.items()}}
