"""The alternatives of a training engine: the combinations of its settings that agree with what the user decided."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from planner.engines.space import EngineSpace, Recomputed, Settings
from planner.graph.expert_load import EXPERTS_OPERATOR
from planner.nearest import divisors
from planner.plan.binding.bind import prepare
from planner.plan.layout.kept import Kept, block_words
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pattern, Pinned

_OWN = ("context_by", "interleave", "tensor_overlap", "expert_overlap", "pattern", "zigzag", "even")
"""Decisions that are always taken from the settings."""


def alternatives(space: EngineSpace, request: SearchRequest, asked: Pinned, experts: tuple[int, ...]) -> list[Pinned]:
    """The alternatives of all settings of an engine that agree with what was `asked`. `experts`: the possible
    expert-parallel degrees (`expert_degrees`)."""
    devices, kinds, turns = request.cluster.devices, _kinds(request), _has_causal_ring(request)
    tokens = request.model.sequence_length is not None
    rows = space.settings if tokens else [replace(one, samples_by="nothing") for one in space.settings]
    every = (_alternatives(settings, asked, experts, devices, kinds, turns=turns) for settings in rows)
    return list(dict.fromkeys(itertools.chain.from_iterable(every)))  # some rows of settings differ in experts only


def expert_degrees(request: SearchRequest) -> tuple[int, ...]:
    """The possible expert-parallel degrees of a model; empty if it has no experts."""
    rules = [rule_of(request.graph, op) for op in request.graph.operators if op.op == EXPERTS_OPERATOR]
    if not rules:
        return ()
    count = math.gcd(*(rule.factors[rule.index["e"]].extent for rule in rules))
    return tuple(degree for degree in divisors(count) if request.cluster.devices % degree == 0)


def _has_causal_ring(request: SearchRequest) -> bool:
    """Whether the model has causal attention that a ring can split: zigzag order balances only that."""
    rules = (rule_of(request.graph, op) for op in request.graph.operators)
    return any(rule.causal and any(f.kind is FactorKind.RING for f in rule.factors) for rule in rules)


def _kinds(request: SearchRequest) -> tuple[frozenset[str], ...]:
    """For each kind of block, the names of its operators that can keep their results."""
    graph, blocks = prepare(request.graph, request.imbalance, request.update.placed, request.fp8)
    each = (block_words(graph, blocks.operators(first)).values() for first in blocks.firsts)
    return tuple(frozenset(name for word in words for name in (*word.names, word.call)) for words in each)


def _ways(
    settings: Settings, asked: Pinned, kinds: Sequence[frozenset[str]], experts: bool
) -> list[tuple[Recomputed, Kept | None]]:
    """The ways to recompute blocks: how many are recomputed, and what these keep. They keep nothing, or the results of
    some operators; selective recomputation needs a named operator in every kind of block."""
    found: list[tuple[Recomputed, Kept | None]] = []
    if asked.recompute != "selective":
        found += [(count, None) for count in settings.recomputed]
    if asked.recompute in (None, "selective") and (settings.selective_experts or not experts):
        for count, kept in settings.selective:
            calls, but = (
                tuple(w for w in words if any(w in kind for kind in kinds)) for words in (kept.calls, kept.but)
            )
            if kinds and all(not kind.isdisjoint((*calls, *but)) for kind in kinds):
                found.append((count, Kept(calls=calls, but=but)))
    return list(dict.fromkeys(found))


def _alternatives(
    settings: Settings,
    asked: Pinned,
    experts: tuple[int, ...],
    devices: int,
    kinds: Sequence[frozenset[str]],
    *,
    turns: bool,
) -> Iterator[Pinned]:
    """The alternatives that a row of settings allows, as far as they agree with what the user decided; `turns` says
    whether rings may be in zigzag order."""
    if settings.piped and asked.pipeline == 1:
        return
    ways: tuple[str | None, ...] = settings.context or (None,)
    if asked.context_by not in (FREE.context_by, "auto"):
        ways = tuple(way for way in ways if way == asked.context_by)
    elif {"heads", "ring", "hybrid"} <= set(ways):
        ways = ("auto",)
    beside = dict(settings.beside_experts) if experts else {}
    if beside.get("context") == 1:
        ways = (None,)
    cut = [] if settings.whole_experts == (True,) else [(1, None)]
    spread = [(None, None)] if not experts else [*cut, *itertools.product(experts, settings.whole_experts)]
    running = _ways(settings, asked, kinds, bool(experts))
    each = itertools.product(settings.zero, running, ways, spread, _copies(settings, devices))
    for zero, (recomputed, kept), way, (expert, whole), replicas in each:
        wanted: dict[str, Any] = {
            **dict(settings.fixed),
            **beside,
            **({} if way else {"context": 1}),
            "zero": zero,
            "replicas": replicas,
            "sequence_parallel": settings.sequence_parallel,
            "expert": expert,
            "whole_experts": whole,
            "context_by": way or "heads",
            "zigzag": settings.zigzag if turns and way not in (None, "heads") else None,
            "recompute": {"none": "none", "all": "selective" if kept else "full"}.get(recomputed),
            "even": settings.even,
            "interleave": 1,
            "tensor_overlap": 1,
            "expert_overlap": False,
            "pattern": Pattern(
                vocabulary=settings.vocabulary,
                counts="equal" if recomputed == "equal" else "any",
                shards=settings.shards,
                interleaved=settings.interleaved,
                piped=settings.piped,
                filled=settings.filled,
                divided=settings.even,
                kept=kept,
                samples_by=settings.samples_by,
                over_context=settings.over_context,
            ),
        }
        for name in (field.name for field in fields(Pinned) if field.name not in _OWN):
            given, open_value = getattr(asked, name), getattr(FREE, name)
            if given != open_value and wanted.setdefault(name, given) != given:
                if wanted[name] is not None:
                    break
                wanted[name] = given
        else:
            apart = min(wanted["replicas"] or 1, wanted["expert"] or 1) > 1
            if settings.replicated_experts or not apart:
                yield Pinned(**wanted)


def _copies(settings: Settings, devices: int) -> tuple[int | None, ...]:
    """Possible numbers of replica groups, each of which shards everything within itself; None stands for one group of
    all devices. Each group has at least two devices."""
    if not settings.replicated:
        return (None,)
    return (None, *(count for count in divisors(devices) if 1 < count <= devices // 2))
