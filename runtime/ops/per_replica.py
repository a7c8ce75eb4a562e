"""An operator that every data-parallel replica computes on its own samples: the local form of one replica runs once for
each replica of this rank.

    ranks 4, replicas 4     one replica per rank: the form is called on local tensors, and nothing is copied
    ranks 2, replicas 4     two replicas per rank: called twice on halves of the samples, results joined in order
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from planner.graph.per_replica import OWN, own_keywords, replicas_in
from runtime.ops.shard import Form, Shard


def per_replica(form: Form, shard: Shard, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
    """The results of all replicas of this rank; `form` is the local form of one."""
    replicas, here = replicas_in(tuple(keywords.items())), shard.replicas
    own = own_keywords(tuple(keywords.items()))
    made: list[Sequence[torch.Tensor]] = []
    for number in range(here):
        places = iter(replicas.operands)
        part = [_part(argument, places, number, here) for argument in arguments]
        results = form(*part, **{name: _part(value, places, number, here) for name, value in own})
        made.append(results if isinstance(results, tuple | list) else (results,))
    placed = iter(replicas.results)
    return tuple(
        _joined(parts, next(placed)) if isinstance(parts[0], torch.Tensor) else parts[0]
        for parts in zip(*made, strict=True)
    )


def _part(argument: Any, places: Iterator[int | None], number: int, here: int) -> Any:
    """A replica's part of an argument; tensors take the next entry of `places`."""
    if isinstance(argument, list | tuple):
        return [_part(item, places, number, here) for item in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    place = next(places)
    if place is None:
        return argument
    if place == OWN:
        return argument[number]
    each = argument.shape[place] // here
    return argument if here == 1 else argument.narrow(place, number * each, each)


def _joined(parts: Sequence[torch.Tensor], place: int | None) -> torch.Tensor:
    assert place is not None, "every result of a replica is its own"
    if place == OWN:
        return torch.stack(list(parts)) if len(parts) > 1 else parts[0].unsqueeze(0)
    return torch.cat(list(parts), place) if len(parts) > 1 else parts[0]
