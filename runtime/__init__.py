"""Executes exactly what a plan says, on torch.distributed.

    import runtime

    step = runtime.parallelize(module, plan, (tokens, labels))      # on every rank, under torchrun
    loss = step(tokens, labels)

    for stage in runtime.audit(plan, graph, samples, cluster):      # anywhere: what it will do, and what was predicted
        assert stage.agrees

Importing this package does not import torch; its names do when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.auditing import StageAudit, audit
    from runtime.optimizer import OptimizerSettings
    from runtime.step import TrainingStep, parallelize

__all__ = ["OptimizerSettings", "StageAudit", "TrainingStep", "audit", "parallelize"]

_HOMES = {
    "OptimizerSettings": "runtime.optimizer",
    "StageAudit": "runtime.auditing",
    "TrainingStep": "runtime.step",
    "audit": "runtime.auditing",
    "parallelize": "runtime.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
