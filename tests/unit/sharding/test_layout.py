import pytest

from planner.errors import LayoutError
from planner.sharding.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    divides,
    format_layout,
    local_fraction,
    local_shape,
    parse_layout,
    replicated,
    shard,
)
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("", ()),
        ("R", (REPLICATE,)),
        ("S0,R,P", (shard(0), REPLICATE, PARTIAL)),
        ("S12", (shard(12),)),
        ("S1,S1", (shard(1), shard(1))),
    ],
)
def test_text_and_back(text: str, layout: Layout) -> None:
    assert parse_layout(text) == layout
    assert format_layout(layout) == text


def test_blanks_are_allowed() -> None:
    assert parse_layout(" S0 , R") == (shard(0), REPLICATE)


@pytest.mark.parametrize("word", ["X", "S", "S-1", "Sx", "s0", "S1.0", "RR", "S²"])
def test_words_that_are_no_placement(word: str) -> None:
    with refused(LayoutError, f"'{word}'", f"R,{word}"):
        parse_layout(f"R,{word}")


@pytest.mark.parametrize("text", ["R,", ",", "R,,R"])
def test_empty_words(text: str) -> None:
    with refused(LayoutError, "''", text):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "sizes", "expected"),
    [
        ("R,R", (2, 4), (8, 12)),
        ("S0,R", (2, 4), (4, 12)),
        ("S0,S0", (2, 4), (1, 12)),
        ("S1,P", (2, 4), (8, 6)),
        ("P,S1", (2, 4), (8, 3)),
        ("", (), (8, 12)),
    ],
)
def test_local_shape(layout: str, sizes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    found = parse_layout(layout)
    assert local_shape((8, 12), found, sizes) == expected
    assert local_fraction(found, sizes) == expected[0] * expected[1] / 96
    assert divides((8, 12), found, sizes)


def test_a_dim_that_does_not_exist() -> None:
    assert not divides((8,), (shard(1),), (2,))
    with refused(LayoutError, "S1", 1, "(8,)"):
        local_shape((8,), (shard(1),), (2,))


def test_a_dim_that_does_not_divide() -> None:
    layout = parse_layout("S0,S0")
    assert not divides((12,), layout, (2, 4))
    with refused(LayoutError, "S0,S0", 0, "(12,)", 8, 8, 12):
        local_shape((12,), layout, (2, 4))


def test_a_scalar_can_be_a_copy_or_a_term() -> None:
    assert local_shape((), parse_layout("R,P"), (2, 4)) == ()
    assert not divides((), (shard(0),), (2,))


def test_replicated() -> None:
    assert replicated(3) == (REPLICATE,) * 3
