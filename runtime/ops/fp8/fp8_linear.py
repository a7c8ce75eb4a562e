"""Linear layers with products in fp8, on pieces of their operands.

    forward     y  = q(x) q(w)'      q(t) = round(t / s) in 8 bits, times s
    backward    dx = q(g) q(w)       s = largest element of what the scale is for / largest number of the dtype
                dw = q(g)' q(x)

A scale is for a tensor; or for a row of a product's left operand and a column of its right one; or for 128 elements of
such a row and 128 x 128 of the weight; or for 32 elements of a row of either operand, and then a power of two. Where
axes cut the elements of a scale, their devices agree on the largest element (see `planner.sharding.rules.fp8`).
Products are torch's scaled ones where the device has them, accumulated in fp32. Elsewhere the same operands are
multiplied in fp32 (in float64 for a model in float64), which differs only in the order of sums. Blocks of 128 are
multiplied by the Hopper kernel, lines of 32 by the Blackwell kernel, where a device has whole ones.

Source: Micikevicius et al. 2022, arXiv 2209.05433; recipes of torchao (`planner.graph.fp8`).

Shape legend: T local tokens, I local inputs, O local outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from planner.fp8_recipes import BLOCK, LINE, Recipe
from planner.graph.fp8 import recipe_of
from planner.models.experts.fp8 import EACH, Cells, blocks_of, fp8_blocks_product, in_powers, largest_in
from planner.sharding.rule import Dims
from runtime.comm import collectives
from runtime.ops.fp8.blocks_product import blocks_product, has_blocks_product
from runtime.ops.fp8.delayed_scales import GRADIENT, INPUT, WEIGHT, LayerScales
from runtime.ops.fp8.fp8_scales import Known
from runtime.ops.fp8.lines_product import has_lines_product, lines_product
from runtime.ops.fp8.narrow_weights import Narrow, place_of, stand_in
from runtime.ops.fp8.scaled_products import Groups, Operand, scaled_product
from runtime.ops.fp8.weight_scales import WeightScales
from runtime.ops.kept_results import whole_call
from runtime.ops.shard import Shard

_WEIGHTS = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The groups of devices that hold pieces of the tokens, of the inputs and of the outputs of a layer; of inputs and
    outputs the first one on this device, and the total number (0: it has all). The groups `along` cut the last dim of
    the tokens; `runs` are this device's (start, length) of its `length` (0: it has all)."""

    tokens: Groups = ()
    inputs: Groups = ()
    outputs: Groups = ()
    input_from: tuple[int, int] = (0, 0)
    output_from: tuple[int, int] = (0, 0)
    along: Groups = ()
    runs: tuple[tuple[int, int], ...] = ()
    length: int = 0


WHOLE = Cut()


def local_fp8_linear(
    shard: Shard,
    x: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    weight_in_fp8: bool = False,
) -> torch.Tensor:
    """The local form of a linear layer in fp8; where an axis cuts the inputs, the result is a term of a sum. The weight
    may arrive `weight_in_fp8` (`runtime.ops.fp8.narrow_weights`)."""
    assert weight_in_fp8 == (weight_OI.dtype == _WEIGHTS), weight_OI.dtype
    recipe = recipe_of(shard.bound.operator)
    assert recipe is not None, shard.bound.operator.op
    rule = shard.bound.rule
    given, (outputs, inputs) = rule.operands[0], rule.operands[1]

    def groups(factors: Sequence[int]) -> Groups:
        axes = [axis for factor in factors for axis in shard.axes(rule.factors[factor].name)]
        return [shard.place.group(axis) for axis in axes]

    def begins(factors: Sequence[int]) -> tuple[int, int]:
        (name,) = (rule.factors[factor].name for factor in factors)
        return (shard.offset(name), shard.extent(name)) if shard.axes(name) else (0, 0)

    cut = Cut(
        tokens=groups([factor for dim in given[:-1] for factor in dim]),
        inputs=groups(inputs),
        outputs=groups(outputs),
        input_from=begins(inputs),
        output_from=begins(outputs),
        **(_along(shard, given) if recipe.scales == "line" else {}),
    )
    return fp8_linear(x, weight_OI, bias_O, recipe, cut, shard.scales)


class _How(NamedTuple):
    """How a layer is computed: `along` is the number of consecutive tokens of a sample on this device; the scales are
    `delayed` ones, or those of a `weight` that arrives in 8 bits; `trains`: a backward pass follows, so delayed scales
    record the amax."""

    recipe: Recipe
    cut: Cut
    along: int
    delayed: LayerScales | None
    weight: WeightScales | None
    trains: bool


