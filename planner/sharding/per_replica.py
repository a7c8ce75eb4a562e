"""Operators that see only the samples of their own data-parallel replica, as all do in DistributedDataParallel.

    whole batch     x (8, d) ─ mean ─> (d) ────────────────> x - mean          one mean of 8 samples, on any plan
    4 replicas      x (8, d) ─ mean ─> (4, d): four means ─> x - mean          a sample meets that of its own replica

A plan computes what one device would on the whole batch: batch norm is synchronised, and a mean over the batch is one
mean. Under DistributedDataParallel without SyncBatchNorm each replica has its own mean; MindSpore calls an operator
that does so `cross_batch`. Here only operators that the user names do it.

The number of replicas is part of what the model computes, as the batch size is, and no property of the plan: sample i
of a micro-batch of s samples is in replica i // (s / R). So the result does not depend on how a plan cuts, one device
can compute it, and plans can be compared. A replica that is whole on a device needs nothing from others: the loop over
replicas is a factor of its own, which is parallel (`planner.sharding.rules.per_replica`).

A value without a batch dim that such an operator makes differs between replicas. It gets a leading dim of replicas, and
every replica computes for itself what reads it, until the result has a batch dim again. A loss that differs between
replicas becomes the mean over them, as gradients are averaged over replicas. New contents of buffers (running
statistics) are those of the first replica, whose buffers DistributedDataParallel broadcasts.

Sources: torch.nn.parallel.DistributedDataParallel (`broadcast_buffers`), torch.nn.SyncBatchNorm; MindSpore's
`cross_batch` ("Distributed Attribute Configuration").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hardware_profiles.spelling import nearest_names
from planner.errors import RequestError
from planner.graph.operator_graph import DETACH, Operator, OperatorGraph, TensorType, ValueRef, substitute
from planner.graph.per_replica import OWN, Places, Replicas, wrapped
from planner.graph.random_ops import CHANCES
from planner.graph.rewriting.updates import UPDATE
from planner.matching import matches
from planner.sharding.rescale import Growth, batch_growths, grown_factors, rescale_batch
from planner.sharding.rule import FactorKind
from planner.sharding.rules import rule_of
from planner.sharding.update import Update

_EACH = 2  # samples of a replica in the prepared graph: a dim of one sample cannot be told from a dim that is broadcast
_JOINING = (FactorKind.REDUCTION, FactorKind.COMBINED)
_NAMES = 6  # of operators in a message
_STILL = Growth()


def prepared_batch(update: Update, batch: int) -> int:
    """Samples of the graph that is prepared for a model whose example has `batch`: enough that every replica has
    some."""
    return _EACH * update.replicas if update.per_replica and update.replicas > 1 else batch


def with_replicas(graph: OperatorGraph, update: Update, batch: int) -> OperatorGraph:
    """The graph of `prepared_batch` samples in which every replica computes for itself the operators that an update
    names; the unchanged graph where it names none, or there is one replica. `batch` are the samples of the example.

    Raises RequestError for a pattern that matches no operator which looks at several samples, and for operators that
    replicas cannot compute by themselves.
    """
    if not update.per_replica:
        return graph
    growths = batch_growths(graph, batch)
    named = _named(graph, update.per_replica, growths)
    if update.replicas == 1:
        return graph
    samples = _EACH * update.replicas
    _check_inputs(graph, batch, samples)
    return _PerReplica(
        graph=rescale_batch(graph, batch, samples),
        each={op.name: op for op in rescale_batch(graph, batch, _EACH).operators},
        growths=growths,
        named=named,
        count=update.replicas,
    ).made()


def joining(graph: OperatorGraph, growths: Mapping[str, tuple[Growth, ...]]) -> tuple[Operator, ...]:
    """Operators that compute something of several samples together."""
    return tuple(
        op
        for op in graph.operators
        if op.name in graph.live
        and any(rule_of(graph, op).factors[f].kind in _JOINING for f in _grown(graph, op, growths))
    )


def _grown(graph: OperatorGraph, op: Operator, growths: Mapping[str, tuple[Growth, ...]]) -> Sequence[int]:
    return tuple(grown_factors(rule_of(graph, op), op, growths))


def _named(graph: OperatorGraph, patterns: Sequence[str], growths: Mapping[str, tuple[Growth, ...]]) -> frozenset[str]:
    """Operators that look at several samples and are named, themselves or their module."""
    able = joining(graph, growths)
    found: set[str] = set()
    for pattern in patterns:
        meant = {op.name for op in able if matches(op.name, pattern) or matches(op.module, pattern)}
        if not meant:
            raise RequestError(
                f"per_replica: '{pattern}' means no operator that looks at several samples; {_these(able, pattern)}"
            )
        found |= meant
    return frozenset(found)


def _these(able: Sequence[Operator], pattern: str) -> str:
    if not able:
        return "no operator of this model does, so that every plan computes what replicas would: leave it out"
    names = list(dict.fromkeys(op.name for op in able))
    near = nearest_names(pattern, names)
    shown = ", ".join(near or names[:_NAMES])
    return f"those that do: {shown}" + (f" and {len(names) - _NAMES} more" if not near and len(names) > _NAMES else "")


def _check_inputs(graph: OperatorGraph, batch: int, samples: int) -> None:
    """Check that no input without samples looks as if it had as many as the prepared graph."""
    for name in graph.inputs:
        shape = graph.types[name].shape
        if shape[:1] == (samples,) and samples != batch:
            raise RequestError(
                f"per_replica: input '{name}' of shape {shape} cannot be told from one with the {samples} samples of"
                f" {samples // _EACH} replicas; give it a leading dim of 1"
            )


@dataclass(kw_only=True)
class _PerReplica:
    """The graph while operators are changed. `each` has the operators, by name, of a model with the samples of one
    replica; `own` the values that differ between replicas."""

    graph: OperatorGraph
    each: Mapping[str, Operator]
    growths: Mapping[str, tuple[Growth, ...]]
    named: frozenset[str]
    count: int
    operators: list[Operator] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)

    def made(self) -> OperatorGraph:
        self.types = dict(self.graph.types)
        for op in self.graph.operators:
            reads = not self.own.isdisjoint(op.operands)
            if op.op == UPDATE and reads:
                self._update(op)
            elif op.op == DETACH and reads:
                self._own(op.results)
                self.operators.append(op)
            elif op.name in self.named or reads:
                self._wrap(op)
            else:
                self.operators.append(op)
        loss = self.graph.loss
        if loss in self.own:
            loss = self._joined(loss, "mean over replicas", "aten.mean.dim", ((0,),), self._maker(loss))
        return replace(self.graph, types=self.types, operators=tuple(self.operators), loss=loss)

    def _maker(self, value: str) -> Operator:
        return self.graph.operators[self.graph.producer[value]]

    def _wrap(self, op: Operator) -> None:
        """Add an operator as every replica computes it."""
        chance = CHANCES.get(op.op)
        if chance is not None and chance.of(op.arguments, dict(op.keywords)) > 0:
            raise _refusal(op, "drops elements at random of what is another in every replica")
        for operand in op.operands:
            self._check_counted(op, operand)
        operands = tuple(OWN if name in self.own else self._place(op, name) for name in op.operands)
        results = [name for name in op.results if name is not None]
        places: Places = tuple(OWN if at is None else at for at in (self._place(op, name) for name in results))
        replicas = Replicas(count=self.count, called=op.op, operands=operands, results=places)
        self._own([name for name, place in zip(results, places, strict=True) if place == OWN])
        self.operators.append(wrapped(self.each[op.name], replicas, op.results))

    def _place(self, op: Operator, name: str) -> int | None:
        """The dim of samples of a value; None where it has none."""
        dims = [dim for dim, growth in enumerate(self.growths[name]) if growth != _STILL]
        if not dims:
            return None
        if len(dims) > 1 or self.growths[name][dims[0]].outer != 1:
            raise _refusal(op, f"has samples in several dims of '{name}', or inside of another loop")
        return dims[0]

    def _check_counted(self, op: Operator, operand: str) -> None:
        """Check that no piece is taken of a range that counts samples: it starts again at zero in every replica."""
        if operand in self.graph.data_dependent or self._place(op, operand) is None:
            return
        waiting, seen = [operand], set[str]()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.graph.producer:
                continue
            seen.add(name)
            maker = self._maker(name)
            if rule_of(self.graph, maker).local_form == "counted":
                raise _refusal(op, f"reads numbers of samples ('{operand}'), which start anew in every replica")
            waiting += maker.operands

    def _own(self, names: Sequence[str | None]) -> None:
        """Mark values as different in every replica."""
        for name in names:
            if name is not None:
                tensor = self.types[name]
                self.types[name] = replace(tensor, shape=(self.count, *tensor.shape))
                self.own.add(name)

    def _update(self, op: Operator) -> None:
        """New contents of buffers: those of the first replica."""
        first = {
            name: self._joined(name, "of the first replica", "aten.select.int", (0, 0), op)
            for name in op.operands
            if name in self.own
        }
        self.operators.append(replace(op, arguments=tuple(substitute(argument, first) for argument in op.arguments)))

    def _joined(self, value: str, what: str, op: str, rest: tuple[int | tuple[int, ...], ...], near: Operator) -> str:
        """Add an operator that makes one value of those of all replicas."""
        name = f"{value} {what}"
        self.types[name] = replace(self.types[value], shape=self.types[value].shape[1:])
        arguments = (ValueRef(value), *rest)
        self.operators.append(
            Operator(name=name, op=op, arguments=arguments, results=(name,), module=near.module, line=near.line)
        )
        return name


def _refusal(op: Operator, why: str) -> RequestError:
    return RequestError(
        f"per_replica: operator '{op.name}' ({op.op}), called in {op.place}, {why}; name other"
        " operators, or leave per_replica out"
    )


__all__ = ["joining", "prepared_batch", "with_replicas"]
