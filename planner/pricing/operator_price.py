"""Seconds and bytes of one operator under many strategies at once.

A strategy divides the extents of the factors. Everything else follows from the rule: FLOPs from its work terms, bytes
from the local shapes, saved activations from what autograd keeps. Arrays have one entry per strategy, (K,).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from costmodels import ROW_MOMENTS, host_rows_time, server_rows_time
from hardware_profiles import DTYPES, Cluster, Software
from planner.errors import RequestError, RuleError
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.pricing.inner_messages import exposed_seconds, inner_messages, joined_bytes
from planner.pricing.kernels.biased_attention import bias_bytes
from planner.pricing.kernels.call import KernelCall
from planner.pricing.kernels.composed_gelu import composed_gelu_bytes
from planner.pricing.kernels.composed_norms import composed_bytes
from planner.pricing.kernels.dropped_branches import dropped_bytes
from planner.pricing.kernels.launches import host_seconds
from planner.pricing.kernels.scans import lacks_kernels
from planner.pricing.kernels.seconds import kernel_seconds
from planner.pricing.kernels.unfused_attention import score_bytes
from planner.pricing.liveness import Liveness
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Dims, Outside, Rule, Strategy, Work, ring_axis
from planner.sharding.rules.experts import matrices_of
from planner.sharding.window import Window
from planner.sharding.zigzag import pieces_of_ring

Array = NDArray[np.float64]

_EMULATED = 9.0
"""Factor for the memory of 8-bit operands that are multiplied in fp32: a copy of four bytes, and a second one that is
scaled."""

PROFILE_DTYPES = {tensor: name for name, dtype in DTYPES.items() for tensor in dtype.tensors}
"""The names of tensor dtypes in profiles. Integers are priced as fp32: they only move memory."""

_PASSES = frozenset({"copy", "elementwise", "embedding", "normalisation", "view"})
"""Classes of operators whose time depends on their bytes alone."""


def profile_dtype(op_class: str, dtype: str) -> str | None:
    """The dtype of a profile whose rate prices an operator; None if there is none. Memory-bound operators in float64,
    in which positions are often computed, move twice the bytes of fp32. Matrix products in float64 have a rate that no
    profile has."""
    return "fp32" if dtype == "float64" and op_class in _PASSES else PROFILE_DTYPES.get(dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorPrices:
    """Prices of one operator, (K,) each.

    Attributes:
        forward, backward: seconds of computation.
        late: the part of these (forward, backward) in which kernels wait for the host.
        host: seconds (forward, backward) in which the host launches them one by one.
        inner_forward, inner_backward: seconds of collectives inside the implementation.
        operands, results: bytes of the local tensors.
        saved_extra: bytes that autograd keeps in addition to operands and results.
        joined: the part of these that was received to be joined to an operand.
        unsaved_extra: the bytes of `saved_extra` for an operator without gradients, whose kernel needs them only while
            it runs.
        transient: bytes that live only while it runs. Forward: the results, and the operands that nothing keeps;
            backward: the gradients of the results and of the operands; whichever is more.
        flops: of forward and backward pass.
    """

    forward: Array
    backward: Array
    late: tuple[Array, Array]
    host: tuple[Array, Array]
    inner_forward: Array
    inner_backward: Array
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    saved_extra: Array
    joined: Array
    unsaved_extra: Array
    transient: Array
    flops: Array


def only(prices: OperatorPrices, candidate: int) -> OperatorPrices:
    """The prices of one candidate."""

    def of(one: Any) -> Any:
        return tuple(map(of, one)) if isinstance(one, tuple) else one[candidate : candidate + 1]

    return OperatorPrices(**{field.name: of(getattr(prices, field.name)) for field in fields(OperatorPrices)})


def joined(first: OperatorPrices, second: OperatorPrices) -> OperatorPrices:
    """Prices of one operator that computes in two ways: under the strategies of the first, then of the second."""

    def both(one: Any, other: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(both(*pair) for pair in zip(one, other, strict=True))
        return np.concatenate([one, other])

    names = [field.name for field in fields(OperatorPrices)]
    return OperatorPrices(**{name: both(getattr(first, name), getattr(second, name)) for name in names})


def dominated_by_second(prices: OperatorPrices) -> NDArray[np.bool_]:
    """For an operator that computes in two ways, under the same K strategies each: whether the second takes at most as
    much as the first in everything (kernels, launches, collectives and bytes), (K,)."""
    (late, late_back), (host, host_back) = prices.late, prices.host
    every = (
        prices.forward - late, prices.backward - late_back, prices.forward, prices.backward, host, host_back,
        prices.inner_forward, prices.inner_backward, prices.saved_extra, prices.unsaved_extra, prices.transient,
    )  # fmt: skip
    first, second = np.split(np.stack(every), 2, axis=1)
    return np.asarray((second <= first).all(axis=0))


def price_operator(
    rule: Rule,
    strategies: Sequence[Strategy],
    operands: Sequence[TensorType],
    results: Sequence[TensorType],
    differentiable: Sequence[bool],
    mesh: Mesh,
    cluster: Cluster,
    optimizer: str = "",
) -> OperatorPrices:
    """Prices of an operator under each strategy.

    `differentiable` says for each operand whether it needs a gradient; `optimizer` updates tables outside of the
    devices. Forward and backward seconds are those of kernels on local shapes, without redistributions between
    operators. Raises RequestError for tables outside of the devices that the optimizer or the cluster cannot have.
    """
    held = _extents(rule, rule.splits, strategies, mesh)
    extents = held if rule.loops == rule.splits else _extents(rule, rule.loops, strategies, mesh)
    extents = _fullest(rule, extents)
    operand_bytes = tuple(_bytes(held, dims, tensor) for dims, tensor in zip(rule.operands, operands, strict=True))
    result_bytes = tuple(_bytes(held, dims, tensor) for dims, tensor in zip(rule.results, results, strict=True))
    read = sum((b for i, b in enumerate(operand_bytes) if i not in rule.looked_up), np.zeros(len(extents)))
    written = sum(result_bytes, np.zeros(len(extents)))
    flops = _flops(rule, extents)
    dtype = _compute_dtype(rule, (*operands, *results))
    looked_up = sum((written for _ in rule.looked_up), np.zeros(len(extents)))
    graded = tuple(i for i, needed in enumerate(differentiable) if needed)
    gradients = sum((operand_bytes[i] for i in graded), np.zeros(len(extents)))
    one = np.ones(len(extents))
    call = KernelCall(
        rule=rule,
        extents=extents,
        dtype=dtype,
        device=cluster.device,
        software=cluster.software,
        graded=graded,
        flops=flops,
        moved=read + written + looked_up,
        moved_backward=read + written + gradients,
        hops=np.array([_hops(rule, strategy, mesh) for strategy in strategies]) if rule.rings else one,
        uneven=np.array([uneven(rule, strategy, mesh) for strategy in strategies]) if rule.rings else one,
    )
    forward, backward = kernel_seconds(call)
    host, back = host_seconds(call)
    if cluster.device.in_line or cluster.software.waits_for_kernels:
        forward, backward = forward + host, backward + back if graded else backward
        host, back = np.zeros(len(extents)), np.zeros(len(extents))
    late = np.maximum(host - forward, 0.0), np.maximum(back - backward, 0.0) if graded else np.zeros(len(extents))
    extra = score_bytes(call)
    if extra is None:
        extra = _sum_work(_kept_beside(rule, cluster.software), extents) if graded else np.zeros(len(extents))
    extra = extra + composed_bytes(call) + composed_gelu_bytes(call) + bias_bytes(call) + dropped_bytes(call)
    come = np.array([joined_bytes(rule, strategy, mesh) for strategy in strategies]) if rule.joined else 0.0 * extra
    extra = extra + come if graded else extra
    inner_forward, inner_backward = exposed_seconds(rule, strategies, mesh, cluster, (forward, backward), graded)
    again, launches = np.zeros(len(extents)), (host, back)
    if graded and rule.op_class in cluster.software.recomputed_in_backward:
        backward, inner_backward = backward + forward, inner_backward + inner_forward
        late, extra, again, launches = (late[0], late[0] + late[1]), again, extra, (host, host + back)
    if rule.outside is not None:
        got, given = _outside(rule.outside, extents, mesh, cluster, optimizer)
        inner_forward = inner_forward + got
        extra = _sum_work(rule.saved_extra, extents) if rule.outside.trained else extra
        if rule.outside.trained:
            inner_backward = inner_backward + given
            backward = backward + forward  # gradients of results are accumulated row by row
    free = rule.op_class == "view"
    saved = {i for i, needed_by in rule.saves if set(needed_by) & set(graded)}
    passing = sum(
        (b for i, b in enumerate(operand_bytes) if i not in saved and i not in rule.looked_up), np.zeros(len(extents))
    )
    over = saved if rule.op_class == "elementwise" and cluster.software.gates_in_place else ()
    fresh = sum((operand_bytes[i] for i in graded if i not in over), np.zeros(len(extents)))
    own = rule.kernel_scratch
    own = rule.scratch if own is None or lacks_kernels(cluster.device, cluster.software) else own
    scratch = _sum_work(own, extents) + _inner_scratch(rule, strategies, held, mesh) + 2 * come
    scratch = scratch + _of_gradients(rule, graded, operand_bytes, result_bytes, extents)
    if rule.casts and rule.op_class != "experts" and not cluster.device.multiplies(rule.computed[0]):
        scratch = scratch * _EMULATED
    return OperatorPrices(
        forward=forward + late[0],
        backward=backward + late[1],
        late=late,
        host=launches,
        inner_forward=inner_forward,
        inner_backward=inner_backward,
        operands=tuple(b / operands[i].element_bytes if i in rule.narrow else b for i, b in enumerate(operand_bytes)),
        results=result_bytes,
        saved_extra=extra,
        joined=come,
        unsaved_extra=_sum_work(() if graded else rule.saved_extra, extents),
        transient=np.zeros(len(extents)) if free else written + np.maximum(passing, fresh) + scratch + again,
        flops=flops * (1 + rule.backward_work(graded)),
    )


def _outside(outside: Outside, extents: Array, mesh: Mesh, cluster: Cluster, optimizer: str) -> tuple[Array, Array]:
    """Seconds to get rows of a table outside of the devices, and to send back their gradients, (K,) each. Raises
    RequestError if the profile does not describe the hosts, and for an optimizer that does not update rows."""
    if cluster.host is None:
        raise RequestError(
            f"place: profile {cluster.name} says nothing of the host beside its devices; add a section [host] to it,"
            " or leave the tables on the devices"
        )
    if outside.trained and optimizer not in ROW_MOMENTS:
        raise RequestError(f"place: tables elsewhere have no {optimizer}; take {' or '.join(ROW_MOMENTS)}")
    rows = np.minimum(_product(extents, outside.ids), float(outside.rows))
    if outside.place == "servers":
        return server_rows_time(rows, outside.row_bytes, cluster.host, cluster)
    group = cluster.group(mesh.size, 1) if mesh.size > 1 else None
    return host_rows_time(rows, outside.row_bytes, cluster.host, group, ROW_MOMENTS.get(optimizer, 0))


def _kept_beside(rule: Rule, software: Software) -> tuple[Work, ...]:
    """What an operator keeps in addition to its operands and results. Experts keep rows and weighted products as they
    multiply them, and the outputs of gate and up as these make them (`planner.sharding.rules.experts`)."""
    remakes = "experts" in software.remakes
    if rule.op_class != "experts" or not (software.keeps_fp8 or remakes):
        return rule.saved_extra
    operand = 0.5 if software.keeps_fp8 else 1.0
    rows, width, *others = rule.saved_extra
    first = len(matrices_of(rule)) - 1
    kept = first + (0.0 if remakes else operand)  # of the outputs of these, and p, the input of down
    return (
        replace(rows, coefficient=operand * rows.coefficient),
        replace(width, coefficient=width.coefficient * kept / (first + 1)),
        *others,
    )


def _hops(rule: Rule, strategy: Strategy, mesh: Mesh) -> float:
    """The number of kernels that an operator runs as: one for every hop of a ring."""
    axis = ring_axis(rule, strategy, mesh.sizes)
    return 1.0 if axis is None else float(mesh.sizes[axis])


def uneven(rule: Rule, strategy: Strategy, mesh: Mesh, place: int = -1) -> float:
    """The work of device number `place` of a ring, by default the last, relative to the mean over all devices. With a
    causal mask and contiguous pieces, device i of n has (2 i + 1) / n times the mean. With a window, the pairs that it
    shows to the device's queries count."""
    axis = ring_axis(rule, strategy, mesh.sizes)
    if axis is None:
        return 1.0
    size = mesh.sizes[axis]
    if rule.window is not None:
        return _uneven_window(rule, rule.window, size, place % size, axis in mesh.zigzag)
    return (2 * (place % size) + 1) / size if rule.causal and axis not in mesh.zigzag else 1.0


