"""Step-by-step computations of modules of transformers, as one operator each, while a module is traced.

Such a module calls a function in its own file. That function is the kernel of another package where the package is
installed, else it is written out: a loop over chunks or over steps, with some operators for each. During a
trace, functions of these names are called as operators of the planner, which compute the same:

    torch_chunk_gated_delta_rule, chunk_kimi_delta_attention    planner.gated_delta_rule
    mamba2_chunk_scan                                           planner.state_space_scan
    mamba_selective_scan                                        planner.selective_scan
    causal_conv1d_fn                                            planner.causal_convolution

So are forward passes in which such a loop is written out:

    MiniMaxLightningAttention.forward                           planner.state_space_scan

Calls with a state, for a state, or with packed sequences stay as they are.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

DELTA_RULE = "planner.gated_delta_rule.default"
STATE_SPACE = "planner.state_space_scan.default"
SELECTIVE_SCAN = "planner.selective_scan.default"
CAUSAL_CONVOLUTION = "planner.causal_convolution.default"
CHUNK = 64
"""Steps of the gated delta rule that are computed at a time, as in the authors' code of these models."""

_THEIRS = "transformers."
_KERNELS = frozenset({"transformers", "mamba_ssm", "causal_conv1d", "fla", "kernels"})
"""Packages whose functions compute what the planner's operators do."""

_SILU = ("silu", "swish")
_PACKED = ("cu_seqlens", "seq_idx")


@contextlib.contextmanager
def scans_as_operators(module: "nn.Module") -> Iterator[None]:
    """While active, modules of transformers inside of `module` call the operators."""
    files = {type(part).__module__ for part in module.modules() if type(part).__module__.startswith(_THEIRS)}
    before: list[tuple[ModuleType, str, Callable[..., Any]]] = [
        (sys.modules[file], name, function)
        for file in sorted(files)
        for name in _CALLS
        if (function := getattr(sys.modules[file], name, None)) is not None and _is_theirs(function)
    ]
    kinds = {type(part) for part in module.modules() if type(part).__module__ in files}
    whole: list[tuple[type, Callable[..., Any]]] = [
        (kind, kind.__dict__["forward"])
        for kind in sorted(kinds, key=lambda kind: kind.__qualname__)
        if kind.__name__ in _FORWARDS and _is_theirs(kind.__dict__["forward"])
    ]
    try:
        for file, name, function in before:
            setattr(file, name, _as_operator(function, _CALLS[name]))
        for kind, function in whole:
            setattr(kind, "forward", _as_operator(function, _FORWARDS[kind.__name__]))  # noqa: B010
        yield
    finally:
        for file, name, function in before:
            setattr(file, name, function)
        for kind, function in whole:
            setattr(kind, "forward", function)  # noqa: B010


def _is_theirs(function: Callable[..., Any]) -> bool:
    """Whether a function is from transformers, or from a package whose kernels it uses, and not put there by a user."""
    written_in = getattr(function, "__globals__", {}).get("__name__") or getattr(function, "__module__", None) or ""
    return written_in.split(".")[0] in _KERNELS


def _as_operator(function: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any, **settings: Any) -> Any:
        packed = any(settings.get(name) is not None for name in _PACKED)
        made = NotImplemented if packed else operator(*given, **settings)
        return function(*given, **settings) if made is NotImplemented else made

    return call


def _delta_rule(
    query: Any,
    key: Any,
    value: Any,
    g: Any,
    beta: Any,
    chunk_size: int = CHUNK,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_others: Any,
) -> Any:
    from planner.graph.operators.delta_rule import gated_delta_rule

    if initial_state is not None or output_final_state:
        return NotImplemented
    return gated_delta_rule(query, key, value, g, beta, bool(use_qk_l2norm_in_kernel), chunk_size), None


def _state_space_scan(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    chunk_size: int,
    D: Any = None,
    dt_bias: Any = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    z: Any = None,
    **_others: Any,
) -> Any:
    from planner.graph.operators.state_space_scan import state_space_scan

    stateful = initial_states is not None or return_final_states
    if stateful or z is not None or (D is not None and D.dim() > 1):
        return NotImplemented
    least, most = dt_limit
    bounds = float(least), None if most == math.inf else float(most)
    return state_space_scan(hidden_states, dt, A, B, C, D, dt_bias, bool(dt_softplus), *bounds, chunk_size)


def _selective_scan(
    hidden_states: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_others: Any,
) -> Any:
    from planner.graph.operators.selective_scan import selective_scan

    if return_last_state:
        return NotImplemented
    return selective_scan(hidden_states, dt, A, B, C, D, z, delta_bias, bool(delta_softplus))


def _causal_convolution(
    hidden_states: Any, weight: Any, bias: Any = None, activation: str | None = None, **_others: Any
) -> Any:
    from planner.graph.operators.causal_convolution import causal_convolution

    if activation is not None and activation not in _SILU:
        return NotImplemented
    return causal_convolution(hidden_states, weight, bias, activation is not None)


def _lightning_attention(
    module: Any,
    hidden_states: Any,
    position_embeddings: Any = None,
    attention_mask: Any = None,
    cache: Any = None,
    past_key_values: Any = None,
    **_others: Any,
) -> Any:
    from planner.graph.operators.lightning_attention import forward

    if cache is not None or past_key_values is not None:
        return NotImplemented
    return forward(module, hidden_states, attention_mask)


def _nothing(*_given: Any, **_settings: Any) -> None:
    """Stands for the kernel of a whole layer, which a module asks for first. None: there is no such kernel."""


_CALLS: Mapping[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _state_space_scan,
    "mamba_selective_scan": _selective_scan,
    "causal_conv1d_fn": _causal_convolution,
    "mamba2_split_conv1d_scan_combined": _nothing,
    "mamba_inner_fn": _nothing,
}
"""Functions of transformers by name, as calls of operators; NotImplemented where they stay as they are."""

_FORWARDS: Mapping[str, Callable[..., Any]] = {"MiniMaxLightningAttention": _lightning_attention}
"""Forward passes of modules of transformers by the name of the class, as calls of operators; NotImplemented where they
stay as they are."""
