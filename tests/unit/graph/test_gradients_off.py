"""Where a model switches gradients off, none flow: as PyTorch has it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import DETACH
from planner.graph.trace import trace
from planner.graph.tracing.gradients_off import GradientsOff


class Model(nn.Module):
    """A student and a teacher, whose results come out of a region of some kind."""

    running: torch.Tensor

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.student, self.teacher, self.other = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        self.register_buffer("running", torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.student(x)
        target = getattr(self, self.kind)(y)
        return (y - target).square().mean()

    def no_grad(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.teacher(y).tanh() + y

    @torch.no_grad()
    def decorated(self, y: torch.Tensor) -> torch.Tensor:
        return self.teacher(y)

    @torch.inference_mode()
    def inference(self, y: torch.Tensor) -> torch.Tensor:
        return self.teacher(y)

    def set_off(self, y: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(False):
            return self.teacher(y)

    def set_on(self, y: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(True), torch.inference_mode(False):
            return self.teacher(y)

    def on_inside(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            away = self.teacher(y)
            with torch.enable_grad():
                inside = self.other(y)
            again = self.teacher(away)
        return inside + again

    def in_place(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.running += y[0].view_as(self.running)
            self.running[:] = self.running
            self.running.copy_(y.sum(0))
        return self.teacher(y) * self.running

    def called(self, y: torch.Tensor) -> torch.Tensor:
        torch.set_grad_enabled(False)
        with torch.set_grad_enabled(True):
            return self.teacher(y)

    def positions(self, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            angles = torch.outer(torch.arange(2.0, dtype=torch.float64), self.running).cos()
        return self.teacher(y) * angles


KINDS = ("no_grad", "decorated", "inference", "set_off", "set_on", "on_inside", "in_place", "positions")


@contextmanager
def as_traced() -> Iterator[None]:
    with GradientsOff() as regions, regions.training():
        yield


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "inference"])  # autograd refuses what comes of it
def test_gradients_are_those_of_pytorch(kind: str) -> None:
    found = []
    for traced in (False, True):
        torch.manual_seed(0)
        model, x = Model(kind), torch.randn(2, 4, dtype=torch.float64)
        if traced:
            with as_traced():
                loss = model(x)
        else:
            loss = model(x)
        assert torch.is_grad_enabled()
        found.append((loss.detach(), torch.autograd.grad(loss, [*model.parameters()], allow_unused=True)))
    (loss, plain), (same, known) = found
    assert torch.equal(loss, same)
    for one, other in zip(plain, known, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_has_a_gradient_is_detached(kind: str) -> None:
    graph = trace(Model(kind), (torch.randn(2, 4, dtype=torch.float64),))
    assert all(op.operands[0] in graph.differentiable for op in graph.operators if op.op == DETACH)
    stopped = {"teacher.weight", "other.weight"} - _reached(graph)
    assert stopped == {
        "on_inside": {"teacher.weight"},
        **{one: {"other.weight"} for one in ("set_on", "positions", "in_place")},
    }.get(kind, {"teacher.weight", "other.weight"})


def _reached(graph: Any) -> set[str]:
    """The weights that the loss has gradients for."""
    wanted = {graph.loss}
    for op in reversed(graph.operators):
        if wanted & {*op.results} and op.op != DETACH:
            wanted |= {*op.operands}
    return wanted & {parameter.name for parameter in graph.parameters if parameter.trainable}


def test_other_threads_go_on_as_they_do() -> None:
    found: list[bool] = []

    def other() -> None:
        for region in (torch.no_grad, lambda: torch.set_grad_enabled(False), torch.inference_mode):
            with region():
                found.append(torch.is_grad_enabled())
            found.append(torch.is_grad_enabled())

    with as_traced():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [False, True] * 3


def test_gradients_that_are_switched_off_for_good_are_refused() -> None:
    with pytest.raises(ModelError, match=r"set_grad_enabled is called at .*test_gradients_off.py:\d+ without `with`"):
        trace(Model("called"), (torch.randn(2, 4, dtype=torch.float64),))


class Stacks(nn.Module):
    """Two stacks of equal layers, of which one is a teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = (nn.ModuleList(nn.Linear(4, 4) for _ in range(3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = x
        with torch.no_grad():
            for layer in self.teacher:
                target = layer(target)
        for layer in self.student:
            x = layer(x)
        return (x - target).square().mean()


def test_layers_that_are_traced_once_are_as_if_all_were() -> None:
    short, full = (trace(Stacks(), (torch.randn(2, 4),), full=full) for full in (False, True))
    assert [op.op for op in short.operators] == [op.op for op in full.operators]
    assert _reached(short) == _reached(full) == {name for name in full.parameter_names if name.startswith("student")}
