"""Leaves out work of `torch.export` whose results tracing does not read: a quarter of the time of a small model.

Stacks     For every operator that it records, PyTorch takes down the whole stack of calls, with the text of each line.
           A graph keeps one line, that of the user's code (`refusals.line_of`), so only this line is looked for.
Code       Whenever PyTorch changes a graph it writes Python code for it and compiles that. With PyTorch's own lazy
           graph modules, code is compiled when somebody calls it.
Operators  Before a graph is made functional, PyTorch lists all composite operators once for each namespace of
           operators, of which there are thirty. Once is enough.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from types import FrameType
from unittest.mock import patch

import torch._export.utils
import torch.fx.proxy
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


@contextlib.contextmanager
def quick_export() -> Iterator[None]:
    """While active, `torch.export` is quicker and records the same operators."""
    listed_once = cache(torch._export.utils._materialize_cpp_cia_ops)
    with (
        patch.object(torch.fx.proxy, "CapturedTraceback", _UsersLine),
        patch.object(torch._export.utils, "_materialize_cpp_cia_ops", listed_once),
        _use_lazy_graph_module(True),
    ):
        yield
