"""The user's decisions about operators, as a filter on candidates.

There are two ways to decide: strategies for operators by name (`Shard`), which leave everything else free; and degrees
of parallelism (`Pinned`, manual mode), which give every mesh axis one purpose:

    axis        operators with a weight to multiply     norms and the like          everything else
    data        batch                                   batch                       batch
    replica     batch                                   batch                       batch
    expert      batch                                   batch                       batch; experts, exchanged by batch
    ring        sequence                                sequence                    sequence, a ring in attention
    context     sequence                                sequence                    sequence, heads in attention
    tensor      a dim of the weight                     nothing, or sequence        heads, hidden, sequence or nothing;
                                                                                    nothing if a norm reads it and
                                                                                    the sequence is not cut

    parameters on a data, ring or context axis: ZeRO 0 full copies; 1 states cut; 2 gradients too; 3 weights too
    parameters on a replica axis: full copies, for every ZeRO stage
    parameters on a tensor axis: cut if a product or an embedding uses them, else full copies
    weights of experts on an axis on which experts are cut: cut along the experts, for every ZeRO stage

An operator without such a dim, or with one that does not divide, does the same work on the whole axis. Megatron-style
plans are points of this space. The search decides what is left open, such as which matrix products are row-parallel and
which are column-parallel.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeVar

from planner.errors import RequestError, unknown_name
from planner.graph.blocks import IDENTITY
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType
from planner.matching import matches
from planner.nearest import multiples, nearest_words
from planner.sharding import layout
from planner.sharding.labels import factor_labels
from planner.sharding.legality import legal_strategies, strategy_fault
from planner.sharding.mesh import Mesh
from planner.sharding.rule import FactorKind, Rule, Strategy, pieces_of, splittable
from planner.sharding.rules import rule_of
from planner.sharding.stored import COPIES, Option, StoredParameter, legal_stored, stored_options
from planner.sharding.usual_pattern import usual_factors
from planner.sharding.zigzag import Sequences, order_fault, sequences_of, tensors_of
from planner.strategy_search.request.configurations import experts_cut
from planner.strategy_search.request.default_strategy import DATA_PARALLEL, follows, of_batch_alone, splits_batch
from planner.strategy_search.request.request import SearchRequest, Shard, Store
from planner.strategy_search.request.space import EXPERTS, Configuration, Pinned, Role
from planner.strategy_search.request.template import Template

T = TypeVar("T")


class NothingAgreesError(RequestError):
    """On this mesh no candidate of an operator agrees with the user's decisions; another mesh may have one."""


_MULTIPLIED = frozenset({"matmul", "embedding", EXPERTS})
_ALONG_EXPERTS = layout.shard(0)


