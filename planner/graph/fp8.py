"""Linear layers whose products are computed in fp8, in the graph that plans are made for.

    traced     x, W ─────> linear ─────────────> y
    with fp8   x, W ─┬─> q(x), q(W) ─> product ─> y        q   cast to e4m3, divided by a scale first
                     └─────────────── kept for the backward pass, as they are

Weights, activations, gradients and everything between products stay in the precision of the training. A recipe says
what one scale covers, what gradients are cast to, and whether weight gradients are products in fp8, too. The names are
those of torchao:

    tensorwise           a scale for each tensor           gradients in e5m2    all three products in fp8
    delayed              the same, from earlier steps      gradients in e5m2    all three products in fp8
    rowwise              a scale for each row or column    gradients in e4m3    all three products in fp8
    rowwise_with_gw_hp   a scale for each row or column    gradients in e4m3    weight gradients as without fp8
    blockwise            a scale for 128 of a row, and     gradients in e4m3    all three products in fp8; those of
                         for 128 x 128 of a weight                              weight gradients as rowwise
    mxfp8                a power of two for 32 of a    gradients in e4m3    all three products in fp8
                         row, of either operand

Blocks are those of DeepSeek-V3 (`blockwise` in Transformer Engine), which also has a scale for 128 tokens in its weight
gradients. Which tokens share such a block would depend on the plan, so a column has one scale here. Scales are computed
from the current tensors ("current" or "dynamic" scaling), except for `delayed`. Lines of 32 are those of
the OCP Microscaling Formats; those of weight gradients are of 32 tokens of a sample. A scale covers the whole
tensor, row, column or block, however a plan cuts it: devices that have pieces of it agree on the largest element, so
that a plan computes what the unsharded model computes under the same recipe.

Linear layers with trainable weights inside the repeated blocks are in fp8 (all but the last one where nothing repeats).
If asked for (`experts`), so are the experts: a scale for a tensor then covers the rows, or the matrix, of each expert.
Layers whose names match a pattern of `left_out` are excluded; the search also leaves out layers that are faster without
fp8 (`planner.strategy_search.request.fp8_layers`). Embeddings, heads, routers of experts and attention are not in fp8.
Tokens may be sent to experts in fp8 (`dispatch`), whatever the experts compute in: e4m3 with a scale for 128 elements
of a token. The gradients of the experts' results are sent so, too; what comes back from the experts is not (DeepSeek-AI
2024, arXiv 2412.19437, section 3.3.3).

Source: Micikevicius et al., "FP8 formats for deep learning", 2022, arXiv 2209.05433 (e4m3 forward, e5m2 for gradients,
one scale for each tensor); torchao 0.14, `torchao.float8.config` (the names of recipes).
"""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from planner.errors import RequestError, did_you_mean
from planner.faults import Fault
from planner.fp8_recipes import EXPERT_TENSORS, HISTORY, LAYER_TENSORS, RECIPES, Recipe
from planner.graph.expert_load import EXPERTS_OPERATOR, matrices_of_experts
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType
from planner.graph.part_names import parameter_matches
from planner.graph.per_replica import PER_REPLICA, called
from planner.matching import matches

