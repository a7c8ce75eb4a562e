"""What makes parsers of engines importable on a machine without accelerators.

Engines import kernels written in Triton beside their parsers, and what loads data, logs and saves. Nothing here runs
any of it, so that empty modules stand in for what is not installed; `typing.override` does nothing and came with
Python 3.12.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
import typing
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_STUBBED = (
    "triton",
    "tensorboard",
    "wandb",
    "datasets",
    "torchdata",
    "torch_checkpointing",
    "PIL",
    "six",
    "tokenizers",
)


class _Stub(ModuleType):
    """A module that has every class, for others to derive from, and every function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[0].isupper() else MagicMock(name=name)
        setattr(self, name, found)
        return found


class _Empty:
    """Last of all finders, finds and makes modules of which anything can be asked."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> object:
        if name.partition(".")[0] not in _STUBBED:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # a loader in kind

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = MagicMock(name=spec.name) if spec.name.startswith("triton") else _Stub(spec.name)
        module.__path__, module.__spec__, module.__name__, module.__version__ = [], spec, spec.name, "3.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


def without_kernels() -> None:
    """Let engines be imported without Triton and others, where they are not installed. PyTorch has looked for it
    before."""
    if any(isinstance(one, _Empty) for one in sys.meta_path):
        return
    for name in ("torch.utils.flop_counter", "torch._dynamo", "torch._inductor.runtime.triton_heuristics"):
        importlib.import_module(name)
    sys.meta_path.append(_Empty())  # type: ignore[arg-type]
    if not hasattr(typing, "override"):
        typing.override = lambda function: function  # type: ignore[attr-defined]
