"""Trying an operator: the same call on small tensors, the values to try it with, and what it makes of them.

The small call has the structure of the true one: equal extents stay equal, 1 stays 1, and the order between extents and
whole numbers among the arguments stays what it is (a band of width 100 in a matrix of 4096 must not cover the small
matrix). Where the operator refuses such a call, other extents are tried, at last the true ones.

Values are doubles for floating operands, so that a wrong split cannot hide in rounding. Nothing here draws from, or
changes, the random numbers of the caller.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner.errors import RuleError
from planner.graph.call import Call, Typed
from planner.graph.operator_graph import COMPLEX, TensorType, TorchConstant
from planner.graph.torch_operators import resolve
from planner.graph.tracing.exported import tensor_type

UNIT = 6  # small extents are multiples of it: they split in 2 and in 3
LARGEST_UNIT = 32  # at most, of a number among the arguments that divides small extents
LARGEST = 2**19  # elements of the operands of a trial
DOMAINS = ("normal", "positive", "fraction", "definite", "sign")
_DOUBLE = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}
_TOLERANCE = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}
"""Tolerance relative to the largest element."""

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The values with which an operator runs at all: floating numbers of a domain, integers below `bound`, whether
    floating operands are doubles (some kernels know single precision only), and whether it has a backward pass."""

    domain: str
    bound: int
    doubles: bool
    graded: bool


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of a call: operands, results, a gradient of each differentiable result, and the gradients of the
    operands.

    `gradients` is empty where no gradient flows, `operand_gradients` has None for what gets none.
    """

    call: Call
    setting: Setting
    operands: Tensors
    results: Tensors
    gradients: Mapping[int, torch.Tensor]
    operand_gradients: tuple[torch.Tensor | None, ...]

    @property
    def tolerance(self) -> float:
        """The tolerance of the least precise dtype: a result that is computed in single precision stays that imprecise
        as a double."""
        arguments = (self.call.arguments, *dict(self.call.keywords).values())
        spelled = [getattr(torch, name) for name in _dtypes(arguments)]
        found = (*(t.dtype for t in (*self.operands, *self.results)), *spelled)
        return max((_TOLERANCE[dtype] for dtype in found if dtype in _TOLERANCE), default=0.0)


def run(call: Call, operands: Sequence[torch.Tensor]) -> Tensors:
    """The tensors that the operator returns for other operands than those of the call."""
    rest = iter(operands)
    arguments = [_filled(argument, rest) for argument in call.arguments]
    keywords = {name: _filled(value, rest) for name, value in call.keywords}
    made = resolve(call.op)(*arguments, **keywords)
    results = made if isinstance(made, tuple | list) else (made,)
    return tuple(result for result in results if isinstance(result, torch.Tensor))


def _filled(argument: Typed, operands: Iterator[torch.Tensor]) -> Any:
    if isinstance(argument, TensorType):
        return next(operands)
    if isinstance(argument, tuple):
        return [_filled(item, operands) for item in argument]
    if isinstance(argument, TorchConstant):
        return torch.device("cpu") if argument.kind == "device" else getattr(torch, argument.name)
    return argument


def small_calls(call: Call) -> Iterator[Call]:
    """Calls of the same structure on small tensors, the most telling first; the last is the call itself, if it is small
    enough. Their results are not known yet."""
    extents = sorted({extent for tensor in call.operands for extent in tensor.shape if extent > 1})
    numbers = sorted(
        {abs(n) for argument in (*call.arguments, *dict(call.keywords).values()) for n in _numbers(argument)}
    )
    tried = []
    for kept in (1, 4):
        for ratios in (True, False):
            for first in (1, 2):
                sizes = _small(extents, [n for n in numbers if n > kept], kept, ratios=ratios, first=first)
                tried += [_resized(call, sizes, respelled=respelled) for respelled in (False, True)]
    tried.append(replace(call, results=()))
    seen = set()
    for small in tried:
        if small not in seen and 0 < sum(tensor.numel for tensor in small.operands) <= LARGEST:
            seen.add(small)
            yield small


def _dtypes(argument: Typed) -> Iterator[str]:
    if isinstance(argument, tuple):
        for item in argument:
            yield from _dtypes(item)
    elif isinstance(argument, TorchConstant) and argument.kind == "dtype":
        yield argument.name


def _numbers(argument: Typed) -> Iterator[int]:
    if isinstance(argument, tuple):
        for item in argument:
            yield from _numbers(item)
    elif isinstance(argument, int) and not isinstance(argument, bool):
        yield argument


def _small(extents: Sequence[int], numbers: Sequence[int], kept: int, *, ratios: bool, first: int) -> dict[int, int]:
    """Small extents for large ones, another for each: multiples of 6 from `first` on, and of 4 and of numbers among the
    arguments where the large extent is a multiple of them. Extents up to `kept` stay.

    With `ratios` an extent that is a small multiple of another one stays that. An extent that is spelled out by a
    number among the arguments stays as well, and so does one for which no small extent is on its side of all numbers.
    """
    found: dict[int, int] = {}
    for extent in extents:
        low = max((n for n in numbers if n < extent), default=0)
        high = min((n for n in numbers if n > extent), default=math.inf)
        multiple = next((found[e] * (extent // e) for e in found if extent in (2 * e, 3 * e, 4 * e)), 0)
        unit = math.lcm(UNIT, *(n for n in (4, *numbers) if 1 < n <= LARGEST_UNIT and extent % n == 0))
        start = unit * (first + 2 * low // unit)
        free = (m for m in range(start, start + unit * (len(extents) + 1), unit) if m not in found.values())
        small = multiple if ratios and multiple > low else next(free)
        found[extent] = extent if extent <= kept or extent in numbers or not low < small < high else small
    return found


def _resized(call: Call, sizes: Mapping[int, int], *, respelled: bool) -> Call:
    def of(argument: Typed) -> Typed:
        if isinstance(argument, TensorType):
            return replace(argument, shape=tuple(sizes.get(extent, extent) for extent in argument.shape))
        if isinstance(argument, tuple):
            return tuple(of(item) for item in argument)
        if respelled and isinstance(argument, int) and not isinstance(argument, bool):
            return sizes.get(argument, argument)
        return argument

    keywords = tuple((name, of(value)) for name, value in call.keywords)
    return replace(call, arguments=tuple(of(argument) for argument in call.arguments), keywords=keywords, results=())


def settings(call: Call) -> Iterator[Setting]:
    """Settings in the order in which they are tried: the most general values first, without a backward pass last."""
    integers = any(not t.floating and t.dtype not in ("bool", *COMPLEX) for t in call.operands)
    extents = sorted({extent for tensor in call.operands for extent in tensor.shape if extent > 1}, reverse=True)
    bounds = (*extents, 2, 1) if integers else (2,)
    for graded, doubles, domain, bound in itertools.product((True, False), (True, False), DOMAINS, bounds):
        yield Setting(domain=domain, bound=bound, doubles=doubles, graded=graded)


HOLES = (0.0, math.nan)
"""Numbers that a mean of floating operands may leave out."""


def values(call: Call, setting: Setting, seed: int, marks: Sequence[float] = ()) -> Tensors:
    """Operands of a call. Their scale depends on the seed, so that clipping and saturation are seen. `marks` are
    numbers that are put in some places: whole numbers of integer operands, others (`HOLES`) of floating ones."""
    generator = torch.Generator().manual_seed(seed)
    scale = (1.0, 4.0, 0.25)[seed % 3]
    made = [_values(tensor, setting, generator, scale) for tensor in call.operands]
    whole = all(isinstance(mark, int) for mark in marks)
    for tensor, of in zip(made, call.operands, strict=True):
        if marks and (of.dtype in ("int32", "int64") if whole else of.floating):
            chosen = torch.randint(len(marks), of.shape, generator=generator)
            places = torch.rand(of.shape, generator=generator) < 0.25
            tensor.copy_(torch.where(places, torch.tensor(marks)[chosen].to(tensor.dtype), tensor))
    return tuple(made)


def marks_of(call: Call) -> tuple[int, ...]:
    """Numbers that may mean something special among indices, as -100: those in the arguments or their defaults."""
    defaults = [argument.default_value for argument in resolve(call.op)._schema.arguments]
    given = [n for argument in (*call.arguments, *dict(call.keywords).values()) for n in _numbers(argument)]
    given += [n for n in defaults if isinstance(n, int) and not isinstance(n, bool)]
    return tuple(sorted(set(given)))


def _values(tensor: TensorType, setting: Setting, generator: torch.Generator, scale: float) -> torch.Tensor:
    if tensor.dtype == "bool":
        return torch.rand(tensor.shape, generator=generator) > 0.5
    dtype = getattr(torch, _DOUBLE.get(tensor.dtype, tensor.dtype) if setting.doubles else tensor.dtype)
    if not tensor.floating and not dtype.is_complex:
        return torch.randint(setting.bound, tensor.shape, generator=generator).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    if setting.domain == "fraction":
        return (0.05 + 0.9 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64)).to(dtype)
    found = scale * torch.randn(tensor.shape, generator=generator, dtype=wide)
    if setting.domain == "sign" and not dtype.is_complex:
        return found.sign().to(dtype)
    if setting.domain == "positive" and not dtype.is_complex:
        found = found.abs() + 0.5
    if setting.domain == "definite" and len(tensor.shape) > 1 and tensor.shape[-1] == tensor.shape[-2]:
        found = found @ found.mH + tensor.shape[-1] * torch.eye(tensor.shape[-1], dtype=wide)
    return found.to(dtype)


def try_call(call: Call, setting: Setting, seed: int, marks: Sequence[float] = ()) -> Case | str:
    """One run of a call, or why it does not run.

    Raises RuleError for what can be neither split nor repeated on several devices: operators that draw random numbers,
    or that change their operands.
    """
    operands = values(call, setting, seed, marks)
    leaves = [
        t.detach().clone().requires_grad_(setting.graded and (t.is_floating_point() or t.is_complex()))
        for t in operands
    ]
    before = torch.get_rng_state()
    try:
        made = run(call, leaves)
        again = run(call, [leaf.detach() for leaf in leaves])
        drawn = not torch.equal(before, torch.get_rng_state())
        flows = [i for i, result in enumerate(made) if result.requires_grad]
        generator = torch.Generator().manual_seed(seed + 1)
        gradients = {i: torch.randn(made[i].shape, generator=generator, dtype=made[i].dtype) for i in flows}
        found = gradients_of(leaves, made, gradients)
    except Exception as error:  # an operator may raise anything at all for a call that it was not written for
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    finally:
        torch.set_rng_state(before)
    if any(not torch.equal(leaf.detach(), t) for leaf, t in zip(leaves, operands, strict=True) if not t.isnan().any()):
        raise RuleError(
            f"operator {call.op} changes its operands in place, which is not supported; return a new tensor (a"
            " norm with running statistics: take BatchNorm, or track_running_stats=False)"
        )
    if drawn or any(
        not same(one.detach(), two, _TOLERANCE.get(two.dtype, 0.0)) for one, two in zip(made, again, strict=True)
    ):
        raise RuleError(
            f"operator {call.op} gives other results when it is called again: operators that draw random numbers are"
            " not supported; take it out, or set its probability to 0"
        )
    results = tuple(result.detach() for result in made)
    typed = tuple(tensor_type(result) for result in results)
    return Case(
        call=replace(call, results=typed),
        setting=setting,
        operands=operands,
        results=results,
        gradients=gradients,
        operand_gradients=found,
    )


def gradients_of(
    leaves: Sequence[torch.Tensor], results: Sequence[torch.Tensor], gradients: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """The gradient of every operand, None for what gets none."""
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    reached = [i for i in gradients if results[i].requires_grad]
    if not reached or not wanted:
        return (None,) * len(leaves)
    found = torch.autograd.grad(
        [results[i] for i in reached], wanted, [gradients[i] for i in reached], allow_unused=True
    )
    each = iter(found)
    return tuple(next(each) if leaf.requires_grad else None for leaf in leaves)


def same(found: torch.Tensor, expected: torch.Tensor, relative: float) -> bool:
    """Equal but for rounding: up to `relative` times the largest element. Whole numbers are compared exactly."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if torch.equal(found, expected):
        return True
    if expected.dtype not in _TOLERANCE or not expected.numel():
        return False
    tolerance = relative * max(float(expected.abs().max()), 1e-30)
    difference = float((found - expected).abs().max())
    if math.isfinite(difference) and math.isfinite(tolerance):
        return difference <= tolerance
    return bool(torch.allclose(found, expected, rtol=relative, atol=0.0, equal_nan=True))


