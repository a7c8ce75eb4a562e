"""What is said of a request that divides into nothing: what was asked, the numbers that clash, and the nearest that do
not."""

import math

from planner.search.request import SearchRequest
from planner.search.space import Pinned, divisors, nearest_words
from planner.search.template import Template

_DEGREES = ("pipeline", "data", "context", "tensor")


def no_configuration(request: SearchRequest, template: Template) -> str:
    """Why a request has no configuration at all."""
    pinned, devices, model = request.pinned, request.cluster.devices, request.model.reference
    blocks, pipeline = template.blocks.count, pinned.pipeline or 1
    if pipeline > 1 and not template.pipelines:
        return (
            f"{model} cannot be cut into {pipeline} pipeline stages: that takes blocks, one after the other, that share"
            " nothing but what each hands to the next; leave the stages at 1"
        )
    if pipeline > max(1, blocks):
        most = max(number for number in divisors(devices) if number <= max(1, blocks))
        return (
            f"{model} has {blocks} blocks, too few for {pipeline} stages; the nearest degree that divides"
            f" {devices} devices is {most}"
        )
    for name in _DEGREES:
        degree = getattr(pinned, name)
        if degree is not None and devices % degree:
            return f"{name} = {degree} does not divide {devices} devices; {nearest_words(degree, divisors(devices))}"
    if pinned.micro_batches is not None and request.global_batch % pinned.micro_batches:
        near = nearest_words(pinned.micro_batches, divisors(request.global_batch))
        return f"micro_batches = {pinned.micro_batches} does not divide the global batch {request.global_batch}; {near}"
    return _virtual(request, template) or _degrees(request, blocks)


def _virtual(request: SearchRequest, template: Template) -> str | None:
    """About virtual stages, where they are decided."""
    pinned, kinds = request.pinned, template.blocks.kinds
    pipeline, virtual, blocks = pinned.pipeline or 1, pinned.virtual_stages or 1, len(kinds)
    if virtual == 1 or pipeline == 1:
        return None
    stages = pipeline * virtual
    if blocks % stages:
        legal = [v for v in range(1, blocks // pipeline + 1) if blocks % (pipeline * v) == 0]
        near = nearest_words(virtual, legal) if legal else f"no number does, as {pipeline} ranks do not divide {blocks}"
        return f"virtual_stages = {virtual} on {pipeline} ranks: {stages} stages do not divide {blocks} blocks; {near}"
    if kinds != kinds[: blocks // stages] * stages:
        return (
            f"virtual_stages = {virtual} on {pipeline} ranks: virtual stages hold equal blocks, and {stages} stages of"
            f" {blocks} blocks hold different kinds of them; leave the virtual stages at 1"
        )
    return None


def _degrees(request: SearchRequest, blocks: int) -> str:
    pinned, devices = request.pinned, request.cluster.devices
    names = ("pipeline", "virtual_stages", "schedule", *_DEGREES[1:], "expert", "micro_batch", "micro_batches", "mesh")
    wanted = [f"{name} = {value}" for name in names if (value := getattr(pinned, name)) is not None]
    return (
        f"nothing divides evenly: {devices} devices, global batch {request.global_batch}, {blocks} blocks, with "
        f"{', '.join(wanted) or 'no option pinned'}{_product(pinned, devices)}; the degrees must multiply to the"
        " devices, micro-batches divide the global batch, data parallel groups each micro-batch; experts are cut"
        " over context and data parallel devices; virtual stages ask for blocks that divide by all stages and for"
        " micro-batches that divide by the ranks"
    )


def _product(pinned: Pinned, devices: int) -> str:
    """What the degrees that are given multiply to, where the devices are no multiple of it."""
    degrees = [degree for name in _DEGREES if (degree := getattr(pinned, name)) is not None]
    product = math.prod(degrees) * math.prod(pinned.mesh or ())
    if len(degrees) + bool(pinned.mesh) < 2 or devices % product == 0:
        return ""
    near = nearest_words(product, divisors(devices))
    return f" (the degrees multiply to {product}; of numbers that divide {devices}, {near})"
