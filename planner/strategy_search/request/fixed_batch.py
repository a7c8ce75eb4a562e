"""A model that computes with micro-batches of one size only: the global batch decides how many."""

from dataclasses import replace

from planner.errors import RequestError
from planner.nearest import multiples, nearest_words
from planner.strategy_search.request.request import SearchRequest


def with_fixed_batch(request: SearchRequest, fault: str, *, given: bool = True) -> SearchRequest:
    """A request whose micro-batches have the samples of the example; `fault` says why. If the global batch was not
    `given`, it becomes the next multiple of that number. Raises RequestError if this contradicts another decision."""
    batch, pinned = request.batch, request.pinned
    why = f"micro-batches of this model have the {batch} samples of its example: {fault}"
    if not given:
        request = replace(request, global_batch=-(-request.global_batch // batch) * batch)
    if request.update.padding_samples:
        raise RequestError(f"pad batch: no sample can be added; {why}; leave it out")
    if request.global_batch % batch:
        near = nearest_words(request.global_batch, multiples(request.global_batch, batch))
        raise RequestError(f"global_batch = {request.global_batch} is no multiple of {batch}; {near}; {why}")
    parts = request.global_batch // batch
    if pinned.micro_batch is not None or pinned.micro_batches not in (None, parts):
        raise RequestError(f"micro_batches: leave it out, or set it to {parts}, and micro_batch out; {why}")
    return replace(request, pinned=replace(pinned, micro_batches=parts))
