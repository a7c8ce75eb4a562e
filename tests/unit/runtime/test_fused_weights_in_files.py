"""Weights that hold several matrices, in files and in the unsharded model, where a graph has them in parts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from planner.errors import CheckpointError
from planner.graph.operator_graph import Cut
from planner.plan.plan import Training
from runtime.checkpoint.fused import as_in_graph
from runtime.checkpoint.regions import Region
from runtime.checkpoint.renamed import boxes_in
from runtime.checkpoint.source import open_checkpoint
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.reference.unsharded import UnshardedStep

CUTS = {f"both.weight[{at}]": Cut(of="both.weight", dim=0, start=3 * at, length=3) for at in range(2)}


def saved(folder: Path, rows: int) -> Path:
    save_file({"both.weight": torch.arange(4.0 * rows).view(rows, 4)}, folder / "some.safetensors")
    return folder / "some.safetensors"


def test_parts_are_read_from_the_whole(tmp_path: Path) -> None:
    source = as_in_graph(open_checkpoint(saved(tmp_path, 6)), CUTS)
    assert torch.equal(torch.cat([source.read(name) for name in CUTS]), torch.arange(24.0).view(6, 4))
    wanted = Region(offset=(1, 2), extent=(2, 2))
    assert [*boxes_in(source, "both.weight[1]", wanted)] == [("both.weight", Region(offset=(4, 2), extent=(2, 2)))]


@pytest.mark.parametrize("rows", [5, 7, 9])
def test_a_weight_of_another_length_is_refused(tmp_path: Path, rows: int) -> None:
    """Also a longer one, whose first rows would be as many as the parts have."""
    with pytest.raises(CheckpointError, match=rf"other shape: both\.weight \[{rows}, 4\], not \[6, 4\]"):
        as_in_graph(open_checkpoint(saved(tmp_path, rows)), CUTS)


class Frozen(nn.Module):
    """A frozen weight of two matrices, and a layer that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(4, 6, bias=False), nn.Linear(3, 1)
        self.both.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.both(x).chunk(2, -1)
        return self.out(first * second).square().mean()


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_frozen_weights_have_no_update_in_parts(optimizer: str) -> None:
    module = Frozen()
    training = Training(global_batch=2, micro_batches=1, precision="fp32", optimizer=optimizer)
    before = {name: weight.clone() for name, weight in module.named_parameters()}
    step = UnshardedStep(module, training, OptimizerSettings(), frozenset({0}), cuts=CUTS)
    step((torch.randn(2, 4),), {})
    changed = [name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])]
    assert changed == ["out.weight", "out.bias"]
