"""Rules whose dims have fixed roles, written like an einsum, and matrix products."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.graph.random_ops import RandomOps
from planner.sharding.rule import Dims, Factor, FactorKind, InnerCollective, Rule, Work
from planner.sharding.rules.masked import masked, without_mask
from planner.sharding.rules.spec import FactorTable, RuleSpec, Saves, broadcast_dims, leading_names, present

WIDE = 4
"""Bytes of an element of float32, in which sums are taken at least."""


@final
@dataclass(frozen=True, kw_only=True)
class InnerPattern:
    """An `InnerCollective` with factor names. Elements are those of the first operand where `element_bytes` is None,
    and at least float32 if `wide`; `only_mean` issues the collective only where the loss is averaged."""

    kind: str
    factor: str
    factors: str
    element_bytes: int | None = None
    forward: int = 0
    backward: int = 0
    home: bool = False
    wide: bool = False
    only_mean: bool = False

    def bind(self, names: Sequence[str], call: Call) -> InnerCollective:
        element = call.operands[0].element_bytes if self.element_bytes is None else self.element_bytes
        return InnerCollective(
            kind=self.kind,
            factor=names.index(self.factor),
            factors=tuple(names.index(name) for name in self.factors.split() if name in names),
            element_bytes=max(element, WIDE) if self.wide else element,
            forward=self.forward,
            backward=self.backward,
            home=self.home,
        )


@final
@dataclass(frozen=True, kw_only=True)
class Einsum(RuleSpec):
    """Dims with roles, as in "... i, o i, o -> ... o".

    `...` stands for any number of leading dims, (g r) for a compound dim whose factors occur alone elsewhere.
    Patterns belong to the arguments at `positions`; an argument that is None drops its pattern. Factors in no result
    are reductions unless listed in `blocked` or `combined`. The pairs in `exchanges` are split together, or either of
    the two alone; so are those in `rings`. With `heads`, g stands for heads of keys and r for the heads of queries that
    share one (see `_grouped`). `work`, `saved_extra`: (coefficient, factors as text); an empty text means all factors.
    The backward pass repeats the `repeated_terms` of `work`, or else `repeated_work` times all of it.
    `saved_elements` is like `saved_extra`, and `scratch_elements` like `scratch`, in elements of the first operand;
    `inner_elements` and `inner_wide` live while it sends, the latter in float32 at least.
    `roles`: (name, factors as text).
    """

    pattern: str
    op_class: str
    positions: tuple[int, ...] = (0, 1, 2, 3)
    blocked: str = ""
    combined: str = ""
    exchanges: tuple[tuple[str, str], ...] = ()
    rings: tuple[tuple[str, str], ...] = ()
    heads: bool = False
    work: tuple[tuple[float, str], ...] = ((1.0, ""),)
    gradient_work: float = 1.0
    gradient_units: tuple[tuple[int, float], ...] = ()
    repeated_work: float = 0.0
    repeated_terms: tuple[int, ...] = ()
    addends: tuple[int, ...] = ()
    looked_up: tuple[int, ...] = ()
    deferred_weight_gradients: tuple[int, ...] = ()
    saves: Saves = ()
    saved_results: tuple[int, ...] = ()
    saved_extra: tuple[tuple[float, str], ...] = ()
    saved_elements: tuple[tuple[float, str], ...] = ()
    scratch_elements: tuple[tuple[float, str], ...] = ()
    inner: tuple[InnerPattern, ...] = field(default=())
    inner_elements: tuple[tuple[float, str], ...] = ()
    inner_wide: tuple[tuple[float, str], ...] = ()
    chance: RandomOps | None = None
    unfused_extra: tuple[tuple[float, str], ...] = ()
    unfused_elements: tuple[tuple[float, str], ...] = ()
    unfused_scratch: tuple[tuple[float, str], ...] = ()
    causal_argument: tuple[int, str] | None = None
    mask_argument: tuple[int, str] | None = None
    mean_argument: tuple[int, str] | None = None
    folds: bool = False
    roles: tuple[tuple[str, str], ...] = ()

    def build(self, call: Call) -> Rule:
        if self.mask_argument is not None and isinstance(call.argument(*self.mask_argument), TensorType):
            # No known implementation passes keys round where there is a mask.
            bare = replace(self, mask_argument=None, rings=(), inner=(), inner_elements=(), inner_wide=())
            return masked(bare.build(without_mask(call, *self.mask_argument)), call, *self.mask_argument)
        table = FactorTable(call.op)
        left, right = (_grouped(self.pattern, call) if self.heads else self.pattern).split("->")
        given = [
            (p, call.arguments[at])
            for p, at in zip(left.split(","), self.positions, strict=False)
            if at < len(call.arguments)
        ]
        used = [(pattern.split(), tensor) for pattern, tensor in given if isinstance(tensor, TensorType)]
        if len(used) != len(call.operands):
            raise RuleError(
                f"{call.op} is called with {len(call.operands)} tensors, its rule '{self.pattern.strip()}' knows"
                f" {len(used)} of them: a mask or a weight as a further argument is not supported yet"
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
        causal = self.causal_argument is not None and call.argument(*self.causal_argument, False) is True
        drops = self.chance is not None and self.chance.of(call.arguments, dict(call.keywords)) > 0
        unfused = drops and not call.drops_fused
        halve = 0.5 if causal and not unfused else 1.0
        for first, second in self.exchanges:
            table.add_exchange(first, second)
        if self.heads and FEW in names:
            table.set_kind(FEW, FactorKind.BLOCKED)
            table.add_exchange(FEW, "r", FactorKind.ALIGNED, "g")
        for first, second in () if drops else self.rings:
            table.add_exchange(first, second, FactorKind.RING)
        factors = table.freeze()
        every, element = [factor.name for factor in factors], call.operands[0].element_bytes
        extra = self.unfused_extra if unfused else self.saved_extra
        elements = self.unfused_elements if unfused else self.saved_elements
        scratch = self.unfused_scratch if unfused else self.scratch_elements
        saved = (*extra, *((element * count, text) for count, text in elements))
        work = tuple(_work(halve * coefficient, text, names) for coefficient, text in self.work)
        mean = self.mean_argument is not None and call.argument(*self.mean_argument, 1) == 1
        return Rule(
            op=call.op,
            factors=factors,
            operands=operands,
            results=results,
            op_class=self.op_class,
            work=work,
            gradient_work=self.gradient_work,
            gradient_units=self.gradient_units,
            repeated_work=0.0 if unfused else self._repeated(work, factors),
            repeated_terms=() if unfused else self.repeated_terms,
            addends=tuple(index for index in self.addends if index < len(operands)),
            saves=present(self.saves, len(operands)),
            looked_up=self.looked_up,
            deferred_weight_gradients=tuple(index for index in self.deferred_weight_gradients if index < len(operands)),
            saved_results=() if unfused else self.saved_results,
            saved_extra=tuple(_work(coefficient, text, names) for coefficient, text in saved),
            scratch=tuple(_work(element * count, text, names) for count, text in scratch),
            inner=tuple(
                pattern.bind(every, call)
                for pattern in self.inner
                if pattern.factor in every and (mean or not pattern.only_mean)
            ),
            inner_scratch=tuple(
                _work(width * count, text, names)
                for width, terms in ((element, self.inner_elements), (max(element, WIDE), self.inner_wide))
                for count, text in terms
            ),
            roles=tuple((role, _work(1.0, text, names).factors) for role, text in self.roles),
            causal=causal,
            unfused=unfused,
            drops=drops and not unfused,
            folds=self.folds,
        )

    def _repeated(self, work: Sequence[Work], factors: Sequence[Factor]) -> float:
        """The share of the forward work that the backward pass does over again."""
        each = [term.coefficient * math.prod(factors[at].extent for at in term.factors) for term in work]
        if not self.repeated_terms or not any(each):
            return self.repeated_work
        return sum(each[at] for at in self.repeated_terms) / sum(each)


FEW = "kv"
"""Heads of keys where several heads of queries share one, and there is more than one."""
MANY = "r"
"""Those heads of queries."""


def _grouped(pattern: str, call: Call) -> str:
    """A pattern with g for heads of keys and (g r) for those of queries, according to their numbers: one loop g where
    every head of queries has its own keys, r where all share one head of keys. Else r are all heads of queries, kv
    those of keys, and g splits both."""
    many, few = call.operands[0].shape[1], call.operands[1].shape[1]
    if many == few:
        return pattern.replace("(g r)", "g")
    return pattern.replace("(g r)", "r") if few == 1 else pattern.replace("(g r)", "r").replace("g", FEW)


def _work(coefficient: float, text: str, names: Sequence[str]) -> Work:
    """A term of work without the factors of extent 1, which a rule does not have and which change no product."""
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
    """Extents of factors that index a dim alone; they fix the split of compound dims."""
    extents: dict[str, int] = {}
    for words, tensor in used:
        tokens = _tokens(words)
        if tokens and tokens[0] == ("...",):
            tokens = tokens[1:]
        for token, extent in zip(tokens, tensor.shape[-len(tokens) :], strict=False):  # fewer dims fit no pattern
            if len(token) == 1:
                extents.setdefault(token[0], extent)
    return extents


def _match(table: FactorTable, words: list[str], shape: Sequence[int], extents: dict[str, int], op: str) -> Dims:
    tokens = _tokens(words)
    if tokens and tokens[0] == ("...",):
        lead = max(0, len(shape) - (len(tokens) - 1))
        tokens = [(name,) for name in leading_names(lead)] + tokens[1:]
    if len(tokens) != len(shape):
        raise RuleError(f"{op}: the rule expects {len(tokens)} dims, the tensor has shape {tuple(shape)}")
    return tuple(_match_dim(table, token, extent, extents) for token, extent in zip(tokens, shape, strict=True))


def _match_dim(table: FactorTable, token: tuple[str, ...], extent: int, extents: dict[str, int]) -> tuple[int, ...]:
    if len(token) == 1:
        return (table.add(token[0], extent),) if extent != 1 else ()
    known = math.prod(extents[name] for name in token if name in extents)
    parts = [(name, extents.get(name, extent // known)) for name in token]
    return tuple(table.add(name, part) for name, part in parts if part != 1)


@final
@dataclass(frozen=True, kw_only=True)
class Matmul(RuleSpec):
    """torch.matmul and its kin: batch dims broadcast, 1-d operands are vectors, an added tensor comes first.

    With a vector it is a pass over its tensors rather than a product of matrices, forward and backward. PyTorch
    multiplies a vector with one matrix as a matrix of one row, though.
    """

    folds: bool = False

    def build(self, call: Call) -> Rule:
        table = FactorTable(call.op)
        *terms, a, b = (operand.shape for operand in call.operands)
        if not a or not b:
            raise RuleError(f"{call.op}: operands of shapes {a} and {b} have no dim to contract")
        batch = _broadcast_shape(a[:-2], b[:-2])
        lead = tuple((table.add(f"b{i}", extent),) if extent != 1 else () for i, extent in enumerate(batch))
        inner = (table.add("k", a[-1], FactorKind.REDUCTION),)
        row = ((table.add("m", a[-2]),),) if len(a) > 1 else ()
        column = ((table.add("n", b[-1]),),) if len(b) > 1 else ()
        first = (*broadcast_dims(lead, batch, a[:-2], call.op), *row, inner)
        second = (*broadcast_dims(lead, batch, b[:-2], call.op), *((inner, *column) if len(b) > 1 else (inner,)))
        result, shape = (*lead, *row, *column), call.results[0].shape
        added = tuple(broadcast_dims(result, shape, term, call.op) for term in terms)
        factors, at = table.freeze(), len(terms)
        return Rule(
            op=call.op,
            factors=factors,
            operands=(*added, first, second),
            results=(result,),
            op_class="matmul" if column and (row or not batch) else "elementwise",
            work=(Work(coefficient=2.0, factors=tuple(range(len(factors)))),),
            addends=tuple(range(at)),
            saves=((at, (at + 1,)), (at + 1, (at,))),
            folds=self.folds,
        )


def _broadcast_shape(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    rank = max(len(a), len(b))
    left, right = (1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b)
    return tuple(max(x, y) for x, y in zip(left, right, strict=True))
