"""The description of a plan, and how a plan differs from the one that its description makes.

Nothing is judged here: a plan of any shape has a description, the nearest one in the words of engines. What the
description leaves out is found by making a plan of it again (`planner.strategy_search.fixed.megatron_layout`) and
comparing the two operator by operator.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hardware_profiles import Home
from planner.export.description import Description, ExportError
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.layout.kept import Kept, block_words, kept_places
from planner.plan.layout.roles import Roles, call_word, roles
from planner.sharding.labels import factor_labels
from planner.sharding.layout import Layout
from planner.sharding.rule import FactorKind

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=[./]|$)")
_BETWEEN = {"elementwise": "operators between products", "normalisation": "norms"}
"""Operators that no engine configures one by one."""
_OTHERWISE, _FOLLOWS = "each sharded differently", "sharded as the products beside them"
_COMPUTING = ("matmul", "attention", "embedding", "experts", "normalisation", "elementwise", "loss")


_PARTS = 3  # most words for what is left out, even if fewer calls (but more than one) are kept


def describe(bound: BoundPlan) -> Description:
    """The nearest description. Raises ExportError if samples do not divide over devices."""
    plan, found = bound.plan, roles(bound)
    training = plan.training
    data = found.data * found.replicated
    if training.part % data:
        raise ExportError(
            f"micro-batches of {training.part} samples do not divide over {data} data parallel devices; plan again"
            f" with degrees by hand, such as --data {data}"
        )
    ring = _ring(bound, found)
    full, selective, kept = _recomputation(bound)
    shared_out = found.zero[0].isdigit() and data * found.context > 1  # a tensor axis may shard some: no ZeRO
    zero = int(found.zero[0]) if shared_out else 0
    tensors = [axis for axis in found.axes if axis.role == "tensor"]
    return Description(
        layers=tuple(stage.blocks for stage in plan.stages),
        virtual_stages=plan.virtual_stages,
        schedule=plan.schedule,
        slices=plan.slices,
        data=data,
        tensor=found.tensor,
        ring=ring,
        heads=found.context // ring,
        zigzag=bool(plan.mesh.zigzag),
        expert=found.expert if any(o.rule.op_class == "experts" for o in bound.operators) else None,
        whole_experts=any(axis.experts for axis in tensors),
        zero=zero,
        replicas=found.replicas if zero else 1,
        sequence_parallel=found.sequence_parallel,
        vocabulary_parallel=found.tensor == 1 or _cuts_words(bound),
        micro_batch=training.part // data,
        micro_batches=training.micro_batches,
        interleave=training.interleave,
        full=full,
        selective=selective,
        kept=kept,
        precision=training.precision,
        optimizer=training.optimizer,
        update=training.update,
        states_at=_where({n: one.state_home for n, one in bound.parameters.items()}, bound, bound.graph.differentiable),
        weights_at=_where({n: one.weight_home for n, one in bound.parameters.items()}, bound, _of_blocks(bound)),
        sequence_length=plan.model.sequence_length,
        imbalance=training.imbalance,
        fp8=training.fp8,
    )


def _where(homes: Mapping[str, Home], bound: BoundPlan, of: Collection[str]) -> Home:
    """Where most bytes of the parameters `of` are."""
    sizes: Counter[Home] = Counter()
    for name in sorted(of):
        if name in homes:
            sizes[homes[name]] += bound.graph.types[name].numel
    return max(sizes, key=lambda home: sizes[home]) if sizes else "device"


def _of_blocks(bound: BoundPlan) -> frozenset[str]:
    """Parameters of repeated blocks; only these may be offloaded between the passes."""
    return frozenset(name for group in bound.plan.groups if group.blocks for name, _ in group.parameters)


def _ring(bound: BoundPlan, found: Roles) -> int:
    """Number of devices in the rings of keys and values."""
    degree = 1
    for position, axis in enumerate(found.axes):
        if axis.role == "context" and any(_is_ring(operator, position) for operator in bound.operators):
            degree *= axis.size
    return degree


def _is_ring(operator: BoundOperator, position: int) -> bool:
    choice = operator.strategy[position]
    return choice is not None and operator.rule.factors[choice].kind is FactorKind.RING


def _cuts_words(bound: BoundPlan) -> bool:
    """Whether an embedding of the samples' tokens is sharded along the vocabulary. A micro-batch of one sample has no
    loop over samples."""
    labels = factor_labels(bound.graph)
    for operator, names in zip(bound.operators, labels, strict=True):
        if operator.rule.op_class == "embedding" and not {"batch", "sequence"}.isdisjoint(names):
            results = {factor for dims in operator.rule.results[0] for factor in dims}
            if any(choice is not None and choice not in results for choice in operator.strategy):
                return True
    return False


def _recomputation(bound: BoundPlan) -> tuple[tuple[int, ...], tuple[int, ...], Kept]:
    """Blocks of every stage that are recomputed whole, and selectively; and what most of the latter keep."""
    full, selective = [], []
    ways: Counter[tuple[int, frozenset[int]]] = Counter()
    for stage in bound.plan.stages:
        counts = [0, 0]
        for block in range(stage.first_block, stage.first_block + stage.blocks):
            kept = bound.recompute_of(block)
            if kept is not None:
                counts[bool(kept)] += 1
                if kept:
                    ways[bound.blocks.firsts[bound.blocks.kinds[block]], kept] += 1
        full.append(counts[0])
        selective.append(counts[1])
    if not ways:
        return tuple(full), tuple(selective), Kept()
    (block, kept), _ = ways.most_common(1)[0]
    return tuple(full), tuple(selective), _kept(bound, block, kept)


def _kept(bound: BoundPlan, block: int, places: frozenset[int]) -> Kept:
    """What a block keeps, in words.

    If some classes and parts are exactly what it leaves out, and are no more words than the kept calls, they are used.
    """
    words = block_words(bound.graph, bound.blocks.operators(block))
    calls = tuple(dict.fromkeys(words[place].call for place in sorted(places)))
    left = frozenset[str]().union(*(words[place].names for place in words.keys() - places))
    names = sorted(left - frozenset[str]().union(*(words[place].names for place in places)))
    most = max(len(calls), _PARTS) if len(calls) > 1 else 1
    for count in range(1, min(len(names), most) + 1):
        for but in itertools.combinations(names, count):
            if frozenset(kept_places(words, Kept(but=but))) == places:
                return Kept(but=but)
    return Kept(calls=calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A property of a plan that its description does not express: `what` it is, in the plan, in the plan of the
    description, and how often."""

    what: str
    here: str
    usual: str
    count: int = 1


