"""Kernels that PyTorch launches, counted below autograd."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
NO_KERNEL = {ATEN.detach.default, ATEN.empty.memory_format, ATEN.empty_like.default, ATEN._unsafe_view.default}
"""Operators that only make views of memory, or only allocate it."""


class LaunchedKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels launched under it, by ATen operator: `found`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Counter[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace in ("aten", "planner") and not function.is_view and function not in NO_KERNEL:
            self.found[str(function)] += function is not ATEN.promote_types.default
        return function(*args, **(kwargs or {}))
