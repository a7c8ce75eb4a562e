"""What a request refuses of a model that was traced: the operator, its line in the model's code, and what to write."""

import inspect
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from planner.errors import PlannerError
from planner.graph.trace import trace
from tests.refusals import refused


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.images = nn.InstanceNorm1d(8, track_running_stats=True)


class Divides(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() / x.shape[0]  # here


class Wide(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).double() @ self.linear.weight.double()).mean()  # here


class Running(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.images(self.linear(x).unsqueeze(2).expand(-1, -1, 4)).mean()  # here


class Norms(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).pow(2).mean()  # here


class Accumulates(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).cumsum(0).mean()  # here


class Negatives(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return F.cross_entropy(y @ y.t(), torch.arange(x.shape[0], device=x.device))  # here


class Averages(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).mean()  # here


FOUR: dict[str, Any] = {"pinned": {"micro_batches": 4}}
CASES: dict[str, tuple[type[nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "a number made of the batch": (Divides, FOUR, ("div", "write a mean")),
    "a dtype without a rate": (Wide, {}, ("float64", "x.float()")),
    "changed operands": (Running, {}, ("aten.instance_norm.default", "track_running_stats=False")),
    "a padded batch under a norm": (Norms, {"global_batch": 15, "pad": {"batch": 2}}, ("take a global batch",)),
    "micro-batches of a sum that runs": (Accumulates, FOUR, ("cumsum", "the batch cannot be changed")),
    "replicas of in-batch negatives": (
        Negatives,
        {"per_replica": ["*"]},
        ("cross_entropy_loss", "name other operators"),
    ),
    "padded weights under a mean": (Averages, {"pad": {"linear.weight": 3}}, ("mean", "pad other weights")),
}


def line_of(module: type[nn.Module]) -> str:
    lines, first = inspect.getsourcelines(module)
    here = next(first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here"))
    return f"{Path(__file__).name}:{here}"


@pytest.mark.parametrize("case", CASES)
def test_names_the_line_of_the_operator(case: str) -> None:
    module, asked, facts = CASES[case]
    request = {"devices": 2, "args": (torch.randn(8, 8),), "global_batch": 16, "precision": "fp32", **asked}
    search: Callable[..., Any] = planner.search
    with refused(PlannerError, line_of(module)) as caught:
        search(module(), "cpu", **request)
    for fact in facts:
        assert fact in str(caught.value)


@pytest.mark.parametrize("folder", ["planner/models", "torch", "planner/graph"])
def test_a_file_of_the_user_is_named_whatever_its_folder_is_called(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "net.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = nn.Linear(8, 8)\n\n    def forward(self, x):\n        return self.linear(x).mean()\n"
    )
    network = runpy.run_path(str(path))["Net"]()
    graph = trace(network, (torch.randn(8, 8),))
    assert {op.line for op in graph.operators} == {f"{path}:9"}
