"""Which linear layers are in fp8: those for which that pays.

Products in fp8 take half as long on devices that have them, and casting their operands takes what it takes, so that
narrow products get slower. A linear layer is left out where, on one device and with the samples that the model was
traced with, it takes no less than without fp8, forward and backward. On devices without such products none pays, and
all are taken as asked: who asks for fp8 there wants its numerics.
"""

import re
from dataclasses import replace

from hardware_profiles import Cluster, Machine, MixedCluster
from planner.errors import RequestError
from planner.fp8_recipes import LINE, RECIPES
from planner.graph.fp8 import Fp8, eligible, fp8_operator, is_left_out
from planner.graph.kinds import find_blocks
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.pricing.operator_price import price_operator
from planner.sharding.mesh import Mesh
from planner.sharding.rules import rule_of

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ALONE = Mesh(axes=())


def paying(graph: OperatorGraph, fp8: Fp8, machine: Machine) -> Fp8:
    """The same, with the patterns of the weights of those linear layers left out for which fp8 does not pay. Raises
    RequestError where it pays for none."""
    cluster = machine.groups[0] if isinstance(machine, MixedCluster) else machine
    if not fp8 or not cluster.device.multiplies("fp8"):
        return fp8
    rate = RECIPES[fp8.recipe].rate
    if not cluster.device.multiplies(rate):
        others = ", ".join(name for name, recipe in RECIPES.items() if cluster.device.multiplies(recipe.rate))
        raise RequestError(
            f"fp8 = {fp8.recipe}: {cluster.device.name} multiplies in fp8, but has no products in {rate}, with a scale"
            f" for each {LINE} elements (devices of Blackwell do); take {others}, or leave fp8 out"
        )
    layers: dict[str, dict[str, bool]] = {}  # by pattern and weight, whether it pays
    known: dict[tuple[object, ...], bool] = {}
    for at in eligible(graph, tuple(find_blocks(graph).numbers)):
        op = graph.operators[at]
        if is_left_out(op, fp8):
            continue
        shape = tuple(graph.types[name].shape for name in op.operands)
        if shape not in known:
            under = replace(op, op=fp8_operator(fp8.recipe))
            known[shape] = _seconds(graph, under, cluster) < _seconds(graph, op, cluster)
        layers.setdefault(_NUMBER.sub("*", op.operands[1]), {})[op.operands[1]] = known[shape]
    if layers and not any(known.values()):
        raise RequestError(
            f"fp8 = {fp8.recipe}: on {cluster.device.name} no linear layer of this model gets faster, as casting its"
            " operands takes longer than the products save; leave fp8 out, or take another recipe or longer sequences"
        )
    slower = list[str]()
    for pattern, pays in layers.items():
        slower += [name for name, faster in pays.items() if not faster] if any(pays.values()) else [pattern]
    return replace(fp8, left_out=tuple(dict.fromkeys((*fp8.left_out, *slower))))


def _seconds(graph: OperatorGraph, op: Operator, cluster: Cluster) -> float:
    """Of an operator on one device, forward and backward."""
    prices = price_operator(
        rule_of(graph, op),
        [()],
        [graph.types[name] for name in op.operands],
        [graph.types[name] for name in op.results if name is not None],
        [name in graph.differentiable for name in op.operands],
        _ALONE,
        cluster,
    )
    return float(prices.forward[0] + prices.backward[0])
