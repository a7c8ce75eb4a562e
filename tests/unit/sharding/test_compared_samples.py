"""Models whose loss compares samples: several micro-batches are another loss, and a note says so."""

import warnings

import pytest
import torch
from torch import nn

import planner
from planner.graph.trace import trace
from planner.sharding.compared_samples import comparing_samples


class Towers(nn.Module):
    """Scores of every pair of samples (`whole`), or of each sample alone."""

    def __init__(self, *, whole: bool, joined: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.whole, self.joined = nn.Linear(6, 5), nn.Linear(6, 5), whole, joined

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = self.left(x), self.right(y)
        if self.joined:
            both = torch.cat([x, y])
            return (both @ both.t()).softmax(-1).square().mean()
        if not self.whole:
            return (x * y).sum(-1).square().mean()
        return nn.functional.cross_entropy(x @ y.t(), torch.arange(x.shape[0], device=x.device))


EXAMPLE = (torch.zeros(4, 6), torch.zeros(4, 6))
JOB = {"args": EXAMPLE, "devices": 2, "global_batch": 8, "precision": "fp32"}


def test_an_operator_with_pairs_of_samples_is_named() -> None:
    note = comparing_samples(trace(Towers(whole=True), EXAMPLE), 4)
    assert note is not None
    assert note.startswith("operator 'matmul', called in module '(root)'")
    assert comparing_samples(trace(Towers(whole=False), EXAMPLE), 4) is None


def test_a_note_says_so_unless_there_is_one_micro_batch() -> None:
    with pytest.warns(UserWarning, match=r"'matmul'.* compares samples .*'micro_batches': 1"):
        planner.estimate(Towers(whole=True), "cpu", pinned={"data": 2, "micro_batches": 2}, **JOB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planner.estimate(Towers(whole=True), "cpu", pinned={"data": 2, "micro_batches": 1}, **JOB)
        planner.estimate(Towers(whole=False), "cpu", pinned={"data": 2, "micro_batches": 2}, **JOB)


def test_a_note_says_when_the_example_decides_the_micro_batch() -> None:
    with pytest.warns(UserWarning, match=r"the 4 samples of the model's example.*cat .*depends on the extent"):
        planner.estimate(Towers(whole=True, joined=True), "cpu", pinned={"tensor": 1}, **JOB)