def decided_of(request: SearchRequest, configuration: Configuration, template: Template) -> "Decided | None":
    """The filter of a request for one configuration; None if nothing is decided."""
    if not request.shards and not request.stores and not configuration.roles:
        return None  # a default requires shards
    pinned = configuration.under(request.pinned)
    return Decided(
        shards=request.shards,
        stores={store.name: store for store in request.stores},
        pinned=pinned,
        roles=configuration.roles,
        experts=experts_cut(pinned, configuration.roles, configuration.mesh) if configuration.roles else (),
        axes=len(configuration.mesh),
        sizes=configuration.mesh,
        template=template,
        falls_back=request.default == DATA_PARALLEL,
        owned=request.update.owned,
        served=request.update.served,
    )


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Filters the candidates of operators and parameters of a template."""

    shards: tuple[Shard, ...]
    stores: Mapping[str, Store]
    pinned: Pinned
    roles: tuple[Role, ...]
    experts: tuple[bool | None, ...]  # for each role whether experts are cut on its axis; None: the search decides
    axes: int  # the number of mesh axes
    sizes: tuple[int, ...]  # their sizes
    template: Template
    owned: bool = False  # whether in ZeRO-1 each optimizer state has one owner
    served: bool = False  # whether that owner is on a parameter server
    falls_back: bool = False  # whether operators that no shard matches split the batch on every axis

    def strategies(self, index: int, rule: Rule, mesh: Mesh) -> tuple[Strategy, ...]:
        """Strategies of an operator that agree with the decisions.

        Raises NothingAgreesError if there is none on this mesh with this batch, and RequestError if a shard matches no
        operator.
        """
        rings = "ring" in self.roles
        if self.falls_back or not self.roles:
            return self.agreeing(index, rule, legal_strategies(rule, mesh, rings=rings), mesh)
        found = legal_strategies(
            rule, mesh, rings=rings, keep=lambda axis, grown: self._keep(index, rule, grown, axis, mesh)
        )
        for shard in self._matching(index):
            found = self._agreeing(index, rule, found, shard, mesh)
        return found

    def _keep(self, index: int, rule: Rule, grown: tuple[Strategy, ...], axis: int, mesh: Mesh) -> tuple[Strategy, ...]:
        """Filters strategies of the axes up to `axis`, by the role of that axis and by the order in which it cuts
        sequences. Only those that remain are extended: an axis is judged by itself and by the axes before it, and later
        axes may always be left unused."""
        if axis in mesh.zigzag:
            rest = (None,) * (len(mesh.axes) - axis - 1)
            whole = tuple((*strategy, *rest) for strategy in grown)
            grown = tuple(one[: axis + 1] for one in self._in_order(index, rule, whole, mesh))
        return self._in_role(index, rule, grown, axis, self.roles[axis])

    def agreeing(self, index: int, rule: Rule, legal: tuple[Strategy, ...], mesh: Mesh) -> tuple[Strategy, ...]:
        """The strategies that agree; the mesh may have only the first axes of the full mesh."""
        found = self._in_order(index, rule, legal, mesh) if mesh.zigzag else legal
        if self.falls_back and not self._matching(index):
            found = self._fallen_back(index, rule, found, mesh)
        for axis, role in enumerate(self.roles[: len(mesh.axes)]):
            found = self._in_role(index, rule, found, axis, role)
        for shard in self._matching(index):
            found = self._agreeing(index, rule, found, shard, mesh)
        return found

    def _fallen_back(self, index: int, rule: Rule, legal: tuple[Strategy, ...], mesh: Mesh) -> tuple[Strategy, ...]:
        """The strategies of an operator without a decision, if such operators split the batch."""
        if not splits_batch(self.template.graph, mesh.sizes):
            raise NothingAgreesError(
                f"default = data_parallel: the samples of a micro-batch do not divide over the"
                f" {math.prod(mesh.sizes)} devices of mesh {'x'.join(map(str, mesh.sizes))}"
            )
        if follows(self.template.graph.operators[index].op, rule.op_class):
            return legal
        return of_batch_alone(self._labels[index], legal, len(mesh.axes))

    def _in_order(self, index: int, rule: Rule, legal: tuple[Strategy, ...], mesh: Mesh) -> tuple[Strategy, ...]:
        """The strategies that agree with the order in which axes cut sequences."""
        op = self.template.graph.operators[index]
        tensors = tensors_of(rule, op.operands, op.results, self._sequences)
        return tuple(strategy for strategy in legal if order_fault(rule, strategy, mesh, tensors) is None)

    def stored(self, name: str, tensor: TensorType, trainable: bool, mesh: Mesh) -> tuple[StoredParameter, ...]:
        """Stored layouts of a parameter that agree with the decisions."""
        wanted = tuple(self._wanted(name, axis) for axis in range(len(mesh.axes)))
        return self._as_stored(name, _agreeing_stored(tensor.shape, mesh.sizes, trainable, wanted))

    def agreeing_stored(self, name: str, legal: tuple[StoredParameter, ...], axes: int) -> tuple[StoredParameter, ...]:
        """The stored layouts that agree, on a mesh with the first `axes` axes."""
        return self._as_stored(name, _agreeing(legal, tuple(self._wanted(name, axis) for axis in range(axes))))

    def _as_stored(self, name: str, legal: tuple[StoredParameter, ...]) -> tuple[StoredParameter, ...]:
        """The stored layouts that match the user's decision for a parameter, on the first axes of the mesh."""
        store = self.stores.get(name)
        if store is None:
            return legal
        found = tuple(one for one in legal if _is_stored(one, store))
        if not found:
            raise NothingAgreesError(
                f"parameter '{name}' cannot be stored as {layout.format_layout(store.weight)} with states cut on axes"
                f" {[axis for axis, cut in enumerate(store.state) if cut]}"
            )
        return found

    def _wanted(self, name: str, axis: int) -> tuple["_Wanted", ...]:
        """What an axis should do to a parameter, followed by alternatives in case that is impossible."""
        if self.falls_back and not self._read_by_decided(name):
            return (_Wanted("whole"),)
        role = self.roles[axis] if axis < len(self.roles) else None
        if role is None:
            return ()
        zero = 0 if role == "replica" else 1 if self.served else self.pinned.zero
        if role == "tensor":
            graph = self.template.graph
            consumers = [at for at in graph.consumers.get(name, ()) if at < len(self._classes)]
            multiplied = any(self._classes[at] in _MULTIPLIED for at in consumers)
            matrix = len(graph.types[name].shape) > 1
            plain: tuple[_Wanted, ...] = (
                _Wanted("cut" if matrix else "cut or whole") if multiplied else _Wanted("whole"),
            )
        else:
            shared = _Wanted("owned") if zero == 1 and self.owned else _Wanted("zero", zero or 0)
            plain = (_Wanted("any"),) if zero is None else (shared, _Wanted("whole"))
        if name not in self._of_experts or self.experts[axis] is False:
            return plain
        first = replace(plain[0], or_experts=True) if self.experts[axis] is None else _Wanted("none", or_experts=True)
        return (first, *plain)

    def _read_by_decided(self, name: str) -> bool:
        """Whether an operator that a shard matches reads a parameter."""
        return any(at in hits for at in self.template.graph.consumers.get(name, ()) for hits in self._matches.values())

    def _in_role(
        self, index: int, rule: Rule, legal: tuple[Strategy, ...], axis: int, role: Role
    ) -> tuple[Strategy, ...]:
        """Candidates that use the axis for its role; if there are none, those that leave it unused."""
        if index in self._views_for_experts:
            return self._along_experts(rule, legal, axis)
        labels = self._labels[index]
        weights = self._weight_factors[index]
        multiplied = rule.op_class in _MULTIPLIED and bool(weights)

        def uses(wanted: Callable[[int], bool]) -> Callable[[Strategy], bool]:
            return lambda strategy: (choice := strategy[axis]) is not None and wanted(choice)

        def unused(strategy: Strategy) -> bool:
            return strategy[axis] is None

        batch, sequence = (
            uses(lambda f, label=label: labels[f] == label)  # type: ignore[misc]  # a default binds the loop's value
            for label in ("batch", "sequence")
        )
        split_sequence = self.pinned.sequence_parallel
        other = uses(lambda f: labels[f] not in ("batch", "sequence"))
        if rule.op_class == EXPERTS and self.experts[axis] is not None:  # the expert degree counts exchanged parts only
            alone = uses(lambda f: f in rule.exchanged)
            legal = tuple(strategy for strategy in legal if not alone(strategy))
        if rule.op_class == EXPERTS and self.experts[axis] is not False:
            swapped = uses(lambda f: rule.factors[f].kind is FactorKind.EXCHANGE)
            plain = (
                uses(lambda f: f in weights) if role == "tensor" else sequence if role in ("ring", "context") else batch
            )
            if self.experts[axis] is None:
                return _first_possible(legal, (lambda s: swapped(s) or plain(s), unused))
            return _first_possible(legal, (swapped, plain, unused))
        ring = uses(lambda f: rule.factors[f].kind is FactorKind.RING)
        if role == "ring" and rule.op_class == "attention":
            return _first_possible(legal, (ring, unused))
        legal = tuple(strategy for strategy in legal if not ring(strategy))  # rings are for ring axes only
        if role in ("data", "nodes", "expert", "replica"):
            return _first_possible(legal, (batch, unused))
        if role in ("ring", "context"):
            inside = uses(lambda f: labels[f] != "batch")
            along = multiplied or (bool(weights) and any(map(sequence, legal)))  # a scan needs whole sequences
            return _first_possible(legal, (sequence, unused) if along else (inside, unused))
        if multiplied:
            usual = self._usual[index] if self.pinned.pattern is not None else None
            if usual is not None and rule.factors[usual].extent % self.sizes[axis] == 0:
                return _first_possible(legal, (uses(lambda f: f == usual), unused))
            return _first_possible(
                legal, (uses(lambda f: f in weights and labels[f] not in ("batch", "sequence")), unused)
            )
        if rule.op_class == "attention":
            return _first_possible(legal, (other, unused))
        if weights and rule.op_class == "normalisation":
            if split_sequence:
                return _first_possible(legal, (sequence, unused))
            allowed = unused if split_sequence is False else lambda s: unused(s) or sequence(s)
            return _first_possible(legal, (allowed,))
        pattern = self.pinned.pattern
        if rule.op_class == "cross_entropy" and pattern is not None and pattern.whole_logits:
            return _first_possible(legal, (unused,))
        if split_sequence is False:
            whole = (unused,) if index in self._residual else ()
            return _first_possible(legal, (*whole, lambda s: unused(s) or other(s)))
        return _first_possible(legal, (lambda s: not batch(s),))

    def _along_experts(self, rule: Rule, legal: tuple[Strategy, ...], axis: int) -> tuple[Strategy, ...]:
        """Candidates of an operator between a weight and the experts: cut along the experts if these are cut on the
        axis, whole if they are not, either if the search decides."""
        experts = set(rule.operands[0][0])
        cut = tuple(strategy for strategy in legal if strategy[axis] in experts)
        whole = tuple(strategy for strategy in legal if strategy[axis] is None)
        if self.experts[axis] is None:
            return cut + whole
        return cut if self.experts[axis] and cut else whole

    def _matching(self, index: int) -> list[Shard]:
        return [shard for shard in self.shards if index in self._matches[shard]]

    @cached_property
    def _matches(self) -> dict[Shard, frozenset[int]]:
        """The operators of the template that each pattern matches; those of the first block stand for all blocks."""
        graph, found = self.template.graph, {}
        for shard in self.shards:
            hits = frozenset(at for at, op in enumerate(graph.operators) if _means(shard.pattern, op))
            if not hits:
                names = [op.name for op in graph.operators]
                raise RequestError(
                    f"--shard {shard.pattern}: {unknown_name('operator', shard.pattern, names)} An operator of the"
                    " first block stands for its twins in all blocks"
                )
            found[shard] = hits
        return found

    def _agreeing(
        self, index: int, rule: Rule, legal: tuple[Strategy, ...], shard: Shard, mesh: Mesh
    ) -> tuple[Strategy, ...]:
        sizes = mesh.sizes
        where = f"operator '{self.template.graph.operators[index].name}' ({rule.format()})"
        labels = self._labels[index]
        known = dict.fromkeys((*splittable(rule), *(label for label in labels if label in ("batch", "sequence"))))
        for name in shard.strategy:
            if name not in ("*", "-") and name not in known:  # a batch of one sample has no such factor
                raise NothingAgreesError(
                    f"{where} has no factor '{name}' to split; it has {', '.join(known) or 'none'}"
                )
        if shard.strategy and len(shard.strategy) != self.axes:
            raise NothingAgreesError(
                f"--shard {shard.text()} has {len(shard.strategy)} entries, one for each mesh axis; this mesh has"
                f" {self.axes}"
            )
        whole = len(sizes) == self.axes
        found = tuple(strategy for strategy in legal if _agrees(rule, labels, strategy, shard, sizes, whole))
        if not found:
            raise NothingAgreesError(
                f"{where}: no legal strategy on mesh {'x'.join(map(str, sizes))} is {shard.text()}"
                f"{_why_not(rule, labels, shard, mesh)}"
            )
        return found

    @cached_property
    def _sequences(self) -> Sequences:
        return sequences_of(self.template.graph)

    @cached_property
    def _labels(self) -> tuple[tuple[str, ...], ...]:
        return factor_labels(self.template.graph)

    @cached_property
    def _weight_factors(self) -> tuple[frozenset[int], ...]:
        """For each operator the factors that index one of its parameters."""
        return tuple(_weight_factors(self.template.graph, index) for index in range(len(self.template.graph.operators)))

    @cached_property
    def _usual(self) -> tuple[int | None, ...]:
        """For each operator the factor that the pattern of engines cuts over tensor-parallel devices."""
        pattern, graph = self.pinned.pattern, self.template.graph
        assert pattern is not None
        return usual_factors(graph, vocabulary=pattern.vocabulary)

    @cached_property
    def _residual(self) -> frozenset[int]:
        """Operators whose results norms read: without sequence parallelism the residual stream is a full copy on every
        device."""
        weighted = {
            at for at, classed in enumerate(self._classes) if classed == "normalisation" and self._weight_factors[at]
        }
        read = set(weighted)
        graph = self.template.graph
        for _ in range(2):  # an identity is between a value and its readers
            read |= {
                edge.producer
                for edge in self.template.edges
                if edge.consumer in weighted
                or (edge.consumer in read and graph.operators[edge.consumer].op == IDENTITY)
            }
        return frozenset(read - weighted)

    @cached_property
    def _of_experts(self) -> frozenset[str]:
        """Weights of experts: parameters of operators that route to experts, also as views and chunks of them."""
        graph = self.template.graph
        experts = (op for op, op_class in zip(graph.operators, self._classes, strict=True) if op_class == EXPERTS)
        return frozenset(name for op in experts for name in graph.parameters_of(op))

    @cached_property
    def _views_for_experts(self) -> frozenset[int]:
        """Operators between a weight and the operator that routes to experts, such as the chunk of a weight that holds
        gates beside the rest: they are cut as the experts are."""
        graph = self.template.graph
        experts = (op for op, op_class in zip(graph.operators, self._classes, strict=True) if op_class == EXPERTS)
        found = set[int]()
        open_names = [name for op in experts for name in op.operands if graph.parameter_behind(name) is not None]
        while open_names:
            if (made := graph.producer.get(open_names.pop())) is not None:
                found.add(made)
                open_names += graph.operators[made].operands
        return frozenset(found)

    @cached_property
    def _classes(self) -> tuple[str, ...]:
        graph = self.template.graph
        return tuple(rule_of(graph, op).op_class for op in graph.operators)


