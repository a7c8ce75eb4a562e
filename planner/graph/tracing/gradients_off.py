"""Regions of a model in which PyTorch records no gradients: `torch.no_grad`, `torch.inference_mode`, `enable_grad`.

    with torch.no_grad():                   traced as
        target = self.teacher(x)            target = detach(teacher(x))

A model is traced without autograd, where such a region would leave no trace. While this is active, results of operators
in such a region are detached. Detaches of values without gradients are removed afterwards, as most such regions compute
positions and masks.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from planner.errors import ModelError
from planner.graph.operator_graph import DETACH, Operator, OperatorGraph, ValueRef
from planner.graph.rewriting.unread import rewired, without_unread
from planner.graph.tracing.known_tensors import changes_first


class GradientsOff(TorchFunctionMode):
    """While active, results are detached where a model switches gradients off."""

    def __init__(self) -> None:
        super().__init__()
        self._on = list[bool]()  # for each region that was entered, the innermost last

    @contextmanager
    def training(self) -> Iterator[None]:
        """The forward pass of a model in training, even where its caller has switched gradients off."""
        entered = (
            _entering(torch.no_grad, self._on, lambda region: False),
            _entering(torch.enable_grad, self._on, lambda region: True),
            _entering(torch.set_grad_enabled, self._on, lambda region: region.mode),
            _entering(torch.inference_mode, self._on, lambda region: self._on[-1] and not region.mode),
        )
        self._on.append(True)
        try:
            with entered[0], entered[1], entered[2], entered[3], _refusing_calls():
                yield
        finally:
            self._on.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._on or self._on[-1]:
            return func(*args, **(kwargs or {}))
        if changes_first(func):
            args = (args[0], *pytree.tree_map(_detached, args[1:]))
        found = func(*args, **(kwargs or {}))
        given = {id(leaf) for leaf in pytree.tree_leaves((args, kwargs))}  # what is changed in place stays itself
        return pytree.tree_map(lambda leaf: leaf if id(leaf) in given else _detached(leaf), found)


def _detached(leaf: Any) -> Any:
    tensor = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    return leaf.detach() if tensor else leaf


@contextmanager
def _entering(kind: Any, regions: list[bool], on: Callable[[Any], bool]) -> Iterator[None]:
    """Note when a region of a kind begins and ends, in which gradients are `on`. PyTorch itself switches gradients only
    in other threads."""
    enter, leave = kind.__enter__, kind.__exit__
    recorded, own = torch.is_grad_enabled(), threading.get_ident()

    def entering(region: Any) -> None:
        if threading.get_ident() == own:
            regions.append(on(region))
        else:
            enter(region)

    def leaving(region: Any, *raised: Any) -> None:
        if threading.get_ident() == own:
            regions.pop()
            torch._C._set_grad_enabled(recorded)
        else:
            leave(region, *raised)

    with patch.object(kind, "__enter__", entering), patch.object(kind, "__exit__", leaving):
        yield


@contextmanager
def _refusing_calls() -> Iterator[None]:
    """Refuse `torch.set_grad_enabled(..)` of a model outside of `with`, because such a region has no end."""
    begin, enter = torch.set_grad_enabled.__init__, torch.set_grad_enabled.__enter__
    begun: dict[int, tuple[object, str]] = {}  # by identity: the object, and the line that made it
    own = threading.get_ident()

    def beginning(region: Any, mode: bool) -> None:
        caller = sys._getframe(1)
        if threading.get_ident() != own or caller.f_globals.get("__name__", "").startswith("torch."):
            begin(region, mode)
            return
        region.prev, region.mode = torch.is_grad_enabled(), mode
        begun[id(region)] = region, f"{caller.f_code.co_filename}:{caller.f_lineno}"

    def entering(region: Any) -> None:
        begun.pop(id(region), None)
        enter(region)

    with (
        patch.object(torch.set_grad_enabled, "__init__", beginning),
        patch.object(torch.set_grad_enabled, "__enter__", entering),
    ):
        yield
    for _, at in begun.values():
        raise ModelError(
            f"torch.set_grad_enabled is called at {at} without `with`, and no plan says where that ends; write"
            " `with torch.no_grad():`, or detach() what has no gradient"
        )


def without_needless_detaches(graph: OperatorGraph) -> OperatorGraph:
    """`graph` without detaches of values that no gradient flows through."""
    names: dict[str, str] = {}
    operators: list[Operator] = []
    for op in graph.operators:
        known = op.reading(names)
        (result, *_), given = known.results, known.arguments[:1]
        if op.op == DETACH and isinstance(given[0], ValueRef) and given[0].name not in graph.differentiable:
            assert result is not None, "a detach makes a tensor"
            names[result] = given[0].name
        else:
            operators.append(known)
    return without_unread(rewired(graph, operators, names), ()) if names else graph
