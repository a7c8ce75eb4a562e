"""The same graph at another batch size or sequence length, without tracing again.

The batch dim of the inputs is followed through the rules: a factor that indexes a growing dim grows, and so does
every result dim that it indexes. In a compound dim (s b) the number of steps of other loops, here s, outside of the
growing loop is known. The batch of a model cannot be changed, and an error says so, where an operator would need two
different growths for one factor, where the batch meets a blocked factor, or where it is 1 and cannot be told from a dim
that is broadcast.

The sequence is followed the same way, from the second dim of the inputs: one slice of it is a graph like the whole.

Code that reads the batch size (`torch.arange(x.shape[0])`, `mask.expand(x.shape[0], ...)`) leaves a number in the
graph. Where such a dim meets one that grows, the model could not run at any other batch unless it grew as well. So the
operator that spells its size is looked for, against the flow, and gets the new size. A batch size that the model's
Python code computes with (`x / x.shape[0]`) is not seen.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from planner.errors import RequestError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType
from planner.graph.per_replica import types_of_one, unwrapped
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of, rule_of_call
from planner.sharding.rules.einsum import FEW, MANY


@dataclass(frozen=True, slots=True)
class Growth:
    """What happens to a dim or factor: a loop in it, with `outer` steps of other loops outside, gets `scale` times as
    many steps."""

    scale: Fraction = Fraction(1)
    outer: int = 1


_STILL = Growth()


def rescale_batch(graph: OperatorGraph, batch: int, new_batch: int) -> OperatorGraph:
    """`graph` with the leading dim `batch` of its inputs changed to `new_batch`.

    Inputs whose leading dim is not `batch` keep their shape. Raises RequestError, naming the operator, where the
    batch cannot be changed.
    """
    if batch == new_batch:
        return graph
    return _rescaled(graph, _Growths(graph, 0, batch, Growth(scale=Fraction(new_batch, batch))), "batch")


def rescale_sequence(graph: OperatorGraph, length: int, new_length: int) -> OperatorGraph:
    """`graph` with the second dim `length` of its inputs changed to `new_length`; constants and buffers keep their
    values at the start of the sequence. Causal attention is among the new positions alone.

    Inputs whose second dim is not `length` keep their shape. Raises RequestError, naming the operator, where the
    sequence length cannot be changed.
    """
    if length == new_length:
        return graph
    growths = _Growths(graph, 1, length, Growth(scale=Fraction(new_length, length)), sequence=True)
    return _rescaled(graph, growths, "sequence length")


def rescale_weights(graph: OperatorGraph, rows: Mapping[str, Growth]) -> OperatorGraph:
    """`graph` with more rows of some weights; all dims of weights and other values that have the same loop grow alike.
    Raises RequestError, naming the operator, where an operator depends on the number of rows."""
    growths = _Growths(graph, 0, 0, _STILL)
    growths.grow(rows)
    return _rescaled(graph, growths, "rows of weights")


def batch_growths(graph: OperatorGraph, batch: int) -> Mapping[str, tuple[Growth, ...]]:
    """How the dims of all values would grow if the leading dim `batch` of the inputs were twice as long. Raises
    RequestError, naming the operator, where the batch cannot be changed."""
    try:
        return _Growths(graph, 0, batch, Growth(scale=Fraction(2))).settled()
    except _RefusalError as refusal:
        raise RequestError(f"the batch cannot be changed: {refusal}") from refusal


def grown_factors(rule: Rule, op: Operator, growths: Mapping[str, tuple[Growth, ...]]) -> Mapping[int, Growth]:
    """The loops of an operator that grow with its operands."""
    return {
        factor: growth
        for name, dims in zip(op.operands, rule.operands, strict=True)
        for dim, indexed in zip(growths[name], dims, strict=True)
        for factor, growth in _of_factors(rule, op, indexed, dim)
        if growth != _STILL
    }


def _rescaled(graph: OperatorGraph, rescaling: "_Growths", what: str) -> OperatorGraph:
    try:
        growths = rescaling.settled()
        known: dict[object, TensorType] = {}
        types = {name: _grown(name, tensor, growths[name], known) for name, tensor in graph.types.items()}
        operators = tuple(_respelled(op, rule_of(graph, op), graph.types, types) for op in graph.operators)
    except _RefusalError as refusal:
        raise RequestError(f"the {what} cannot be changed: {refusal}") from refusal
    return replace(graph, types=types, operators=operators)


class _RefusalError(Exception):
    """Why the graph cannot be changed."""


class _ClashError(Exception):
    """An operator needs a dim of one of its operands to grow, and it does not."""

    def __init__(self, why: str, wanted: Sequence[tuple[str, int, Growth]]) -> None:
        super().__init__(why)
        self.why, self.wanted = why, wanted


class _Growths:
    """Growth of every dim of every value. `grown` is the growth of the dim `growing` of inputs in which that dim has
    this `length`. `spelled` has the growths of dims that an operator makes from nothing, by value and dim."""

    def __init__(
        self, graph: OperatorGraph, growing: int, length: int, grown: Growth, *, sequence: bool = False
    ) -> None:
        self._graph, self._sequence = graph, sequence
        self._follow = frozenset(graph.buffers) if sequence else frozenset[str]()  # grow where needed
        self._spelled: dict[str, dict[int, Growth]] = {}
        self._again = 0  # the first operator that the last demanded growth changes
        self._anew = set[str]()  # names in `_given` that it changes
        self._given = {
            name: tuple(
                grown if dim == growing and extent == length and name in graph.inputs else _STILL
                for dim, extent in enumerate(tensor.shape)
            )
            for name, tensor in graph.types.items()
            if name not in graph.producer
        }

    def grow(self, rows: Mapping[str, Growth]) -> None:
        """Let the first dim of these weights grow, and all weights that have the same loop."""
        self._follow = self._graph.parameter_names
        self._given.update((name, (growth, *self._given[name][1:])) for name, growth in rows.items())

    def settled(self) -> Mapping[str, tuple[Growth, ...]]:
        """Growths of all values: forward through the graph, and again from each size that proves to be spelled."""
        operators = self._graph.operators
        rules = [rule_of(self._graph, op) for op in operators]
        alike: dict[tuple[Growth, ...], tuple[Growth, ...]] = {}
        growths = {name: alike.setdefault(dims, dims) for name, dims in self._given.items()}
        results: dict[object, list[tuple[Growth, ...]]] = {}  # of equal operators on operands that grow alike
        while True:
            try:
                for op, rule in zip(operators[self._again :], rules[self._again :], strict=True):
                    made = [result for result in op.results if result is not None]
                    apart = rule.looked_up or not self._spelled.keys().isdisjoint(made)
                    key = (id(rule), *(id(growths[name]) for name in op.operands))  # ids of tuples that `alike` keeps
                    if apart or key not in results:
                        self._propagate(rule, op, growths)
                        found = [alike.setdefault(growths[result], growths[result]) for result in made]
                        if not apart:
                            results[key] = found
                    else:
                        found = results[key]
                    growths.update(zip(made, found, strict=True))
            except _ClashError as clash:
                self._again = len(operators)
                if not all(self._demand(*wanted) for wanted in clash.wanted) or self._again == len(operators):
                    raise _RefusalError(clash.why) from clash
                growths.update((name, alike.setdefault(self._given[name], self._given[name])) for name in self._anew)
                self._anew.clear()
            else:
                return growths

    def _propagate(self, rule: Rule, op: Operator, growths: dict[str, tuple[Growth, ...]]) -> None:
        """Growth of the results of an operator from that of its operands."""
        factors: dict[int, Growth] = {}
        for name, dims in zip(op.operands, rule.operands, strict=True):
            for growth, indexed in zip(growths[name], dims, strict=True):
                for factor, wanted in _of_factors(rule, op, indexed, growth):
                    if factors.setdefault(factor, wanted) == wanted:
                        continue
                    if _STILL not in (factors[factor], wanted):
                        raise _RefusalError(
                            f"{op.name}{op.at} would need two scales for factor '{rule.factors[factor].name}'"
                        )
                    factors[factor] = wanted if wanted != _STILL else factors[factor]
        grouped = _grown_groups(rule, op, factors)
        self._check_agreement(rule, op, growths, factors)
        for factor, growth in factors.items():
            attends = self._sequence and rule.op_class == "attention" and rule.causal
            blocked = rule.factors[factor].kind is FactorKind.BLOCKED and factor not in grouped
            if growth != _STILL and blocked and not attends and not _looked_up(rule, factor):
                raise _RefusalError(f"{op.name}{op.at} depends on the extent of its dim '{rule.factors[factor].name}'")
        for result, dims in zip((r for r in op.results if r is not None), rule.results, strict=True):
            spelled = self._spelled.get(result, {})
            growths[result] = tuple(
                spelled.get(dim) or _of_dim(rule, op, indexed, factors) for dim, indexed in enumerate(dims)
            )

    def _check_agreement(
        self, rule: Rule, op: Operator, growths: Mapping[str, tuple[Growth, ...]], factors: Mapping[int, Growth]
    ) -> None:
        """Check that a factor grows in all operands or in none, and that tables grow with numbers that count the
        batch."""
        lacking: list[tuple[str, int, Growth]] = []
        why = ""
        for name, dims in zip(op.operands, rule.operands, strict=True):
            for dim, (growth, indexed) in enumerate(zip(growths[name], dims, strict=True)):
                wanted = _of_dim(rule, op, indexed, factors)
                if growth != wanted:
                    why = why or next(
                        f"{op.name}{op.at} would need two scales for factor '{rule.factors[factor].name}'"
                        for factor in indexed
                        if factors.get(factor, _STILL) != _STILL
                    )
                    lacking.append((name, dim, wanted))
        if not lacking:
            for dim, wanted in self._counted_beyond(rule, op, growths):
                why = f"{op.name}{op.at} would look beyond dim {dim} of {op.operands[0]}"
                lacking.append((op.operands[0], dim, wanted))
        if lacking:
            raise _ClashError(why, lacking)

    def _counted_beyond(
        self, rule: Rule, op: Operator, growths: Mapping[str, tuple[Growth, ...]]
    ) -> Iterator[tuple[int, Growth]]:
        """Dims that numbers which count the samples look into, and which have no more elements than before. Numbers
        that count something else are the same for each sample, as positions are (`arange(s).repeat(b, 1)`)."""
        if rule.looked_up != (0,) or not self._may_count.intersection(op.operands[1:]):
            return
        looked = [
            dim
            for dim, indexed in enumerate(rule.operands[0])
            if any(rule.factors[factor].kind is FactorKind.BLOCKED for factor in indexed)
        ]
        for dim, numbers in zip(looked, op.operands[1:], strict=False):
            grown = next((growth for growth in growths[numbers] if growth != _STILL), None)
            if grown is not None and growths[op.operands[0]][dim] == _STILL and self._is_counting(numbers, growths):
                yield dim, grown

    def _is_counting(self, name: str, growths: Mapping[str, tuple[Growth, ...]]) -> bool:
        """Whether a value is made of numbers that count the samples, and of no data."""
        made_of = self._counts_in[name] if name in self._may_count else 0
        return any(
            made_of >> at & 1 and any(growth != _STILL for growth in growths.get(counted, ()))
            for at, counted in enumerate(self._counted)
        )

    @cached_property
    def _counted(self) -> tuple[str, ...]:
        """Results of operators that count (arange), made from nothing."""
        counts = (op for op in self._graph.operators if rule_of(self._graph, op).local_form == "counted")
        return tuple(name for op in counts for name in op.results if name is not None)

    @cached_property
    def _counts_in(self) -> Mapping[str, int]:
        """Which `_counted` values each value is made of, one bit for each; values made of none are left out."""
        found = {name: 1 << at for at, name in enumerate(self._counted)}
        for op in self._graph.operators:
            made_of = functools.reduce(operator.or_, (found.get(name, 0) for name in op.operands), 0)
            if made_of:
                found.update((name, made_of | found.get(name, 0)) for name in op.results if name is not None)
        return found

    @cached_property
    def _may_count(self) -> frozenset[str]:
        """Values that are made of counts and of no data, whatever grows."""
        return frozenset(self._counts_in.keys() - self._graph.data_dependent)

    @cached_property
    def _first_use(self) -> Mapping[str, int]:
        """The first operator that reads each value."""
        uses = [(name, at) for at, op in enumerate(self._graph.operators) for name in op.operands]
        return dict(reversed(uses))

    def _demand(self, name: str, dim: int, growth: Growth) -> bool:
        """Let a dim grow by changing the operator that spells its extent; False where the value is data or a weight."""
        graph = self._graph
        if name in self._follow:
            if name in graph.parameter_names and growth.outer != 1:  # zeros go behind all elements of a dim
                return False
            known = self._given[name]
            if known[dim] != growth:
                self._given[name] = (*known[:dim], growth, *known[dim + 1 :])
                self._again = min(self._again, self._first_use[name])
                self._anew.add(name)
            return known[dim] in (_STILL, growth)  # several ways may lead here
        if name not in graph.producer:
            return False
        op = graph.operators[graph.producer[name]]
        rule = rule_of(graph, op)
        made = [result for result in op.results if result is not None]
        indexed = rule.results[made.index(name)][dim]
        found = False
        for factor, wanted in _of_factors(rule, op, indexed, growth):
            if wanted == _STILL:
                continue
            sources = [
                (operand, at, Growth(wanted.scale, outer))
                for operand, dims in zip(op.operands, rule.operands, strict=True)
                for at, inside in enumerate(dims)
                if (outer := _outer(rule, inside, factor, wanted)) is not None
            ]
            if not sources:
                if rule.local_form is None:
                    return False
                spelled = self._spelled.setdefault(name, {})
                if spelled.get(dim) != growth:
                    spelled[dim] = growth
                    self._again = min(self._again, graph.producer[name])
                return True
            found = all(self._demand(*source) for source in sources)
        return found


def _grown_groups(rule: Rule, op: Operator, factors: dict[int, Growth]) -> frozenset[int]:
    """The heads of queries and of keys, where several heads of queries share one of keys: both grow alike, by whole
    groups, so that as many share one as before. None in other operators."""
    if rule.op_class != "attention" or FEW not in rule.index:
        return frozenset()
    heads = rule.index[MANY], rule.index[FEW]
    wanted = {factors.get(factor, _STILL) for factor in heads} - {_STILL}
    if len(wanted) > 1:
        raise _RefusalError(f"{op.name}{op.at} would need two scales for its heads of queries and of keys")
    for growth in wanted:
        factors.update(dict.fromkeys(heads, growth))
    return frozenset(heads)


def _outer(rule: Rule, indexed: tuple[int, ...], factor: int, growth: Growth) -> int | None:
    """Steps of other loops outside of the growing loop in a dim that a factor indexes; None where it does not index
    it."""
    if factor not in indexed:
        return None
    outside = (f for f in indexed[: indexed.index(factor)] if f != rule.replica)
    return math.prod(rule.factors[f].extent for f in outside) * growth.outer


def _looked_up(rule: Rule, factor: int) -> bool:
    """Whether a factor indexes only dims that numbers look into: more elements change nothing."""
    return not any(
        factor in indexed
        for tensors in (
            [dims for index, dims in enumerate(rule.operands) if index not in rule.looked_up],
            rule.results,
        )
        for dims in tensors
        for indexed in dims
    )


def _of_factors(rule: Rule, op: Operator, indexed: tuple[int, ...], growth: Growth) -> Iterator[tuple[int, Growth]]:
    """Which factor of a dim grows. Where replicas compute by themselves, the samples of each grow, never their
    number."""
    outside = 1
    indexed = tuple(factor for factor in indexed if factor != rule.replica)
    found = growth == _STILL
    for factor in indexed:
        extent = rule.factors[factor].extent
        here = not found and growth.outer % outside == 0 and outside <= growth.outer < outside * extent
        yield factor, Growth(growth.scale, growth.outer // outside) if here else _STILL
        found = found or here
        outside *= extent
    if not found:
        raise _RefusalError(
            f"{op.name}{op.at} cannot tell it from a dim of extent 1; give example inputs with 2 or more of it"
        )


def _of_dim(rule: Rule, op: Operator, indexed: tuple[int, ...], factors: Mapping[int, Growth]) -> Growth:
    outside, found = 1, _STILL
    for factor in indexed:
        if factor == rule.replica:
            continue
        growth = factors.get(factor, _STILL)
        if growth != _STILL:
            if found != _STILL:
                raise _RefusalError(f"{op.name}{op.at} puts two dims that depend on it into one")
            found = Growth(growth.scale, outside * growth.outer)
        outside *= rule.factors[factor].extent
    return found


def _grown(name: str, tensor: TensorType, growths: tuple[Growth, ...], known: dict[object, TensorType]) -> TensorType:
    """The type of a value with these growths; `known` has one object for all equal types."""
    key = (tensor, id(growths))
    if key not in known:
        known[key] = _larger(name, tensor, growths)
    return known[key]


def _larger(name: str, tensor: TensorType, growths: tuple[Growth, ...]) -> TensorType:
    shape = tuple(extent * growth.scale for extent, growth in zip(tensor.shape, growths, strict=True))
    if any(extent.denominator != 1 for extent in shape):
        raise _RefusalError(f"{name} of shape {tensor.shape} would get the shape ({', '.join(map(str, shape))})")
    return replace(tensor, shape=type(tensor.shape)(int(extent) for extent in shape))


def _respelled(op: Operator, rule: Rule, before: Mapping[str, TensorType], after: Mapping[str, TensorType]) -> Operator:
    """An operator that spells out its result's shape, or part of it, spells out the new one."""
    result = op.results[0]
    if rule.replica is not None:
        return _respelled_of_one(op, before, after)
    if rule.local_form is None or result is None or before[result].shape == after[result].shape:
        return op
    spelled = _SPELLINGS[rule.local_form](op, after[result].shape, after)
    return replace(op, arguments=spelled)


