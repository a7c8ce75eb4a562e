"""Buffers that change once a step: who says so, and what is changed."""

from collections.abc import Mapping

import torch
from torch import nn

from planner.models.experts.router import Router, Routing
from runtime.parameters.after_step import step_ends


class Counting(nn.Module):
    """A buffer of its own, and a module inside that counts too."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.inner = inner

    def after_step(self, buffers: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return {"steps": buffers["steps"] + 1}


def test_each_module_changes_its_own_buffers() -> None:
    module = Counting(nn.Sequential(Counting(), nn.BatchNorm1d(2)))
    held = dict(module.named_buffers())
    before = {name: content.clone() for name, content in held.items()}
    ends = step_ends(module)
    assert [end.path for end in ends] == ["", "inner.0"]
    for end in ends:
        end.apply(held)
    changed = {name for name, content in held.items() if not torch.equal(content, before[name])}
    assert changed == {"steps", "inner.0.steps"}
    assert not module.steps.any()  # what the module holds is the business of whoever trains it


def test_a_router_without_a_bias_changes_nothing() -> None:
    held: dict[str, torch.Tensor] = {}
    (end,) = step_ends(nn.ModuleDict({"router": Router(4, Routing(chosen=2))}))
    end.apply(held)
    assert (end.path, end.buffers, held) == ("router", (), {})
