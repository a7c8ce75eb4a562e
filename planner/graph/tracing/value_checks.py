"""Questions about the values of tensors, asked while a module is traced on tensors without values.

    nn.TransformerEncoder()(x, mask=mask)    is this mask a causal one?    no answer is needed: the mask is applied
    torch.distributions.Normal(mean, scale)  are these values allowed?     taken as allowed
    if labels.max() >= self.classes: raise   is there an error to raise?   taken as none
    assert (lengths > 0).all()
    torch._check(mask.sum().item() == n)
    if not torch.isfinite(x).all(): ...      did anything overflow?        nothing did: a run stops where it does

The answers change nothing that is computed. A model that runs without a plan really asks all but the first question. No
answer is given to checks within a `try` or a `suppress` that catches errors, nor to whether numbers are finite that no
parameter made: masks often are not, nor are inputs with gaps.
"""

import ast
import functools
import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.distributions import Distribution
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from planner.graph.tracing.known_tensors import KnownTensors, Writes

_FINITE: Mapping[Any, bool] = {
    torch.isfinite: True,
    torch.Tensor.isfinite: True,
    torch.isinf: False,
    torch.Tensor.isinf: False,
    torch.isnan: False,
    torch.Tensor.isnan: False,
}
"""What these functions return for numbers that have not overflowed."""
_TOGETHER: Mapping[Any, bool] = {torch.all: True, torch.Tensor.all: True, torch.any: False, torch.Tensor.any: False}
"""The results for equal elements: `all` of true elements is true, `any` of false elements is false."""


class ChecksPassed(TorchFunctionMode):
    """While active, tensors that only decide whether an error is raised have the values that raise none, and
    numbers that parameters made are finite."""

    def __init__(self) -> None:
        super().__init__()
        self._writes = Writes()
        self._finite = KnownTensors[bool](self._writes)  # results of such checks, with their value for finite numbers
        self._computed = WeakTensorKeyDictionary()  # tensors that parameters have made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.__bool__:
            answer = self._finite.said(args[0])
            answer = _asked() if answer is None else answer
            return func(*args) if answer is None else answer
        result = self._writes.call(func, args, given)
        operands = [leaf for leaf in pytree.tree_leaves((args, given)) if isinstance(leaf, torch.Tensor)]
        if any(isinstance(each, nn.Parameter) or each in self._computed for each in operands):
            made = operands[:1] if func is torch.Tensor.__setitem__ else pytree.tree_leaves(result)
            self._computed.update((each, True) for each in made if isinstance(each, torch.Tensor))
        if not isinstance(result, torch.Tensor) or not operands or "out" in given:
            return result
        if func in _FINITE and operands[0] in self._computed:
            self._finite.say(result, _FINITE[func])
        elif func in _TOGETHER and self._finite.said(operands[0]) is _TOGETHER[func]:
            self._finite.say(result, _TOGETHER[func])
        return result


def _asked() -> bool | None:
    """The value that a tensor must have which a model asks for right now (`_passing`)."""
    asking: FrameType | None = sys._getframe(2)
    while asking is not None and asking.f_code.co_name == "__torch_function__":  # other modes' on the way
        asking = asking.f_back
    return None if asking is None else _passing(asking.f_code.co_filename, asking.f_lineno)


_ASSERTED = frozenset(
    {"aten._assert_scalar.default", "aten.sym_constrain_range.default", "aten.sym_constrain_range_for_size.default"}
)


def without_asserted_numbers(graph: fx.Graph) -> None:
    """Remove from an exported graph the assertions about numbers that are read out of tensors, and these reads."""
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users or _writes(node):
            continue
        if str(node.target) in _ASSERTED or _is_number_of_content(node.meta.get("val")):
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    """Whether a call changes one of its operands, such as filling a slice of some samples."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_number_of_content(value: Any) -> bool:
    """Whether a number, or the shape of a tensor, is unknown before there are values."""
    if isinstance(value, torch.Tensor):
        return not all(isinstance(extent, int) for extent in value.shape)
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat)


def _passing(file: str, line: int) -> bool | None:
    """The value that the tensors asked in a line must have so that nothing is raised there; None where their values
    decide more than that."""
    tree = _parsed("".join(linecache.getlines(file)))
    if tree is None:
        return None
    asking = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If | ast.Assert | ast.While | ast.IfExp)
        and node.test.lineno <= line <= (node.test.end_lineno or node.test.lineno)
    ]
    if len(asking) != 1 or not _only_raises(asking[0]) or _caught(tree, asking[0]):
        return None
    wanted = set(_wanted(asking[0].test, isinstance(asking[0], ast.Assert)))
    return wanted.pop() if len(wanted) == 1 else None


@functools.lru_cache(maxsize=4)
def _parsed(text: str) -> ast.Module | None:
    """The parsed code of a file, cached because every layer of a model may ask in it; None where it is no code."""
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _only_raises(node: ast.If | ast.Assert | ast.While | ast.IfExp) -> bool:
    if isinstance(node, ast.Assert):
        return True
    return isinstance(node, ast.If) and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)


def _caught(tree: ast.Module, node: ast.AST) -> bool:
    """Whether what is raised there may be caught by the code around it."""
    catching = (each.body for each in ast.walk(tree) if _catches(each))
    return any(node is part for body in catching for line in body for part in ast.walk(line))


def _catches(node: ast.AST) -> TypeGuard[ast.Try | ast.TryStar | ast.With | ast.AsyncWith]:
    """Whether errors in the body of a statement may be caught there: `try` with handlers, `with suppress(...)`."""
    if isinstance(node, ast.With | ast.AsyncWith):
        managers = (item.context_expr for item in node.items)
        names = (ast.unparse(each.func) for each in managers if isinstance(each, ast.Call))
        return any(name.rpartition(".")[2] == "suppress" for name in names)
    return isinstance(node, ast.Try | ast.TryStar) and bool(node.handlers)


def _wanted(test: ast.expr, value: bool) -> Iterator[bool]:
    """The value that each part of a test must have for the test to have a value."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _wanted(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _wanted(part, value)
    else:
        yield value


@contextmanager
def without_value_checks() -> Iterator[None]:
    """While active, masks of `nn.Transformer` and its parts are causal only where a caller says so, arguments of
    distributions are not checked unless a caller asks for it, and checks of a model that only raise are passed."""

    def as_said(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with (
        ChecksPassed(),
        patch.object(transformer, "_detect_is_causal_mask", as_said),
        patch.object(Distribution, "_validate_args", False),
    ):
        yield
