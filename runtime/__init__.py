"""Executes exactly what a plan says, on torch.distributed.

    import runtime

    step = runtime.parallelize(module, plan, (tokens, labels))      # on every rank, under torchrun
    loss = step(tokens, labels)

Importing this package does not import torch; its names do when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.optimizers import OptimizerSettings
    from runtime.step import TrainingStep, parallelize

__all__ = ["OptimizerSettings", "TrainingStep", "parallelize"]

_HOMES = {
    "OptimizerSettings": "runtime.optimizers",
    "TrainingStep": "runtime.step",
    "parallelize": "runtime.step",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
