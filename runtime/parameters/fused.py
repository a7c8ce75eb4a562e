"""Weights of a module that hold several matrices, and the parameters of a graph that are parts of them
(`planner.graph.rewriting.fused_weights`)."""

from collections.abc import Mapping

import torch

from planner.graph.operator_graph import Cut, Parameter


def part_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The part of a weight, a view."""
    return whole.narrow(cut.dim, cut.start, cut.length)


def in_graph(weights: Mapping[str, torch.Tensor], parameter: Parameter) -> torch.Tensor:
    """A parameter of a graph, from the weights of the module by name; a view where it is a part."""
    whole = weights[parameter.in_module]
    return whole if parameter.cut is None else part_of(whole, parameter.cut)


def all_in_graph(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    """Tensors by the names of the module's weights, with parts, which are views, in place of those that are `cuts`."""
    parts: dict[str, list[str]] = {}
    for name, cut in cuts.items():
        parts.setdefault(cut.of, []).append(name)
    found = {}
    for of, whole in tensors.items():
        found.update({name: part_of(whole, cuts[name]) for name in parts[of]} if of in parts else {of: whole})
    return found


def in_module(tensors: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut]) -> dict[str, torch.Tensor]:
    """Tensors by the names of parameters of a graph, under the names of the module's weights: parts are joined.
    Parts of one weight are all there, or none is."""
    found, parts = dict(tensors), dict[str, list[tuple[Cut, torch.Tensor]]]()
    for name in [name for name in tensors if name in cuts]:
        parts.setdefault(cuts[name].of, []).append((cuts[name], found.pop(name)))
    for of, each in parts.items():
        each.sort(key=lambda one: one[0].start)
        found[of] = torch.cat([part for _, part in each], dim=each[0][0].dim)
    return found
