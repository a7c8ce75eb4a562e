"""Reads what a mask says, as formulas of positions, from the operators that make it, without making it.

    i = arange(S)                                  position of dim 0
    i[:, None] - i[None, :]                        q - k
    (q - k >= 0) & (q - k < w)                     two comparisons, both hold
    documents[:, :, None] == documents[:, None]    equal at q and at k, per sample
    positions[:, :, None] >= positions[:, None]    at least at q what it is at k, per sample
    q // c == k // c                               both in one chunk

A value is an integer that is linear in the indices of its dims, or the chunk that an index lies in, or a choice between
two numbers by a condition, or numbers of the batch of which only the place is known. A condition is a disjunction of
conjunctions. Any other value has no formula (None), and its mask stays a tensor. Nothing depends on the extent
of the sequence, so a mask of a million positions is read as fast as a mask of ten.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from planner.graph.operator_graph import Argument, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.mask_formulas import (
    ALWAYS,
    EXACT,
    HIDES,
    MOST,
    NEVER,
    WIDE,
    Apart,
    AtLeast,
    Atom,
    Choice,
    Chunk,
    Condition,
    Equal,
    Formula,
    Linear,
    Number,
    OfBatch,
    SameChunk,
    TooLongError,
    as_choice,
    both,
    condition_of,
    decided,
    either,
    is_exact,
    moved,
    negated,
    number_of,
    of_one_sample,
    opposite,
    sum_of,
    within,
    zero_where_it_holds,
)

Compare = Callable[[Number, Number], bool]


_HANDED_ON = frozenset(
    f"aten.{name}.default" for name in ("alias", "clone", "contiguous", "detach", "expand", "reshape", "view")
)
"""Operators that change no number where shape and dtype stay."""


class MaskReader:
    """Formulas of the values of a graph. Numbers of the batch have the shape `batch`, (samples, positions)."""

    def __init__(self, graph: OperatorGraph, batch: tuple[int, int]) -> None:
        self._graph, self._batch = graph, batch
        self._found: dict[str, Formula | None] = {}

    def formula(self, name: str) -> Formula | None:
        """The formula of a value; None where it has none."""
        waiting = [name]
        while waiting:  # without recursion: a mask may pass through any number of operators
            op = self._maker(waiting[-1])
            missing = [operand for operand in op.operands if operand not in self._found] if op is not None else []
            if missing:
                waiting += missing
                continue
            at = waiting.pop()
            if at not in self._found:
                found = OfBatch(self._origin(at), (0, 1), 2) if self._of_batch(at) else self._read(op)
                tensor = self._graph.types[at]
                self._found[at] = within(found, tensor.shape, self._batch) if is_exact(found, tensor.dtype) else None
        return self._found[name]

    def _origin(self, name: str) -> str:
        """The numbers of the batch that a value passes on unchanged."""
        made = self._graph.producer.get(name)
        op = None if made is None else self._graph.operators[made]
        if op is None or op.op not in _HANDED_ON or self._graph.types[op.operands[0]] != self._graph.types[name]:
            return name
        return self._origin(op.operands[0])

    def counted_breaks(self, name: str) -> str | None:
        """The numbers of the batch whose breaks a value counts, `(diff(p) != 1).cumsum(-1)`: between two places with
        the same count they grow by one for each position. None for any other value."""
        count = self._made_by(name, "aten.cumsum.default")
        breaks = None if count is None else self._made_by(count.operands[0], "aten.ne.Scalar")
        steps = None if breaks is None else self._made_by(breaks.operands[0], "aten.diff.default")
        if count is None or breaks is None or steps is None or len(steps.arguments) != 4:
            return None
        *_, before = steps.operands  # one number, before the first
        told = (breaks.arguments[1], steps.arguments[1], self._graph.types[before].shape[1:])
        along = count.arguments[1] in (1, -1) and steps.arguments[2] in (1, -1)
        found = self.formula(steps.operands[0])
        if told != (1, 1, (1,)) or not along or not isinstance(found, OfBatch) or found.place != (0, 1):
            return None
        if any(self._graph.types[each].dtype not in WIDE for each in (name, steps.operands[0])):  # 0 behind 255
            return None
        return found.name

    def _made_by(self, name: str, made_by: str) -> Operator | None:
        made = self._graph.producer.get(name)
        op = None if made is None else self._graph.operators[made]
        return op if op is not None and op.op == made_by else None

    def _maker(self, name: str) -> Operator | None:
        """The operator that makes a value, where `_OPERATORS` can read it."""
        made = None if name in self._found or self._of_batch(name) else self._graph.producer.get(name)
        op = None if made is None else self._graph.operators[made]
        return op if op is not None and op.op in _OPERATORS and op.results == (name,) else None

    def _of_batch(self, name: str) -> bool:
        tensor = self._graph.types[name]
        return tensor.shape == self._batch and not tensor.floating and name in self._graph.data_dependent

    def _read(self, op: Operator | None) -> Formula | None:
        if op is None:
            return None
        try:
            return _OPERATORS[op.op](_Call(self._graph, op, [self._argument(argument) for argument in op.arguments]))
        except TooLongError:
            return None

    def _argument(self, argument: Argument) -> object:
        if isinstance(argument, ValueRef):
            found = self._found[argument.name]
            return argument if found is None else found
        return tuple(self._argument(item) for item in argument) if isinstance(argument, tuple) else argument


@dataclass(frozen=True, slots=True)
class _Call:
    """An operator with formulas for its tensors, where they have one."""

    graph: OperatorGraph
    op: Operator
    given: Sequence[object]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.graph.types[cast("str", self.op.results[0])].shape

    @property
    def dtype(self) -> str:
        """Dtype of the result."""
        return self.graph.types[cast("str", self.op.results[0])].dtype

    def shape_of(self, position: int) -> tuple[int, ...]:
        argument = self.op.arguments[position]
        return self.graph.types[argument.name].shape if isinstance(argument, ValueRef) else ()

    def broadcast(self, position: int) -> Formula | None:
        """An argument, or a number, broadcast to the dims of the result."""
        value = self.given[position]
        if isinstance(value, bool | int | float):
            return Linear((0,) * len(self.shape), value)
        if not isinstance(value, Formula):
            return None
        rank = len(self.shape)
        shift = rank - len(self.shape_of(position))
        return moved(value, {dim: dim + shift for dim in range(rank - shift)}, rank)

    def integer(self, position: int, default: int) -> int:
        value = self.given[position] if position < len(self.given) else default
        return value if isinstance(value, int) else default


def _choice(call: _Call, condition: Condition, yes: Number = True, no: Number = False) -> Choice | None:
    known = decided(condition, call.shape)
    return Choice(known, yes, no, len(call.shape)) if len(known) <= MOST else None


def _views(call: _Call) -> Formula | None:
    """The same numbers in the same order, in other dims: only dims of extent 1 are added or removed."""
    before, after = call.shape_of(0), call.shape
    long = [dim for dim, extent in enumerate(before) if extent != 1], [d for d, e in enumerate(after) if e != 1]
    if [before[dim] for dim in long[0]] != [after[dim] for dim in long[1]]:
        return None
    return _dims(call, dict(zip(*long, strict=True)))


def _dims(call: _Call, dims: Mapping[int, int]) -> Formula | None:
    """The first argument with other dims. Removed dims of extent 1 had index 0."""
    value, shape = call.given[0], call.shape_of(0)
    if isinstance(value, OfBatch | Choice):
        value = of_one_sample(value, dims, shape)
    return moved(value, dims, len(call.shape)) if isinstance(value, Formula) else None


def _same(call: _Call) -> Formula | None:
    value = call.given[0]
    return value if isinstance(value, Formula) and call.shape == call.shape_of(0) else None


def _cast(call: _Call) -> Formula | None:
    """Numbers of another dtype: of bool they are 0 or 1."""
    value, boolean = _same(call), call.dtype == "bool"
    if call.dtype not in EXACT and not isinstance(value, Choice):
        return None
    if boolean == _boolean(call, 0) or (not boolean and not isinstance(value, OfBatch)):
        return value
    condition = condition_of(value)
    return None if condition is None else _choice(call, condition)


def _unsqueeze(call: _Call) -> Formula | None:
    rank = len(call.shape)
    new = call.integer(1, 0) % rank
    return _dims(call, {dim: dim + (dim >= new) for dim in range(rank - 1)})


def _expand(call: _Call) -> Formula | None:
    shift = len(call.shape) - len(call.shape_of(0))
    return _dims(call, {dim: dim + shift for dim in range(len(call.shape_of(0)))})


def _permute(call: _Call) -> Formula | None:
    rank, order = len(call.shape), call.given[1]
    places = [item % rank for item in order if isinstance(item, int)] if isinstance(order, tuple) else []
    return _dims(call, {old: new for new, old in enumerate(places)}) if len(places) == rank else None


def _transpose(call: _Call) -> Formula | None:
    rank = len(call.shape)
    first, second = call.integer(1, 0) % rank, call.integer(2, 1) % rank
    return _dims(call, {**{d: d for d in range(rank)}, first: second, second: first})


def _slice(call: _Call) -> Formula | None:
    """A slice: only one from the start, or of all of a dim, or of a value that does not depend on the dim."""
    value, dim = call.given[0], call.integer(1, 0)
    untouched = isinstance(value, Linear) and not value.steps[dim]
    if not untouched and (call.integer(2, 0) or call.integer(4, 1) != 1):
        return None
    if isinstance(value, OfBatch) and call.shape != call.shape_of(0):
        return None
    return _dims(call, {d: d for d in range(len(call.shape))})


def _arange(call: _Call) -> Formula | None:
    start, end, step = (0, call.given[0], 1) if len(call.given) == 1 else (*call.given, 1)[:3]
    if not all(isinstance(number, int) for number in (start, end, step)):
        return None
    return Linear((cast("int", step),), cast("int", start))


def _filled(position: int | None, number: Number) -> Callable[[_Call], Formula | None]:
    """A tensor filled with one number: the argument at a position, or `number`."""

    def read(call: _Call) -> Formula | None:
        found = number if position is None else call.given[position]
        return Linear((0,) * len(call.shape), found) if isinstance(found, bool | int | float) else None

    return read


def _triangle(upper: bool) -> Callable[[_Call], Formula | None]:
    """The part on one side of a diagonal, and 0 elsewhere."""

    def read(call: _Call) -> Formula | None:
        value, sign = as_choice(_same(call)), 1 if upper else -1
        if value is None or len(call.shape) < 2:
            return None
        steps = (*(0 for _ in call.shape[2:]), -sign, sign)
        inside: Condition = frozenset({frozenset({AtLeast(steps, -sign * call.integer(1, 0))})})
        if value.condition == ALWAYS or value.yes == value.no:
            return _choice(call, inside, value.yes, 0)
        kept = both(value.condition, inside)
        return _choice(call, kept, value.yes, 0) if not value.no else None

    return read


def _logical(join: Callable[[Condition, Condition], Condition]) -> Callable[[_Call], Formula | None]:
    def read(call: _Call) -> Formula | None:
        first, second = (condition_of(call.broadcast(at)) for at in (0, 1))
        boolean = all(_boolean(call, at) for at in (0, 1))
        return _choice(call, join(first, second)) if boolean and first is not None and second is not None else None

    return read


def _boolean(call: _Call, position: int) -> bool:
    argument = call.op.arguments[position]
    return isinstance(argument, bool) or (
        isinstance(argument, ValueRef) and call.graph.types[argument.name].dtype == "bool"
    )


def _not_of(call: _Call) -> Formula | None:
    condition = condition_of(call.broadcast(0))
    return _choice(call, opposite(condition)) if condition is not None and _boolean(call, 0) else None


def _compared(compare: Compare) -> Callable[[_Call], Formula | None]:
    def read(call: _Call) -> Formula | None:
        first, second = call.broadcast(0), call.broadcast(1)
        if isinstance(first, OfBatch) and isinstance(second, OfBatch):
            return _same_number(call, compare, first, second)
        if isinstance(first, Chunk) and isinstance(second, Chunk):
            return _same_chunk(call, compare, first, second)
        if isinstance(first, Linear) and isinstance(second, Linear):
            difference = sum_of(first, second, -1)
            return _choice(call, _comparison(compare, difference)) if isinstance(difference.number, int) else None
        chosen, number = (first, second) if isinstance(first, Choice) else (second, first)
        if not isinstance(chosen, Choice) or not isinstance(number, Linear) or any(number.steps):
            return None
        sides = [
            compare(one, number.number) if chosen is first else compare(number.number, one)
            for one in (chosen.yes, chosen.no)
        ]
        return _choice(call, _by(chosen.condition, *sides))

    return read


def _by(condition: Condition, yes: bool, no: bool) -> Condition:
    """Where a choice by a condition is true."""
    if yes == no:
        return ALWAYS if yes else NEVER
    return condition if yes else opposite(condition)


def _same_number(call: _Call, compare: Compare, first: OfBatch, second: OfBatch) -> Choice | None:
    if first.name != second.name or first.place == second.place:
        return None
    if compare not in (operator.eq, operator.ne):
        return _choice(call, frozenset({frozenset({_apart(compare, first, second)})}))
    if first.more != second.more:
        return None
    atom = Equal(first.name, frozenset({first.place, second.place}), compare is operator.eq)
    return _choice(call, frozenset({frozenset({atom})}))


def _same_chunk(call: _Call, compare: Compare, first: Chunk, second: Chunk) -> Choice | None:
    if first.size != second.size or first.dim == second.dim or compare not in (operator.eq, operator.ne):
        return None
    atom = SameChunk(frozenset({first.dim, second.dim}), first.size, compare is operator.eq)
    return _choice(call, frozenset({frozenset({atom})}))


def _apart(compare: Compare, first: OfBatch, second: OfBatch) -> Apart:
    """Where the first number compares to the second in this way."""
    if compare in (operator.le, operator.lt):
        first, second = second, first
    number = first.more - second.more - (compare in (operator.gt, operator.lt))
    return Apart(first.name, first.place, second.place, number)


def _comparison(compare: Compare, difference: Linear) -> Condition:
    """Where an integer compares to 0 in this way."""
    steps, number = difference.steps, difference.number
    least, most = AtLeast(steps, number), AtLeast(tuple(-step for step in steps), -number)
    if compare in (operator.eq, operator.ne):
        equal: Condition = frozenset({frozenset({least, most})})
        return equal if compare is operator.eq else opposite(equal)
    atoms: dict[Compare, Atom] = {
        operator.ge: least,
        operator.le: most,
        operator.gt: negated(most),
        operator.lt: negated(least),
    }
    return frozenset({frozenset({atoms[compare]})})


def _added(factor: int, swapped: bool = False) -> Callable[[_Call], Formula | None]:
    """A sum or a difference. For two masks of numbers, each 0 where it shows, the sum shows where both do."""

    def read(call: _Call) -> Formula | None:
        if call.op.keywords and any(key == "alpha" and value != 1 for key, value in call.op.keywords):
            return None
        if call.dtype == "bool":
            return None
        first, second = call.broadcast(1 if swapped else 0), call.broadcast(0 if swapped else 1)
        if isinstance(first, Linear) and isinstance(second, Linear):
            return sum_of(first, second, factor)
        more = number_of(second)
        if isinstance(first, OfBatch) and isinstance(more, int):
            return replace(first, more=first.more + factor * more)
        one, other = as_choice(first), as_choice(second)
        if one is None or other is None:
            return None
        if other.yes == other.no:
            return replace(one, yes=one.yes + factor * other.yes, no=one.no + factor * other.yes)
        if one.yes == one.no:
            return replace(other, yes=one.yes + factor * other.yes, no=one.yes + factor * other.no)
        one, other = zero_where_it_holds(one), zero_where_it_holds(other)
        hides = one.no == other.no <= HIDES  # the sum is twice that where neither holds
        if factor == 1 and one.yes == other.yes == 0 and hides:
            return _choice(call, both(one.condition, other.condition), 0, one.no)
        return None

    return read


def _times(call: _Call) -> Formula | None:
    first, second = call.broadcast(0), call.broadcast(1)
    if isinstance(second, Linear) and isinstance(first, Linear) and not (any(first.steps) and any(second.steps)):
        value, by = (first, second.number) if not any(second.steps) else (second, first.number)
        whole = not any(value.steps) or isinstance(by, int)
        return Linear(tuple(int(step * by) for step in value.steps), value.number * by) if whole else None
    one, other = as_choice(first), as_choice(second)
    if one is None or other is None:
        return None
    if other.yes == other.no:
        return replace(one, yes=_product(one.yes, other.yes), no=_product(one.no, other.yes))
    if one.yes == one.no:
        return replace(other, yes=_product(one.yes, other.yes), no=_product(one.yes, other.no))
    if not one.no and not other.no and abs(one.yes) != float("inf") and abs(other.yes) != float("inf"):
        return _choice(call, both(one.condition, other.condition), one.yes * other.yes, 0)
    return None


def _product(first: Number, second: Number) -> Number:
    """The product as in PyTorch: 0 times infinity is nan, for which no comparison holds."""
    return first * second


def _chunk(call: _Call) -> Formula | None:
    """An index divided by a number, rounded down."""
    value, size = call.broadcast(0), number_of(call.broadcast(1))
    if not isinstance(value, Linear) or value.number or not isinstance(size, int) or size < 1:
        return None
    dims = [dim for dim, step in enumerate(value.steps) if step]
    return Chunk(dims[0], size, len(value.steps)) if [value.steps[dim] for dim in dims] == [1] else None


def _where(call: _Call) -> Formula | None:
    condition = condition_of(call.broadcast(0))
    return _chosen(call, condition, as_choice(call.broadcast(1)), as_choice(call.broadcast(2)))


def _masked_fill(call: _Call) -> Formula | None:
    condition = condition_of(call.broadcast(1))
    return _chosen(call, condition, as_choice(call.broadcast(2)), as_choice(call.broadcast(0)))


def _chosen(call: _Call, condition: Condition | None, yes: Choice | None, no: Choice | None) -> Choice | None:
    if condition is None or yes is None or no is None or yes.yes != yes.no:
        return None
    if no.yes == no.no:
        return _choice(call, condition, yes.yes, no.yes)
    if yes.yes == no.no:  # the condition, or the earlier choice
        return _choice(call, both(opposite(condition), no.condition), no.yes, no.no)
    return _choice(call, either(condition, no.condition), no.yes, no.no) if yes.yes == no.yes else None


def _differences(call: _Call) -> Formula | None:
    """`diff` of a value that grows by one step along a dim, with a first number one step below: the step everywhere."""
    value, prepended = call.given[0], call.given[3] if len(call.given) > 3 else None
    if not isinstance(value, Linear) or call.integer(1, 1) != 1 or len(call.given) > 4:
        return None
    dim = call.integer(2, -1) % len(value.steps)
    others = [step for at, step in enumerate(value.steps) if at != dim]
    if prepended is not None:
        if not isinstance(prepended, Linear) or call.shape_of(3)[dim] != 1:
            return None
        before = [step for at, step in enumerate(prepended.steps) if at != dim]
        if before != others or prepended.number != value.number - value.steps[dim]:
            return None
    return Linear((0,) * len(value.steps), value.steps[dim])


def _summed(call: _Call) -> Formula | None:
    """`cumsum` of one number: grows by that number."""
    number, rank = number_of(call.given[0]), len(call.shape)
    if not isinstance(number, int) or not rank:
        return None
    steps = [0] * rank
    steps[call.integer(1, 0) % rank] = int(number)
    return Linear(tuple(steps), int(number))


def _picked(call: _Call) -> Formula | None:
    """Numbers at positions, `mask[samples, positions]`."""
    value, numbers, rank = call.given[0], call.given[1], len(call.shape)
    arguments = cast("tuple[Argument, ...]", call.op.arguments[1])
    if not isinstance(numbers, tuple) or len(numbers) != len(call.shape_of(0)):
        return None
    found: list[Linear] = []
    for number, extent, argument in zip(numbers, call.shape_of(0), arguments, strict=True):
        if not isinstance(number, Linear) or not isinstance(argument, ValueRef):
            return None
        shape = call.graph.types[argument.name].shape
        spread = moved(number, {dim: dim + rank - len(shape) for dim in range(len(shape))}, rank)
        ends = [step * (size - 1) for step, size in zip(number.steps, shape, strict=True)]
        first, last = (number.number + sum(end(at, 0) for at in ends) for end in (min, max))
        if not isinstance(spread, Linear) or first < 0 or last >= extent:  # a negative one counts from the end
            return None
        found.append(spread)
    if isinstance(value, Linear):
        picked = Linear((0,) * rank, value.number)
        for step, spread in zip(value.steps, found, strict=True):
            picked = sum_of(picked, spread, step)
        return picked
    return _picked_of_batch(call, value, found) if isinstance(value, OfBatch) and value.place == (0, 1) else None


def _picked_of_batch(call: _Call, value: OfBatch, indices: Sequence[Linear]) -> OfBatch | None:
    """Numbers of the batch, where each index is a position of one dim."""
    found: list[int | None] = []
    for index, extent in zip(indices, call.shape_of(0), strict=True):
        dims = [dim for dim, step in enumerate(index.steps) if step]
        if len(dims) == 1 and index.steps[dims[0]] == 1 and not index.number and call.shape[dims[0]] == extent:
            found.append(dims[0])
        elif not dims and extent == 1:
            found.append(None)
        else:
            return None
    sample, position = found
    return replace(value, place=(sample, position), rank=len(call.shape)) if position is not None else None


_COMPARISONS: Mapping[str, Compare] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "eq": operator.eq,
    "ne": operator.ne,
}
_OPERATORS: Mapping[str, Callable[[_Call], Formula | None]] = {
    **dict.fromkeys(("aten.arange.default", "aten.arange.start", "aten.arange.start_step"), _arange),
    **dict.fromkeys(("aten.zeros.default", "aten.new_zeros.default", "aten.zeros_like.default"), _filled(None, 0)),
    **dict.fromkeys(("aten.ones.default", "aten.new_ones.default", "aten.ones_like.default"), _filled(None, 1)),
    **dict.fromkeys(("aten.full.default", "aten.full_like.default"), _filled(1, 0)),
    "aten.new_full.default": _filled(2, 0),
    "aten.scalar_tensor.default": _filled(0, 0),
    **dict.fromkeys(("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"), _views),
    **dict.fromkeys(
        ("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default", "aten.flatten.using_ints"), _views
    ),
    "aten.unsqueeze.default": _unsqueeze,
    **dict.fromkeys(("aten.expand.default", "aten.broadcast_to.default"), _expand),
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.slice.Tensor": _slice,
    **dict.fromkeys(("aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.to.device"), _same),
    **dict.fromkeys(("aten.to.dtype", "aten.to.dtype_layout", "aten._to_copy.default", "aten.to.other"), _cast),
    "aten.tril.default": _triangle(False),
    "aten.triu.default": _triangle(True),
    **dict.fromkeys(("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"), _logical(both)),
    **dict.fromkeys(("aten.__or__.Tensor", "aten.bitwise_or.Tensor", "aten.logical_or.default"), _logical(either)),
    **dict.fromkeys(("aten.bitwise_not.default", "aten.logical_not.default"), _not_of),
    **{
        f"aten.{name}.{kind}": _compared(compare)
        for name, compare in _COMPARISONS.items()
        for kind in ("Tensor", "Scalar")
    },
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _added(1)),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar"), _added(-1)),
    **dict.fromkeys(("aten.rsub.Scalar", "aten.rsub.Tensor"), _added(-1, swapped=True)),
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _times),
    **dict.fromkeys(("aten.floor_divide.default", "aten.floor_divide.Scalar"), _chunk),
    **dict.fromkeys(
        ("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar"), _where
    ),
    **dict.fromkeys(("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"), _masked_fill),
    "aten.index.Tensor": _picked,
    "aten.diff.default": _differences,
    "aten.cumsum.default": _summed,
}
"""How a value is read off the operator that makes it."""
