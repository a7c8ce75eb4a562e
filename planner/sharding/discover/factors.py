"""Finding the factors of a call: which dims of operands and results can be cut together.

    change one chunk of operand i along d ──> which elements of the results change?
        only those of the same chunk along e, for every chunk      (i, d) may go with e: a parallel factor
        others too                                                 (i, d) may be a reduction

Few sets of dims are left after this sieve. Each is tried by execution (`proof.fault`), most dims first. A set is a
factor if its split recombines, forward and backward, in 2 pieces, in 3, and in as many as the dim has elements. Where
only coarser splits recombine, some elements must stay together, and the piece of the dim is written `(d0 4)`: this
finds the outer factors of views and the scale of an upsampling. Cost for n operand dims and r result dims: O(n) runs
for the sieve, and O(n + r) proofs where the sieve leaves one set for each dim, as it mostly does.

The search does not find a cut that needs more than pieces of the operands (lookups with an offset, halos, sorting,
scans), nor a factor that one result has and another sums over, which no rule can say. All of those are blocked.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from planner.errors import RuleError
from planner.graph.operator_graph import WrittenRule
from planner.sharding.discover.proof import fault
from planner.sharding.discover.trial import Case, run, same, values
from planner.sharding.rules.written import build_written

TRIED = 96  # sets of dims for one dim, at most

Cut = tuple[int | None, ...]  # per tensor the dim that is cut


@dataclass(frozen=True, kw_only=True)
class Found:
    """A factor: the dim of each operand and result that it indexes, and in each how many elements stay together.

    A reduction indexes no result; `addends` are operands that join its sum once, and `mean` says that it averages.
    """

    operands: Cut
    results: Cut
    pieces: tuple[int, ...] = ()
    addends: tuple[int, ...] = ()
    mean: bool = False

    @property
    def reduction(self) -> bool:
        return all(dim is None for dim in self.results)


def find_factors(case: Case) -> tuple[Found, ...]:
    """The factors of a call: parallel ones in the order of the result's dims, then reductions."""
    reach = _reach(case)
    used: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    found: list[Found] = []
    for seed in _operand_dims(case):
        if seed not in used:
            factor = _first(case, _parallel(case, seed, reach, used, taken))
            if factor is not None:
                found.append(factor)
                used.update(_places(factor.operands))
                taken.update(_places(factor.results))
    found.sort(key=lambda factor: factor.results[0] or 0)
    for seed in _operand_dims(case):
        if seed not in used:
            factor = _first(case, _reductions(case, seed, used))
            if factor is not None:
                found.append(factor)
                used.update(_places(factor.operands))
    return tuple(found)


def _places(cut: Cut) -> Iterator[tuple[int, int]]:
    return ((tensor, dim) for tensor, dim in enumerate(cut) if dim is not None)


def _operand_dims(case: Case) -> list[tuple[int, int]]:
    return [(i, d) for i, t in enumerate(case.operands) for d, extent in enumerate(t.shape) if extent > 1]


def _first(case: Case, candidates: Iterator[Found]) -> Found | None:
    """The first candidate that holds, with the finest pieces for which it does."""
    for candidate in itertools.islice(candidates, TRIED):
        extents = [case.operands[i].shape[d] for i, d in _places(candidate.operands)]
        extents += [case.results[i].shape[d] for i, d in _places(candidate.results)]
        common = math.gcd(*extents)
        if not any(_holds(case, candidate, n, (n,)) for n in _primes(common)):
            continue
        for count in (n for n in range(common, 1, -1) if common % n == 0):
            if _holds(case, candidate, count, {count, *(n for n in (2, 3) if count % n == 0)}):
                return _with_pieces(case, candidate, count)
    return None


