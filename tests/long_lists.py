"""Long lists of cases: a few run by default, more with `-m thorough`, and all with `-m exhaustive` beside it.

    @pytest.mark.cases(2, 6)          of all cases of this test two run by default, six more in the thorough list, and
    def test_what_is_predicted(...)   the others are exhaustive; `cases(2)` has all others in the thorough list

Cases are drawn evenly from the list. Those that are marked as thorough by hand are drawn with what is left, and those
that are marked as exhaustive stay so.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest

_MARKED = type(pytest.param())


def mark_long_lists(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of tests that bear `cases` with the list that they belong to."""
    found: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") is not None and item.get_closest_marker("exhaustive") is None:
            found[item.nodeid.partition("[")[0]].append(item)
    for cases in found.values():
        mark = cases[0].get_closest_marker("cases")
        assert mark is not None
        usual, *more = mark.args
        unmarked = [case for case in cases if case.get_closest_marker("thorough") is None]
        drawn = {id(unmarked[at]) for at in _drawn(len(unmarked), usual)}
        left = [case for case in cases if id(case) not in drawn]
        thorough = _drawn(len(left), more[0] if more else len(left))
        for at, case in enumerate(left):
            case.add_marker("thorough" if at in thorough else "exhaustive")


def _drawn(count: int, wanted: int) -> set[int]:
    """So many places of a list, evenly spread; all where the list is shorter."""
    return {place * count // min(wanted, count) for place in range(min(wanted, count))}


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
