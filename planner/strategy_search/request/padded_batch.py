"""Adds samples of weight zero to a global batch that the devices do not divide (see
`planner.sharding.padded_batch`)."""

from collections.abc import Callable
from dataclasses import replace

from planner.nearest import multiples, nearest_words
from planner.strategy_search.request.request import SearchRequest


def padding_samples(global_batch: int, multiple: int | None) -> int:
    """The samples that make a global batch a multiple of a number; 0 without such a number."""
    return -global_batch % (multiple or 1)


def with_padded_batch(request: SearchRequest, *, given: bool, noted: Callable[[str], None]) -> SearchRequest:
    """The request with a padded global batch, if the data-parallel degree does not divide it. It gets the fewest
    samples such that every micro-batch still has a sample of the batch.

    Unchanged if the user has decided on a multiple (`given`), and for an engine, which trains no samples of weight
    zero. `noted` receives a message."""
    pinned, batch = request.pinned, request.global_batch
    data, parts = pinned.data or 1, pinned.micro_batches or 1
    added = -batch % (data * (pinned.micro_batch or 1) * parts)
    if given or request.space is not None or batch % data == 0 or added * parts >= batch + added:
        return request
    noted(
        f"--data {data} does not divide the global batch {batch}, which gets {added} samples of weight zero;"
        " --pad batch=1 refuses it"
    )
    return replace(request, update=replace(request.update, padding_samples=added))


def nearest_batches(request: SearchRequest) -> str:
    """In words, the nearest global batches that need no padding."""
    pinned = request.pinned
    step = (pinned.data or request.cluster.devices) * (pinned.micro_batch or 1) * (pinned.micro_batches or 1)
    return nearest_words(request.global_batch, multiples(request.global_batch, step)).replace(
        "values", "global batches"
    )