def differences(bound: BoundPlan, usual: BoundPlan) -> tuple[Difference, ...]:
    """How a plan differs from that of its description: computation first, then storage."""
    found = [*_mesh_differences(bound, usual), *_block_differences(bound, usual), *_offload_differences(bound, usual)]
    found += _overlap_differences(bound, usual)
    if bound.plan.training.tokens_once and not usual.plan.training.tokens_once:
        found += [Difference(what="tokens sent to experts", here="once to each node", usual="once to each expert")]
    operators: Counter[tuple[str, str, str]] = Counter()
    between: Counter[str] = Counter()
    for op_class in _COMPUTING:
        for here, there in zip(bound.operators, usual.operators, strict=True):
            if here.rule.op_class == op_class and (one := _split(bound, here)) != (other := _split(usual, there)):
                if op_class in _BETWEEN:
                    between[_BETWEEN[op_class]] += 1
                else:
                    operators[_pattern(here.operator.name), one, other] += 1
    found += [Difference(what=w, here=h, usual=u, count=count) for (w, h, u), count in operators.items()]
    found += [Difference(what=what, here=_OTHERWISE, usual=_FOLLOWS, count=n) for what, n in between.items()]
    return (*found, *_stored_differences(bound, usual))


def _stored_differences(bound: BoundPlan, usual: BoundPlan) -> Iterable[Difference]:
    """Differences in the number of pieces of parameters; the dim that is cut does not matter for storage."""
    for kind in ("weight", "gradient", "state"):
        names: dict[tuple[str, str], list[str]] = {}
        for name, stored in bound.parameters.items():
            one, other = (_pieces(b, getattr(s, kind)) for b, s in ((bound, stored), (usual, usual.parameters[name])))
            if one != other:
                names.setdefault((one, other), []).append(name)
        for (one, other), alike in names.items():
            patterns = list(dict.fromkeys(_pattern(name) for name in alike))
            more = f" and {len(patterns) - 2} more" if len(patterns) > 2 else ""
            what = f"stored {kind} of {', '.join(patterns[:2])}{more}"
            yield Difference(what=what, here=one, usual=other, count=len(alike))