def _with_pieces(case: Case, candidate: Found, count: int) -> Found:
    tensors = (*zip(case.operands, candidate.operands, strict=True), *zip(case.results, candidate.results, strict=True))
    return Found(
        operands=candidate.operands,
        results=candidate.results,
        pieces=tuple(1 if dim is None else tensor.shape[dim] // count for tensor, dim in tensors),
        addends=candidate.addends,
        mean=candidate.mean,
    )


def _holds(case: Case, candidate: Found, count: int, splits: Sequence[int] | set[int]) -> bool:
    """Whether a factor of `count` pieces can be split in these ways."""
    try:
        rule = build_written(case.call, written((_with_pieces(case, candidate, count),), case))
    except RuleError:
        return False
    factor = next((i for i, each in enumerate(rule.factors) if each.name in ("d0", "r0")), None)
    return factor is not None and all(fault(case, rule, (factor,), (n,)) is None for n in sorted(splits))


def written(factors: Sequence[Found], case: Case) -> WrittenRule:
    """The rule with these factors; every other dim is blocked."""
    names: dict[tuple[bool, int, int], str] = {}
    pieces: dict[tuple[bool, int, int], int] = {}
    mean: list[str] = []
    addends: set[int] = set()
    parallel, reductions = itertools.count(), itertools.count()
    for factor in factors:
        name = f"r{next(reductions)}" if factor.reduction else f"d{next(parallel)}"
        for of_result, cut in ((False, factor.operands), (True, factor.results)):
            for tensor, dim in _places(cut):
                names[of_result, tensor, dim] = name
                at = tensor + len(case.operands) * of_result
                pieces[of_result, tensor, dim] = factor.pieces[at] if factor.pieces else 1
        if factor.mean:
            mean.append(name)
        addends.update(factor.addends)
    blocked: list[str] = []

    def side(of_result: bool, tensors: Sequence[torch.Tensor]) -> str:
        texts = []
        for i, tensor in enumerate(tensors):
            words = []
            for dim, extent in enumerate(tensor.shape):
                place = (of_result, i, dim)
                if place in names:
                    words.append(names[place] if pieces[place] == 1 else f"({names[place]} {pieces[place]})")
                elif extent == 1:
                    words.append("1")
                else:
                    words.append(f"{'y' if of_result else 'x'}{i}d{dim}")
                    blocked.append(words[-1])
            texts.append(" ".join(words))
        return ", ".join(texts) if tensors else "none"

    text = f"{side(False, case.operands)} -> {side(True, case.results)}"
    return WrittenRule(text=text, blocked=tuple(blocked), mean=tuple(mean), addends=tuple(sorted(addends)))


Reach = dict[tuple[int, int], tuple[frozenset[int], ...]]
"""For each operand dim, per result, the dims along which a chunk of it reaches only the same chunk."""


def _reach(case: Case) -> Reach:
    found: Reach = {}
    fresh = values(case.call, case.setting, seed=3)
    for i, dim in _operand_dims(case):
        each = [_reached(case, fresh, i, dim, count) for count in _primes(case.operands[i].shape[dim])]
        found[i, dim] = tuple(frozenset().union(*dims) for dims in zip(*each, strict=True))
    return found


def _primes(extent: int) -> list[int]:
    return [n for n in range(2, extent + 1) if extent % n == 0 and all(n % m for m in range(2, n))]


def _reached(case: Case, fresh: Sequence[torch.Tensor], i: int, dim: int, count: int) -> list[set[int]]:
    """For each result the dims along which each of `count` chunks of an operand reaches only the same chunk."""
    kept = [{d for d, e in enumerate(result.shape) if e > 1 and e % count == 0} for result in case.results]
    step = case.operands[i].shape[dim] // count
    for chunk in range(count):
        if not any(kept):
            break
        changed = case.operands[i].clone()
        changed.narrow(dim, chunk * step, step).copy_(fresh[i].narrow(dim, chunk * step, step))
        made = _run(case, (*case.operands[:i], changed, *case.operands[i + 1 :]))
        if made is None:
            return [set() for _ in case.results]
        for result, now, dims in zip(case.results, made, kept, strict=True):
            dims -= {d for d in dims if not _outside_same(result, now, d, chunk, count, case.tolerance)}
    return kept


def _run(case: Case, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...] | None:
    """Results for other values, None where the operator has none."""
    try:
        with torch.no_grad():
            made = run(case.call, operands)
    except Exception:  # an operator may raise anything at all for values that contradict each other
        return None
    equal = all(one.shape == other.shape for one, other in zip(made, case.results, strict=True))
    return made if equal else None


def _outside_same(one: torch.Tensor, other: torch.Tensor, dim: int, chunk: int, count: int, tolerance: float) -> bool:
    pairs = zip(one.chunk(count, dim), other.chunk(count, dim), strict=True)
    return all(same(now, before, tolerance) for at, (before, now) in enumerate(pairs) if at != chunk)


def _parallel(
    case: Case, seed: tuple[int, int], reach: Reach, used: set[tuple[int, int]], taken: set[tuple[int, int]]
) -> Iterator[Found]:
    """Sets of dims that may be a parallel factor, most dims first."""
    free = [sorted(d for d in dims if (k, d) not in taken) for k, dims in enumerate(reach[seed])]
    for results in itertools.product(*free) if free else ():
        others: list[list[int | None]] = []
        for i, operand in enumerate(case.operands):
            fits = [
                d
                for d in range(operand.dim())
                if (i, d) in reach and (i, d) not in used and all(e in reach[i, d][k] for k, e in enumerate(results))
            ]
            others.append([seed[1]] if i == seed[0] else [*fits, None])
        sets = sorted(itertools.islice(itertools.product(*others), 4096), key=lambda cut: cut.count(None))
        yield from (Found(operands=cut, results=tuple(results)) for cut in sets)


def _reductions(case: Case, seed: tuple[int, int], used: set[tuple[int, int]]) -> Iterator[Found]:
    """Sets of dims that may be a reduction, most dims first: as a sum, with operands that join it once, as a mean."""
    extent = case.operands[seed[0]].shape[seed[1]]
    others: list[list[int | None]] = [
        [seed[1]] if i == seed[0] else [*(d for d, e in enumerate(t.shape) if e == extent and (i, d) not in used), None]
        for i, t in enumerate(case.operands)
    ]
    none = (None,) * len(case.results)
    for cut in sorted(itertools.islice(itertools.product(*others), 4096), key=lambda cut: cut.count(None)):
        lacking = [i for i, dim in enumerate(cut) if dim is None and case.operands[i].is_floating_point()]
        yield Found(operands=cut, results=none)
        yield Found(operands=cut, results=none, mean=True)
        for count in (1, len(lacking)):
            for addends in itertools.combinations(lacking, count) if count <= len(lacking) and lacking else ():
                yield Found(operands=cut, results=none, addends=addends)