def _weight_factors(graph: OperatorGraph, index: int) -> frozenset[int]:
    op = graph.operators[index]
    rule = rule_of(graph, op)
    return frozenset(
        factor
        for name, dims in zip(op.operands, rule.operands, strict=True)
        if name in graph.parameter_names
        for factors in dims
        for factor in factors
    )


def _means(pattern: str, op: Operator) -> bool:
    """Whether a pattern matches an operator. The planner's own identities match only a pattern without wildcards."""
    return matches(op.name, pattern) if op.op != IDENTITY else pattern == op.name


def _why_not(rule: Rule, labels: Sequence[str], shard: Shard, mesh: Mesh) -> str:
    """Why the strategy that a shard gives is illegal, with extents that would work; empty if the shard gives no
    complete strategy."""
    named = {label: at for at, label in reversed(list(enumerate(labels)))} | dict(rule.index)
    strategy = tuple(named.get(name) for name in shard.strategy)
    fault = strategy_fault(rule, strategy, mesh) if len(strategy) == len(mesh.axes) else None
    if fault is None:
        return ""
    counts = zip(rule.factors, pieces_of(rule, strategy, mesh.sizes), strict=True)
    odd = next(((factor, count) for factor, count in counts if factor.extent % count), None)
    if odd is None:
        return f": {fault.reason}"
    factor, count = odd
    near = nearest_words(factor.extent, multiples(factor.extent, count))
    return f": {fault.reason}; change or pad it: {near}"