def _respelled_of_one(op: Operator, before: Mapping[str, TensorType], after: Mapping[str, TensorType]) -> Operator:
    """An operator of every replica, whose arguments are those of one replica."""
    one = unwrapped(op)
    types = types_of_one(op, before)
    again = _respelled(one, rule_of_call(one, types), types, types_of_one(op, after))
    return replace(op, arguments=again.arguments)


Spelled = tuple[Argument, ...]


def _shape_from(op: Operator, shape: tuple[int, ...], types: Mapping[str, TensorType]) -> Spelled:
    """view, expand, unflatten: the last argument has the sizes of all dims, or of those from one on."""
    *before, sizes = op.arguments
    if not isinstance(sizes, tuple):
        return op.arguments
    start = before[1] if len(before) > 1 else 0
    assert isinstance(start, int)
    first = start if start >= 0 else start + len(shape) - len(sizes) + 1
    extents = zip(sizes, shape[first : first + len(sizes)], strict=True)
    return (*before, tuple(size if size == -1 else extent for size, extent in extents))


def _first_list(op: Operator, shape: tuple[int, ...], types: Mapping[str, TensorType]) -> Spelled:
    """zeros, new_full: the first list is the shape."""
    at = next(at for at, argument in enumerate(op.arguments) if isinstance(argument, tuple))
    return (*op.arguments[:at], shape, *op.arguments[at + 1 :])


def _times(op: Operator, shape: tuple[int, ...], types: Mapping[str, TensorType]) -> Spelled:
    """repeat: how many times along each dim."""
    source = types[op.operands[0]].shape
    padded = (1,) * (len(shape) - len(source)) + source
    return (op.arguments[0], tuple(whole // extent for whole, extent in zip(shape, padded, strict=True)))


def _counted(op: Operator, shape: tuple[int, ...], types: Mapping[str, TensorType]) -> Spelled:
    """arange of an end, of a start and an end, or of these and a step."""
    start, step = (op.arguments[0] if len(op.arguments) > 1 else 0), (op.arguments[2] if len(op.arguments) > 2 else 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise _RefusalError(f"{op.name}{op.at} counts in fractions")
    end = start + step * shape[0]
    return (end,) if len(op.arguments) == 1 else (start, end, *op.arguments[2:])


_SPELLINGS: Mapping[str, Callable[[Operator, tuple[int, ...], Mapping[str, TensorType]], Spelled]] = {
    "counted": _counted,
    "expand": _shape_from,
    "filled": _first_list,
    "reshape": _shape_from,
    "tiled": _times,
}
"""How the arguments of an operator spell out the shape of its result, by `Rule.local_form`."""