def _mesh_differences(bound: BoundPlan, usual: BoundPlan) -> Iterable[Difference]:
    here, there = _axes(bound), _axes(usual)
    if here != there:
        yield Difference(what="order of the mesh, outermost first", here=here, usual=there)


def _axes(bound: BoundPlan) -> str:
    """Roles of the axes with their degrees; neighbouring axes of one role are merged."""
    merged: list[tuple[str, int]] = []
    found = roles(bound)
    for axis in found.axes:
        role = "data" if axis.role == "replicated" else axis.role
        if role == "data" and found.replicas > 1 and not axis.shared:
            role = "replicas"
        if merged and merged[-1][0] == role:
            merged[-1] = (role, merged[-1][1] * axis.size)
        else:
            merged.append((role, axis.size))
    return " x ".join(f"{role} {size}" for role, size in merged) or "one device"


def _offload_differences(bound: BoundPlan, usual: BoundPlan) -> Iterable[Difference]:
    """Partial offload, and offload of activations, which no engine can be told."""
    here, there = roles(bound).offload, roles(usual).offload
    if here != there:
        yield Difference(what="offload", here=here, usual=there)


def _overlap_differences(bound: BoundPlan, usual: BoundPlan) -> Iterable[Difference]:
    """Collectives in chunks under the products beside them, which no engine can be told."""
    here, there = (one.plan.training.tensor_overlap for one in (bound, usual))
    if here and not there:
        counts = " or ".join(str(n) for n in sorted({max(chunks) for _, *chunks, _ in here}))
        words = f"in {counts} chunks, overlapped with products"
        yield Difference(what="collectives of tensor parallelism", here=words, usual="exposed")
    if bound.plan.training.expert_overlap and not usual.plan.training.expert_overlap:
        yield Difference(what="all-to-all of experts", here="overlapped with other work", usual="exposed")


def _block_differences(bound: BoundPlan, usual: BoundPlan) -> Iterable[Difference]:
    """Blocks whose recomputation keeps something else; their place in a stage does not matter."""
    ways: Counter[tuple[str, str]] = Counter()
    for stage in bound.plan.stages:
        blocks = range(stage.first_block, stage.first_block + stage.blocks)
        here, there = (Counter(_way(b, block) for block in blocks) for b in (bound, usual))
        for one, other in zip(sorted((here - there).elements()), sorted((there - here).elements()), strict=True):
            ways[one, other] += 1
    for (one, other), count in ways.items():
        yield Difference(what="recomputation of a block", here=one, usual=other, count=count)


def _way(bound: BoundPlan, block: int) -> str:
    kept = bound.recompute_of(block)
    if kept is None:
        return "none"
    inside = [bound.operators[at] for at in bound.blocks.operators(block)]
    words = (call_word(inside[place].operator.name, inside[place].rule.op_class) for place in sorted(kept))
    return f"keeps {', '.join(words)}" if kept else "full"


def _split(bound: BoundPlan, operator: BoundOperator) -> str:
    """`o 8, b 2`: the factors that a strategy splits, and the number of pieces."""
    pieces: Counter[str] = Counter()
    for axis, choice in zip(bound.plan.mesh.axes, operator.strategy, strict=True):
        if choice is not None:
            name = operator.rule.factors[choice].name
            pieces[name] = (pieces[name] or 1) * axis.size
    return _words(pieces)


def _pieces(bound: BoundPlan, layout: Layout) -> str:
    """`8 pieces`: the number of pieces of a tensor with this layout."""
    cut = math.prod(
        axis.size for axis, placement in zip(bound.plan.mesh.axes, layout, strict=True) if placement.is_shard
    )
    return f"{cut} pieces" if cut > 1 else "whole"


def _words(pieces: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(pieces.items())) or "whole"


def _pattern(name: str) -> str:
    """A name without the numbers of modules, the same for all modules that are alike."""
    return _NUMBER.sub("*", name)