def working(call: Call, find: Callable[[Case], bool] = lambda _: True) -> tuple[Case | None, str]:
    """The first case of a call that runs and has numbers in its results, and why the last one did not."""
    why, deaf = "it was not tried", False
    for setting in settings(call):
        if deaf and not setting.graded:  # the operator has a backward pass, and this case saw nothing of it
            break
        case = try_call(call, setting, seed=0)
        if isinstance(case, str):
            why = case
        elif not all(_numbers_alone(result) for result in case.results):
            why = "its results are no numbers for any values that were tried"
        elif _deaf(case):
            deaf = True
            why = "its results are the same whatever the values that were tried"
        elif find(case):
            return case, ""
    return None, why


def _deaf(case: Case) -> bool:
    """Whether no gradient comes to any operand and other values make the same results, as in a loss for targets 1 and
    -1 that is given other numbers. Such a case recombines however it is cut."""
    if not case.gradients or any(each is not None and bool(each.any()) for each in case.operand_gradients):
        return False
    other = try_call(case.call, case.setting, seed=1)
    return not isinstance(other, str) and all(map(torch.equal, case.results, other.results))


def _numbers_alone(result: torch.Tensor) -> bool:
    return bool(result.isfinite().all()) if result.is_floating_point() or result.is_complex() else True
