"""Modes that were entered before hear of no plain question, but of those of tensors that answer for themselves."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from planner.graph.tracing.plain_questions import PlainQuestions


class Heard(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = list[str]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Own(torch.Tensor):
    """A class that is asked itself."""


def test_modes_hear_of_what_computes_alone() -> None:
    x, parameter, own = torch.ones(2, 3), torch.nn.Parameter(torch.ones(2)), torch.ones(2).as_subclass(Own)
    with Heard() as heard, PlainQuestions():
        assert (x.shape, x.stride(), parameter.dtype, parameter.requires_grad) == ((2, 3), (3, 1), torch.float32, True)
        assert torch.equal((x + 1).t(), torch.full((3, 2), 2.0))
        assert own.dim() == 1
    assert heard.names == ["add", "t", "full", "equal", "dim"]
