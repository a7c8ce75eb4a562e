"""Makes the unsharded module compute the same linear layers and experts in fp8 as a plan, by the same recipe.

The module is called as its author wrote it. Calls of `F.linear` with the weight of such a layer, and of
`planner::experts` with such experts, are intercepted where PyTorch lets functions be overridden. A layer that is
computed inside of another function, as in `F.multi_head_attention_forward`, cannot be intercepted; layers that were not
met by the end reveal it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from planner.errors import ModelError
from planner.fp8_recipes import EXPERT_TENSORS, LAYER_TENSORS, RECIPES, Recipe
from planner.graph.expert_load import EXPERTS_OPERATOR, matrices_of_experts
from planner.graph.fp8 import Fp8, is_linear, recipe_of
from planner.graph.operator_graph import Cut, Operator
from planner.models.experts.delayed import DelayedProducts
from planner.models.experts.mixture import matrices_of
from planner.models.experts.rows import activation_of
from runtime.ops.experts import SplitExperts, split_experts
from runtime.ops.fp8.delayed_scales import DelayedScales, LayerScales
from runtime.ops.fp8.fp8_linear import fp8_linear
from runtime.parameters.fused import all_in_graph, part_of

_GATE, _TENSORS, _FP8 = 3, 6, 11
"""Positions in the arguments of the experts operator: of its first matrix, which is None without a gate; of its
settings; and among these of its recipe and `dispatch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsIn:
    """How experts with this number of `matrices` are computed: the name of a recipe (None: no fp8), and whether tokens
    are dispatched in 8 bits."""

    fp8: str
    dispatch: bool
    matrices: int


Recipes = Mapping[str, tuple[Recipe | ExpertsIn | None, ...]]
"""Recipes of linear layers by the names of their weights, and of experts by the names of their first matrices: a single
one, or, where only some of the layers that share a weight are in fp8, one for each call in order."""


def recipes_of(operators: Iterable[Operator]) -> dict[str, tuple[Recipe | ExpertsIn | None, ...]]:
    """The recipes of all operators in fp8."""
    found: defaultdict[str, list[Recipe | ExpertsIn | None]] = defaultdict(list)
    for op in operators:
        if is_linear(op):
            found[op.operands[1]].append(recipe_of(op))
        elif op.op == EXPERTS_OPERATOR and len(op.arguments) > _FP8 and any(op.arguments[_FP8:]):
            fp8, dispatch = op.arguments[_FP8:]
            matrices = matrices_of_experts(op)
            found[matrices[0]].append(ExpertsIn(fp8=str(fp8), dispatch=bool(dispatch), matrices=len(matrices)))
    return {
        name: tuple(each) if len(set(each)) > 1 else (each[0],)
        for name, each in found.items()
        if any(recipe is not None for recipe in each)
    }


def scales_of_module(
    module: nn.Module, recipes: Recipes, fp8: Fp8, cuts: Mapping[str, Cut] | None = None
) -> DelayedScales:
    """The delayed scales of the layers with `recipes`, as for a plan on one device."""
    weights = all_in_graph(dict(module.named_parameters()), cuts or {})
    shapes: dict[str, tuple[int, ...]] = {}
    for name, each in recipes.items():
        for one in each:
            if isinstance(one, Recipe) and one.delayed:
                shapes[name] = (LAYER_TENSORS,)
            elif isinstance(one, ExpertsIn) and one.fp8 and RECIPES[one.fp8].delayed:
                shapes[name] = (EXPERT_TENSORS[one.matrices], weights[name].shape[0])
    wide = {weights[name].dtype for name in shapes} == {torch.float64}
    return DelayedScales(shapes, fp8, next(iter(weights.values())).device, wide=wide)


class SameFp8(TorchFunctionMode):
    """A context for one call of a module, in which the layers with `recipes`, by the names of their weights, are
    computed in fp8, with these `scales` under delayed scaling. `cuts` are parameters that are parts of weights."""

    def __init__(
        self,
        module: nn.Module,
        recipes: Recipes,
        scales: DelayedScales | None = None,
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        super().__init__()
        weights = dict(module.named_parameters()) if recipes else {}
        self._parts: dict[int, list[tuple[str, Cut | None]]] = {
            id(one): [(name, None)] for name, one in weights.items()
        }
        for of, each in groupby((cuts or {}).items() if recipes else (), key=lambda one: one[1].of):
            self._parts[id(weights[of])] = list(each)
        self._recipes, self._scales = recipes, scales
        self._calls: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.planner.experts.default:
            first = next((matrix for matrix in args[_GATE:_TENSORS] if matrix is not None), None)
            name = "" if first is None else self._names_of(first)[0][0]
            how = self._next(name)
            if not isinstance(how, ExpertsIn):
                return func(*args, **(kwargs or {}))
            if (scales := self._scales_of(name)) is not None:
                return _delayed_experts(args[:_TENSORS], how, scales, **(kwargs or {}))
            return func(*args, **(kwargs or {}), fp8=how.fp8, dispatch=how.dispatch)
        named = dict(zip(("input", "weight", "bias"), args, strict=False)) if func is F.linear else {}
        given = {**named, **(kwargs or {})} if named else {}
        parts = self._names_of(given["weight"]) if given else []
        recipes = [self._next(name) for name, _ in parts]
        if not any(isinstance(recipe, Recipe) for recipe in recipes):
            return func(*args, **(kwargs or {}))
        found = []
        for (name, cut), recipe in zip(parts, recipes, strict=True):
            weight, bias = given["weight"], given.get("bias")
            if cut is not None:
                weight, bias = part_of(weight, cut), None if bias is None else part_of(bias, cut)
            if isinstance(recipe, Recipe):
                found.append(fp8_linear(given["input"], weight, bias, recipe, known=self._scales_of(name)))
            else:
                found.append(F.linear(given["input"], weight, bias))
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def _names_of(self, weight: torch.Tensor) -> list[tuple[str, Cut | None]]:
        """The parameters of the graph that a weight is, or into which it is taken apart."""
        return self._parts.get(id(weight), [("", None)])

    def _scales_of(self, name: str) -> LayerScales | None:
        return None if self._scales is None or name not in self._scales.names else self._scales.of(name)

    def _next(self, name: str) -> Recipe | ExpertsIn | None:
        """The recipe of the next call with a weight."""
        each = self._recipes.get(name)
        if each is None:
            return None
        self._calls[name] += 1
        return each[(self._calls[name] - 1) % len(each)]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        unmet = next((name for name in self._recipes if not self._calls[name]), None)
        if error is None and unmet is not None:
            raise ModelError(
                f"the plan has '{unmet}' in fp8, but the module uses it inside of a function that cannot be traced;"
                " leave it out of fp8 (--fp8-left-out; no --fp8-experts), or do not compare (--no-check)"
            )


def _delayed_experts(
    operands: tuple[Any, ...],
    how: ExpertsIn,
    scales: LayerScales,
    *,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    limit: float = 0.0,
    slope: float = 1.0,
    offset: float = 0.0,
    activation: str = "silu",
) -> torch.Tensor:
    """Experts with delayed scales, all of them on this device."""
    x, weights, chosen, gate, up, down = operands
    act = activation_of(activation, gated=gate is not None, limit=limit, slope=slope, offset=offset)
    products = DelayedProducts(recipe=RECIPES[how.fp8], scales=scales, first=act.first)
    split = SplitExperts(experts=len(down), cuts=(), products=products, dispatch=how.dispatch, activation=act)
    matrices = matrices_of(gate, up, down, gate_bias, up_bias)
    return split_experts(x, weights, chosen, (*matrices.first, matrices.down, *matrices.biases), split)