def _along(shard: Shard, given: Dims) -> dict[str, Any]:
    """The cut of the last token dim, along which the lines of weight gradients run."""
    names = [shard.bound.rule.factors[factor].name for dim in given[-2:-1] for factor in dim]
    axes = [axis for name in names for axis in shard.axes(name)]
    if not axes:
        return {}
    region, dim = shard.region, len(given) - 2
    runs = dict(region.runs).get(dim, ((region.start[dim], region.shape[dim]),))
    length = shard.bound.rule.whole_extent([shard.bound.rule.index[name] for name in names])
    return {"along": [shard.place.group(axis) for axis in axes], "runs": runs, "length": length}


def fp8_linear(
    x: torch.Tensor,
    weight_OI: torch.Tensor,
    bias_O: torch.Tensor | None,
    recipe: Recipe,
    cut: Cut = WHOLE,
    known: Known | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear` with products in fp8. `known` scales: all of the layer's under delayed scaling, or
    those of a weight that arrives in 8 bits."""
    delayed, weight = (known, None) if isinstance(known, LayerScales) else (None, known)
    assert (delayed is not None) == recipe.delayed, recipe
    assert recipe.delayed or (weight is not None) == (weight_OI.dtype == _WEIGHTS), recipe
    x_TI = x.reshape(-1, x.shape[-1])
    along = x.shape[-2] if x.ndim > 1 else 1
    how = _How(recipe, cut, along, delayed, weight, torch.is_grad_enabled())
    operands = [operand for operand in (x_TI, weight_OI, bias_O) if operand is not None]
    if how.trains and any(operand.requires_grad for operand in operands):
        run = _Run(how)
        token = _Begin.apply(run, x_TI, weight_OI, bias_O)  # type: ignore[no-untyped-call]
        y_TO: torch.Tensor = _End.apply(token, run, *(operand.detach() for operand in operands))  # type: ignore[no-untyped-call]
    else:
        y_TO, *_ = _made(how, x_TI, weight_OI, bias_O)
    return y_TO.reshape(*x.shape[:-1], weight_OI.shape[0])


def _made(
    how: _How, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """The product, and the scales of its operands where each has a single one."""
    recipe, cut, _, delayed, weight, trains = how

    def compute() -> tuple[torch.Tensor, ...]:
        if recipe.scales == "block":
            y_TO = _blocks_product(x_TI, weight_OI, _WEIGHTS, cut, None if weight is None else weight.largest)
            return (y_TO if bias_O is None else y_TO + bias_O,)
        if recipe.scales == "line":
            y_TO = _lines_product(x_TI, weight_OI, _WEIGHTS, cut.input_from, cut.inputs)
            return (y_TO if bias_O is None else y_TO + bias_O,)
        left, right = Operand(x_TI, _WEIGHTS), Operand(weight_OI, _WEIGHTS)
        if delayed is not None:
            scales = delayed.scale(INPUT), delayed.scale(WEIGHT)
        elif recipe.scales == "tensor":
            of_weight = right.scale((*cut.outputs, *cut.inputs)) if weight is None else weight.scales
            scales = left.scale((*cut.tokens, *cut.inputs)), of_weight
        else:
            scales = left.scales(cut.inputs), right.scales(cut.inputs)
        y_TO = scaled_product(left, right, scales, x_TI.dtype)
        y_TO = y_TO if bias_O is None else y_TO + bias_O
        return y_TO, *(scales if recipe.scales == "tensor" else ())

    if delayed is not None and trains:
        delayed.see(INPUT, x_TI)
        if weight_OI.dtype != _WEIGHTS:  # else the code that cast it has recorded it
            delayed.see(WEIGHT, weight_OI)
    return whole_call(compute)


class _Run:
    """A layer between its two autograd nodes: the scales of its operands, and the gradient of its result."""

    def __init__(self, how: _How) -> None:
        self.how = how
        self.narrow: Narrow | None = None  # receives the gradient of an 8-bit weight
        self.scales: Sequence[torch.Tensor] = ()
        self.gradient: torch.Tensor | None = None

    def handed(self, gradient_OI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
        """The gradient of the weight for autograd."""
        if self.narrow is None:
            return gradient_OI.to(weight_OI.dtype)
        self.narrow.gradient = gradient_OI
        return stand_in(weight_OI)


class _Begin(torch.autograd.Function):
    """Keeps the original operands, because gradients need them along their other dim, and computes the gradients. It
    comes before the product: a recomputation that stops once everything for the backward pass has been saved stops
    before the product (see `runtime.ops.overlapped_products`)."""

    @staticmethod
    def forward(
        ctx: Any, run: _Run, x_TI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.run = run
        if weight_OI.dtype == _WEIGHTS:
            run.narrow = place_of(weight_OI)
        ctx.save_for_backward(x_TI, weight_OI)
        return x_TI.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        recipe, cut, along, delayed, weight, _trains = ctx.run.how
        gradient, ctx.run.gradient = ctx.run.gradient, None
        assert gradient is not None, "the node behind has been there"
        gradient_TO, low = gradient.reshape(-1, weight_OI.shape[0]), getattr(torch, recipe.gradients)
        bias = gradient_TO.sum(0) if ctx.needs_input_grad[3] else None
        if recipe.scales == "block":
            turned = replace(
                cut, inputs=cut.outputs, outputs=cut.inputs, input_from=cut.output_from, output_from=cut.input_from
            )
            known = None if weight is None else weight.largest.t()
            gradient_TI = _blocks_product(gradient_TO, weight_OI.t(), low, turned, known)
            left, right = Operand(gradient_TO.t(), low), Operand(x_TI.t(), _WEIGHTS)
            scales = left.scales(cut.tokens), right.scales(cut.tokens)
            return None, gradient_TI, ctx.run.handed(scaled_product(left, right, scales, x_TI.dtype), weight_OI), bias
        if recipe.scales == "line":
            return None, *_gradients_in_lines(x_TI, weight_OI, gradient_TO, low, cut, along), bias
        left = Operand(gradient_TO, low)
        whole = left.scale((*cut.tokens, *cut.outputs)) if recipe.scales == "tensor" and delayed is None else None
        if delayed is not None:
            delayed.see(GRADIENT, gradient_TO)
            whole = delayed.scale(GRADIENT)
        right, made = Operand(weight_OI.t(), _WEIGHTS), ctx.run.scales
        scales = (left.scales(cut.outputs), right.scales(cut.outputs)) if whole is None else (whole, made[1])
        gradient_TI = scaled_product(left, right, scales, x_TI.dtype)
        if not recipe.weight_gradients:
            return None, gradient_TI, gradient_TO.t().mm(x_TI), bias
        left, right = Operand(gradient_TO.t(), low), Operand(x_TI.t(), _WEIGHTS)
        scales = (left.scales(cut.tokens), right.scales(cut.tokens)) if whole is None else (whole, made[0])
        return None, gradient_TI, ctx.run.handed(scaled_product(left, right, scales, x_TI.dtype), weight_OI), bias


class _End(torch.autograd.Function):
    """Computes the product; backward it passes the gradient of the result to the node before."""

    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        run: _Run,
        x_TI: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
    ) -> torch.Tensor:
        ctx.run = run
        y_TO, *run.scales = _made(run.how, x_TI, weight_OI, bias_O)
        return y_TO

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.run.gradient = gradients[0]
        return (gradients[0].new_empty(0), *[None] * (len(ctx.needs_input_grad) - 1))


def _blocks_product(
    rows_TI: torch.Tensor, weight_OI: torch.Tensor, low: torch.dtype, cut: Cut, known: torch.Tensor | None = None
) -> torch.Tensor:
    """The product of rows with a transposed weight: a scale per 128 elements of a row, and per 128 x 128 of the weight.
    For a weight that arrives in 8 bits, the largest elements of all its blocks are `known`."""
    spread = known is not None
    spread |= any(whole and extent % BLOCK for extent, (_, whole) in _cuts(rows_TI, weight_OI, cut))
    inside = blocks_of(rows_TI.shape[1], *cut.input_from, rows_TI.device, spread=spread)
    outside = blocks_of(weight_OI.shape[0], *cut.output_from, rows_TI.device, spread=spread)
    of_rows = largest_in(rows_TI, EACH, inside)
    for group in cut.inputs if inside.shared else ():
        of_rows = collectives.all_reduce_max(of_rows, group)
    of_weight = known
    if of_weight is None:
        of_weight = largest_in(weight_OI, outside, inside)
        shared = (*(cut.inputs if inside.shared else ()), *(cut.outputs if outside.shared else ()))
        for group in shared:
            of_weight = collectives.all_reduce_max(of_weight, group)
    if not (inside.shared or outside.shared) and has_blocks_product(rows_TI, weight_OI):
        of_weight = _own(_own(of_weight, 0, outside), 1, inside)
        return blocks_product(rows_TI, _own(of_rows, 1, inside), weight_OI, of_weight, low)
    assert inside.at is not None, "blocks have more than one element"
    assert outside.at is not None, "blocks have more than one element"
    name = str(low).removeprefix("torch.")
    made_TO: torch.Tensor = fp8_blocks_product(rows_TI, of_rows, weight_OI, of_weight, inside.at, outside.at, name)
    return made_TO


def _own(most: torch.Tensor, dim: int, cells: Cells) -> torch.Tensor:
    """The largest elements of the whole blocks on this device, from those of all blocks of a dim."""
    assert cells.at is not None, "blocks have more than one element"
    return most if cells.block else most.index_select(dim, cells.at[::BLOCK])


def _gradients_in_lines(
    x_TI: torch.Tensor, weight_OI: torch.Tensor, gradient_TO: torch.Tensor, low: torch.dtype, cut: Cut, along: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the inputs and of the weight, with lines of 32 outputs and of 32 consecutive tokens."""
    of_inputs = _lines_product(gradient_TO, weight_OI.t(), low, cut.output_from, cut.outputs)
    lines = _lines_of_tokens(along, cut, x_TI.device)
    (of_gradient, inside), (of_x, _) = (_of_tokens(one, along, lines, cut.along) for one in (gradient_TO, x_TI))
    maxima = in_powers(of_gradient, low), in_powers(of_x, _WEIGHTS)
    whole = not lines.shared and along % LINE == 0
    return of_inputs, _by_lines(gradient_TO.t(), maxima[0], x_TI.t(), maxima[1], inside, low, whole=whole)


def _lines_product(
    rows_RK: torch.Tensor, others_CK: torch.Tensor, low: torch.dtype, begins: tuple[int, int], groups: Groups
) -> torch.Tensor:
    """The product of rows with transposed others; scales are powers of two for 32 elements of either operand. `begins`
    says which part is on this device."""
    lines = blocks_of(rows_RK.shape[1], *begins, rows_RK.device, LINE)
    assert lines.at is not None, "lines have more than one element"
    maxima = []
    for values, dtype in ((rows_RK, low), (others_CK, _WEIGHTS)):
        most = largest_in(values, EACH, lines)
        for group in groups if lines.shared else ():
            most = collectives.all_reduce_max(most, group)
        maxima.append(in_powers(most, dtype))
    return _by_lines(rows_RK, maxima[0], others_CK, maxima[1], lines.at, low, whole=not lines.shared)


def _by_lines(
    rows_RK: torch.Tensor,
    of_rows_RL: torch.Tensor,
    others_CK: torch.Tensor,
    of_others_CL: torch.Tensor,
    inside: torch.Tensor,
    low: torch.dtype,
    *,
    whole: bool,
) -> torch.Tensor:
    """The product of rows with transposed others, by the largest elements of lines; K is `inside` of lines, either
    `whole` consecutive ones or parts. Uses the device's kernel where it has one."""
    if whole and has_lines_product(rows_RK, others_CK):
        return lines_product(rows_RK, of_rows_RL, others_CK, of_others_CL, low)
    name = str(low).removeprefix("torch.")
    made_RC: torch.Tensor = fp8_blocks_product(rows_RK, of_rows_RL, others_CK, of_others_CL, inside, None, name)
    return made_RC


def _lines_of_tokens(held: int, cut: Cut, device: torch.device) -> Cells:
    """The lines of 32 consecutive tokens of each sample; `shared` where devices have parts of them."""
    if all(start % LINE == 0 and length % LINE == 0 for start, length in cut.runs):
        return blocks_of(held, 0, 0, device, LINE)
    places = [torch.arange(start, start + length, device=device) for start, length in cut.runs]
    return Cells(torch.cat(places) // LINE, -(-cut.length // LINE), shared=True)


def _of_tokens(values_TC: torch.Tensor, along: int, lines: Cells, groups: Groups) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest elements of lines of tokens in each column, C L for the lines of all samples, and the line of each
    token."""
    most = largest_in(values_TC.reshape(-1, along, values_TC.shape[1]), lines, EACH)
    for group in groups if lines.shared else ():
        most = collectives.all_reduce_max(most, group)
    samples = torch.arange(most.shape[0], device=values_TC.device)
    assert lines.at is not None, "lines have more than one element"
    inside = (samples[:, None] * lines.cells + lines.at).flatten()
    return most.flatten(0, 1).t(), inside


def _cuts(rows_TI: torch.Tensor, weight_OI: torch.Tensor, cut: Cut) -> tuple[tuple[int, tuple[int, int]], ...]:
    return (rows_TI.shape[1], cut.input_from), (weight_OI.shape[0], cut.output_from)
