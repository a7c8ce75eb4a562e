"""Models of transformers without their caches of keys and values, while they are traced.

Their configs say `use_cache` by default: a call makes an object that every layer writes to, for a later call that
training never makes. Layers that share such an object could not be traced once for all
(`planner.graph.tracing.repeats`), because a layer gets what the layer before has left in it.
"""

import contextlib
from collections.abc import Iterator

from torch import nn

_THEIRS = "transformers."


@contextlib.contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """While active, configs of transformers inside of `module` say that nothing is cached. A call that says
    `use_cache=True`, or passes a cache, still has a cache."""
    configs = {id(config): config for part in module.modules() if (config := _config(part)) is not None}
    for config in configs.values():
        config["use_cache"] = False
    try:
        yield
    finally:
        for config in configs.values():
            config["use_cache"] = True


def _config(part: nn.Module) -> dict[str, object] | None:
    """The attributes of the config of a module where it has one that says `use_cache`."""
    config = vars(part).get("config")
    found = type(config).__mro__[0:-1] if config is not None else ()
    theirs = any(each.__module__.startswith(_THEIRS) for each in found)
    return vars(config) if theirs and vars(config).get("use_cache") is True else None
