"""From a rule that was found by trial, as text, to the rule of a call.

Nothing in the text is believed: whatever does not fit the call, or says what no rule can say, raises RuleError.
"""

from collections.abc import Sequence
from itertools import chain

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType, WrittenRule
from planner.graph.written import Token, parse_sides
from planner.sharding.rule import Dims, FactorKind, Rule, Work
from planner.sharding.rules.spec import FactorTable

OP_CLASS = "elementwise"
"""The cost class of every such operator. Its work is not known: it is priced as one pass over its tensors."""


def build_written(call: Call, written: WrittenRule) -> Rule:
    """The rule of one call. Raises RuleError where the text cannot be read or does not fit the call."""
    try:
        left, right = parse_sides(written.text)
    except ValueError as error:
        raise RuleError(f"{call.op}: {error}") from error
    table = FactorTable(call.op)
    operands = _side(table, call, "operand", left, call.operands)
    results = _side(table, call, "result", right, call.results)
    _set_kinds(table, call, written, operands, results)
    factors = table.freeze()
    names = [factor.name for factor in factors]
    known = {token.factor for token in chain(*left, *right)} | set(names)
    counted = " ".join(text for _, text in (*written.saved_extra, *written.scratch))
    for word in (*written.blocked, *written.mean, *counted.split()):
        if word not in known:
            raise RuleError(f"{call.op}: '{word}' is no factor of the rule '{written.text}'")
    _check_positions(call, written)
    largest = max((*operands, *results), key=lambda dims: _points(dims, [f.extent for f in factors]), default=())
    return Rule(
        op=call.op,
        factors=factors,
        operands=operands,
        results=results,
        op_class=OP_CLASS,
        work=(Work(coefficient=1.0, factors=tuple(f for dim in largest for f in dim)),),
        addends=written.addends,
        saves=written.saves,
        saved_results=written.saved_results,
        saved_extra=_work(names, written.saved_extra),
        scratch=_work(names, written.scratch),
        mean_over=tuple(names.index(name) for name in written.mean if name in names),
    )


def _work(names: Sequence[str], counted: Sequence[tuple[float, str]]) -> tuple[Work, ...]:
    """`coefficient` for each point of some factors; the call has no factors of extent 1."""
    return tuple(
        Work(coefficient=count, factors=tuple(names.index(name) for name in text.split() if name in names))
        for count, text in counted
    )


def _side(
    table: FactorTable, call: Call, what: str, tensors: Sequence[Sequence[Token]], types: Sequence[TensorType]
) -> tuple[Dims, ...]:
    if len(tensors) != len(types):
        raise RuleError(f"{call.op}: the rule has {len(tensors)} {what}s, the call {len(types)}")
    return tuple(_tensor(table, call, tokens, tensor) for tokens, tensor in zip(tensors, types, strict=True))


def _tensor(table: FactorTable, call: Call, tokens: Sequence[Token], tensor: TensorType) -> Dims:
    if len(tokens) != len(tensor.shape):
        raise RuleError(f"{call.op}: the rule expects {len(tokens)} dims, the tensor has shape {tensor.shape}")
    named = [token.factor for token in tokens if token.factor is not None]
    if len(set(named)) != len(named):
        raise RuleError(f"{call.op}: a factor indexes two dims of one tensor, {' '.join(named)}")
    return tuple(_dim(table, call, token, extent) for token, extent in zip(tokens, tensor.shape, strict=True))


def _dim(table: FactorTable, call: Call, token: Token, extent: int) -> tuple[int, ...]:
    """Factors of a dim: pieces, and the elements of a piece, which are never cut. Those of extent 1 have none."""
    count, rest = divmod(extent, token.piece)
    if rest or (token.factor is None and extent != 1):
        pieces = f"{token.factor} pieces of {token.piece}" if token.factor else f"one piece of {token.piece}"
        raise RuleError(f"{call.op}: a dim of extent {extent} is not {pieces}")
    found = () if token.factor is None or count == 1 else (table.add(token.factor, count),)
    inner = () if token.piece == 1 else (table.add(f"{token.factor}:{token.piece}", token.piece, FactorKind.BLOCKED),)
    return (*found, *inner)


def _set_kinds(
    table: FactorTable, call: Call, written: WrittenRule, operands: Sequence[Dims], results: Sequence[Dims]
) -> None:
    for index, factor in enumerate(table.freeze()):
        having = sum(any(index in dim for dim in dims) for dims in results)
        if factor.name in written.blocked:
            table.set_kind(factor.name, FactorKind.BLOCKED)
        elif factor.kind is FactorKind.BLOCKED:
            continue
        elif not having:
            table.set_kind(factor.name, FactorKind.REDUCTION)
        elif having < len(results) or not any(index in dim for dims in operands for dim in dims):
            raise RuleError(f"{call.op}: factor '{factor.name}' must be in an operand and in every result, or in none")


def _check_positions(call: Call, written: WrittenRule) -> None:
    operands = {*written.addends, *(i for i, js in written.saves for i in (i, *js))}
    if not operands <= set(range(len(call.operands))) or not set(written.saved_results) <= set(
        range(len(call.results))
    ):
        raise RuleError(
            f"{call.op}: the rule speaks of operands {sorted(operands)} and results {sorted(written.saved_results)},"
            f" the call has {len(call.operands)} and {len(call.results)}"
        )


def _points(dims: Dims, extents: Sequence[int]) -> int:
    found = 1
    for dim in dims:
        for factor in dim:
            found *= extents[factor]
    return found
