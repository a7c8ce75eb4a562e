"""What the user names as `package.module:factory`: the one place where a name is imported.

The name comes from the user who typed the command or wrote the call: `--model`, `--dataset`. Importing runs code, with
the current folder first on the path, so no name that was read from a file may come here: not from a plan, a manifest of
a checkpoint, a config or the settings of an engine. `planner.plan.binding.model_of` decides what a plan may build.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from planner.errors import PlannerError, unknown_name


def imported_factory(reference: str, option: str, error: type[PlannerError]) -> Callable[[], Any]:
    """The callable that `package.module:factory` names, from the import path or the current folder, which the user
    asked for with `option`. Raises `error` where there is none."""
    path, colon, name = reference.partition(":")
    if "/" in path or path.endswith(".py"):
        raise error(f"{option} {reference} names a file; write package.module:factory, with dots and without .py")
    if not colon:
        raise error(f"{option} {reference}: write package.module:factory")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(path)
    except Exception as raised:  # a module of the user's may raise anything
        raise error(
            f"cannot import '{path}' of {option} {reference}: {type(raised).__name__}: {raised}; the import path and"
            f" {here} were searched"
        ) from raised
    factory = getattr(module, name, None)
    if not callable(factory):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise error(unknown_name(f"factory in {path}", name, public))
    found: Callable[[], Any] = factory
    return found
