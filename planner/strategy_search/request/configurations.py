"""The configurations of a request: all that divide evenly and agree with its decisions."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import get_args

from costmodels import FORWARD
from planner.engines.space import sample_step
from planner.limits import checked
from planner.nearest import divisors
from planner.plan.plan import INTERLEAVED
from planner.plan.schedule_checks import PASSES
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.strategy_search.request.attention_degrees import attention_fault, heads_of, key_heads_of, length_of
from planner.strategy_search.request.space import Configuration, Pattern, Pinned, Role
from planner.strategy_search.request.template import Template


def context_splits(pinned: Pinned, context: int) -> Iterator[tuple[int, int]]:
    """The possible numbers of devices in a ring and by heads whose product is the context degree."""
    if context == 1:
        yield 1, 1
    elif pinned.context_by in (None, "heads", "ring"):
        yield (context, 1) if pinned.context_by == "ring" else (1, context)
    else:
        least = 2 if pinned.context_by == "hybrid" else 1
        for heads in divisors(context):
            if pinned.ulysses in (None, heads) and heads >= least and context // heads >= least:
                yield context // heads, heads


def _divides_attention(
    attention: Sequence[Rule], roles: tuple[Role, ...], mesh: tuple[int, ...], pinned: Pinned
) -> bool:
    """Whether a context that is left to the search, or that an engine splits in one way, divides the attention of the
    model, so that no two devices do the same work."""
    degrees = dict(zip(roles, mesh, strict=False))
    ring, heads = degrees.get("ring", 1), degrees.get("context", 1)
    open_way = pinned.context_by in ("hybrid", "auto") or pinned.pattern is not None
    if not open_way or ring * heads == 1:
        return True
    within = heads * degrees.get("tensor", 1) if heads > 1 else 1
    turns = pinned.zigzag is not False
    return all(
        attention_fault(rule, ring, heads, turns) is None and (heads_of(rule) % within == 0) for rule in attention
    )


def configurations(
    template: Template, devices: int, global_batch: int, pinned: Pinned, padding: int = 0, replicas: int = 1
) -> Iterator[Configuration]:
    """All configurations that divide evenly: the devices into ranks and axes, and the batch into micro-batches. Each
    micro-batch has real samples, not only the `padding` at the end of the batch, and equally many for each of the
    `replicas`. The decisions have been checked (`planner.strategy_search.request.checks`).

    Virtual stages need a number of micro-batches that is a multiple of the number of ranks. They hold equal blocks.
    Unequal ones are tried where equal ones are not possible, or where equal ones leave the ranks at the ends busier
    than others.
    """
    zigzag = template.causal_ring and pinned.zigzag is not False
    rules = (rule_of(template.graph, op) for op in template.graph.operators)
    attention = [rule for rule in rules if rule.op_class == "attention"]
    for pipeline in divisors(devices):
        if pinned.pipeline not in (None, pipeline) or not _cuts(template, pipeline):
            continue
        for mesh, roles, degree in _meshes(devices // pipeline, pinned):
            if not _divides_attention(attention, roles, mesh, pinned):
                continue
            if not _fits_pattern(attention, roles, mesh, pinned):
                continue
            for micro_batches in checked(divisors(global_batch)):
                if pinned.micro_batches not in (None, micro_batches) or padding * micro_batches >= global_batch:
                    continue
                if global_batch // micro_batches % replicas:
                    continue
                if pinned.micro_batch is not None and micro_batches * pinned.micro_batch * degree != global_batch:
                    continue
                if roles and global_batch // micro_batches % degree:
                    continue
                if pinned.pattern and not pinned.pattern.runs(template.blocks.count, pipeline, micro_batches):
                    continue
                if micro_batches % (pinned.interleave or 1) or (pipeline > 1 and pipeline * micro_batches > PASSES):
                    continue
                if pinned.schedule == "pipedream_2bw" and micro_batches < pipeline:
                    continue
                for virtual, uneven in _virtual_stages(template, pipeline, micro_batches, pinned):
                    yield Configuration(
                        pipeline=pipeline,
                        virtual_stages=virtual,
                        uneven=uneven,
                        mesh=mesh,
                        roles=roles,
                        micro_batches=micro_batches,
                        schedule=INTERLEAVED if virtual > 1 else pinned.searched_schedule,
                        even=pinned.even and pipeline > 1,
                        zigzag=zigzag and "ring" in roles,
                    )


def shares_configurations(pinned: Pinned) -> Pinned:
    """The decisions, without those that do not change which configurations exist."""
    pattern = pinned.pattern
    if pattern is not None:
        pattern = replace(pattern, vocabulary=True, counts="any", selective=False, kept=None)
    return replace(pinned, zero=None if pinned.zero is None else 0, recompute=None, pattern=pattern)


def decided_apart(configuration: Configuration, pinned: Pinned) -> Pinned:
    """The decisions beside the degrees for configurations with these axes, without decisions that have no meaning
    there."""
    tensor = "tensor" in configuration.roles
    shards = any(role not in ("tensor", "replica") for role in configuration.roles)
    pattern = pinned.pattern
    return Pinned(
        zero=(pinned.zero or 0) if shards else 0,
        sequence_parallel=bool(pinned.sequence_parallel) and tensor,
        expert=pinned.expert,
        whole_experts=bool(pinned.whole_experts) and tensor if pinned.expert is not None else None,
        replicas=pinned.replicas,
        recompute=pinned.recompute,
        pattern=None
        if pattern is None
        else Pattern(vocabulary=pattern.vocabulary or not tensor, counts=pattern.counts, kept=pattern.kept),
    )


def _fits_pattern(attention: Sequence[Rule], roles: tuple[Role, ...], mesh: tuple[int, ...], pinned: Pinned) -> bool:
    """Whether enough devices take part in ZeRO sharding, heads divide evenly over all devices that split them, and
    sequences as the engine cuts them."""
    if pinned.pattern is None:
        return True
    degrees = dict(zip(roles, mesh, strict=False))
    by_heads = degrees.get("tensor", 1) * degrees.get("context", 1)
    whole = all(heads_of(rule) % by_heads == 0 and key_heads_of(rule) % by_heads == 0 for rule in attention)
    step = sample_step(
        pinned.pattern.samples_by, degrees.get("ring", 1) * degrees.get("context", 1), degrees.get("tensor", 1)
    )
    whole &= all(length_of(rule) % step == 0 for rule in attention)
    shards = math.prod(size for role, size in degrees.items() if role not in ("tensor", "replica"))
    if "replica" in degrees and degrees.keys().isdisjoint(
        ("data", "nodes", "expert")
    ):  # nothing is sharded over a context alone
        return False
    return whole and shards >= pinned.pattern.shards


def _cuts(template: Template, pipeline: int) -> bool:
    return pipeline == 1 or (template.pipelines and pipeline <= template.blocks.count)


_FEW = 8
"""A number of equal stages on each rank that leaves a small bubble. If this many or fewer are possible, the same
numbers of unequal stages are tried if ranks are not equally busy with equal stages. Of other numbers those of
`_UNEQUAL` are tried that divide the blocks into stages of as many blocks, but of other kinds."""


_UNEQUAL = (2, 4)
"""Numbers of unequal stages on each rank that are tried if no such number of equal ones is possible."""


EMPTY = 2
"""Stages that may hold no block: the first and the last."""


def may_be_uneven(pinned: Pinned) -> bool:
    """Whether virtual stages may hold unequal numbers of blocks."""
    return not pinned.even and (pinned.pattern is None or not pinned.pattern.divided)


def _virtual_stages(
    template: Template, pipeline: int, micro_batches: int, pinned: Pinned
) -> tuple[tuple[int, bool], ...]:
    """Numbers of stages on each rank, and whether they hold unequal blocks."""
    plain = ((1, False),)
    if pipeline == 1 and (pinned.schedule not in (None, "1f1b", FORWARD) or pinned.slices not in (None, 0, 1)):
        return ()
    if pinned.in_a_v:  # searched with one stage per rank, cut in two after the search
        return plain if 2 * pipeline <= template.blocks.count else ()
    interleaved = pinned.schedule == INTERLEAVED
    sliced = pinned.slices is not None or (pinned.interleave or 1) > 1
    wanted = int(sliced and not interleaved) if pinned.virtual_stages is None else pinned.virtual_stages
    if wanted == 1 or pipeline == 1 or (wanted == 0 and pinned.schedule not in (None, INTERLEAVED)):
        return plain if wanted in (0, 1) else ()
    blocks, pattern, equal, uneven = template.blocks.count, pinned.pattern, list[int](), list[int]()
    if pattern is not None and not pattern.interleaved:
        return plain if wanted in (0, 1) else ()
    if micro_batches % (pipeline * (pinned.interleave or 1)) == 0:
        if blocks % pipeline == 0:
            equal += [v for v in divisors(blocks // pipeline)[1:] if _equal(template.blocks.kinds, pipeline * v)]
        if may_be_uneven(pinned):
            few = [v for v in equal if v <= _FEW]
            tried = few if template.heavy_ends else []
            unlike = [v for v in _UNEQUAL if v not in equal and blocks % (pipeline * v) == 0]
            uneven += (wanted,) if wanted else (*tried, *unlike) if few else _UNEQUAL
    most = blocks + (EMPTY if wanted else 0)
    possible = (*plain, *((v, False) for v in equal), *((v, True) for v in uneven if pipeline * v <= most))
    return tuple((v, cut) for v, cut in possible if wanted in (0, v) and not (interleaved and v == 1))


def _equal(kinds: tuple[int, ...], stages: int) -> bool:
    """Whether all of this number of stages hold the same kinds of blocks in the same order."""
    size = len(kinds) // stages
    return kinds == kinds[:size] * stages


def _meshes(devices: int, pinned: Pinned) -> Iterator[tuple[tuple[int, ...], tuple[Role, ...], int]]:
    """Meshes, the roles of their axes, and the data-parallel degree where it is known."""
    if pinned.mesh is not None:
        if math.prod(pinned.mesh) == devices:
            yield pinned.mesh, (), 1
        return
    if pinned.free:
        yield from ((mesh, (), 1) for mesh in mesh_shapes(devices))
    if pinned.manual:
        for data in divisors(devices):
            for context in checked(divisors(devices // data)):
                degrees: dict[Role, int] = {"data": data, "context": context, "tensor": devices // data // context}
                if all(getattr(pinned, name) in (None, degree) for name, degree in degrees.items()):
                    parts = _rest(pinned, degrees["tensor"], context)
                    for ring, heads in context_splits(pinned, context) if parts is not None else ():
                        replicas = pinned.replicas or 1
                        if parts is None or data % (parts * replicas):
                            continue
                        shards = data // parts // replicas
                        nodes = parts // pinned.node if parts % pinned.node == 0 and pinned.node > 1 else 1
                        inside: dict[Role, int] = {"nodes": nodes, "expert": parts // nodes}
                        inside |= {"ring": ring, "context": heads}
                        degrees = {**degrees, "replica": replicas, "data": shards, **inside}
                        real = tuple((name, degrees[name]) for name in get_args(Role) if degrees[name] > 1)
                        if real or not pinned.free:  # a single device without axes stands among the free meshes
                            yield tuple(degree for _, degree in real), tuple(name for name, _ in real), data


def _rest(pinned: Pinned, tensor: int, context: int) -> int | None:
    """The part of the expert-parallel degree that is left for the data axis; None if it does not divide evenly, or if
    an engine does not support it."""
    parts = pinned.expert or 1
    if pinned.whole_experts:
        if parts % tensor:
            return None
        parts //= tensor
    if pinned.pattern is not None and pinned.pattern.over_context and parts > 1 and parts % context:
        return None
    return parts // context if parts % context == 0 else parts


def experts_cut(pinned: Pinned, roles: tuple[Role, ...], sizes: tuple[int, ...]) -> tuple[bool | None, ...]:
    """For each role of an axis whether experts are cut on it; None if the search decides."""
    if pinned.expert is None:
        return (None,) * len(roles)
    degrees = dict(zip(roles, sizes, strict=True))
    within = pinned.expert // (degrees.get("tensor", 1) if pinned.whole_experts else 1)
    along = within % (degrees.get("ring", 1) * degrees.get("context", 1)) == 0
    cut: dict[Role, bool] = {
        "replica": False,
        "data": False,
        "nodes": True,
        "expert": True,
        "ring": along,
        "context": along,
        "tensor": bool(pinned.whole_experts),
    }
    return tuple(cut[role] for role in roles)


def mesh_shapes(devices: int) -> tuple[tuple[int, ...], ...]:
    """Meshes of one or two axes over that many devices; a single device has no axes."""
    if devices == 1:
        return ((),)
    pairs = tuple((outer, devices // outer) for outer in divisors(devices) if 1 < outer < devices)
    return ((devices,), *pairs)