def _agrees(
    rule: Rule, labels: tuple[str, ...], strategy: Strategy, shard: Shard, sizes: tuple[int, ...], whole: bool
) -> bool:
    """Whether a strategy is the one that a shard asks for, by the names of factors or by their labels; or, if the mesh
    is not complete, whether it can become that strategy."""
    for choice, wanted in zip(strategy, shard.strategy, strict=False):
        names = ("-",) if choice is None else (rule.factors[choice].name, labels[choice])
        if wanted != "*" and wanted not in names:
            return False
    cut = pieces_of(rule, strategy, sizes)
    for every, cuts in zip(rule.operands, shard.cuts, strict=False):
        if len(every) < len(cuts) or (not cuts and every):
            return False
        leading = len(every) - len(cuts) + 1  # leading dims count as one
        dims = (sum(every[:leading], ()), *every[leading:]) if cuts else ()
        for factors, pieces in zip(dims, cuts, strict=True):
            count = math.prod(cut[factor] for factor in factors)
            if pieces % count or (whole and count != pieces):
                return False
    return True


def _is_stored(stored: StoredParameter, store: Store) -> bool:
    return all(
        weight == wanted and state.is_shard == cut
        for weight, state, wanted, cut in zip(stored.weight, stored.state, store.weight, store.state, strict=False)
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What an axis should do to a parameter: cut it permanently ("cut"), leave it "whole", shard what a ZeRO stage
    shards, give the optimizer state to one owner ("owned"), or "any". `or_experts`: or cut it along the experts."""

    what: Literal["cut", "whole", "cut or whole", "zero", "owned", "any", "none"]
    zero: int = 0
    or_experts: bool = False

    def holds(self, option: Option) -> bool:
        weight, gradient, state = option
        cut = (weight.is_shard, gradient.is_shard, state.is_shard)
        if self.or_experts and weight == _ALONG_EXPERTS:
            return True
        if self.what == "owned":
            return option == COPIES
        if self.what == "zero":
            return cut == _SHARED_OUT[self.zero]
        whole = not any(cut)
        return {"cut": cut[0], "whole": whole, "cut or whole": cut[0] or whole, "any": True, "none": False}[self.what]


_SHARED_OUT = {0: (False,) * 3, 1: (False, False, True), 2: (False, True, True), 3: (True,) * 3}
"""For each ZeRO stage, whether weight, gradient and optimizer state are sharded."""


@lru_cache(maxsize=4096)
def _agreeing_stored(
    shape: tuple[int, ...], sizes: tuple[int, ...], trainable: bool, wanted: tuple[tuple[_Wanted, ...], ...]
) -> tuple[StoredParameter, ...]:
    """All stored layouts that agree. They are built axis by axis. An axis that stores nothing more is always legal, so
    if layouts of the first axes agree, some layouts of all axes agree. Cached: called for every parameter of a shape,
    and for every micro-batch size."""
    options = tuple(stored_options(len(shape), trainable))
    allowed: list[tuple[Option, ...]] = []
    for axis, wishes in enumerate(wanted):
        first = options
        if wishes and wishes[0].what != "any":
            for wish in wishes:
                those = tuple(option for option in options if wish.holds(option))
                if those and legal_stored(shape, sizes[: axis + 1], trainable, (*allowed, those)):
                    first = those
                    break
        allowed.append(first)
    return legal_stored(shape, sizes, trainable, allowed)


def _agreeing(legal: tuple[StoredParameter, ...], wanted: Sequence[tuple[_Wanted, ...]]) -> tuple[StoredParameter, ...]:
    found = legal
    for axis, wishes in enumerate(wanted):
        if wishes and wishes[0].what != "any":
            found = _first_possible(found, [_on(axis, wish) for wish in wishes])
    return found


def _on(axis: int, wish: _Wanted) -> Callable[[StoredParameter], bool]:
    return lambda stored: wish.holds(stored.on(axis))


def _first_possible(candidates: tuple[T, ...], filters: Sequence[Callable[[T], bool]]) -> tuple[T, ...]:
    """The result of the first filter that leaves anything; all candidates if none does."""
    for wanted in filters:
        found = tuple(candidate for candidate in candidates if wanted(candidate))
        if found:
            return found
    return candidates
