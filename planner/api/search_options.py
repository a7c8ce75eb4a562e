"""The options of searches, once: `search`, `estimate`, `pareto`, `compare` and `capacity` take them, and the command
fills them in. `planner.search` documents them."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, Unpack, get_args, get_origin, get_type_hints, is_typeddict

from planner.graph.expert_load import EVEN
from planner.sharding.update import Update
from planner.strategy_search.request.request import SIMPLICITY, Alltoall, Default, Objective, Shard
from planner.strategy_search.request.space import Pinned

Shards: TypeAlias = Mapping[str, "str | Sequence[Sequence[int]]"] | Sequence[Shard]
"""Strategies given by hand: {"*q_proj*": "b,o"}, or records of `planner.shard`."""

Pads: TypeAlias = Mapping[str, int] | str
"""{"lm_head.weight": 4, "batch": 4}, or "auto"."""


class JobOptions(TypedDict, total=False):
    """What is planned, and what is decided about it."""

    cluster: str | None
    engine: str | None
    seq_len: int | None
    global_batch: int | None
    imbalance: float
    tokens_once: int | None
    precision: str | None
    fp8: str | None
    fp8_layers: Sequence[str]
    fp8_left_out: Sequence[str]
    fp8_gathered: bool
    fp8_experts: bool
    fp8_dispatch: bool
    fp8_history: int | None
    fp8_margin: int | None
    optimizer: str
    pinned: Pinned | Mapping[str, Any] | None
    shard: Shards
    default: Default
    place: Mapping[str, str] | str | None
    pad: Pads | Sequence[Pads] | None
    per_replica: Sequence[str]
    update: Update | Mapping[str, Any] | None
    search: str
    forward_only: bool
    alltoall: Alltoall
    time_limit: float | None
    memory_limit: float | None
    memory_margin: float | None
    planner_memory: float | None
    certify: bool
    rule_cache: str | os.PathLike[str] | None
    graph_cache: str | os.PathLike[str] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] | None
    batch: int | None


class SearchOptions(JobOptions, total=False):
    """The same, and which plan is the best."""

    objective: Objective
    top: int
    simplicity: float


USUAL: SearchOptions = {
    "cluster": None,
    "engine": None,
    "seq_len": None,
    "global_batch": None,
    "imbalance": EVEN,
    "tokens_once": None,
    "precision": None,
    "fp8": None,
    "fp8_layers": (),
    "fp8_left_out": (),
    "fp8_gathered": False,
    "fp8_experts": False,
    "fp8_dispatch": False,
    "fp8_history": None,
    "fp8_margin": None,
    "optimizer": "adamw",
    "pinned": None,
    "shard": (),
    "default": "search",
    "place": None,
    "pad": None,
    "per_replica": (),
    "update": None,
    "search": "dynamic_programming",
    "forward_only": False,
    "alltoall": True,
    "time_limit": None,
    "memory_limit": None,
    "memory_margin": None,
    "planner_memory": None,
    "certify": False,
    "rule_cache": None,
    "graph_cache": None,
    "args": (),
    "kwargs": None,
    "batch": None,
    "objective": "time",
    "top": 1,
    "simplicity": SIMPLICITY,
}
"""The options that nobody gives."""


def spelled_out(function: Callable[..., object]) -> inspect.Signature:
    """The signature of a function, with the options in place of `**options: Unpack[...]`, as `help` shows it."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    rest = parameters[-1] if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else None
    if rest is None or get_origin(rest.annotation) is not Unpack:
        return signature
    (options,) = get_args(rest.annotation)
    assert is_typeddict(options)
    named = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=USUAL[name], annotation=kind)  # type: ignore[literal-required]
        for name, kind in get_type_hints(options).items()
    ]
    return signature.replace(parameters=[*parameters[:-1], *named])
