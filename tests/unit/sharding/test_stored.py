"""Stored layouts: exactly the legal ones are listed, full copies first."""

import itertools

import pytest

from planner.faults import Fault
from planner.sharding.layout import PARTIAL, REPLICATE, PaddedShape, divides, shard
from planner.sharding.stored import StoredParameter, legal_stored, stored_fault


@pytest.mark.parametrize(("shape", "count"), [((), 2), ((8,), 6), ((8, 8), 10)])
def test_options_of_one_axis(shape: tuple[int, ...], count: int) -> None:
    assert len(legal_stored(shape, (2,), True)) == count
    assert len(legal_stored(shape, (2,), False)) == 1 + len(shape)


@pytest.mark.parametrize(("shape", "sizes"), [((4, 6), (2, 2)), (PaddedShape((62,)), (4, 2, 2))])
def test_what_is_listed_is_what_has_no_fault(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    placements = (REPLICATE, PARTIAL, *map(shard, range(len(shape))))
    layouts = list(itertools.product(placements, repeat=len(sizes)))
    legal = {
        stored
        for weight, gradient, state in itertools.product(layouts, repeat=3)
        if all(divides(shape, layout, sizes) for layout in (weight, gradient, state))
        and stored_fault(stored := StoredParameter(weight=weight, gradient=gradient, state=state)) is None
    }
    found = legal_stored(shape, sizes, True)
    assert set(found) == legal
    assert len(found) == len(legal)


def test_full_copies_come_first() -> None:
    first = legal_stored((8, 8), (2, 4), True)[0]
    assert {*first.weight, *first.gradient, *first.state} == {REPLICATE}


def test_a_gradient_cut_finer_than_its_weight_needs_a_state_cut_alike() -> None:
    def fault(state: int) -> Fault | None:
        return stored_fault(StoredParameter(weight=(REPLICATE,), gradient=(shard(0),), state=(shard(state),)))

    assert fault(0) is None
    assert str(fault(1)) == "a gradient cut as S0 on axis 0 needs a state cut alike, not S1"