def _uneven_window(rule: Rule, window: Window, size: int, place: int, zigzag: bool) -> float:
    length = rule.factors[rule.index["k"]].extent
    runs = pieces_of_ring(length, size, place, zigzag)
    return size * sum(window.pairs(*run, length) for run in runs) / window.pairs(0, length, length)


def transient_bytes(alive: Liveness, graph: OperatorGraph, at: int, rule: Rule, prices: OperatorPrices) -> Array:
    """Bytes that live while an operator runs, without weights, (K,). For logits made a piece at a time, only the
    gradients of their inputs count; for overwritten logits, only their inputs."""
    if not alive.trains:  # inputs count beside outputs, and weights exist anyway
        named = enumerate(graph.operators[at].operands)
        weights = (prices.operands[i] for i, n in named if n in graph.parameter_names and i not in rule.looked_up)
        held = sum(weights, np.zeros_like(prices.transient))
        return np.maximum(prices.transient - held, 0.0) + prices.unsaved_extra
    if at in alive.overwritten:
        lost = prices.operands if rule.op_class != "cross_entropy" else ()
        return sum(lost if prices.transient.any() else (), np.zeros_like(prices.transient))
    if at not in alive.piecewise:
        return prices.transient
    graded = (i for i, name in enumerate(graph.operators[at].operands) if name in graph.differentiable)
    return sum((prices.operands[i] for i in graded if rule.op_class == "matmul"), np.zeros_like(prices.transient))


