"""The forms in which rules are written. Each spec is data; `build` turns it, with the shapes of one call, into a
`Rule`.

`Einsum` covers operators whose dims have fixed roles; the families below it cover those whose rule follows from the
shapes alone (elementwise, views, reductions, concatenation, ...). No spec knows the name of an operator.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call, Typed
from planner.graph.operator_graph import TensorType
from planner.sharding.rule import Dims, Factor, FactorKind, InnerCollective, Rule, Work

Saves = tuple[tuple[int, tuple[int, ...]], ...]
_LEADING = ("b", "s", "t", "u", "w", "x")


class RuleSpec(ABC):
    """How to build the rule of a call."""

    @abstractmethod
    def build(self, call: Call) -> Rule:
        """The rule of one call. Raises RuleError where the shapes do not match the operator."""


class FactorTable:
    """Factors collected while a rule is built; a factor met again must have the same extent."""

    def __init__(self, op: str) -> None:
        self._op = op
        self._factors: dict[str, Factor] = {}

    def add(self, name: str, extent: int, kind: FactorKind = FactorKind.PARALLEL) -> int:
        known = self._factors.get(name)
        if known is None:
            self._factors[name] = Factor(name=name, extent=extent, kind=kind)
        elif known.extent != extent:
            raise RuleError(
                f"{self._op}: factor '{name}' has extent {known.extent} in one tensor and {extent} in another"
            )
        return list(self._factors).index(name)

    def set_kind(self, name: str, kind: FactorKind) -> None:
        self._factors[name] = Factor(name=name, extent=self._factors[name].extent, kind=kind)

    def freeze(self) -> tuple[Factor, ...]:
        return tuple(self._factors.values())


def dims_of(
    table: FactorTable, shape: Sequence[int], kind: FactorKind = FactorKind.PARALLEL, prefix: str = "d"
) -> Dims:
    """One factor per dim named d0, d1, ...; dims of extent 1 have none."""
    return tuple(
        (table.add(f"{prefix}{dim}", extent, kind),) if extent != 1 else () for dim, extent in enumerate(shape)
    )


def normal_dim(dim: int, rank: int) -> int:
    """A dim counted from the front."""
    return dim + rank if dim < 0 else dim


def integers(value: Typed) -> tuple[int, ...]:
    """An int or a list of ints as a tuple."""
    if isinstance(value, int):
        return (value,)
    if isinstance(value, tuple) and all(isinstance(item, int) for item in value):
        return tuple(item for item in value if isinstance(item, int))
    raise RuleError(f"expected integers, found {value!r}")


@final
@dataclass(frozen=True, kw_only=True)
class InnerPattern:
    """An `InnerCollective` with factor names; `only_mean` issues it only where the loss is averaged."""

    kind: str
    factor: str
    factors: str
    element_bytes: int
    forward: int = 0
    backward: int = 0
    only_mean: bool = False

    def bind(self, names: Sequence[str]) -> InnerCollective:
        return InnerCollective(
            kind=self.kind,
            factor=names.index(self.factor),
            factors=tuple(names.index(name) for name in self.factors.split() if name in names),
            element_bytes=self.element_bytes,
            forward=self.forward,
            backward=self.backward,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Einsum(RuleSpec):
    """Dims with roles, as in "... i, o i, o -> ... o".

    `...` stands for any number of leading dims, (g r) for a compound dim whose factors occur alone elsewhere.
    Patterns belong to the arguments at `positions`; an argument that is None drops its pattern. Factors in no result
    are reductions unless listed in `blocked` or `combined`. `work`, `saved_extra`: (coefficient, factors as text); an
    empty text means all factors.
    """

    pattern: str
    op_class: str
    positions: tuple[int, ...] = (0, 1, 2, 3)
    blocked: str = ""
    combined: str = ""
    work: tuple[tuple[float, str], ...] = ((1.0, ""),)
    gradient_work: float = 1.0
    addends: tuple[int, ...] = ()
    looked_up: tuple[int, ...] = ()
    saves: Saves = ()
    saved_results: tuple[int, ...] = ()
    saved_extra: tuple[tuple[float, str], ...] = ()
    inner: tuple[InnerPattern, ...] = field(default=())
    causal_argument: tuple[int, str] | None = None
    mean_argument: tuple[int, str] | None = None

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        left, right = self.pattern.split("->")
        given = [
            (p, call.arguments[at])
            for p, at in zip(left.split(","), self.positions, strict=False)
            if at < len(call.arguments)
        ]
        used = [(pattern.split(), tensor) for pattern, tensor in given if isinstance(tensor, TensorType)]
        if len(used) != len(call.operands):
            raise RuleError(
                f"{call.op}: {len(call.operands)} tensor arguments, the rule '{self.pattern}' takes {len(used)} of them"
            )
        extents = _single_extents(used)
        operands = tuple(_match(table, pattern, tensor.shape, extents, call.op) for pattern, tensor in used)
        results = tuple(
            _match(table, pattern.split(), result.shape, extents, call.op)
            for pattern, result in zip(right.split(","), call.results, strict=True)
        )
        return self._finish(call, table, operands, results)

    def _finish(self, call: Call, table: FactorTable, operands: tuple[Dims, ...], results: tuple[Dims, ...]) -> Rule:
        kept = {f for dims in results for factors in dims for f in factors}
        names = [factor.name for factor in table.freeze()]
        for index, name in enumerate(names):
            if name in self.blocked.split() or name.rstrip("0123456789") in self.blocked.split():
                table.set_kind(name, FactorKind.BLOCKED)
            elif name in self.combined.split():
                table.set_kind(name, FactorKind.COMBINED)
            elif index not in kept:
                table.set_kind(name, FactorKind.REDUCTION)
        halve = 0.5 if self.causal_argument and call.argument(*self.causal_argument, False) is True else 1.0
        factors = table.freeze()
        mean = self.mean_argument is not None and call.argument(*self.mean_argument, 1) == 1
        return Rule(
            op=call.op,
            factors=factors,
            operands=operands,
            results=results,
            op_class=self.op_class,
            work=tuple(_work(halve * coefficient, text, names) for coefficient, text in self.work),
            gradient_work=self.gradient_work,
            addends=tuple(index for index in self.addends if index < len(operands)),
            saves=tuple((i, js) for i, js in self.saves if i < len(operands)),
            looked_up=self.looked_up,
            saved_results=self.saved_results,
            saved_extra=tuple(_work(coefficient, text, names) for coefficient, text in self.saved_extra),
            inner=tuple(
                pattern.bind(names)
                for pattern in self.inner
                if pattern.factor in names and (mean or not pattern.only_mean)
            ),
        )


def _work(coefficient: float, text: str, names: Sequence[str]) -> Work:
    """Factors of extent 1 are not in a rule; they change no product."""
    factors = tuple(names.index(name) for name in text.split() if name in names) if text else tuple(range(len(names)))
    return Work(coefficient=coefficient, factors=factors)


def _tokens(words: Iterable[str]) -> list[tuple[str, ...]]:
    """Dims of a pattern: `b (g r) q` becomes [("b",), ("g", "r"), ("q",)]."""
    tokens: list[tuple[str, ...]] = []
    group: list[str] | None = None
    for word in words:
        name = word.strip("()")
        if word.startswith("("):
            group = [name]
        elif group is not None:
            group.append(name)
        if group is None:
            tokens.append((name,))
        elif word.endswith(")"):
            tokens.append(tuple(group))
            group = None
    return tokens


def _single_extents(used: Sequence[tuple[list[str], TensorType]]) -> dict[str, int]:
    """Extents of the factors that index some dim alone, which fixes the split of compound dims."""
    extents: dict[str, int] = {}
    for words, tensor in used:
        tokens = _tokens(words)
        if tokens and tokens[0] == ("...",):
            tokens = tokens[1:]
        for token, extent in zip(tokens, tensor.shape[len(tensor.shape) - len(tokens) :], strict=True):
            if len(token) == 1:
                extents.setdefault(token[0], extent)
    return extents


def _match(table: FactorTable, words: list[str], shape: Sequence[int], extents: dict[str, int], op: str) -> Dims:
    tokens = _tokens(words)
    if tokens and tokens[0] == ("...",):
        lead = len(shape) - (len(tokens) - 1)
        tokens = [(name,) for name in _leading_names(lead)] + tokens[1:]
    if len(tokens) != len(shape):
        raise RuleError(f"{op}: the rule expects {len(tokens)} dims, the tensor has shape {tuple(shape)}")
    return tuple(_match_dim(table, token, extent, extents) for token, extent in zip(tokens, shape, strict=True))


def _match_dim(table: FactorTable, token: tuple[str, ...], extent: int, extents: dict[str, int]) -> tuple[int, ...]:
    if len(token) == 1:
        return (table.add(token[0], extent),) if extent != 1 else ()
    known = math.prod(extents[name] for name in token if name in extents)
    parts = [(name, extents.get(name, extent // known)) for name in token]
    return tuple(table.add(name, part) for name, part in parts if part != 1)


def _leading_names(count: int) -> tuple[str, ...]:
    return _LEADING[:count] if count <= len(_LEADING) else tuple(f"b{i}" for i in range(count))


@final
@dataclass(frozen=True, kw_only=True)
class Elementwise(RuleSpec):
    """Every dim of the result is a factor; operands are broadcast to the result."""

    op_class: str = "elementwise"
    work: float = 1.0
    saves: Saves = ()
    saved_results: tuple[int, ...] = ()
    saved_extra_bytes: float = 0.0
    blocked_dims: tuple[int, str, int] | None = (
        None  # position, name and default of an argument that names blocked dims
    )
    local_form: str | None = None
    broadcast: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.results[0].shape
        rank = len(shape)
        blocked = set()
        if self.blocked_dims is not None:
            position, name, default = self.blocked_dims
            blocked = {normal_dim(dim, rank) for dim in integers(call.argument(position, name, default))}
        result = tuple(
            (table.add(f"d{dim}", extent, FactorKind.BLOCKED if dim in blocked else FactorKind.PARALLEL),)
            if extent != 1
            else ()
            for dim, extent in enumerate(shape)
        )
        operands = tuple(_broadcast(result, shape, operand.shape, call.op) for operand in call.operands)
        everything = tuple(range(len(table.freeze())))
        if self.broadcast:
            table.add("copies", 1, FactorKind.BROADCAST)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=operands,
            results=(result,) * len(call.results),
            op_class=self.op_class,
            work=(Work(coefficient=self.work, factors=everything),) if self.work else (),
            saves=self.saves,
            saved_results=self.saved_results,
            saved_extra=(Work(coefficient=self.saved_extra_bytes, factors=everything),)
            if self.saved_extra_bytes
            else (),
            local_form=self.local_form,
        )


def _broadcast(result: Dims, shape: Sequence[int], operand: Sequence[int], op: str) -> Dims:
    offset = len(shape) - len(operand)
    if offset < 0 or any(extent not in (1, shape[offset + dim]) for dim, extent in enumerate(operand)):
        raise RuleError(f"{op}: an operand of shape {tuple(operand)} does not broadcast to {tuple(shape)}")
    return tuple(result[offset + dim] if extent != 1 else () for dim, extent in enumerate(operand))


@final
@dataclass(frozen=True, kw_only=True)
class Normalise(RuleSpec):
    """Norms over the trailing dims listed at position 1, which are blocked; weight and bias have just those dims."""

    work: float
    saves: Saves

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        lead = len(shape) - len(integers(call.argument(1, "normalized_shape")))
        own = ("h",) if len(shape) - lead == 1 else tuple(f"h{i}" for i in range(len(shape) - lead))
        kinds = [FactorKind.PARALLEL] * lead + [FactorKind.BLOCKED] * len(own)
        dims = tuple(
            (table.add(name, extent, kind),) if extent != 1 else ()
            for name, extent, kind in zip((*_leading_names(lead), *own), shape, kinds, strict=True)
        )
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=tuple(_broadcast(dims, shape, operand.shape, call.op) for operand in call.operands),
            results=(dims,),
            op_class="normalisation",
            work=(Work(coefficient=self.work, factors=tuple(range(len(table.freeze())))),),
            saves=tuple((i, js) for i, js in self.saves if i < len(call.operands)),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Reshape(RuleSpec):
    """The same elements in the same order under another shape: dims are merged and split.

    The common refinement of the two shapes gives the factors: (b s) h d -> b s (h d). Where no refinement exists (6 x
    4 -> 8 x 3) the dims concerned are blocked.
    """

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source, target = call.operands[0], call.results[0]
        source_dims, target_dims = _refine(table, source.shape, target.shape)
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source_dims,),
            results=(target_dims,),
            op_class="view" if source.contiguous else "copy",
            local_form="reshape",
        )


def _refine(table: FactorTable, source: Sequence[int], target: Sequence[int]) -> tuple[Dims, Dims]:
    names = iter(range(1_000_000))
    left: list[tuple[int, ...]] = [()] * len(source)
    right: list[tuple[int, ...]] = [()] * len(target)
    for group in _groups(source, target):
        lows, highs = (
            [dim for dim in dims if shape[dim] != 1] for dims, shape in zip(group, (source, target), strict=True)
        )
        cuts = sorted({math.prod(source[d] for d in lows[: k + 1]) for k in range(len(lows))}
                      | {math.prod(target[d] for d in highs[: k + 1]) for k in range(len(highs))})  # fmt: skip
        if all(b % a == 0 for a, b in itertools.pairwise(cuts)):
            parts = [b // a for a, b in zip([1, *cuts], cuts, strict=False)]
            factors = [(table.add(f"d{next(names)}", part), cut) for part, cut in zip(parts, cuts, strict=True)]
            for dims, shape, out in ((lows, source, left), (highs, target, right)):
                low = 1
                for dim in dims:
                    high = low * shape[dim]
                    out[dim] = tuple(index for index, cut in factors if low < cut <= high)
                    low = high
        else:
            for dims, shape, out in ((lows, source, left), (highs, target, right)):
                for dim in dims:
                    out[dim] = (table.add(f"d{next(names)}", shape[dim], FactorKind.BLOCKED),)
    return tuple(left), tuple(right)


def _groups(source: Sequence[int], target: Sequence[int]) -> Iterable[tuple[list[int], list[int]]]:
    """Smallest runs of dims of the two shapes with equal products."""
    i = j = 0
    while i < len(source) or j < len(target):
        lows, highs, low, high = [], [], 1, 1
        while True:
            if (low <= high and i < len(source)) or j >= len(target):
                low *= source[i]
                lows.append(i)
                i += 1
            else:
                high *= target[j]
                highs.append(j)
                j += 1
            if low == high and (lows or highs) and (low > 1 or (i >= len(source) and j >= len(target))):
                break
            if i >= len(source) and j >= len(target):
                break
        yield lows, highs


@final
@dataclass(frozen=True, kw_only=True)
class Permute(RuleSpec):
    """Dims in another order: transpose (two dims at `positions` 1 and 2), permute (a list), or the matrix transpose."""

    form: str

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        source = dims_of(table, call.operands[0].shape)
        rank = len(source)
        order = list(range(rank))
        if self.form == "permute":
            order = [normal_dim(dim, rank) for dim in integers(call.argument(1, "dims"))]
        else:
            first, second = (
                (call.integer(1, "dim0", 0), call.integer(2, "dim1", 1))
                if self.form == "transpose"
                else (rank - 2, rank - 1)
            )
            if rank >= 2:
                first, second = normal_dim(first, rank), normal_dim(second, rank)
                order[first], order[second] = order[second], order[first]
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source,),
            results=(tuple(source[dim] for dim in order),),
            op_class="view",
        )


@final
@dataclass(frozen=True, kw_only=True)
class AlongDim(RuleSpec):
    """Operators that pick, split or join along dims: those are blocked unless they are unchanged, all others pass
    through.

    `dim` is the position, the name and the default of the argument that names the dim. `drops` says that the results
    lack it (select, unbind), `adds` that the results have a new one (stack), `spells_extent` that an argument gives the
    extent of the dim, which then cannot be split even where nothing changes (narrow).
    """

    dim: tuple[int, str, int]
    op_class: str = "copy"
    spells_extent: bool = False
    drops: bool = False
    adds: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        dim = normal_dim(call.integer(*self.dim), len(shape) + self.adds)
        rest = [extent for at, extent in enumerate(shape) if self.adds or at != dim]
        whole = not (self.drops or self.adds or self.spells_extent) and all(
            tensor.shape == shape for tensor in (*call.operands, *call.results)
        )
        kind = FactorKind.PARALLEL if whole else FactorKind.BLOCKED
        passing = [(table.add(f"d{at}", extent),) if extent != 1 else () for at, extent in enumerate(rest)]

        def dims(tensor: TensorType, has: bool, name: str) -> Dims:
            if not has:
                return tuple(passing)
            extent = tensor.shape[dim]
            own = (table.add("along" if whole else name, extent, kind),) if extent != 1 else ()
            return (*passing[:dim], own, *passing[dim:])

        operands = tuple(dims(tensor, not self.adds, f"in{i}") for i, tensor in enumerate(call.operands))
        results = tuple(dims(tensor, not self.drops, f"out{i}") for i, tensor in enumerate(call.results))
        return Rule(op=call.op, factors=table.freeze(), operands=operands, results=results, op_class=self.op_class)


@final
@dataclass(frozen=True, kw_only=True)
class Reduce(RuleSpec):
    """Sum or mean over some dims (all where none are given); other reductions block the dims."""

    combine: str  # "sum", "mean" or "blocked"

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        shape = call.operands[0].shape
        given = call.argument(1, "dim")
        listed = integers(given) if isinstance(given, int | tuple) and not isinstance(given, bool) else ()
        reduced = {normal_dim(dim, len(shape)) for dim in listed} or set(range(len(shape)))
        kind = FactorKind.BLOCKED if self.combine == "blocked" else FactorKind.REDUCTION
        source = tuple(
            (table.add(f"d{dim}", extent, kind if dim in reduced else FactorKind.PARALLEL),) if extent != 1 else ()
            for dim, extent in enumerate(shape)
        )
        kept = [source[dim] for dim in range(len(shape)) if dim not in reduced]
        if len(call.results[0].shape) == len(shape):  # keepdim
            kept = [() if dim in reduced else source[dim] for dim in range(len(shape))]
        everything = tuple(range(len(table.freeze())))
        return Rule(
            op=call.op,
            factors=table.freeze(),
            operands=(source,),
            results=(tuple(kept),) * len(call.results),
            op_class="elementwise",
            work=(Work(coefficient=1.0, factors=everything),),
            mean_over=tuple(f for dim in reduced for f in source[dim]) if self.combine == "mean" else (),
        )


@final
@dataclass(frozen=True, kw_only=True)
class Matmul(RuleSpec):
    """torch.matmul and its kin: batch dims broadcast, 1-d operands are vectors."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        a, b = call.operands[0].shape, call.operands[1].shape
        if not a or not b:
            raise RuleError(f"{call.op}: operands of shapes {a} and {b} have no dim to contract")
        batch = _broadcast_shape(a[:-2], b[:-2])
        lead = tuple((table.add(f"b{i}", extent),) if extent != 1 else () for i, extent in enumerate(batch))
        inner = (table.add("k", a[-1], FactorKind.REDUCTION),)
        row = ((table.add("m", a[-2]),),) if len(a) > 1 else ()
        column = ((table.add("n", b[-1]),),) if len(b) > 1 else ()
        first = (*_broadcast(lead, batch, a[:-2], call.op), *row, inner)
        second = (*_broadcast(lead, batch, b[:-2], call.op), *((inner, *column) if len(b) > 1 else (inner,)))
        factors = table.freeze()
        return Rule(
            op=call.op,
            factors=factors,
            operands=(first, second),
            results=((*lead, *row, *column),),
            op_class="matmul",
            work=(Work(coefficient=2.0, factors=tuple(range(len(factors)))),),
            saves=((0, (1,)), (1, (0,))),
        )


def _broadcast_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class Factory(RuleSpec):
    """Results made from nothing (arange, full, ...) or element by element from nothing known: the same on every
    device."""

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        operands = tuple(dims_of(table, t.shape, FactorKind.BLOCKED, f"in{i}_") for i, t in enumerate(call.operands))
        results = tuple(dims_of(table, t.shape, FactorKind.BLOCKED, f"out{i}_") for i, t in enumerate(call.results))
        return Rule(op=call.op, factors=table.freeze(), operands=operands, results=results, op_class="copy")
