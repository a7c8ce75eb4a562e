"""Makes the plain module compute the same linear layers and experts in fp8 as a plan does, by the same recipe.

The module is called as its author wrote it; calls of `F.linear` with the weight of such a layer, and of
`planner::experts` with such experts, are caught where PyTorch lets functions be overridden. A function that computes
such a layer inside of itself, as `F.multi_head_attention_forward` does, is not seen through: what was not met at the
end says so.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError
from planner.fp8_recipes import Recipe
from planner.graph.expert_load import EXPERTS_OPERATOR
from planner.graph.fp8 import Fp8, recipe_of
from planner.graph.operator_graph import Operator
from runtime.ops.delayed_scales import DelayedScales
from runtime.ops.fp8_linear import fp8_linear

_GATE, _FP8 = 3, 11
"""Of the operator with experts: where the first of its matrices stands, and where its recipe and `dispatch` do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsIn:
    """How experts are computed: the name of a recipe, none without one, and whether tokens come to them in 8 bits."""

    fp8: str
    dispatch: bool


Recipes = Mapping[str, Recipe | ExpertsIn]
"""Of linear layers by the names of their weights, and of experts by that of their first matrices."""


def recipes_of(operators: Iterable[Operator]) -> dict[str, Recipe | ExpertsIn]:
    """The recipes of what is in fp8."""
    found: dict[str, Recipe | ExpertsIn] = {}
    for op in operators:
        recipe = recipe_of(op)
        if recipe is not None:
            found[op.operands[1]] = recipe
        elif op.op == EXPERTS_OPERATOR and len(op.arguments) > _FP8 and any(op.arguments[_FP8:]):
            fp8, dispatch = op.arguments[_FP8:]
            found[op.operands[_GATE]] = ExpertsIn(fp8=str(fp8), dispatch=bool(dispatch))
    return found


def delayed_scales(module: nn.Module, recipes: Recipes, fp8: Fp8) -> DelayedScales:
    """Those of what has `recipes`, as a plan on one device has them."""
    weights = dict(module.named_parameters())
    names = [name for name, recipe in recipes.items() if isinstance(recipe, Recipe) and recipe.delayed]
    wide = {weights[name].dtype for name in names} == {torch.float64}
    return DelayedScales(names, fp8, next(iter(weights.values())).device, wide=wide)


class SameFp8(TorchFunctionMode):
    """A context in which what has `recipes`, by the names of its weights in a module, is computed in fp8, with these
    `scales` where they are those of steps before."""

    def __init__(self, module: nn.Module, recipes: Recipes, scales: DelayedScales | None = None) -> None:
        super().__init__()
        weights = dict(module.named_parameters()) if recipes else {}
        self._recipes = {id(weights[name]): recipe for name, recipe in recipes.items()}
        self._scales = {} if scales is None else {id(weights[name]): scales.of(name) for name in scales.names}
        self._left = {id(weights[name]): name for name in recipes}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.planner.experts.default:
            how = self._recipes.get(id(args[_GATE])) if len(args) > _GATE else None
            if not isinstance(how, ExpertsIn):
                return func(*args, **(kwargs or {}))
            self._left.pop(id(args[_GATE]), None)
            return func(*args, **(kwargs or {}), fp8=how.fp8, dispatch=how.dispatch)
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) if func is F.linear else {}
        given = {**named, **(kwargs or {})} if named else {}
        recipe = self._recipes.get(id(given.get("weight")))
        if not isinstance(recipe, Recipe):
            return func(*args, **(kwargs or {}))
        self._left.pop(id(given["weight"]), None)
        return fp8_linear(
            given["input"], given["weight"], given.get("bias"), recipe, delayed=self._scales.get(id(given["weight"]))
        )

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if error is None and self._left:
            raise ModelError(
                f"the module computes with '{next(iter(self._left.values()))}' inside of a function that is not seen"
                " through, where the plan has it in fp8; leave it out (--fp8-left-out; no --fp8-experts), or do not"
                " compare (--no-check)"
            )
