"""Executes exactly what a plan says, on torch.distributed.

    import runtime

    step = runtime.parallelize(model, "plan.json")           # on every rank, under torchrun
    for tokens, labels in runtime.loader(dataset, step):     # whole global batches, the same on every rank
        loss = step(tokens, labels)

    runtime.get_rank("data"), runtime.get_group_size("tensor")     # places in the groups of the plan
    checkpoints = runtime.Checkpoints("runs/a")              # on every rank
    checkpoints.save(step)                                   # goes on in the background
    checkpoints.restore(step)                                # the newest, under any plan

    for stage in runtime.audit(plan, graph, samples, cluster):      # anywhere: what it will do, and what was predicted
        assert stage.agrees

Importing this package does not import torch; its names do when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.auditing import StageAudit, audit
    from runtime.checkpoint.saving import Checkpoints
    from runtime.groups import Groups, get_group, get_group_size, get_rank
    from runtime.guard_settings import GuardSettings
    from runtime.loading import BatchLoader, loader
    from runtime.optimizers import OptimizerSettings
    from runtime.tokens import TokensDataset
    from runtime.training_step import TrainingStep, parallelize

__all__ = [
    "BatchLoader",
    "Checkpoints",
    "Groups",
    "GuardSettings",
    "OptimizerSettings",
    "StageAudit",
    "TokensDataset",
    "TrainingStep",
    "audit",
    "get_group",
    "get_group_size",
    "get_rank",
    "loader",
    "parallelize",
]

_HOMES = {
    "BatchLoader": "runtime.loading",
    "Checkpoints": "runtime.checkpoint.saving",
    "Groups": "runtime.groups",
    "GuardSettings": "runtime.guard_settings",
    "OptimizerSettings": "runtime.optimizers",
    "StageAudit": "runtime.auditing",
    "TokensDataset": "runtime.tokens",
    "TrainingStep": "runtime.training_step",
    "audit": "runtime.auditing",
    "get_group": "runtime.groups",
    "get_group_size": "runtime.groups",
    "get_rank": "runtime.groups",
    "loader": "runtime.loading",
    "parallelize": "runtime.training_step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
