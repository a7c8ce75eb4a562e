"""Lists of cases of which a few are run by default and the others with `-m thorough`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases of a parametrized test, all but the first `count` of them marked as thorough."""
    return [
        case if at < count else pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.thorough)
        for at, case in enumerate(cases)
    ]
