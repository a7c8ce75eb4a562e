"""What the arguments of a call decide: degrees, places of tables, padding, replicas and strategies of operators."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hardware_profiles import Machine, parts_of
from planner.api.checks import number, public, record, texts, word
from planner.errors import RequestError
from planner.sharding.update import Update
from planner.strategy_search.request.offload import NOTHING, parse_offload
from planner.strategy_search.request.per_replica import parse_per_replica
from planner.strategy_search.request.request import Padding, Placing, Shard
from planner.strategy_search.request.shard import shard as sharded
from planner.strategy_search.request.space import FREE, Pinned

shard = public(sharded)


def completed(pinned: Pinned, machine: Machine, *, owned: bool) -> Pinned:
    """All degrees: data parallelism takes the remaining devices, and ZeRO is 1 where states are `owned` whole."""
    filled = replace(
        pinned,
        tensor=pinned.tensor or 1,
        pipeline=pinned.pipeline or _fewest_stages(machine),
        context=pinned.context or 1,
        expert=pinned.expert or 1,
        virtual_stages=pinned.virtual_stages or (None if pinned.schedule == "interleaved_1f1b" or pinned.in_a_v else 1),
        zero=int(owned) if pinned.zero is None else pinned.zero,
        offload=pinned.offload or NOTHING,
    )
    others = math.prod(degree or 1 for degree in (filled.tensor, filled.pipeline, filled.context))
    if pinned.mesh is not None:
        raise RequestError("pinned['mesh']: estimate takes degrees; leave the mesh to search")
    if filled.data is None and machine.devices % others:
        raise RequestError(
            f"tensor x pipeline x context = {others} does not divide {machine.devices} devices; change a degree"
        )
    return replace(filled, data=filled.data or machine.devices // others)


def _fewest_stages(machine: Machine) -> int:
    """The minimum number of pipeline stages: each lies in one group of devices, and all have equally many."""
    return machine.devices // math.gcd(*(part.devices for part in parts_of(machine)))


def pinned_given(pinned: object) -> Pinned:
    if isinstance(pinned, Mapping):
        pinned = dict(pinned)
        if isinstance(pinned.get("offload"), str):
            pinned["offload"] = parse_offload(pinned["offload"])
    elif isinstance(pinned, Pinned) and isinstance(pinned.offload, str):
        pinned = replace(pinned, offload=parse_offload(pinned.offload))
    return record("pinned", pinned, Pinned, FREE)


def places_given(place: object, update: Update) -> tuple[Placing, Update]:
    if place is None:
        return ("given" if update.placed else "fit"), update
    if isinstance(place, Mapping):
        tables = tuple((str(pattern), str(where)) for pattern, where in place.items())
        return "given", replace(update, placed=(*update.placed, *tables))
    word("place", place, ("auto", "none"))
    return ("auto" if place == "auto" else "given"), update


def padding_given(pad: object, update: Update) -> tuple[Padding, int | None, Update]:
    """How the search pads weights, the multiple of the global batch, and the update with the padded weights."""
    auto, rows = False, dict[object, int]()
    for one in pad if isinstance(pad, list | tuple) else () if pad is None else (pad,):
        if isinstance(one, Mapping):
            rows |= one
        else:
            word("pad", one, ("auto",))
            auto = True
    for pattern, multiple in rows.items():
        number(f"pad[{str(pattern)[:80]!r}]", multiple)
    weights = tuple((str(pattern), multiple) for pattern, multiple in rows.items() if pattern != "batch")
    if "batch" in rows and update.padding_samples:
        raise RequestError("pad['batch'] and update['padding_samples'] both pad the global batch; give one of them")
    padding: Padding = "auto" if auto else "given"
    return padding, rows.get("batch"), replace(update, padded=(*update.padded, *weights))


def replicas_given(per_replica: Sequence[str], update: Update) -> Update:
    """The update with the operators that each replica computes alone."""
    texts("per_replica", per_replica)
    patterns, count = parse_per_replica(per_replica)
    if update.replicas and count not in (0, update.replicas):
        raise RequestError(f"per_replica has {count} replicas, update['replicas'] {update.replicas}; give one of them")
    both = tuple(dict.fromkeys((*update.per_replica, *patterns)))
    return replace(update, per_replica=both, replicas=count or update.replicas)


def shards_given(given: object) -> tuple[Shard, ...]:
    if isinstance(given, Mapping):
        return tuple(shard(str(pattern), strategy) for pattern, strategy in given.items())
    if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(one, Shard) for one in given):
        raise RequestError("shard: give {'*q_proj*': 'b,o'}, or a list of planner.shard(pattern, strategy)")
    return tuple(given)
