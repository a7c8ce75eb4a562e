"""The rule of one call, by trial.

    true call ─ shrink ─> small call ─ find factors ─> rule ─ prove ─> on other seeds, other extents, pairs of factors
                                                         │               and each factor at its true extent
                                                         └─ a factor that fails is blocked, until all that is left holds

A rule that was found once, and was read from a file, is proved in the same way, without the search.

Limits. An operator whose behaviour changes with values or extents that were not tried is misjudged: one that clips at a
constant beyond the values drawn here, or that looks further along a dim than the largest trial is long (2**19 elements
of all operands). Kernels that read out of bounds instead of raising bring the process down with them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import combinations

import torch

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import WrittenRule
from planner.graph.torch_operators import resolve
from planner.graph.written import parse_sides
from planner.sharding.discover.factors import find_factors, written
from planner.sharding.discover.proof import fault, retyped
from planner.sharding.discover.saved import with_saved
from planner.sharding.discover.trial import HOLES, LARGEST, UNIT, Case, marks_of, small_calls, try_call, working
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules.written import build_written

SEEDS = (1, 2, 4, 5)
MOST_RANKS = 16  # of a proof at true extents


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums in one order, and no threads that wait for each other over small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def rule_by_trial(call: Call) -> WrittenRule:
    """The rule of a call. Every factor is blocked, and `reason` says why, where no split was found.

    Raises RuleError for an operator that cannot run on several devices at all: one that draws random numbers, or that
    changes its operands.
    """
    check_kind(call)
    if not call.operands:
        return blocked(call, "it has no operand that could be split")
    cases, why = _cases(call)
    if not cases:
        return blocked(call, f"it could not be tried on small tensors: {why}")
    proved, why = _proved(call, written(find_factors(cases[0]), cases[0]), cases)
    proved = with_saved(proved, cases[0])
    if any(factor.kind is not FactorKind.BLOCKED for factor in build_written(call, proved).factors):
        return proved
    return replace(proved, reason=why or "no split of its operands recombines to its result")


@lru_cache(maxsize=1024)
@one_thread()
def check_rule(call: Call, rule: WrittenRule) -> str | None:
    """Why a rule that was read from a file does not hold for a call; None where it holds.

    A rule is proved once in a process. Raises RuleError as `rule_by_trial` does.
    """
    check_kind(call)
    built = build_written(call, rule)
    if all(factor.kind is FactorKind.BLOCKED for factor in built.factors):
        return None
    cases, why = _cases(call)
    if not cases:
        return f"it could not be tried on small tensors: {why}"
    return next((text for _, text in _faults(call, rule, cases)), None)


@one_thread()
def kept_again(call: Call, rule: WrittenRule) -> WrittenRule:
    """The rule with what autograd keeps as it is found here, whatever the rule says of that."""
    bare = WrittenRule(text=rule.text, blocked=rule.blocked, mean=rule.mean, addends=rule.addends, reason=rule.reason)
    cases, _ = _cases(call)
    if not cases:
        whole = blocked(call, rule.reason)
        return replace(bare, saves=whole.saves, saved_results=whole.saved_results)
    return with_saved(bare, cases[0])


def check_kind(call: Call) -> None:
    """Raises RuleError for operators that say themselves that they cannot be repeated on several devices."""
    schema = resolve(call.op)._schema
    if schema.is_mutable:
        raise RuleError(
            f"operator {call.op} changes its operands in place, which is not supported; return a new tensor"
        )


def blocked(call: Call, reason: str) -> WrittenRule:
    """The rule under which an operator runs whole on every device."""
    names: list[str] = []

    def side(letter: str, tensors: Sequence[Sequence[int]]) -> str:
        texts = []
        for i, shape in enumerate(tensors):
            words = ["1" if extent == 1 else f"{letter}{i}d{dim}" for dim, extent in enumerate(shape)]
            names.extend(word for word in words if word != "1")
            texts.append(" ".join(words))
        return ", ".join(texts) if tensors else "none"

    left = side("x", [tensor.shape for tensor in call.operands])
    right = side("y", [tensor.shape for tensor in call.results])
    saves = tuple(i for i, tensor in enumerate(call.operands) if tensor.floating)
    return WrittenRule(
        text=f"{left} -> {right}",
        blocked=tuple(names),
        saves=tuple((i, saves) for i in range(len(call.operands)) if saves),
        saved_results=tuple(range(len(call.results))) if saves else (),
        reason=reason,
    )


def _cases(call: Call) -> tuple[list[Case], str]:
    """Cases of at least two different extents, or of the true ones; none where the call has too few."""
    found: list[Case] = []
    first_reason = ""
    for small in small_calls(call):
        if len(found) == 2:
            break
        case, why = working(small, lambda case: _resembles(case.call, call))
        if case is not None and all(case.call.operands != other.call.operands for other in found):
            found.append(case)
        first_reason = first_reason or why
    if len(found) == 1 and found[0].call.operands != call.operands:
        return [], "it runs for one choice of extents only, which proves nothing about others"
    return found, first_reason


def _resembles(small: Call, call: Call) -> bool:
    """Whether both calls have results of the same kind: as many, with as many dims, and the same dims of extent 1."""
    if len(small.results) != len(call.results):
        return False
    return all(
        [extent == 1 for extent in mine.shape] == [extent == 1 for extent in true.shape]
        for mine, true in zip(small.results, call.results, strict=True)
    )


def _proved(call: Call, rule: WrittenRule, cases: Sequence[Case]) -> tuple[WrittenRule, str]:
    """The rule without the factors that fail, and why the last of them did."""
    reason = ""
    while True:
        failed = next(_faults(call, rule, cases), None)
        if failed is None:
            return rule, reason
        name, reason = failed
        rule = _without(rule, name)


def _without(rule: WrittenRule, name: str) -> WrittenRule:
    """The rule with a factor blocked. Dims that it cut together get factors of their own, as nothing relates them."""
    sides, blocked_names = [], list(rule.blocked)
    for letter, side in zip("xy", parse_sides(rule.text), strict=True):
        texts = []
        for i, tokens in enumerate(side):
            words = []
            for dim, token in enumerate(tokens):
                word = token.factor or "1"
                if word == name:
                    word = f"{letter}{i}d{dim}"
                    blocked_names.append(word)
                elif token.piece > 1:
                    word = f"({word} {token.piece})"
                words.append(word)
            texts.append(" ".join(words))
        sides.append(", ".join(texts) if side else "none")
    return replace(
        rule,
        text=" -> ".join(sides),
        blocked=tuple(blocked_names),
        mean=tuple(each for each in rule.mean if each != name),
    )


def _faults(call: Call, rule: WrittenRule, cases: Sequence[Case]) -> Iterator[tuple[str, str]]:
    """Factors that cannot be split, with the reason; the cheapest checks come first."""
    try:
        true = build_written(call, rule)
    except RuleError as error:
        for factor in _splittable_names(rule):
            yield factor, str(error)
        return
    for case in cases:
        try:
            built = build_written(case.call, rule)
        except RuleError as error:
            for factor in _splittable_names(rule):
                yield factor, str(error)
            return
        yield from _faults_of(built, case, call)
    for index, each in enumerate(true.factors):
        if each.kind is not FactorKind.BLOCKED:
            yield from _at_true_extent(call, rule, true, index, cases[0])


def _splittable_names(rule: WrittenRule) -> list[str]:
    left, right = parse_sides(rule.text)
    names = [token.factor for tokens in (*left, *right) for token in tokens if token.factor is not None]
    return [name for name in dict.fromkeys(reversed(names)) if name not in rule.blocked]


def _faults_of(rule: Rule, first: Case, call: Call) -> Iterator[tuple[str, str]]:
    """Every factor alone on several seeds, and every two on two axes."""
    cases = [first]
    marks = marks_of(call) if any(tensor.dtype in ("int32", "int64") for tensor in call.operands) else ()
    trials = [(seed, ()) for seed in SEEDS] + [(SEEDS[-1] + at, (mark,)) for at, mark in enumerate(marks, 1)]
    for seed, marked in trials:
        case = try_call(first.call, first.setting, seed, marked)
        if isinstance(case, str):
            continue  # values that the operator does not take
        if [t.shape for t in case.call.results] != [t.shape for t in first.call.results]:
            for factor in rule.factors:
                if factor.kind is not FactorKind.BLOCKED:
                    yield factor.name, "the shapes of its results depend on the values of its operands"
        cases.append(case)
    able = [i for i, factor in enumerate(rule.factors) if factor.kind is not FactorKind.BLOCKED]
    holed = [try_call(first.call, first.setting, SEEDS[0], (hole,)) for hole in HOLES if rule.mean_over]
    of_means = [*cases, *(case for case in holed if not isinstance(case, str))]
    for index in able:
        for at, case in enumerate(of_means if index in rule.mean_over else cases):
            splits = _splits(rule.factors[index].extent)
            for count in splits if at == 0 else splits[:2]:
                why = fault(case, rule, (index,), (count,))
                if why:
                    yield rule.factors[index].name, f"split in {count}: {why}"
    for one, other in combinations(able, 2):
        counts = tuple(_splits(rule.factors[i].extent)[0] for i in (one, other))
        why = fault(cases[-1], rule, (one, other), counts)
        if why:
            yield rule.factors[other].name, f"split together with {rule.factors[one].name}: {why}"


def _splits(extent: int) -> tuple[int, ...]:
    """2 pieces, 3 pieces, and as many as the extent."""
    found = [n for n in (2, 3) if extent % n == 0 and extent >= n]
    return (*found, extent) if extent not in found else tuple(found)


def _at_true_extent(call: Call, rule: WrittenRule, true: Rule, index: int, case: Case) -> Iterator[tuple[str, str]]:
    """One factor as long as it is in the true call, or the nearest multiple of 6, all others short."""
    name = true.factors[index].name
    small = build_written(case.call, rule)
    extent = UNIT * math.ceil(true.factors[index].extent / UNIT)
    if name not in small.index or extent <= small.factors[small.index[name]].extent:
        return
    shapes = []
    for tensor, dims in zip(case.call.operands, small.operands, strict=True):
        at = small.index[name]
        shapes.append(
            [
                extent * (length // small.factors[at].extent) if at in factors else length
                for length, factors in zip(tensor.shape, dims, strict=True)
            ]
        )
    if sum(math.prod(shape) for shape in shapes) > LARGEST:
        return
    long = try_call(retyped(case.call, shapes), case.setting, seed=0)
    if isinstance(long, str):
        yield name, f"at extent {extent}: {long}"
        return
    try:
        built = build_written(long.call, rule)
    except RuleError as error:
        yield name, str(error)
        return
    for count in (n for n in _splits(extent) if n <= MOST_RANKS):
        why = fault(long, built, (built.index[name],), (count,))
        if why:
            yield name, f"at extent {extent}, split in {count}: {why}"
