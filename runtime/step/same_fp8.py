"""Makes the plain module compute the same linear layers in fp8 as a plan does, by the same recipe.

The module is called as its author wrote it; calls of `F.linear` with the weight of such a layer are caught where
PyTorch lets functions be overridden. A function that computes such a layer inside of itself, as
`F.multi_head_attention_forward` does, is not seen through: what was not met at the end says so.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError
from planner.graph.fp8 import Recipe, recipe_of
from planner.graph.operator_graph import Operator
from runtime.ops.fp8_linear import fp8_linear


def recipes_of(operators: Iterable[Operator]) -> dict[str, Recipe]:
    """The recipes of the linear layers in fp8, by the names of their weights."""
    found = ((op.operands[1], recipe_of(op)) for op in operators if len(op.operands) > 1)
    return {name: recipe for name, recipe in found if recipe is not None}


class SameFp8(TorchFunctionMode):
    """A context in which the linear layers of a module whose weights have `recipes`, by their names, are in fp8."""

    def __init__(self, module: nn.Module, recipes: Mapping[str, Recipe]) -> None:
        super().__init__()
        weights = dict(module.named_parameters()) if recipes else {}
        self._recipes = {id(weights[name]): recipe for name, recipe in recipes.items()}
        self._left = {id(weights[name]): name for name in recipes}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) if func is F.linear else {}
        given = {**named, **(kwargs or {})} if named else {}
        recipe = self._recipes.get(id(given.get("weight")))
        if recipe is None:
            return func(*args, **(kwargs or {}))
        self._left.pop(id(given["weight"]), None)
        return fp8_linear(given["input"], given["weight"], given.get("bias"), recipe)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and self._left:
            raise ModelError(
                f"the module computes with '{next(iter(self._left.values()))}' inside of a function that is not seen"
                " through, where the plan has a linear layer in fp8; leave it out (--fp8-left-out), or do not compare"
                " (--no-check)"
            )
