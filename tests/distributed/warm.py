"""Imported once, in the process from which the workers of all pools are forked: what every one of them needs.

A process takes 5 CPU seconds until it has imported PyTorch and traced a first model; a fork takes none of them.
"""

import os

import torch

torch.set_num_threads(1)

from tests.distributed import plans, tasks, tasks_checking, tasks_models, tasks_placed, tasks_saving, updates  # noqa: E402, F401, I001
import runtime.launch.launch, runtime.launch.training  # noqa: E402, F401, E401
from planner.graph.trace import trace  # noqa: E402

trace(plans.build("llama"), plans.inputs("llama"))  # imports what tracing needs
assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
