"""Which linear layers are in fp8: those that the user names, and of the others those for which fp8 pays.

Matrix products in fp8 take half as long on devices that have them, but casting the operands costs extra. So narrow
products, products of few rows, and sharded products become slower. Therefore each layer chooses, for each of its
strategies:

    q_proj, b on axis0     in fp8       without it                the first `narrow` candidates, and all others
    q_proj, o on axis0     in fp8       without it
    k_proj, b on axis0         -        without it                narrow: fp8 is better at nothing

Candidates differ in seconds, in launches, in transient memory, and in collectives that overlap with their products, but
not in layouts; experts that may be in fp8 are such layers, too. So exact search and its bounds hold over them as over
strategies (`planner.strategy_search.tables.cost_table`). In a plan, all blocks of a kind are alike. A search may find
some ways to run them with a layer in fp8 and others without it. This is a relaxation; the plan then takes the choice
that is faster over all blocks (`planner.strategy_search.finalists.fp8_choice`).

On devices without fp8 products fp8 never pays, and all layers are in fp8 as asked: a user who asks for fp8 there wants
its numerics. The same holds for engines that only have a setting for all layers or none.
"""

from collections.abc import Sequence
from dataclasses import replace

from hardware_profiles import PYTORCH, MixedCluster
from planner.errors import RequestError
from planner.fp8_recipes import BLOCK, LINE, RECIPES
from planner.graph.blocks import Blocks
from planner.graph.fp8 import (
    ALL_LAYERS,
    check_patterns,
    eligible,
    experts_of,
    is_in_fp8,
    is_left_out,
    is_meant,
    weight_of,
)
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import OperatorGraph
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.template import Template


def with_fp8_layers(request: SearchRequest) -> SearchRequest:
    """The request with all layers decided, if nothing is left to search: on devices without products in fp8, and for
    engines that cannot leave out layers.

    Raises RequestError for a recipe that the devices have no products for, and for patterns of fp8 layers that match no
    layer, or match one that is left out.
    """
    fp8, layers = request.fp8, request.fp8_layers
    if layers and layers != ALL_LAYERS:
        graph = request.graph
        could = eligible(graph, tuple(find_blocks(graph).numbers))
        could += experts_of(graph) if fp8.experts else ()
        check_patterns(graph, could, layers, "fp8_layers")
        both = [op for at in could if is_meant(op := graph.operators[at], layers) and is_left_out(op, fp8)]
        if both:
            raise RequestError(
                f"fp8_layers and fp8_left_out both mean '{weight_of(both[0])}'; leave it out of one of them"
            )
    if not fp8:
        return replace(request, fp8_layers=ALL_LAYERS)
    cluster = request.cluster
    device = (cluster.groups[0] if isinstance(cluster, MixedCluster) else cluster).device
    told = request.space is not None and not request.space.leaves_out
    if not device.multiplies("fp8"):
        return replace(request, fp8_layers=ALL_LAYERS)
    rate = RECIPES[fp8.recipe].rate
    if not device.multiplies(rate):
        others = ", ".join(name for name, recipe in RECIPES.items() if device.multiplies(recipe.rate))
        raise RequestError(
            f"fp8 = {fp8.recipe}: {device.name} multiplies in fp8, but has no products in {rate}, with a scale"
            f" for each {LINE} elements (devices of Blackwell do); take {others}, or leave fp8 out"
        )
    if RECIPES[fp8.recipe].scales == "block" and device.multiplies("mxfp8") and cluster.software == PYTORCH:
        raise RequestError(
            f"fp8 = {fp8.recipe}: torch has products with a scale for each {BLOCK} elements on Hopper alone; on"
            f" {device.name} the same would be multiplied in fp32; take mxfp8, tensorwise, rowwise, or leave fp8 out"
        )
    return replace(request, fp8_layers=ALL_LAYERS) if told else request


def open_layers(template: Template, prepared: OperatorGraph, layers: Sequence[str]) -> frozenset[int]:
    """The linear layers and experts in fp8 of a template that no pattern matches in any block of their kind."""
    blocks = template.blocks
    return frozenset(
        at
        for at, op in enumerate(template.graph.operators)
        if is_in_fp8(op)
        and not any(is_meant(prepared.operators[place], layers) for place in places_of(template, blocks, at))
    )


def places_of(template: Template, blocks: Blocks, index: int) -> tuple[int, ...]:
    """The places of an operator of a template in the whole graph: one in each block of its kind."""
    kind = template.kind_of(index)
    if kind is None:
        return (index if index < template.start or not blocks.count else index - template.stop + blocks.stop,)
    place = index - template.held[kind].start
    return tuple(blocks.borders[b] + place for b, other in enumerate(blocks.kinds) if other == kind)
