"""Weights of modules that are built on the host have no data there."""

import subprocess
import sys

import torch
from torch import nn

from planner.models.weights_apart import weights_without_data

LARGE = """
import resource
import torch
from torch import nn
from planner.models.weights_apart import weights_without_data

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with weights_without_data():
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)]
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(100))).to("cpu", torch.bfloat16)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, model[0].weight.dtype, rates[2] > 0)
"""


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.ones(4, 4))
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.first.weight = weight
        self.second.weight = weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.number = self.scale.item()


def test_weights_take_no_memory() -> None:
    """27 GB of weights, of which none is filled."""
    found = subprocess.run([sys.executable, "-c", LARGE], check=True, capture_output=True, text=True).stdout.split()
    assert int(found[0]) < 2**18  # KiB: less than one weight
    assert found[1:] == ["torch.bfloat16", "True"]


def test_tied_weights_stay_tied_and_buffers_have_data() -> None:
    with weights_without_data():
        module = Tied()
    assert module.first.weight is module.second.weight
    assert module.first.weight.is_meta
    assert module.number == 2.0
    assert not nn.Linear(2, 2).weight.is_meta