_LINEAR = "aten.linear.default"
_PREFIX = "planner.fp8_linear."
_TENSORS, _SETTINGS = 6, (0, 1.0, False, 1, 1)
"""Arguments of an operator with experts: its tensors, and its usual settings (`planner.models.experts.mixture`)."""
_FIRST, _RECIPE = 3, 11
"""The place of its first matrix among its operands, and of its recipe among its arguments."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
"""The number of a block in the name of a weight."""
IN_FP8 = "weight_in_fp8"
"""The keyword of a linear layer in fp8 whose weight is cast where it is stored, and gathered in fp8."""
_WORDS = 16
"""Extents of products in fp8 are multiples of this many elements, as the kernels of devices demand."""
_LONGEST, _WIDEST = 2**16, 64
"""Most steps of a history, and the largest margin."""


WORD = "fp8"
"""The precision that stands for the usual recipe."""

USUAL = "tensorwise"
"""The recipe that `--precision fp8` means: the fastest one, and the default of torchao and Transformer Engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Which linear layers are computed in fp8, and how: the name of a recipe, or none; patterns of the names of
    operators, modules or weights that are `left_out`; whether weights of blocks are `gathered` in fp8; whether
    `experts` are in fp8, and tokens that are sent to them (`dispatch`). Delayed scales are those of the largest
    elements of `history` steps, times 2 to the `margin`."""

    recipe: str = ""
    left_out: tuple[str, ...] = ()
    gathered: bool = False
    experts: bool = False
    dispatch: bool = False
    history: int = HISTORY
    margin: int = 0

    def __bool__(self) -> bool:
        return bool(self.recipe)

    def text(self) -> str:
        """As people read it."""
        left = f" but for {', '.join(self.left_out)}" if self.left_out else ""
        more = ", weights gathered in fp8" if self.gathered else ""
        more += (", experts" if self.experts else "") + (", dispatch" if self.dispatch else "")
        if self.delayed and (self.history, self.margin) != (HISTORY, 0):
            more += f", history {self.history}" + (f", margin {self.margin}" if self.margin else "")
        return f"{self.recipe}{left}{more}" if self.recipe else "none"

    @property
    def delayed(self) -> bool:
        """Whether scales are those of earlier steps."""
        recipe = RECIPES.get(self.recipe)
        return recipe is not None and recipe.delayed


NO_FP8 = Fp8()

GATHERED = ("tensorwise", "delayed", "blockwise")
"""Recipes whose weights may be gathered in fp8: the forward and the backward product use the same cast. Scales for rows
or lines, along the sum of a product, differ between the two."""

ALL_LAYERS = ("*",)
"""The pattern that means every linear layer."""

_FP32 = 4  # bytes


def history_bytes(fp8: Fp8, scales: Sequence[int] = (LAYER_TENSORS,)) -> float:
    """Bytes on a device for tensors with these delayed `scales` (`delayed_scales`): for each scale the largest elements
    of earlier steps, that of this step, and the scale (`runtime.ops.fp8.delayed_scales`)."""
    return float(math.prod(scales) * (fp8.history + 2) * _FP32)


def fp8_fault(fp8: Fp8) -> Fault | None:
    """Why these settings are impossible; None where they are possible."""
    if fp8.recipe and fp8.recipe not in RECIPES:
        reason = f"is no recipe; take one of {', '.join(RECIPES)}"
        return Fault(option="fp8", value=repr(fp8.recipe), reason=reason)
    if fp8.left_out and not fp8.recipe:
        reason = "keeps layers out of fp8, and no recipe is given; give one (fp8), or leave it out"
        return Fault(option="fp8_left_out", value=", ".join(fp8.left_out), reason=reason)
    for option, asked in (("fp8_experts", fp8.experts), ("fp8_dispatch", fp8.dispatch)):
        if asked and not fp8.recipe:
            return Fault(option=option, value="true", reason="needs a recipe of linear layers; give one (fp8)")
    if fp8.gathered and fp8.recipe not in GATHERED:
        reason = f"goes with fp8 = {' or '.join(GATHERED)}, whose weights are cast once for both of their products"
        return Fault(option="fp8_gathered", value="true", reason=reason)
    return _history_fault(fp8)


def _history_fault(fp8: Fp8) -> Fault | None:
    """Why scales cannot be delayed with these settings."""
    for option, value, usual, low, high in (
        ("fp8_history", fp8.history, HISTORY, 1, _LONGEST),
        ("fp8_margin", fp8.margin, 0, -_WIDEST, _WIDEST),
    ):
        if value != usual and not fp8.delayed:
            return Fault(
                option=option, value=f"{value}", reason="goes with delayed scales; set fp8 = delayed, or leave it out"
            )
        if not low <= value <= high:
            return Fault(option=option, value=f"{value}", reason=f"is not legal; give {low} to {high}")
    return None


def chosen(
    precision: str | None,
    recipe: str | None,
    left_out: Sequence[str] = (),
    *,
    gathered: bool = False,
    experts: bool = False,
    dispatch: bool = False,
    history: int | None = None,
    margin: int | None = None,
) -> tuple[str | None, Fp8]:
    """The precision of everything else, None where that is left to the machine, and what is in fp8. "fp8" is no
    precision of its own: it stands for the usual recipe."""
    known = recipe or (USUAL if precision == WORD else "")
    return None if precision == WORD else precision, Fp8(
        recipe=known,
        left_out=tuple(left_out),
        gathered=gathered,
        experts=experts,
        dispatch=dispatch,
        history=HISTORY if history is None else history,
        margin=margin or 0,
    )


def recipe_of(op: Operator) -> Recipe | None:
    """The recipe of a linear layer in fp8; None for every other operator."""
    return RECIPES.get(op.op.removeprefix(_PREFIX)) if op.op.startswith(_PREFIX) else None


def reads_fp8(op: Operator) -> bool:
    """Whether a linear layer in fp8 gets its weight in fp8, as it is gathered."""
    return recipe_of(op) is not None and bool(dict(op.keywords).get(IN_FP8))


def _travelling(graph: OperatorGraph, inside: Sequence[int]) -> frozenset[int]:
    """Linear layers of repeated blocks whose weights nothing else reads."""
    return frozenset(at for at in inside if _has_own_weight(graph, at))


def _has_own_weight(graph: OperatorGraph, at: int) -> bool:
    op = graph.operators[at]
    if called(op) != _LINEAR:
        return False
    weight = op.operands[1]
    return tuple(graph.consumers[weight]) == (at,) and op.operands.count(weight) == 1


def is_linear(op: Operator) -> bool:
    """Whether it is a linear layer, in fp8 or not."""
    return op.op == _LINEAR or recipe_of(op) is not None


def delayed_scales(operators: Iterable[Operator], types: Mapping[str, TensorType]) -> dict[str, tuple[int, ...]]:
    """The shapes of delayed scales. Linear layers have a scale for each of their tensors, under the name of the weight,
    which several layers may share; experts have a scale for each tensor of each expert, under their first matrix."""
    found: dict[str, tuple[int, ...]] = {}
    for op in operators:
        name = delayed_weight(op)
        if name is not None:
            found[name] = (
                (EXPERT_TENSORS[len(matrices_of_experts(op))], types[name].shape[0])
                if op.op == EXPERTS_OPERATOR
                else (LAYER_TENSORS,)
            )
    return found


def scales_on_their_way(operators: Iterable[Operator], types: Mapping[str, TensorType]) -> dict[str, tuple[int, ...]]:
    """The shapes of the scales of weights that are gathered in 8 bits by current scales, by name: one, (), or
    one for each 128 x 128."""
    found: dict[str, tuple[int, ...]] = {}
    for op in operators:
        recipe = recipe_of(op)
        if recipe is not None and not recipe.delayed and reads_fp8(op):
            name = op.operands[1]
            found[name] = tuple(-(-extent // recipe.block) for extent in types[name].shape) if recipe.block else ()
    return found


def read_in_fp8(graph: OperatorGraph) -> Sequence[str]:
    """Names of weights that linear layers of a graph get in fp8, as they are gathered."""
    if ("read in fp8",) not in graph.derived:
        graph.derived["read in fp8",] = sorted({op.operands[1] for op in graph.operators if reads_fp8(op)})
    return cast("Sequence[str]", graph.derived["read in fp8",])


def travelling_scales(graph: OperatorGraph) -> Mapping[str, tuple[int, ...]]:
    """`scales_on_their_way` of all operators of a graph."""
    if ("scales on their way",) not in graph.derived:
        graph.derived["scales on their way",] = scales_on_their_way(graph.operators, graph.types)
    return cast("Mapping[str, tuple[int, ...]]", graph.derived["scales on their way",])


def scales_of(graph: OperatorGraph) -> Mapping[str, tuple[int, ...]]:
    """`delayed_scales` of all operators of a graph."""
    if ("delayed scales",) not in graph.derived:
        graph.derived["delayed scales",] = delayed_scales(graph.operators, graph.types)
    return cast("Mapping[str, tuple[int, ...]]", graph.derived["delayed scales",])


def delayed_weight(op: Operator) -> str | None:
    """The weight under which the delayed scales of an operator are kept; None where it has none."""
    recipe, place = (experts_recipe(op), _FIRST) if op.op == EXPERTS_OPERATOR else (recipe_of(op), 1)
    return None if recipe is None or not recipe.delayed else op.operands[place]


def experts_recipe(op: Operator) -> Recipe | None:
    """The recipe of experts in fp8; None for every other operator."""
    if op.op != EXPERTS_OPERATOR or len(op.arguments) <= _RECIPE:
        return None
    return RECIPES.get(str(op.arguments[_RECIPE]))


def fp8_operator(recipe: str) -> str:
    """The name of the operator that is a linear layer under a recipe."""
    return _PREFIX + recipe


def with_fp8(graph: OperatorGraph, inside: Sequence[int], fp8: Fp8) -> OperatorGraph:
    """`graph` with linear layers in fp8, of the operators `inside` the repeated blocks, or of all but the last where
    there are none.

    Raises RequestError where no linear layer can be in fp8, where a `left_out` pattern matches none, or where a layer
    that is not left out is computed by every replica by itself.
    """
    if not fp8:
        return graph
    could = eligible(graph, inside)
    if not could:
        raise RequestError(
            f"fp8 = {fp8.recipe}: the model has no linear layer that can be in fp8: one with a trainable weight of two"
            f" dims that are multiples of {_WORDS}, in a repeated block"
        )
    experts = experts_of(graph)
    check_patterns(graph, (*could, *experts), fp8.left_out, "fp8_left_out")
    taken = {at for at in could if not is_left_out(graph.operators[at], fp8)}
    some = fp8.experts and any(not is_left_out(graph.operators[at], fp8) for at in experts)
    if not (taken or some or fp8.dispatch):
        more = " and no experts" if fp8.experts else ""
        raise RequestError(
            f"fp8_left_out: {', '.join(fp8.left_out)} leaves no linear layer{more} in fp8; leave fp8 out"
        )
    for op in (graph.operators[at] for at in sorted(taken)):
        if op.op == PER_REPLICA:
            raise RequestError(
                f"fp8 = {fp8.recipe}: every replica computes '{op.name}' by itself (per_replica), as it reads what is"
                " another in each, and a scale is one of all samples; leave it out"
                f" (fp8_left_out = '{op.operands[1]}')"
            )
    name, travelling = fp8_operator(fp8.recipe), _travelling(graph, inside) if fp8.gathered else frozenset()
    operators = [
        replace(op, op=name, keywords=((IN_FP8, True),) if at in travelling else ()) if at in taken else op
        for at, op in enumerate(graph.operators)
    ]
    if fp8.experts or fp8.dispatch:
        operators = _with_experts(graph, operators, fp8)
    return replace(graph, operators=tuple(operators))


def is_in_fp8(op: Operator) -> bool:
    """Whether it is a linear layer in fp8, or experts are."""
    return recipe_of(op) is not None or experts_recipe(op) is not None


def without_fp8(op: Operator) -> Operator:
    """A linear layer in fp8, or experts, without fp8; tokens are sent to experts as before."""
    assert is_in_fp8(op)
    if op.op == EXPERTS_OPERATOR:
        return replace(op, arguments=(*op.arguments[:_RECIPE], "", *op.arguments[_RECIPE + 1 :]))
    return replace(op, op=_LINEAR, keywords=())


def weight_of(op: Operator) -> str:
    """The weight of a linear layer; the first matrix of experts."""
    return op.operands[_FIRST if op.op == EXPERTS_OPERATOR else 1]


def leaving_out(graph: OperatorGraph, fp8: Fp8) -> OperatorGraph:
    """A graph with linear layers and experts in fp8, without fp8 in those that `fp8` leaves out; everywhere where it
    has no recipe."""
    changed = [without_fp8(op) if is_in_fp8(op) and not _stays(op, fp8) else op for op in graph.operators]
    same = all(one is other for one, other in zip(changed, graph.operators, strict=True))
    return graph if same else replace(graph, operators=tuple(changed))


def _stays(op: Operator, fp8: Fp8) -> bool:
    """Whether a linear layer, or experts, that are in fp8 stay so under `fp8`."""
    return bool(fp8) and not is_left_out(op, fp8) and (fp8.experts or op.op != EXPERTS_OPERATOR)


def also_left_out(graph: OperatorGraph, fp8: Fp8, plain: Collection[int]) -> Fp8:
    """The settings under which, in a graph with linear layers and experts in `fp8`, the operators at some places are
    computed without it, too. They are left out by patterns of their weights, with `*` for numbers of blocks where that
    matches nothing else in fp8; there is no recipe where nothing in fp8 is left. Without experts in fp8 no pattern is
    about experts."""
    places = [at for at, op in enumerate(graph.operators) if is_in_fp8(op)]
    if len(plain) == len(places) and not fp8.dispatch:
        return NO_FP8
    experts = {at for at in places if graph.operators[at].op == EXPERTS_OPERATOR}
    if fp8.experts and experts <= set(plain):
        fp8, places, plain = replace(fp8, experts=False), sorted({*places} - experts), {*plain} - experts
    uses = Counter(weight_of(graph.operators[at]) for at in places)
    words, apart, holds = dict[str, None](), set(plain), dict[str, bool]()
    for at in sorted(plain):
        op = graph.operators[at]
        weight = weight_of(op)
        exact = weight if uses[weight] == 1 else op.name
        pattern = _NUMBER.sub("*", exact)
        if pattern not in holds:  # once for all blocks
            holds[pattern] = all(other in apart for other in places if _is_meant(graph.operators[other], pattern))
        words[pattern if holds[pattern] else exact] = None
    return replace(fp8, left_out=tuple(dict.fromkeys((*fp8.left_out, *words))))


def experts_of(graph: OperatorGraph) -> tuple[int, ...]:
    """The operators with experts, as places of operators."""
    return tuple(at for at, op in enumerate(graph.operators) if op.op == EXPERTS_OPERATOR)


def check_patterns(graph: OperatorGraph, could: Sequence[int], patterns: Sequence[str], option: str) -> None:
    """Raise RequestError for a pattern that matches no linear layer, and no experts, that could be in fp8."""
    for pattern in patterns:
        if not any(_is_meant(graph.operators[at], pattern) for at in could):
            names = [weight_of(graph.operators[at]) for at in could]
            hint = did_you_mean(pattern, names, f"there is {names[0]}")
            raise RequestError(f"{option}: no linear layer that could be in fp8 matches '{pattern}'; {hint}")


def _with_experts(graph: OperatorGraph, operators: Sequence[Operator], fp8: Fp8) -> list[Operator]:
    """The operators, with fp8 in the settings of experts. Raises RequestError where there are no experts, and for
    experts whose weights are frozen, or parts of others, whose extents no product in fp8 takes, or which have a
    capacity."""
    option = "fp8_experts" if fp8.experts else "fp8_dispatch"
    if not any(op.op == EXPERTS_OPERATOR for op in operators):
        raise RequestError(f"{option}: no operator of this model routes to experts; leave it out")
    found = []
    for op in operators:
        if op.op == EXPERTS_OPERATOR:
            extents = graph.types[op.operands[_FIRST]].shape[1:]
            settings = (*op.arguments[_TENSORS:], *_SETTINGS[len(op.arguments) - _TENSORS :])
            if any(extent % _WORDS for extent in extents):
                raise RequestError(
                    f"{option}: '{op.name}' has experts of {extents[0]} x {extents[1]}, and products in fp8 take"
                    f" multiples of {_WORDS}; leave it out"
                )
            matrices = matrices_of_experts(op)
            if not graph.differentiable.issuperset(matrices):
                raise RequestError(f"{option}: '{op.name}' has experts that are frozen; leave it out")
            if not graph.parameter_names.issuperset(matrices):
                raise RequestError(
                    f"{option}: matrices of the experts of '{op.name}' are made of weights, as where gate and up are"
                    " one, and scales in fp8 are those of weights; leave it out"
                )
            if settings[0]:
                raise RequestError(
                    f"{option}: '{op.name}' has experts with a capacity, {settings[0]} rows of a sample, and scales of"
                    " rows that are empty; leave it out"
                )
            own = (fp8.recipe if fp8.experts and not is_left_out(op, fp8) else "", fp8.dispatch)
            op = replace(op, arguments=(*op.arguments[:_TENSORS], *settings, *own))
        found.append(op)
    return found


def eligible(graph: OperatorGraph, inside: Sequence[int]) -> tuple[int, ...]:
    """The linear layers that can be in fp8, as places of operators (see `with_fp8`), those of replicas among them."""
    trained = {parameter.name for parameter in graph.parameters if parameter.trainable}
    linears = [at for at, op in enumerate(graph.operators) if called(op) == _LINEAR and op.operands[1] in trained]
    within = set(inside)
    here = [at for at in linears if at in within] if within else linears[:-1]
    experts = {graph.types[op.operands[_FIRST]].shape[0] for op in graph.operators if op.op == EXPERTS_OPERATOR}
    return tuple(at for at in here if _fits(graph, graph.operators[at], experts))


def is_left_out(op: Operator, fp8: Fp8) -> bool:
    """Whether a linear layer, or experts, are left out."""
    return is_meant(op, fp8.left_out)


def is_meant(op: Operator, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches a linear layer or experts, by the names of operators, modules or weights."""
    return any(_is_meant(op, pattern) for pattern in patterns)


def _fits(graph: OperatorGraph, op: Operator, experts: set[int]) -> bool:
    """Whether a product can be in fp8; a layer with an output for each of the experts is a router."""
    given, weight = (graph.types[name] for name in op.operands[:2])
    whole = all(extent % _WORDS == 0 for extent in (*weight.shape, given.shape[-1]))
    return whole and op.operands[0] in graph.differentiable and weight.shape[0] not in experts


def _is_meant(op: Operator, pattern: str) -> bool:
    names = (op.name, op.module)
    return any(matches(name, pattern) for name in names) or parameter_matches(weight_of(op), pattern)
