"""Requests with operators that every data-parallel replica computes separately (see `planner.sharding.per_replica`)."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from planner.errors import RequestError
from planner.nearest import divisors, multiples, nearest_of, nearest_words
from planner.strategy_search.request.request import SearchRequest


def parse_per_replica(texts: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Patterns, and the number of replicas, 0 if it is not given. Each text is PATTERN or PATTERN=N. Raises
    RequestError."""
    patterns, counts = [], set[int]()
    for text in texts:
        pattern, equals, number = text.rpartition("=")
        pattern, number = (pattern, number) if equals else (text, "")
        if not pattern.strip() or (equals and not re.fullmatch("0*[1-9][0-9]{0,8}", number.strip())):
            raise RequestError(f"per_replica: '{text}': write PATTERN, or PATTERN=N for N replicas, as in '*norm*=4'")
        patterns.append(pattern.strip())
        counts |= {int(number)} if equals else set()
    if len(counts) > 1:
        raise RequestError(f"per_replica: {' and '.join(map(str, sorted(counts)))} replicas; a batch is cut once")
    return tuple(dict.fromkeys(patterns)), next(iter(counts), 0)


def with_replica_count(request: SearchRequest, only_batch: str | None) -> SearchRequest:
    """The request with the number of replicas. By default it is the data-parallel degree, or the number of devices that
    nothing else uses. Raises RequestError if it does not divide the batch, if the data-parallel degree does not divide
    it, and for a model that computes with one batch size only (`only_batch` says why)."""
    update, pinned = request.update, request.pinned
    if not update.per_replica:
        return request
    if only_batch is not None:
        raise RequestError(f"per_replica: replicas have fewer samples than the example of this model: {only_batch}")
    taken = (pinned.pipeline or 1) * (pinned.tensor or 1) * (pinned.context or 1)
    count = update.replicas or pinned.data or max(1, request.cluster.devices // taken)
    if pinned.data is not None and count % pinned.data:
        raise RequestError(
            f"per_replica: data = {pinned.data} does not divide {count} replica{'s' * (count > 1)};"
            f" {nearest_words(pinned.data, divisors(count))}, or as many replicas as data"
        )
    if request.global_batch % count:
        legal = [one for one in divisors(request.global_batch) if one % (pinned.data or 1) == 0]
        options: dict[str, tuple[int, Iterable[int]]] = {"replicas": (count, legal)}
        if count < request.global_batch or not update.replicas:
            options |= {"global_batch": (request.global_batch, multiples(request.global_batch, count))}
        raise RequestError(
            f"per_replica: {count} replicas do not divide the global batch {request.global_batch};"
            f" {nearest_of(options)}"
        )
    return replace(request, update=replace(update, replicas=count))
