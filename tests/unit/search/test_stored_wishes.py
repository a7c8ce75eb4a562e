"""Stored layouts that grow axis by axis with what is wanted of them are those that all layouts are filtered to."""

import itertools

import pytest

from planner.sharding.stored import legal_stored
from planner.strategy_search.request.constraints import _agreeing, _agreeing_stored, _Wanted

WISHES = (
    (),
    (_Wanted("any"),),
    (_Wanted("whole"),),
    (_Wanted("cut"),),
    (_Wanted("cut or whole"),),
    *((_Wanted("zero", zero), _Wanted("whole")) for zero in range(4)),
    (_Wanted("none", or_experts=True), _Wanted("zero", 1), _Wanted("whole")),
)


@pytest.mark.parametrize("shape", [(8, 12), (3, 5), (8,)], ids=str)
def test_growing_with_wishes_is_filtering_by_them(shape: tuple[int, ...]) -> None:
    legal = legal_stored(shape, (2, 4), True)
    for wanted in itertools.product(WISHES, WISHES):
        assert _agreeing_stored(shape, (2, 4), True, wanted) == _agreeing(legal, wanted)


def test_frozen_parameters_grow_alike() -> None:
    legal = legal_stored((8, 12), (2, 4), False)
    for wanted in itertools.product(WISHES, WISHES):
        assert _agreeing_stored((8, 12), (2, 4), False, wanted) == _agreeing(legal, wanted)
