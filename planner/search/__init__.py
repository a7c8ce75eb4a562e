"""The search: cost tables, pieces and their prices, solvers, and the space around them.

The package itself can be called: `planner.search("llama70b", "h100-80gb", devices=64)`, which is
`planner.search.api.search`.
"""

import sys
from types import ModuleType
from typing import Any

__all__: list[str] = []


class _Search(ModuleType):
    """A package that is also its most important function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from planner.search.api import search

        return search(*args, **kwargs)


sys.modules[__name__].__class__ = _Search
