"""A strategy of operators given by hand: `*.q_proj=b,o`, or as cuts of the dims of operands."""

import ast
from collections.abc import Sequence

from hardware_profiles.foreign import ForeignTextError, literal, parse_python
from planner.errors import RequestError
from planner.strategy_search.request.request import Shard


def shard(pattern: str, strategy: str | Sequence[Sequence[int]]) -> Shard:
    """A strategy for the operators whose name matches `pattern` (wildcards as in `fnmatch`).

    `strategy` names a factor of the operator for each mesh axis, slowest links first: "b,o", with "-" for an axis that
    is not used and "*" for an axis that is left to the search. Or it gives the number of parts of each dim of each
    operand, as in ((4, 1, 1), (1, 2)) for a linear layer, as text or as numbers; this holds on any mesh on which it is
    possible. Operators have the names that `plan show` and plan files use. A pattern that matches an operator of the
    first block holds for all blocks.
    """
    if not isinstance(strategy, str):
        rows = tuple(tuple(dims) for dims in strategy)
        if not rows or min((pieces for row in rows for pieces in row), default=1) < 1:
            raise RequestError(f"--shard {pattern}={rows!r:.80}: give the cuts of each operand's dims, each 1 or more")
        return Shard(pattern=pattern, cuts=rows)
    text = strategy.strip()
    if not text:
        raise RequestError(f"--shard {pattern}=: the strategy is missing; write the names of factors, as in b,o")
    if text.startswith("("):
        return Shard(pattern=pattern, cuts=_cuts(pattern, text))
    return Shard(pattern=pattern, strategy=tuple(word.strip() for word in text.split(",")))


def _cuts(pattern: str, text: str) -> tuple[tuple[int, ...], ...]:
    try:
        body = parse_python(text).body
        found = literal(body[0].value) if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    except ForeignTextError:
        found = None
    rows = found if isinstance(found, tuple) and all(isinstance(row, tuple) for row in found) else ()
    if not rows or not all(isinstance(pieces, int) and pieces > 0 for row in rows for pieces in row):
        raise RequestError(
            f"--shard {pattern}={text:.80}: write the cuts of each operand's dims, as in ((4,1,1),(1,2))"
        )
    return rows
