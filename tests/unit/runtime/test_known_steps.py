"""The way of a parameter is looked for once, not in every step."""

import pytest
import torch

from planner.sharding.layout import replicated
from planner.sharding.redistribute import redistribution
from runtime.comm import redistribute
from tests.unit.runtime.test_local_ops import RANKS


def test_the_way_of_a_parameter_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(*arguments: object) -> object:
        asked.append(arguments)
        return redistribution(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(redistribute, "redistribution", counted)
    redistribute._known_steps.cache_clear()
    layout, weight = replicated(len(RANKS[0].mesh.axes)), torch.ones(12, 8)
    for _ in range(3):
        assert torch.equal(redistribute.convert(weight, weight.shape, layout, layout, RANKS[0]), weight)
    assert len(asked) == 1
