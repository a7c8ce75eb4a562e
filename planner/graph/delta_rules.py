"""The gated delta rule of transformers' models as one operator, while a module is traced.

Their modules call a function of the file that they stand in, which spells the rule out: a loop over chunks, that writes
into its results, with some operators for each, and while a model is exported a loop over the rows of a triangle beside.
For the time of a trace a function of these names is called as `planner::gated_delta_rule`, which computes the same.
Called with a state, or for one, it stays as it is.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DELTA_RULE = "planner.gated_delta_rule.default"
CHUNK = 64
"""Steps that are computed at a time, as those who wrote these models have them."""

_NAMES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
_THEIRS = "transformers."
_SETTINGS = frozenset({"chunk_size", "use_qk_l2norm_in_kernel", "initial_state", "output_final_state"})


@contextlib.contextmanager
def delta_rules_as_operators(module: "nn.Module") -> Iterator[None]:
    """While active, modules of transformers inside of `module` call the operator."""
    files = {type(part).__module__ for part in module.modules() if type(part).__module__.startswith(_THEIRS)}
    found = [(sys.modules[file], name) for file in sorted(files) for name in _NAMES if hasattr(sys.modules[file], name)]
    before: list[tuple[ModuleType, str, Callable[..., Any]]] = [
        (file, name, getattr(file, name)) for file, name in found
    ]
    try:
        for file, name, function in before:
            setattr(file, name, _as_operator(function))
        yield
    finally:
        for file, name, function in before:
            setattr(file, name, function)


def _as_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(query: Any, key: Any, value: Any, g: Any, beta: Any, **settings: Any) -> tuple[Any, None]:
        from planner.graph.delta_rule import gated_delta_rule

        more = {name: said for name, said in settings.items() if name not in _SETTINGS and said is not None}
        if settings.get("initial_state") is not None or settings.get("output_final_state") or "cu_seqlens" in more:
            made: tuple[Any, None] = function(query, key, value, g=g, beta=beta, **settings)
            return made
        normalised, chunk = settings.get("use_qk_l2norm_in_kernel", False), settings.get("chunk_size", CHUNK)
        return gated_delta_rule(query, key, value, g, beta, bool(normalised), chunk), None

    return call
