"""A limit of memory that nothing can keep to."""

import pytest
import torch

import planner
from hardware_profiles.units import KIB, MIB
from planner.errors import InfeasibleError
from tests.refusals import refused


class Loss(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).mean()


def searched(limit: float) -> None:
    planner.search(
        Loss(8, 8),
        "cpu",
        args=(torch.zeros(4, 8),),
        batch=4,
        devices=2,
        global_batch=8,
        precision="fp32",
        memory_limit=limit,
    )


@pytest.mark.parametrize(("limit", "text"), [(100, "100 bytes"), (4 * KIB, "4.0 KiB"), (511 * MIB, "0.499 GiB")])
def test_below_what_a_device_reserves_it_says_so(limit: float, text: str) -> None:
    with refused(InfeasibleError, text, "memory limit", "reserves", "0.500 GiB"):
        searched(limit)


def test_above_that_it_is_a_limit_like_any_other() -> None:
    searched(513 * MIB)
