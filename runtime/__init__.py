"""Executes exactly what a plan says, on torch.distributed.

    import runtime

    step = runtime.parallelize(model, "plan.json")           # on every rank, under torchrun
    for tokens, labels in runtime.loader(dataset, step):     # whole global batches, the same on every rank
        loss = step(tokens, labels)

    runtime.get_rank("data"), runtime.get_group_size("tensor")     # places in the groups of the plan
    checkpoints = runtime.Checkpoints("runs/a")              # on every rank
    checkpoints.save(step)                                   # writes in the background
    checkpoints.restore(step)                                # the newest checkpoint, under any plan

    for stage in runtime.audit(plan, graph, samples, cluster):      # on any machine: predicted and executed work
        assert stage.agrees

`runtime.integrations` runs a plan in the training loops of other libraries.

Importing this package does not import torch; torch is imported when one of the names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.auditing.audit import StageAudit, audit
    from runtime.checkpoint.saving import Checkpoints
    from runtime.comm.groups import Groups, get_group, get_group_size, get_rank
    from runtime.data.loading import BatchLoader, loader
    from runtime.data.tokens import TokensDataset
    from runtime.guard_settings import GuardSettings
    from runtime.optimizers.optimizers import OptimizerSettings
    from runtime.step.training_step import TrainingStep, parallelize

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
    "BatchLoader": "runtime.data.loading",
    "Checkpoints": "runtime.checkpoint.saving",
    "Groups": "runtime.comm.groups",
    "GuardSettings": "runtime.guard_settings",
    "OptimizerSettings": "runtime.optimizers.optimizers",
    "StageAudit": "runtime.auditing.audit",
    "TokensDataset": "runtime.data.tokens",
    "TrainingStep": "runtime.step.training_step",
    "audit": "runtime.auditing.audit",
    "get_group": "runtime.comm.groups",
    "get_group_size": "runtime.comm.groups",
    "get_rank": "runtime.comm.groups",
    "loader": "runtime.data.loading",
    "parallelize": "runtime.step.training_step",
}


def _loaded(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


if not TYPE_CHECKING:  # type checkers would take every name for one of this module
    __getattr__ = _loaded
