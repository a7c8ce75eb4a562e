"""Lists of cases of which a few are run by default, more with `-m thorough`, and all with `-m exhaustive` beside it."""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import pytest

_MARKED = type(pytest.param())


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test: so many as they are, the others marked as thorough, but for those that are
    marked already."""
    return [_values(case) if at < count else _marked(case, pytest.mark.thorough) for at, case in enumerate(cases)]


def rarely(cases: Iterable[Any]) -> list[Any]:
    """The same cases, all marked as exhaustive."""
    return [_marked(case, pytest.mark.exhaustive) for case in cases]


def pairs(*lists: Iterable[Any]) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Every combination of three lists, and whether it is one of the few in which each value of one list meets each of
    another: those whose places sum to a multiple of the length of the shortest list."""
    numbered = [list(enumerate(one)) for one in lists]
    modulus = min(map(len, numbered))
    for chosen in product(*numbered):
        yield tuple(value for _, value in chosen), sum(place for place, _ in chosen) % modulus == 0


def _values(case: Any) -> Any:
    if not isinstance(case, _MARKED):
        return case
    return case.values if len(case.values) > 1 else case.values[0]


def _marked(case: Any, mark: Any) -> Any:
    if isinstance(case, _MARKED):
        return case
    return pytest.param(*case if isinstance(case, tuple) else (case,), marks=mark)
