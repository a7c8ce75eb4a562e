"""What is said where a model of the user's cannot be traced: the line that is the cause, and what to change."""

import inspect
import linecache
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.trace import trace
from tests.refusals import refused
from tests.unit.graph import untraceable

CAUSES = {
    "Branches": ("branches on the values of a tensor", "choose between tensors with torch.where"),
    "ReadsNumber": ("reads a number out of a tensor", r"keep it a tensor \(y / y.max\(\)"),
    "ReadsNumberOnly": ("reads a number out of a tensor", "or compute it before the call"),
    "ChangesInput": ("changes args_0 in its forward pass", r"change a copy, x = x.clone\(\)"),
    "PicksRows": ("depends on the content of a tensor", r"torch.where\(mask, x, 0\)"),
    "CountsRows": ("depends on the content of a tensor", "hide elements with a mask"),
    "ReadsNothing": ("reads an attribute that is not there", "the content of its text_config"),
    "Loops": ("loops as often as the values of a tensor say", "loop a number of times that is fixed before the call"),
    "Ranges": ("loops as often as the values of a tensor say", "loop a number of times that is fixed before the call"),
    "LeavesTorch": ("leaves PyTorch", "use PyTorch's operators in place of numpy's"),
    "Numpy": ("leaves PyTorch", "use PyTorch's operators in place of numpy's"),
    "MakesAsManyRows": ("takes a shape from the values of a tensor", "hide elements with a mask"),
    "Lists": ("reads a number out of a tensor", "keep it a tensor"),
    "OwnDraws": ("calls the autograd.Function Noisy .* draws random numbers by aten.rand_like", "use nn.Dropout"),
    "OwnTakesDict": ("calls the autograd.Function Scaled .* an argument of the type dict", "pass tensors, numbers"),
    "OwnNeedsData": (
        "calls the autograd.Function Pointed .* without data",
        "torch.library.custom_op, with register_fake",
    ),
    "OwnInPlace": ("calls the autograd.Function Passed .* returns an argument", "return a new tensor"),
    "CountsInBatch": ("scale_grad_by_freq.*micro-batches have parts of the batch", "leave it out"),
    "CountsInBags": ("scale_grad_by_freq.*micro-batches have parts of the batch", "leave it out"),
    "Packs": ("packs sequences by their lengths", "pad sequences to one length"),
    "Drops": ("draws random numbers of Python", "choose with a tensor that is an input"),
    "DropsTorch": ("branches on the values of a tensor", "choose between tensors with torch.where"),
    "NoLoss": (r"returned a tensor of shape \(4, 8\)", 'return the scalar loss, .* or in a dict as "loss"'),
    "Losses": ("returned several losses, loss_a, loss_b", "'loss': weight . loss_a . weight . loss_b"),
    "Named": ("returned several losses, near, far", "return their weighted sum as well"),
    "Sparse": ("makes a sparse tensor", "keep it dense"),
    "WithoutKernel": ("calls an operator that cannot run without data", "torch.library.custom_op with register_fake"),
    "TakesGradient": ("takes a gradient in its forward pass", "a plan takes gradients of the loss alone"),
    "Hooks": ("changes gradients by a hook", "the backward of an autograd.Function"),
    "SpellsOut": ("spells out a size", r"write -1, or a size of the input \(x.shape\[0\]\)"),
    "MixesDtypes": ("mixes dtypes", r"x.to\(self.weight.dtype\)\), or plan in fp32"),
    "Convolves": ("mixes dtypes", r"x.to\(self.weight.dtype\)\), or plan in fp32"),
    "Starts": ("mixes dtypes.*aten.gru_cell.default is called on bfloat16 and float32", r"x.to\(self.weight.dtype\)"),
    "Norms": ("mixes dtypes.*aten.layer_norm.default is called on float32", r"x.to\(self.weight.dtype\)"),
    "Counts": ("mixes dtypes.*aten.linear.default is called on int64 and float32", r"x.to\(self.weight.dtype\)"),
    "Sizes": ("mixes sizes", r"module\(.args\), with what the factory returns, has to run in PyTorch"),
    "Broadcasts": ("mixes sizes", "has to run in PyTorch"),
    "Chooses": ("mixes sizes", "has to run in PyTorch"),
    "Aligns": ("calls a CTC loss that cannot run without data: aten._ctc_loss", "a row of padded targets for each"),
    "FlexAttention": ("calls FlexAttention", "F.scaled_dot_product_attention"),
    "Transforms": ("has not in 16 bits", "float32"),
    "OtherDevice": ("mixes tensors of different devices", "device=x.device"),
}


ON_META = (
    "Aligns",
    "Convolves",
    "Counts",
    "Norms",
    "OtherDevice",
    "Sizes",
    "Sparse",
    "Starts",
    "Transforms",
    "WithoutKernel",
)
"""Which can be traced with data, as no command does."""


def offending_line(module: type[nn.Module]) -> int:
    lines, first = inspect.getsourcelines(module)
    marked = [first + at for at, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return marked[0] if marked else module.forward.__code__.co_firstlineno


@pytest.mark.cases(8)
@pytest.mark.parametrize("name", CAUSES)
def test_names_the_line_and_what_to_change(name: str) -> None:
    linecache.checkcache()
    module = getattr(untraceable, name)
    with torch.device("meta" if name in ON_META else "cpu"):
        built, example = module(), torch.ones(4, 8)
    what, remedy = CAUSES[name]
    with pytest.raises(ModelError) as raised:
        trace(built, (example,))
    message = str(raised.value)
    assert re.search(rf"{what}.*; .*{remedy}", message), message
    assert f"{Path(untraceable.__file__).name}:{offending_line(module)}" in message
    assert "\n" not in message


def test_a_lazy_parameter_has_no_shape() -> None:
    with refused(ModelError, "lazy parameter", "nn.LazyLinear"):
        trace(nn.Sequential(nn.Linear(8, 4), nn.LazyLinear(1)), (torch.ones(4, 8),))


def test_all_modules_are_covered() -> None:
    nets = {
        name
        for name, found in vars(untraceable).items()
        if isinstance(found, type) and issubclass(found, untraceable.Net) and found is not untraceable.Net
    }
    assert nets == set(CAUSES)


def test_what_watches_autograd_functions_is_put_back() -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ModelError):
        trace(untraceable.OwnDraws(), (torch.ones(4, 8),))
    assert torch.autograd.Function.__dict__["apply"] is before


def test_a_weighted_sum_of_losses_is_a_loss() -> None:
    class Weighted(untraceable.Losses):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            losses = super().forward(x)
            return {"loss": losses["loss_a"] + 0.5 * losses["loss_b"], **losses}

    graph = trace(Weighted(), (torch.ones(4, 8),))
    assert graph.operators[graph.producer[graph.loss]].op == "aten.add.Tensor"
