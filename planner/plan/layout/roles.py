"""What a plan means in the words people use: which axis is data, tensor, sequence or context parallel, which ZeRO
stage, whether norms are cut too, which blocks are recomputed.

The role of an axis is given by the factor that splits most of the contraction work (for batch and sequence see
`planner.sharding.labels`):

    a factor that indexes a parameter      tensor parallel
    batch                                  data parallel
    sequence                               sequence split: context parallel (attention by Ulysses, or by a ring)
    a dim that stencils slide over         context parallel, by pixels
    none                                   replicated

Experts may be cut on an axis of any role, where tokens are exchanged: that is expert parallelism.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.sharding.labels import factor_labels
from planner.sharding.layout import REPLICATE
from planner.sharding.rule import FactorKind
from planner.sharding.stored import owned_axes

_CONTRACTIONS = frozenset({"matmul", "attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """One mesh axis in words: its role for most of the work, its degree, whether experts are cut on it, and
    whether its devices shard the state of most parameters (ZeRO)."""

    axis: str
    size: int
    role: str  # "data", "tensor", "context", "replicated"
    detail: str
    experts: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """Degrees of parallelism in the usual words. The product of all but `expert`, the number of parts that experts are
    cut into, is the number of devices. `zero_shares`: every ZeRO stage in use, and its share of the parameters."""

    pipeline: int
    data: int
    tensor: int
    context: int
    expert: int
    replicated: int
    sequence_parallel: bool
    zero: str  # of most parameters
    recomputation: str
    offload: str
    axes: tuple[AxisRole, ...]
    zero_shares: tuple[tuple[str, float], ...] = ()

    @property
    def replicas(self) -> int:
        """Groups of data parallel devices, each of which shards parameters within itself; 1 where nothing is sharded,
        or no axis shards most of it."""
        if not any(axis.shared for axis in self.axes):
            return 1
        return math.prod(axis.size for axis in self.axes if axis.role in ("data", "replicated") and not axis.shared)


def roles(bound: BoundPlan) -> Roles:
    """The usual words for a plan. Looks at the work of all stages."""
    labels = factor_labels(bound.graph)
    mesh = bound.plan.mesh
    axes = tuple(_axis_role(bound, labels, position) for position in range(len(mesh.axes)))
    degrees = Counter({"data": 1, "tensor": 1, "context": 1, "replicated": 1})
    for axis in axes:
        degrees[axis.role] *= axis.size
    shares = _zero_shares(bound)
    return Roles(
        pipeline=bound.plan.pipeline,
        data=degrees["data"],
        tensor=degrees["tensor"],
        context=degrees["context"],
        expert=math.prod(axis.size for axis in axes if axis.experts),
        replicated=degrees["replicated"],
        sequence_parallel=any(
            axis.role == "tensor" and _norms_cut(bound, labels, position) for position, axis in enumerate(axes)
        ),
        zero=shares[0][0] if shares else "off",
        zero_shares=shares,
        recomputation=_recomputation(bound),
        offload=_offload(bound),
        axes=axes,
    )


def _axis_role(bound: BoundPlan, labels: tuple[tuple[str, ...], ...], position: int) -> AxisRole:
    linear: Counter[str] = Counter()
    attention: Counter[str] = Counter()
    for operator, names in zip(bound.operators, labels, strict=True):
        if operator.rule.op_class in _CONTRACTIONS:
            counter = attention if operator.rule.op_class == "attention" else linear
            counter[_factor_role(bound, operator, names, position)] += int(operator.rule.flops)
    role = linear.most_common(1)[0][0] if linear else "replicated"
    inside = attention.most_common(1)[0][0] if attention else role
    detail = {
        "data": "batch",
        "tensor": "weights",
        "sequence": "sequence",
        "replicated": "nothing",
    }.get(role, role)
    if inside == "ring":
        detail += ", by a ring in attention"
    elif inside not in (role, "replicated") and not (role == "tensor" and inside == "heads"):
        detail += f", {inside} in attention" + (" (Ulysses)" if (role, inside) == ("sequence", "heads") else "")
    axis = bound.plan.mesh.axes[position]
    experts = any(_cuts_experts(one, position) for one in bound.operators if one.rule.exchanged)
    word = "context" if role in ("sequence", "pixels") else role
    return AxisRole(
        axis=axis.name,
        size=axis.size,
        role=word,
        detail=detail + (", experts" if experts else ""),
        experts=experts,
        shared=word != "tensor" and _shares_out(bound, position),
    )


def _shares_out(bound: BoundPlan, position: int) -> bool:
    """Whether the states of most parameters are cut on an axis. Experts, cut by expert parallelism, do not count."""
    reading = (o.operator for o in bound.operators if o.rule.op_class == "experts")
    experts = {name for op in reading for name in bound.graph.parameters_of(op)}
    numel = {name: bound.graph.types[name].numel for name in bound.parameters if name not in experts}
    update, sizes = bound.plan.training.update, bound.plan.mesh.sizes
    owned = {name for name in numel if update.owned and position in owned_axes(bound.parameters[name], sizes)}
    cut = sum(size for name, size in numel.items() if name in owned or bound.parameters[name].state[position].is_shard)
    return cut * 2 > sum(numel.values())


def _cuts_experts(operator: BoundOperator, position: int) -> bool:
    choice = operator.strategy[position]
    return choice is not None and not operator.rule.exchanged.isdisjoint(operator.rule.splits[choice])


def _factor_role(bound: BoundPlan, operator: BoundOperator, names: tuple[str, ...], position: int) -> str:
    choice = operator.strategy[position]
    if choice is None:
        return "replicated"
    if operator.rule.factors[choice].kind is FactorKind.RING:
        return "ring"
    if names[choice] in ("batch", "sequence"):
        return {"batch": "data"}.get(names[choice], "sequence")
    if operator.rule.factors[choice].kind is FactorKind.HALO:
        return "pixels"
    for name, dims in zip(operator.operator.operands, operator.rule.operands, strict=True):
        if name in bound.parameters and any(choice in factors for factors in dims):
            return "tensor"
    return "heads" if operator.rule.op_class == "attention" else "tensor"


def _norms_cut(bound: BoundPlan, labels: tuple[tuple[str, ...], ...], position: int) -> bool:
    norms = [(o, n) for o, n in zip(bound.operators, labels, strict=True) if o.rule.op_class == "normalisation"]
    cut = [o.strategy[position] is not None and n[o.strategy[position] or 0] == "sequence" for o, n in norms]
    return bool(cut) and sum(cut) * 2 > len(cut)


def _zero_shares(bound: BoundPlan) -> tuple[tuple[str, float], ...]:
    """The ZeRO stages of the parameters, and the share of the parameters that each covers, the largest first:

    3 where weights are gathered for use (without a backward pass there is nothing else), 2 where the gradient is cut
    finer than the weight, 1 where only the state is.
    Experts that are cut over all devices that shard other parameters have nothing left to shard.
    """
    sizes: Counter[str] = Counter()
    whole = "3 (weights, gradients and states)" if bound.plan.schedule_kind.trains else "3 (weights)"
    wanted, shared = _wanted(bound), dict[str, set[int]]()
    for name, stored in bound.parameters.items():
        axes = range(len(stored.weight))
        gathered = {
            axis for layout in wanted.get(name, ()) for axis in axes
            if stored.weight[axis].is_shard and layout[axis] == REPLICATE
        }  # fmt: skip
        shared[name] = gathered | {axis for axis in axes if stored.state[axis] != stored.weight[axis]}
        if bound.plan.training.update.owned:
            shared[name] |= set(owned_axes(stored, bound.plan.mesh.sizes))
        cut = any(stored.gradient[axis].is_shard and not stored.weight[axis].is_shard for axis in axes)
        word = whole if gathered else "2 (gradients and states)" if cut else "1 (states)"
        sizes[word if shared[name] else "off"] += bound.graph.types[name].numel
    some = set[int]().union(*shared.values())
    for name, stored in bound.parameters.items():
        if some and not shared[name] and all(stored.state[axis].is_shard for axis in some):
            sizes["off"] -= bound.graph.types[name].numel
    return tuple((word, size / max(sizes.total(), 1)) for word, size in sizes.most_common())


def _recomputation(bound: BoundPlan) -> str:
    """`none`, `full`, or how many blocks are recomputed, and what blocks keep that do not recompute everything: each
    way of keeping results by itself, or, if there are more than two, what all such blocks keep and what only some keep.
    """
    count = bound.blocks.count
    ways: Counter[tuple[str, ...]] = Counter()
    for block in range(count):
        if (kept := bound.recompute_of(block)) is not None:
            inside = bound.blocks.operators(block)
            operators = (bound.operators[inside[place]] for place in sorted(kept))
            ways[tuple(dict.fromkeys(call_word(o.operator.name, o.rule.op_class) for o in operators))] += 1
    if not ways:
        return "none"
    if ways == {(): count}:
        return "full"
    full = ways.pop((), 0)
    words = [f"{full} of {count} blocks fully"] if full else []
    if len(ways) > 2:
        always = [name for name in dict.fromkeys(chain(*ways)) if all(name in names for names in ways)]
        others = [name for name in dict.fromkeys(chain(*ways)) if name not in always]
        number = f"{ways.total()}" if words else f"{ways.total()} of {count} blocks"
        keeping = f"{_listed(always)}; some also {_listed(others)}" if always else _listed(others, "or")
        return ", ".join([*words, f"{number} keep {keeping}"])
    for names, blocks in ways.items():
        number = f"{blocks}" if words else f"{blocks} of {count} blocks"
        words.append(f"{number} {'keeps' if blocks == 1 and words else 'keep'} {_listed(names)}")
    return ", ".join(words)


def _listed(names: Sequence[str], last: str = "and") -> str:
    """`q_proj, k_proj and attention`."""
    return f" {last} ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _offload(bound: BoundPlan) -> str:
    """`none`, or what is offloaded: `optimizer states on the host`, `38% of the optimizer states on
    the host`."""
    states: Counter[str] = Counter()
    weights: Counter[str] = Counter()
    for name, stored in bound.parameters.items():
        weights[stored.weight_home] += bound.graph.types[name].numel
        if name in bound.graph.differentiable:
            states[stored.state_home] += bound.graph.types[name].numel
    words = [*_shares(states, "optimizer states"), *_shares(weights, "weights")]
    offloaded = Counter(bound.offloaded_blocks.values())
    words += [
        f"activations of {offloaded[home]} of {bound.blocks.count} blocks on the {home}" for home in sorted(offloaded)
    ]
    return ", ".join(words) or "none"


def _shares(sizes: Counter[str], what: str) -> Iterator[str]:
    """The part of something that is on the host, and the part on a disk."""
    whole = sum(sizes.values())
    for home in ("host", "disk"):
        if sizes[home]:
            share = sizes[home] / whole
            some = "" if sizes[home] == whole else f"{share:.0%} of the " if share >= 0.005 else "a few of the "
            yield f"{some}{what} on the {home}"


def call_word(name: str, op_class: str) -> str:
    """`attention`, the module of an operator with a weight (`q_proj`), or the call (`silu`)."""
    place, _, call = name.rpartition("/")
    if op_class == "attention":
        return "attention"
    return place.rpartition(".")[2] if op_class == "matmul" and place else call


def _wanted(bound: BoundPlan) -> Mapping[str, tuple[tuple[object, ...], ...]]:
    found: dict[str, list[tuple[object, ...]]] = {}
    for operator in bound.operators:
        for name, duplex in zip(operator.operator.operands, operator.layouts.operands, strict=True):
            if name in bound.parameters:
                found.setdefault(name, []).append(duplex.forward)
    return {name: tuple(layouts) for name, layouts in found.items()}
