"""Choices that are left to the search, and tried one after the other, each in a search of its own.

    weights that hold several matrices    whole: one product, fewer launches | apart: tensor parallelism divides each
                                          (`planner.graph.rewriting.fused_weights`)
    zero_by = auto      slices | whole parameters                       the better by the objective of the request
    padding = auto      nothing padded | what 2, 4, 8 .. do not divide, of weights and of the global batch; each also
                        with rows of whole words of 16 bytes, where products of others take longer (`Device.misaligned`)
    alltoall = auto     everywhere | inside a node, where there are several | nowhere

The space without the all-to-all is not part of the space with it: redistributions take the way that moves the fewest
bytes, and on slow or many links an all-gather of more bytes can be faster.

The bounds are about the chosen variant. Parameters on servers are used only if asked for.

For a number of shards, the weights are padded whose rows it does not divide: with rows of whole heads if it does not
divide the heads of an attention (`rows / heads` each), else with single rows. A weight that cannot be padded stays as
it is: an operator looks at all of its rows, or something that depends on them cannot grow (`planner.sharding.padding`).
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

from hardware_profiles import PYTORCH, parts_of
from planner.errors import InfeasibleError, LimitError, PlannerError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.rewriting.fused_weights import with_fused_weights_apart
from planner.limits import sharing
from planner.nearest import divisors
from planner.plan.carried import graph_text
from planner.plan.outline import outline
from planner.pricing.kernels.call import WORD
from planner.sharding.mesh import NODE
from planner.sharding.padding import Padded, with_padding
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of
from planner.sharding.update import AUTO_ZERO_BY, PARAMETERS, SLICES
from planner.strategy_search.request.attention_degrees import heads_of, key_heads_of
from planner.strategy_search.request.request import AUTO, SearchRequest
from planner.strategy_search.result import SearchResult

_MOST = 8
"""Up to this number of shards weights are padded if the tensor degree is left open: usually those of a node."""
_PASSING = ("view", "copy", "elementwise")
"""Classes of operators whose results are in pieces as their operands are."""
_SHORT = 2  # bytes of an element
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")


class BeatenError(Exception):
    """No plan of a variant is faster than those of the variants before it."""


def best_of_variants(
    request: SearchRequest, solve: Callable[[SearchRequest], SearchResult], score: Callable[[SearchResult], float]
) -> SearchResult:
    """The best of `solve` over the choices that a request leaves to it. It counts as stopped if the search of any of
    them was stopped, or reached a limit of the planner before there was a plan.

    Raises what `solve` raises for the first of them, if it raises something for each.
    """
    found: list[SearchResult] = []
    errors: list[PlannerError] = []
    variants = list(variants_of(request))
    for number, one in enumerate(variants):
        try:
            with sharing(len(variants) - number):
                found.append(solve(one))
        except (InfeasibleError, RequestError) as error:
            errors.append(error)
        except BeatenError:
            continue
    if not found:
        raise errors[0]
    stops = [error.by for error in errors if isinstance(error, LimitError)]
    stops += [one.statistics.stopped_by for one in found if one.statistics.stopped_by]
    return min(found, key=score).cut_short(next(iter(stops), None))


def variants_of(request: SearchRequest) -> Iterator[SearchRequest]:
    """The requests that decide what a request leaves to the search; the request itself if that is nothing."""
    yield from _of_graph(request)
    apart = with_fused_weights_apart(request.graph)
    if apart is not request.graph and any(_stays_divided(apart, part) for part in apart.cuts):
        known = request.model
        text = known.graph and graph_text(apart, batch=request.batch, sequence_length=known.sequence_length)
        model = replace(known, fingerprint=apart.fingerprint(), outline=outline(apart), graph=text)
        yield from _of_graph(replace(request, graph=apart, model=model))


def _stays_divided(graph: OperatorGraph, weight: str) -> bool:
    """Whether a product or attention can split what a linear layer makes with a part of a weight. The latent of MLA and
    its rotary key are normalised, or rotated, as a whole, so that every device needs all of them."""
    (result,) = graph.operators[graph.consumers[weight][0]].results
    todo, seen = [(result, len(graph.types[result or ""].shape) - 1)], set[tuple[str | None, int]]()
    while todo:
        value, dim = todo.pop()
        if value is None or (value, dim) in seen:
            continue
        seen.add((value, dim))
        for op in (graph.operators[at] for at in graph.consumers.get(value, ())):
            rule = rule_of(graph, op)
            read = [dims[dim] for name, dims in zip(op.operands, rule.operands, strict=True) if name == value]
            for factor in {_outermost(rule, factors) for factors in read} - {None}:
                if rule.op_class not in _PASSING:
                    return True
                places = (
                    (name, at)
                    for name, dims in zip(op.results, rule.results, strict=True)
                    for at, factors in enumerate(dims)
                    if factor in factors
                )
                todo.extend(places)
    return False


def _outermost(rule: Rule, factors: Sequence[int]) -> int | None:
    """The factor on which a dim is cut; None if that cannot be split, alone or with another."""
    found = next((at for at in factors if rule.factors[at].extent > 1), None)
    together = {part for factor in rule.factors for part in factor.parts}
    splits = found is not None and (rule.factors[found].kind != FactorKind.BLOCKED or found in together)
    return found if splits else None


def _of_graph(request: SearchRequest) -> Iterator[SearchRequest]:
    update = request.update
    owners: tuple[str, ...] = (update.zero_by,)
    if update.zero_by == AUTO_ZERO_BY:
        mine = request.cluster.software.name == PYTORCH.name and request.space is None
        shared = request.pinned.zero in (None, 1) and not request.pinned.forward_only
        owners = (SLICES, PARAMETERS) if mine and shared else (SLICES,)
    for zero_by in owners:
        for padded, samples in product(_paddings(request), _batches(request)):
            changed = replace(update, zero_by=zero_by, padded=padded, padding_samples=samples)
            decided = request if changed == update else replace(request, update=changed, padding="given")
            yield from _with_alltoall(decided)


def _with_alltoall(request: SearchRequest) -> Iterator[SearchRequest]:
    """The request with every possible choice of where the all-to-all is used, if that is left to the search."""
    if request.alltoall != AUTO:
        yield request
        return
    yield replace(request, alltoall=True)
    several = any(len(part.group(part.devices, 1).spans) > 1 for part in parts_of(request.cluster))
    for alltoall in (NODE, False) if several else (False,):
        with contextlib.suppress(RequestError):  # the user's decisions need it
            yield replace(request, alltoall=alltoall)


def _paddings(request: SearchRequest) -> list[Padded]:
    given = request.update.padded
    if request.padding != "auto" or request.space is not None:
        return [given]
    tensor = request.pinned.tensor
    degrees = [tensor] if tensor else [d for d in divisors(request.cluster.devices) if d <= _MOST]
    found = [given, *(padding_for(request.graph, degree, given) for degree in degrees if degree > 1)]
    if _misaligned(request):
        found += [aligned(request.graph, padded) for padded in found]
    return list(dict.fromkeys(found))


def _batches(request: SearchRequest) -> list[int]:
    """Samples that may be added to the global batch, so that it divides over the devices that share it, and
    micro-batches."""
    pinned, batch, given = request.pinned, request.global_batch, request.update.padding_samples
    if request.padding != "auto" or request.space is not None or given or request.update.per_replica:
        return [given]  # replicas have equally many samples
    each = pinned.micro_batch or pinned.micro_batches or 1
    degrees = [pinned.data] if pinned.data else divisors(request.cluster.devices)
    return list(dict.fromkeys([0, *(-batch % (degree * each) for degree in degrees)]))


def padding_for(graph: OperatorGraph, shards: int, given: Padded = ()) -> Padded:
    """Patterns of weights, and multiples for their rows, with which `shards` shards divide as much as possible of a
    graph, beside what is `given`."""
    found, larger = given, with_padding(graph, given)
    for multiple_of in (_of_heads, _of_rows):
        for pattern in _patterns(graph):
            multiple = multiple_of(larger, _first(graph, pattern), shards)
            if multiple is None:
                continue
            tried = (*found, (pattern, multiple))
            try:
                grown = with_padding(graph, tried)
            except RequestError:
                continue
            if multiple_of is _of_rows or _whole_heads(grown, shards) > _whole_heads(larger, shards):
                found, larger = tried, grown
    return found


def aligned(graph: OperatorGraph, given: Padded) -> Padded:
    """What is given, plus multiples for the rows of 16-bit weights of matrix products, so that these rows are whole
    words of 16 bytes where that is possible: they are columns of a product, or what its gradients are summed over."""
    found, larger, multiplied = given, with_padding(graph, given), _multiplied(graph)
    for pattern in _patterns(graph):
        name = _first(graph, pattern)
        weight = larger.types[name]
        words = WORD // int(weight.element_bytes)
        if name not in multiplied or weight.element_bytes != _SHORT or weight.shape[0] % words == 0:
            continue
        multiple = math.lcm(words, dict(found).get(pattern, 1))
        tried = ((pattern, multiple), *(one for one in found if one[0] != pattern))
        try:
            larger = with_padding(graph, tried)
        except RequestError:
            continue
        found = tried
    return found


def misaligned_rows(request: SearchRequest) -> dict[str, int]:
    """Weights whose rows are not padded though their products take longer that way, and the number of these rows."""
    mine = request.cluster.software.name == PYTORCH.name and request.space is None
    if not mine or request.padding == "auto" or not _misaligned(request):
        return {}
    graph, given = request.graph, request.update.padded
    padded = [pattern for pattern, _ in aligned(graph, given) if pattern not in dict(given)]
    return {pattern: graph.types[_first(graph, pattern)].shape[0] for pattern in padded}


def _misaligned(request: SearchRequest) -> bool:
    return any(part.device.misaligned > 1 for part in parts_of(request.cluster))


def _of_heads(graph: OperatorGraph, name: str, shards: int) -> int | None:
    """The multiple that makes the heads divide whose rows the weight holds, if these are its rows; None if they do."""
    rows = graph.types[name].shape[0]
    for op in graph.operators:
        rule = rule_of(graph, op)
        if rule.op_class != "attention":
            continue
        few = key_heads_of(rule)
        heads = few if few > 1 else heads_of(rule)
        if heads % shards and rows % heads == 0:
            return rows // heads * shards
    return None


def _of_rows(graph: OperatorGraph, name: str, shards: int) -> int | None:
    return shards if graph.types[name].shape[0] % shards else None


def _whole_heads(graph: OperatorGraph, shards: int) -> int:
    """The number of attentions whose heads `shards` divides."""
    rules = (rule_of(graph, op) for op in graph.operators)
    return sum(
        heads_of(rule) % shards == 0 and (key_heads_of(rule) % shards == 0 or key_heads_of(rule) == 1)
        for rule in rules
        if rule.op_class == "attention"
    )


def _patterns(graph: OperatorGraph) -> list[str]:
    """Matrices of the model, those of all blocks by one pattern."""
    names = (p.name for p in graph.parameters if len(graph.types[p.name].shape) > 1)
    return list(dict.fromkeys(_NUMBER.sub("*", name) for name in names))


def _multiplied(graph: OperatorGraph) -> frozenset[str]:
    """Matrices that matrix products read, directly or through a view; not tables whose rows are only looked up."""
    found: set[str] = set()
    seen = {name: name for name in graph.parameter_names if len(graph.types[name].shape) == 2}
    for op in graph.operators:
        kind = rule_of(graph, op).op_class
        read = [seen[operand] for operand in op.operands if operand in seen]
        if kind == "matmul":
            found.update(read)
        elif kind == "view" and read:
            seen.update(dict.fromkeys(filter(None, op.results), read[0]))
    return frozenset(found)


def _first(graph: OperatorGraph, pattern: str) -> str:
    return next(p.name for p in graph.parameters if _NUMBER.sub("*", p.name) == pattern)
