"""Leaves out work of `torch.export` whose results tracing does not read: a fifth of the time of most models.

Stacks     For every operator that it records, PyTorch takes down the whole stack of calls, with the text of each line.
           A graph keeps one line, that of the user's code (`refusals.line_of`), so only this line is looked for.
Code       Whenever PyTorch changes a graph it writes Python code for it and compiles that. With PyTorch's own lazy
           graph modules, code is compiled when somebody calls it.
Operators  Before a graph is made functional, PyTorch lists all composite operators once for each namespace of
           operators, of which there are thirty; once is enough. Then it registers 11,000 kernels by a decorator whose
           annotations take longer than the rest of it; they are registered without.
"""

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch._export.utils
import torch.fx.proxy
from torch._C import DispatchKey
from torch._ops import OperatorBase
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from planner.graph.tracing.refusals import is_users


class _UsersLine:
    """Stands in for the `CapturedTraceback` of PyTorch, which keeps lines in functions named `forward` alone."""

    @staticmethod
    def extract() -> "_UsersLine":
        return _UsersLine()

    def summary(self) -> traceback.StackSummary:
        """The innermost line of the user's code in a function named `forward`, without its text."""
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            file, name = frame.f_code.co_filename, frame.f_code.co_name
            if name == "forward" and is_users(file):
                return traceback.StackSummary([traceback.FrameSummary(file, frame.f_lineno, name, line="")])
            frame = frame.f_back
        return traceback.StackSummary()


def _registering(whole: Callable[[OperatorBase, Any], Any]) -> Callable[[OperatorBase, Any], Any]:
    """What `py_impl` does for kernels of dispatch keys that have none yet; `whole` does all else."""

    def py_impl(operator: OperatorBase, key: Any) -> Any:
        if not isinstance(key, DispatchKey) or key == DispatchKey.Python or key in operator.py_kernels:
            return whole(operator, key)

        def register(kernel):  # type: ignore[no-untyped-def]  # annotations are what takes long
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
            return kernel

        return register

    return py_impl


@contextlib.contextmanager
def quick_export() -> Iterator[None]:
    """While active, `torch.export` is quicker and records the same operators."""
    listed_once = cache(torch._export.utils._materialize_cpp_cia_ops)
    with (
        patch.object(torch.fx.proxy, "CapturedTraceback", _UsersLine),
        patch.object(torch._export.utils, "_materialize_cpp_cia_ops", listed_once),
        patch.object(OperatorBase, "py_impl", _registering(OperatorBase.py_impl)),
        _use_lazy_graph_module(True),
    ):
        yield