def _extents(rule: Rule, cut: tuple[tuple[int, ...], ...], strategies: Sequence[Strategy], mesh: Mesh) -> Array:
    """The extent of each factor on one device, given what an axis cuts, (K, factors)."""
    whole = np.array([float(factor.extent) for factor in rule.factors])
    return whole / _pieces(len(whole), cut, tuple(strategies), mesh.sizes)


@lru_cache(maxsize=4096)
def _pieces(
    factors: int, cut: tuple[tuple[int, ...], ...], strategies: tuple[Strategy, ...], sizes: tuple[int, ...]
) -> Array:
    """The number of parts into which each factor is cut, (K, factors); it does not depend on the batch."""
    found = np.ones((len(strategies), factors))
    for row, strategy in zip(found, strategies, strict=True):
        for choice, size in zip(strategy, sizes, strict=True):
            for factor in cut[choice] if choice is not None else ():
                row[factor] *= size
    return found


def _fullest(rule: Rule, extents: Array) -> Array:
    """The extents on the device with the most work."""
    uneven = [at for at, factor in enumerate(rule.factors) if factor.imbalance != 1.0]
    if not uneven:
        return extents
    whole = np.array([float(factor.extent) for factor in rule.factors])
    times = np.array([factor.imbalance for factor in rule.factors])
    return np.where(extents < whole, np.minimum(extents * times, whole), extents)


