"""How much memory a contender leaves free that needs more than the search counts."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from planner.strategy_search.finalists.room import Room
from planner.strategy_search.request.space import FREE

LIMIT = 100.0
NEEDED = 21.0
"""Bytes that have to be left free."""


@dataclass(kw_only=True)
class _Drawn(Room):
    """Plans that take as much longer as they leave free, with an emptiness as large as what they leave free beyond
    `NEEDED`."""

    maker: Any = None
    overlapping: Any = None
    orders: Any = None
    rooms: list[float] = field(default_factory=list)
    nothing: float = -1.0
    """With this room the search finds nothing."""

    def __post_init__(self) -> None:
        self.request = SimpleNamespace(pinned=FREE)  # type: ignore[assignment]
        self.orders = SimpleNamespace(reordered=lambda ranked, cutoff: ranked)
        self.maker = SimpleNamespace(
            limits_of=lambda configuration: [LIMIT],
            overfull_by=lambda ranked: NEEDED - ranked.room,
            unsettled=lambda found: found,
        )

    def again(self, found: Any, room: float) -> Any:
        self.rooms.append(room)
        return _plan(room, found=room != self.nothing)


def _plan(room: float, *, found: bool = True) -> Any:
    outcome = SimpleNamespace(ranks=("a rank",) if found else ())
    return SimpleNamespace(room=room, objective=1 + room / 100, configuration=None, outcome=outcome)


@pytest.mark.parametrize(
    ("high", "tried", "kept"),
    [
        (80.0, [40, 20, 30], 30.0),  # 40 leaves 19 empty, with 20 it does not fit, 30 leaves 9
        (30.0, [], 30.0),  # full enough
    ],
)
def test_less_is_left_free_where_much_stays_empty(high: float, tried: list[float], kept: float) -> None:
    room = _Drawn()
    leaner, ranked = room._less_room(_plan(0.0), _plan(high), _plan(high), 0.0, 2.0)
    assert room.rooms == tried
    assert leaner.room == ranked.room == kept  # type: ignore[attr-defined]


def test_a_plan_stays_where_the_search_finds_nothing_with_less_left_free() -> None:
    room = _Drawn(nothing=20.0)
    leaner, _ = room._less_room(_plan(0.0), _plan(80.0), _plan(80.0), 0.0, 2.0)
    assert room.rooms == [40, 20]
    assert leaner.room == 40.0  # type: ignore[attr-defined]
