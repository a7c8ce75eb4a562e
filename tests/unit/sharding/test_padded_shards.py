"""Shards of parameters whose dims devices do not divide: equal, with zeros at the end of the dim."""

import pytest

from planner.errors import LayoutError
from planner.sharding.layout import (
    PaddedShape,
    divides,
    local_shape,
    local_share,
    parse_layout,
    shard_length,
    whole_shape,
)
from planner.sharding.redistribute import redistribution
from planner.sharding.stored import legal_stored
from tests.distributed.plans import mesh_of
from tests.refusals import refused


@pytest.mark.parametrize(
    ("extent", "sizes", "length"),
    [
        (1600, (24,), 67),  # 8 rows of zeros
        (8192, (96,), 86),
        (8192, (8, 12), None),  # shards of 1024 rows, which 12 does not divide
        (8256, (12, 8), 86),  # 12 divides 8256, and 8 its shards
        (4096, (1, 8), 512),
        (33, (4,), None),  # a twelfth of zeros
        (7, (8,), None),
        (1, (1,), 1),
    ],
)
def test_the_outer_axis_pads_a_sixteenth_at_most(extent: int, sizes: tuple[int, ...], length: int | None) -> None:
    assert shard_length(extent, sizes) == length


def test_shapes_with_and_without_padding() -> None:
    shape, cut = PaddedShape((1600, 6400)), parse_layout("S0,S1")
    assert divides(shape, cut, (24, 8))
    assert not divides((1600, 6400), cut, (24, 8))
    assert local_shape(shape, cut, (24, 8)) == (67, 800)
    assert whole_shape(shape, cut, (24, 8)) == (1608, 6400)
    assert whole_shape((1600, 6400), cut, (8, 8)) == (1600, 6400)
    assert local_share(shape, cut, (24, 8)) == 67 * 800 / (1600 * 6400)
    assert local_share(shape, parse_layout("S1,R"), (8, 24)) == 1 / 8
    assert shape != (1600, 6400)
    with refused(LayoutError, "4 does not divide 33", "not even with 6% of it as padding"):
        local_shape(PaddedShape((33,)), parse_layout("S0"), (4,))


def test_a_gather_leaves_the_padding_out_and_a_scatter_adds_it() -> None:
    mesh, shape = mesh_of(24), PaddedShape((1600, 8))
    whole, cut, partial = (parse_layout(text) for text in ("R", "S0", "P"))
    gather = redistribution(shape, mesh, cut, whole)
    scatter = redistribution(shape, mesh, partial, cut)
    assert [(step.kind, step.extent) for step in gather] == [("all_gather", 1600)]
    assert [(step.kind, step.padding) for step in scatter] == [("reduce_scatter", 8)]
    assert gather[0].fraction == scatter[0].fraction == 1608 / 1600


def test_zero_is_there_for_any_number_of_devices() -> None:
    assert {str(stored.state[0]) for stored in legal_stored(PaddedShape((1600, 6400)), (24,), True)} == {
        "R",
        "S0",
        "S1",
    }
    assert {str(stored.state[0]) for stored in legal_stored((1600, 6400), (24,), True)} == {"R"}