def _bytes(extents: Array, dims: Dims, tensor: TensorType) -> Array:
    factors = [factor for indexed in dims for factor in indexed]
    return _product(extents, factors) * tensor.element_bytes


def _product(extents: Array, factors: Sequence[int]) -> Array:
    if not factors:
        return np.ones(len(extents))
    found: Array = extents[:, factors[0]]
    for factor in factors[1:]:
        found = found * extents[:, factor]
    return found


def _sum_work(terms: Sequence[Work], extents: Array) -> Array:
    return sum((term.coefficient * _product(extents, term.factors) for term in terms), np.zeros(len(extents)))


def _flops(rule: Rule, extents: Array) -> Array:
    return _sum_work(rule.work, extents)


def _compute_dtype(rule: Rule, tensors: Sequence[TensorType]) -> str:
    for tensor in tensors:
        if tensor.floating:
            found = profile_dtype(rule.op_class, tensor.dtype)
            if found is None:
                raise RuleError(f"{rule.op} computes in {tensor.dtype}, for which no machine profile has a peak")
            return found
    return "fp32"


def _of_gradients(
    rule: Rule, graded: Sequence[int], operands: Sequence[Array], results: Sequence[Array], extents: Array
) -> Array:
    """Transient bytes while gradients of operands are computed one after the other, and until those of broadcast
    operands are summed. A stepwise operator frees more than that in the meantime."""
    if rule.stepwise:
        return np.zeros(len(extents))
    most = np.zeros(len(extents))
    for place in graded:
        most = np.maximum(most, _sum_work(rule.scratch_of_gradient(place), extents))
    summed = [place for place in graded if rule.makes_whole_gradients and place not in rule.handed]
    return most + sum(np.where(operands[place] == results[0], 0.0, results[0]) for place in summed)


def _inner_scratch(rule: Rule, strategies: Sequence[Strategy], extents: Array, mesh: Mesh) -> Array:
    if not rule.inner_scratch:
        return np.zeros(len(extents))
    sends = [bool(inner_messages(rule, strategy, mesh)) for strategy in strategies]
    return np.where(sends, _sum_work(rule.inner_scratch, extents), 0.0)
