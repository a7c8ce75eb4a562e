"""Names of conventional patterns in a plan: what each mesh axis does to an operator, and how a parameter is kept, in
the words of their authors.

    column, row parallel      a product cut along its outputs, or its inputs, on a tensor axis (Shoeybi et al. 2019)
    vocabulary parallel       embedding, head or loss cut along the vocabulary (the same)
    sequence parallel         norms and the like cut along the sequence on a tensor axis (Korthikanti et al. 2022)
    Ulysses, ring attention   attention on a context axis by heads (Jacobs et al. 2023), or by a ring (Liu et al. 2023)
    expert parallel           experts cut where tokens are exchanged (Lepikhin et al. 2020)
    spatial parallel          convolutions and pooling cut along pixels, with halos (Dryden et al. 2019)
    DDP                       whole weights, whose gradients are all-reduced (Li et al. 2020)
    ZeRO-1, ZeRO-2            states, gradients too, sharded among replicas of a weight (Rajbhandari et al. 2020)
    FSDP, HSDP                weights too, gathered for use; HSDP: replicas that each do so (Zhao et al. 2023)

Anything else is described by what the axis splits, in the words of the operator's rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.sharding.labels import factor_labels
from planner.sharding.layout import PARTIAL, REPLICATE, Layout
from planner.sharding.rule import FactorKind
from planner.sharding.rules.convolution import SPATIAL
from planner.sharding.stored import StoredParameter, owned_axes

REPLICATED = "replicated"

_FACTORS = {
    "o": "out",
    "i": "in",
    "g": "heads",
    "r": "query heads",
    "v": "vocabulary",
    "h": "hidden",
    "n": "tokens",
    "f": "width",
    "e": "experts",
    "e@b": "experts",
    "e@s": "experts",
    "k@q": "ring",
}
"""Names of factors in rules, spelled out."""


@dataclass(frozen=True, kw_only=True)
class Patterns:
    """Names for a bound plan whose mesh axes have these `roles` ("data", "tensor", "context", "replicated")."""

    bound: BoundPlan
    roles: tuple[str, ...]

    @cached_property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """Per operator a label for each factor: batch, sequence, or the name in the rule."""
        return factor_labels(self.bound.graph)

    @cached_property
    def _vocabularies(self) -> frozenset[int]:
        """Extents of the vocabularies of embeddings."""
        return frozenset(
            operator.rule.factors[operator.rule.index["v"]].extent
            for operator in self.bound.operators
            if operator.rule.op_class == "embedding" and "v" in operator.rule.index
        )

    def of_operator(self, at: int) -> tuple[str, ...]:
        """What each axis does to an operator."""
        return tuple(self._on_axis(at, self.labels[at], axis) for axis in range(len(self.roles)))

    def _on_axis(self, at: int, labels: Sequence[str], axis: int) -> str:
        operator = self.bound.operators[at]
        choice, rule, role = operator.strategy[axis], operator.rule, self.roles[axis]
        if choice is None:
            return REPLICATED
        factor, label = rule.factors[choice], labels[choice]
        if factor.kind is FactorKind.RING:
            return "ring attention"
        if not rule.exchanged.isdisjoint(rule.splits[choice]):
            return "expert parallel"
        if label == "batch":
            return "data parallel"
        if label == "sequence":
            return "sequence parallel" if role == "tensor" else "context parallel"
        if factor.kind is FactorKind.HALO or (factor.name in SPATIAL and "c" in rule.index):  # of images with channels
            return "spatial parallel"
        if rule.op_class == "attention":
            return "Ulysses" if role == "context" else "head parallel"
        if choice in self._weight_factors(operator):
            head = rule.op_class == "matmul" and self.bound.blocks.block_of(at) is None
            if factor.extent in self._vocabularies and (head or rule.op_class == "embedding"):
                return "vocabulary parallel"
            if rule.op_class == "matmul":
                outputs = {one for dims in rule.results for factors in dims for one in factors}
                return "column parallel" if choice in outputs else "row parallel"
            if rule.op_class == "experts":
                return "expert tensor parallel"
        if rule.op_class == "cross_entropy" and factor.extent in self._vocabularies:
            return "vocabulary parallel"
        return f"splits {factor_word(label)}"

    def _weight_factors(self, operator: BoundOperator) -> frozenset[int]:
        names = zip(operator.operator.operands, operator.rule.operands, strict=True)
        own = (dims for name, dims in names if self.bound.graph.parameter_behind(name) is not None)
        return frozenset(factor for dims in own for factors in dims for factor in factors)

    def of_parameter(self, name: str) -> str:
        """How a parameter is kept: `DDP`, `FSDP`, `HSDP`, `ZeRO-1`, `tensor shards, FSDP over axis0`."""
        stored, used = self.bound.parameters[name], self._used(name)
        words: dict[str, list[str]] = {}
        for axis, size in enumerate(self.bound.plan.mesh.sizes):
            if size > 1:
                word = self._kept(stored, used, axis)
                words.setdefault(word, []).append(self.bound.plan.mesh.names[axis])
        plain = words.pop(REPLICATED, [])
        copies = words.pop("copies", [])
        apart = all(self._role_of(axis) == "tensor" for axis in copies)
        if not apart and "FSDP" in words:
            words = {("HSDP" if word == "FSDP" else word): axes for word, axes in words.items()}
        alone = len(words) == 1 and not plain and not copies
        said = [
            word if alone or word == "tensor shards" else f"{word} over {' and '.join(axes)}"
            for word, axes in words.items()
        ]
        home = {stored.weight_home, stored.state_home} - {"device"}
        said += [f"offloaded to the {' and the '.join(sorted(home))}"] if home else []
        whole = "replicated, gradients all-reduced" if apart else "DDP"
        return ", ".join(said) or (whole if copies else REPLICATED)

    def _role_of(self, axis: str) -> str:
        return self.roles[self.bound.plan.mesh.names.index(axis)]

    def _kept(self, stored: StoredParameter, used: Layout | None, axis: int) -> str:
        """What one axis does to a parameter."""
        weight, gradient, state = stored.on(axis)
        if weight.is_shard:
            gathered = used is not None and used[axis] == REPLICATE
            return "FSDP" if gathered else "tensor shards" if self.roles[axis] == "tensor" else "shards"
        if gradient.is_shard:
            return "ZeRO-2"
        if state.is_shard:
            return "ZeRO-1"
        update = self.bound.plan.training.update
        if update.owned and axis in owned_axes(stored, self.bound.plan.mesh.sizes):
            return "parameter servers" if update.served else "ZeRO-1 by parameters"
        return "copies" if gradient == PARTIAL else REPLICATED

    def _used(self, name: str) -> Layout | None:
        """The layout in which the first operator that reads a parameter uses it."""
        for at in self.bound.graph.consumers.get(name, ())[:1]:
            operator = self.bound.operators[at]
            return operator.layouts.operands[operator.operator.operands.index(name)].forward
        return None


def factor_word(name: str) -> str:
    """The word for a factor; elementwise operators name their factors by the dims of their result, `d2`."""
    return f"dim {name[1:]}" if name[:1] == "d" and name[1:].isdigit() else _FACTORS.get(name, name)
