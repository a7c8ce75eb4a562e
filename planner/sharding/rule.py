"""The factor rule: one description of an operator from which all of its sharding follows.

An operator is a loop nest. A rule names the loop indices, its *factors*, and says which factors index each dim of
each operand and result, outer to inner:

    linear   b s i, o i -> b s o        i is in no result: a reduction

A *strategy* gives each mesh axis one factor, or none. For an axis with factor f, derived here and nowhere else:

    tensor that has f          forward S(dim)       gradient S(dim)
    operand without f          forward R            gradient P      (each device sees a part of the loop)
    addend without f           forward P            gradient R      (a bias joins a sum once; where f is a reduction)
    result without f           forward and gradient depend on the kind of f:
        reduction              forward P            gradient R
        combined               forward R            gradient R      (the operator's implementation combines the parts,
                                                                     though other results may have f: batch norm)
        broadcast              forward R            gradient P      (consumers see parts; see `planner.identity`)
    any tensor, axis unused    forward R            gradient R

so data parallelism is "split b" with the gradient sum of the weights as a consequence, and column and row parallelism
of a linear layer are "split o" and "split i". The idea is that of Shardy's OpShardingRule and of the SOAP / TensorOpt
line of work; the dual backward layouts are those of DTensor's `to_local(grad_placements=...)`.

A dim that is indexed by several factors, (h d), is cut on its outermost factors only: an inner factor can be split
once all factors outside of it are split completely, because a shard must be one contiguous piece.

An *exchange* splits two loops on one axis, where the operator's implementation moves rows between the devices: experts
e while tokens are cut along b before and after, written e@b. Each tensor is cut along the one of the two that it has,
and no gradient is partial on the axis, because every row of the axis reaches the device that has the matching piece:

    experts  b s h, e f h -> b s h      axis given e@b: tokens S(0), weights S(0), result S(0); all-to-all inside

Two loops are *aligned* where each index of the shorter loop belongs to a run of the longer one, as key heads belong to
the query heads that share them. One axis splits both, piece by piece. Or it splits the longer loop alone, where every
piece then needs at most one index of the shorter loop: operands with the shorter loop are whole on the axis, and their
gradient is partial, as for every operand without the factor:

    attention  b r q d, b kv k d -> b r q d    g = kv, r aligned: 8 key heads on an axis of 8; r: on an axis of 16

A *ring* is an exchange in which every device meets all pieces of the first factor, so that only the second divides the
work: keys k are passed round to queries q, written k@q (Liu et al. 2023, arXiv 2310.01889). It is used only where a
plan asks for it.

A *halo* splits a dim that a stencil slides over, and that of its results, h@ph: a piece is read with the edges of its
neighbours, which the implementation sends (`planner.sharding.halo`), from one device to the next where the halo spans
several pieces. An operator takes a halo on one axis at most.

A rule and what a strategy makes of it (layouts, extents) are one definition, and so in one file;
`planner.sharding.legality` says which strategies are legal.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from planner.errors import StrategyError
from planner.sharding.layout import PARTIAL, REPLICATE, Layout, Placement, shard
from planner.sharding.mesh import Mesh
from planner.sharding.window import Window


class FactorKind(Enum):
    """How a factor may be split."""

    PARALLEL = "parallel"  # in the results: pieces are independent
    REDUCTION = "reduction"  # in no result: pieces are terms of a sum
    COMBINED = "combined"  # not in every result: the named implementation combines the pieces itself
    BROADCAST = "broadcast"  # indexes nothing here: only the gradient is in pieces
    EXCHANGE = "exchange"  # splits two other factors at once: the implementation moves rows between the devices
    ALIGNED = "aligned"  # splits two other factors at once: the pieces of one use those of the other
    RING = "ring"  # splits two other factors at once; every device gets all pieces of the first, one after the other
    HALO = "halo"  # splits two other factors at once; a piece of the first is read with the edges of its neighbours
    BLOCKED = "blocked"  # cannot be split by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One loop index: its name in the rule, its extent, and how it may be split. An exchange, or a ring, is no loop of
    its own: it has the extent 1, and `parts` are the two factors that it splits at once. Where the loop is cut, the
    device with the most work has `imbalance` times the average, but no more than all. For a halo, a piece of the first
    part is read with up to `reach` elements on either side, of one neighbour or several; 0 where it is read alone."""

    name: str
    extent: int
    kind: FactorKind
    parts: tuple[int, ...] = ()
    imbalance: float = 1.0
    reach: int = 0


Pair = tuple[Placement, Placement]  # of a value and of its gradient, on one axis
_OPERAND_WITHOUT: Mapping[FactorKind, Pair] = dict.fromkeys(FactorKind, (REPLICATE, PARTIAL))
_ADDEND_WITHOUT: Mapping[FactorKind, Pair] = {**_OPERAND_WITHOUT, FactorKind.REDUCTION: (PARTIAL, REPLICATE)}
_RESULT_WITHOUT: Mapping[FactorKind, Pair] = {
    FactorKind.REDUCTION: (PARTIAL, REPLICATE),
    FactorKind.COMBINED: (REPLICATE, REPLICATE),
    FactorKind.BROADCAST: (REPLICATE, PARTIAL),
}

Dims = tuple[tuple[int, ...], ...]  # per dim of a tensor the factors that index it, outer to inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One term of the floating point work: coefficient * product of the extents of these factors."""

    coefficient: float
    factors: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerCollective:
    """A collective that an implementation issues inside the operator when `factor` is split.

    The message has `element_bytes` for each point of `factors` (of the loops of one device). A "send_recv" of a ring
    passes a piece on: each device sends a piece that it holds to the next device. A ring of n devices does this n - 1
    times for each `forward` and `backward`, and once more where the piece goes `home` to the device it is for. A
    "send_recv" of a halo sends an edge of `rows` rows of `element_bytes` to a neighbour; where pieces are shorter than
    that, a device sends several, its own first, then those that it received. A `backward` message belongs to the
    gradient of operand `gradient_of`, if one is named. In a message of rows, `once` says that the rows of a token for
    the same part of the outermost axis of an exchange are sent once. An `outermost` message is sent on that axis alone.
    A message with `blocks` is sent only where a device's piece of the factor does not consist of whole blocks of that
    size; for an `ordered` factor, which zigzag axes cut into two chunks, where a chunk does not.
    """

    kind: str
    factor: int
    factors: tuple[int, ...]
    element_bytes: float
    forward: int = 0
    backward: int = 0
    home: bool = False
    gradient_of: int | None = None
    once: "Once | None" = None
    outermost: bool = False
    blocks: int = 0
    ordered: bool = False
    rows: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """Rows that are sent once to each part of an axis: a token has `chosen` of them, in `chosen_groups` of `groups` of
    experts; a row has `row` bytes (`costmodels.once_share`)."""

    chosen: int
    groups: int
    chosen_groups: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Composed:
    """The PyTorch operators of one cost class that an operator of the graph runs as: how many they are in the forward
    and in the backward pass, and the bytes that they read and write."""

    op_class: str
    operators: tuple[int, int]
    moved: tuple[Work, ...]
    moved_backward: tuple[Work, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What an operator gets from a table that is not on the devices: some of its `rows`, one for each point of the
    factors `ids`, `row_bytes` each, from a `place` ("host" or "servers"); `trained` says that gradients go back."""

    place: str
    ids: tuple[int, ...]
    rows: int
    row_bytes: int
    trained: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Rule:
    """The rule of one call; equal calls share one object, so rules are compared by identity.

    Operands are the tensor arguments in order, results the tensor results.

    `op_class` names the cost class; `work` the forward floating point operations. The gradient of each operand takes
    `gradient_work` times as many, times its `gradient_units` where those are not 1; the backward pass does
    `repeated_work` times as many over again, which are the `repeated_terms` of `work` where some are named. `addends`
    are operands that join a reduction's sum once; `looked_up` are operands of which only some rows are read.
    `deferred_weight_gradients` are the weights of a linear layer: their gradients are products of their own, which can
    be computed later.

    Autograd keeps operand i for the gradients of operands J where `saves` has (i, J), the results in `saved_results`,
    and `saved_extra` bytes beside them. `scratch` bytes live only while the operator runs: `kernel_scratch` instead
    where fused kernels compute what several PyTorch operators are composed for, and `inner_scratch` where it sends any
    of `inner`. `gradient_scratch` has bytes that live only while the gradient of an operand is made. An operator that
    runs `stepwise` has its `scratch` in the forward pass, too, and frees `saved_extra` as its backward pass proceeds.

    Each element of a `pointwise` result is computed from the elements in its place; gradients of its operands have its
    shape and dtype first, and are then summed and cast to those of the operands. Operands that are `handed` the
    gradient of the result use that tensor itself. An activation `joins_product` where kernels of chains compute it
    within the product behind it (`planner.graph.gates`). A cast to fp32, and the loss that alone reads it, `joins_loss`
    where kernels of the loss read what is cast (`planner.graph.cast_losses`). A linear layer `joins_projection` where
    launches are counted and another layer of the same input stands for it (`planner.graph.projections`). A product that
    `folds` the leading dims of its operands copies operands whose leading dims cannot be viewed as one. With `spread`
    the gradient of what is summed is that of the sum, broadcast to its shape without any memory. With `joined` the data
    that collectives of `inner` bring are joined to a copy of the first operand while the operator runs, and autograd
    keeps them as they came. `passes` says that the gradient of an operand of the same type is that of the result
    itself, and that a copy that would change nothing is not made.

    `local_form` ("reshape", "expand", ...) is what an operator that spells out a shape becomes on shards: that operator
    of the tensor and its local result shape. `mean_over` lists reductions that average instead of sum. `roles` names
    the factors whose product is each extent that the time of the kernel depends on, where the operands do not tell.
    `chunk` are the steps of a state-space scan that are computed at a time. `causal` says that half of the work is
    masked, `unfused` that attention has its scores in memory, and `drops` that a fused kernel drops probabilities.
    `window` says which keys a query sees by their positions; `seen` is the share that it leaves of the scores counted
    without it.
    `outside` is what the operator gets from a table that is not on the devices. `computed` are the dtypes in which the
    result, the gradient of the first operand and that of the second are computed, where they differ from those of the
    tensors; `gained` is the share that remains of the time that this saves. `scaled_in_blocks` says that the operands
    of the first two have scales of blocks; one kernel finds these scales and casts. `narrow` operands arrive cast to 8
    bits. An operator that every data-parallel replica computes by itself has in `one` the rule of one replica, and the
    loop over replicas as its last factor (`planner.sharding.rules.per_replica`).
    """

    op: str
    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    op_class: str
    work: tuple[Work, ...] = ()
    gradient_work: float = 1.0
    gradient_units: tuple[tuple[int, float], ...] = ()
    repeated_work: float = 0.0
    repeated_terms: tuple[int, ...] = ()
    addends: tuple[int, ...] = ()
    saves: tuple[tuple[int, tuple[int, ...]], ...] = ()
    looked_up: tuple[int, ...] = ()
    deferred_weight_gradients: tuple[int, ...] = ()
    saved_results: tuple[int, ...] = ()
    saved_extra: tuple[Work, ...] = ()
    scratch: tuple[Work, ...] = ()
    kernel_scratch: tuple[Work, ...] | None = None
    gradient_scratch: tuple[tuple[int, Work], ...] = ()
    pointwise: bool = False
    folds: bool = False
    joins_product: bool = False
    joins_loss: bool = False
    joins_projection: bool = False
    stepwise: bool = False
    spread: bool = False
    handed: tuple[int, ...] = ()
    inner: tuple[InnerCollective, ...] = ()
    inner_scratch: tuple[Work, ...] = ()
    joined: bool = False
    local_form: str | None = None
    mean_over: tuple[int, ...] = ()
    roles: tuple[tuple[str, tuple[int, ...]], ...] = ()
    chunk: int = 0
    causal: bool = False
    window: Window | None = None
    seen: float = 1.0
    passes: bool = False
    unfused: bool = False
    drops: bool = False
    computed: tuple[str, str, str] = ("", "", "")
    gained: float = 1.0
    scaled_in_blocks: bool = False
    narrow: tuple[int, ...] = ()
    outside: Outside | None = None
    one: "Rule | None" = None
    composed: tuple[Composed, ...] = ()

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Factor index by name."""
        return {factor.name: i for i, factor in enumerate(self.factors)}

    def whole_extent(self, factors: Sequence[int]) -> int:
        """Points of these factors over all devices."""
        return math.prod(self.factors[factor].extent for factor in factors)

    @cached_property
    def flops(self) -> float:
        """Floating point operations of the forward pass over all devices."""
        return self.flops_of([factor.extent for factor in self.factors])

    def flops_of(self, extents: Sequence[float]) -> float:
        """Floating point operations of the forward pass for these extents of the loops, one for each factor."""
        return sum(term.coefficient * math.prod(extents[factor] for factor in term.factors) for term in self.work)

    @property
    def replica(self) -> int | None:
        """The loop over replicas that each compute the operator by themselves; None where there is none."""
        return None if self.one is None else len(self.one.factors)

    @property
    def makes_whole_gradients(self) -> bool:
        """Whether gradients of operands first have the shape and the dtype of the result."""
        return self.pointwise and self.op_class == "elementwise" and not self.passes

    def scratch_of_gradient(self, place: int) -> tuple[Work, ...]:
        """Memory that lives only while the gradient of an operand is computed."""
        return tuple(work for at, work in self.gradient_scratch if at == place)

    @property
    def casts(self) -> bool:
        """Whether its operands are cast to another dtype for its products."""
        return any(self.computed)

    @cached_property
    def splits(self) -> tuple[tuple[int, ...], ...]:
        """For each factor the factors that an axis given to it cuts: itself; the parts of an exchange; nothing where
        only the gradient is in pieces."""
        return tuple(
            factor.parts if factor.parts
            else () if factor.kind is FactorKind.BROADCAST
            else (index,)
            for index, factor in enumerate(self.factors)
        )  # fmt: skip

    @cached_property
    def loops(self) -> tuple[tuple[int, ...], ...]:
        """For each factor the loops that an axis given to it cuts. As `splits`, without the part of an exchange or a
        ring that every device runs in full: the second of an exchange, whose rows may come from everywhere, and the
        first of a ring."""
        run = {FactorKind.EXCHANGE: slice(0, 1), FactorKind.RING: slice(1, None)}
        return tuple(
            factor.parts[run[factor.kind]] if factor.kind in run else cut
            for factor, cut in zip(self.factors, self.splits, strict=True)
        )

    @cached_property
    def exchanged(self) -> frozenset[int]:
        """Factors that an exchange splits together with one that counts tokens: experts."""
        return frozenset(factor.parts[0] for factor in self.factors if factor.kind is FactorKind.EXCHANGE)

    @cached_property
    def rings(self) -> frozenset[int]:
        """Factors whose operands a ring may pass from device to device."""
        return frozenset(i for i, factor in enumerate(self.factors) if factor.kind is FactorKind.RING)

    @cached_property
    def halos(self) -> frozenset[int]:
        """Factors whose pieces are read with edges of their neighbours."""
        return frozenset(i for i, factor in enumerate(self.factors) if factor.kind is FactorKind.HALO and factor.reach)

    @cached_property
    def aligned(self) -> tuple[tuple[int, int, int], ...]:
        """For each aligned factor: itself, the shorter loop, and the longer one."""
        return tuple((i, *f.parts[:2]) for i, f in enumerate(self.factors) if f.kind is FactorKind.ALIGNED)  # type: ignore[misc]

    @cached_property
    def nesting(self) -> tuple[tuple[frozenset[int], frozenset[int]], ...]:
        """For each factor the factors outside and inside of it in a compound dim."""
        dims = [factors for tensor in (*self.operands, *self.results) for factors in tensor if len(factors) > 1]
        return tuple(
            (
                frozenset(g for dim in dims if f in dim for g in dim[: dim.index(f)]),
                frozenset(g for dim in dims if f in dim for g in dim[dim.index(f) + 1 :]),
            )
            for f in range(len(self.factors))
        )

    def backward_work(self, graded: Iterable[int], *, repeated: bool = True) -> float:
        """Work of the backward pass for the gradients of these operands, in units of the forward work; the gradients of
        addends take none."""
        units = dict(self.gradient_units)
        worked = [units.get(at, 1.0) for at in graded if at not in self.addends]
        return self.gradient_work * sum(worked) + (self.repeated_work if worked and repeated else 0.0)

    @cached_property
    def placements(self) -> tuple[tuple[Mapping[int | None, Pair], ...], tuple[Mapping[int | None, Pair], ...]]:
        """For each operand and each result, the placements that each choice for one axis gives it."""
        operands = tuple(
            self._placements(dims, _ADDEND_WITHOUT if index in self.addends else _OPERAND_WITHOUT)
            for index, dims in enumerate(self.operands)
        )
        return operands, tuple(self._placements(dims, _RESULT_WITHOUT) for dims in self.results)

    def _placements(self, dims: Dims, without: Mapping[FactorKind, Pair]) -> Mapping[int | None, Pair]:
        found: dict[int | None, Pair] = {None: (REPLICATE, REPLICATE)}
        for index, factor in enumerate(self.factors):
            cut = self.splits[index]
            dim = next((dim for dim, factors in enumerate(dims) if any(f in factors for f in cut)), None)
            if dim is not None:
                found[index] = (shard(dim), shard(dim))
            elif factor.kind in without:
                found[index] = without[factor.kind]
        return found

    def format(self) -> str:
        """The rule as text, `b s i, o i -> b s o`."""
        return f"{self._side(self.operands)} -> {self._side(self.results)}"

    def _side(self, tensors: tuple[Dims, ...]) -> str:
        return ", ".join(" ".join(self._dim(dim) for dim in dims) for dims in tensors)

    def _dim(self, dim: tuple[int, ...]) -> str:
        names = " ".join(self.factors[f].name for f in dim)
        return names if len(dim) == 1 else f"({names})" if dim else "1"


Strategy = tuple[int | None, ...]  # per mesh axis the index of a factor of the rule, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplex:
    """Layouts of one tensor in both directions: the value itself and its gradient."""

    forward: Layout
    gradient: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLayouts:
    """What a strategy says about every tensor of one call."""

    operands: tuple[Duplex, ...]
    results: tuple[Duplex, ...]


def derive_layouts(rule: Rule, strategy: Strategy) -> OperatorLayouts:
    """Layouts of all operands and results under a legal strategy (see `check_strategy`)."""
    operands, results = rule.placements
    return OperatorLayouts(
        operands=tuple(_duplex(table, strategy) for table in operands),
        results=tuple(_duplex(table, strategy) for table in results),
    )


def _duplex(table: Mapping[int | None, Pair], strategy: Strategy) -> Duplex:
    pairs = [table[choice] for choice in strategy]
    return Duplex(forward=tuple([pair[0] for pair in pairs]), gradient=tuple([pair[1] for pair in pairs]))


def local_extents(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[int, ...]:
    """Extent of each factor on one device."""
    pieces = pieces_of(rule, strategy, mesh.sizes)
    return tuple(factor.extent // count for factor, count in zip(rule.factors, pieces, strict=True))


def loop_extents(rule: Rule, strategy: Strategy, mesh: Mesh) -> tuple[float, ...]:
    """Extent of each loop on the device with the most work."""
    pieces = _pieces(rule.loops, strategy, mesh.sizes)
    return tuple(
        [
            factor.extent // count * (min(factor.imbalance, count) if count > 1 else 1)
            for factor, count in zip(rule.factors, pieces, strict=True)
        ]
    )


def ring_axis(rule: Rule, strategy: Strategy, sizes: Sequence[int]) -> int | None:
    """The axis of two devices or more along which a ring passes operands; None where there is no ring."""
    if not rule.rings:
        return None
    return next((axis for axis, choice in enumerate(strategy) if choice in rule.rings and sizes[axis] > 1), None)


def pieces_of(rule: Rule, strategy: Strategy, sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of pieces into which a strategy cuts each factor."""
    return _pieces(rule.splits, strategy, sizes)


def _pieces(cut: tuple[tuple[int, ...], ...], strategy: Strategy, sizes: Sequence[int]) -> tuple[int, ...]:
    pieces = [1] * len(cut)
    for choice, size in zip(strategy, sizes, strict=True):
        for factor in cut[choice] if choice is not None else ():
            pieces[factor] *= size
    return tuple(pieces)


def splittable(rule: Rule) -> tuple[str, ...]:
    """Names of the factors that a strategy may use."""
    return tuple(factor.name for factor in rule.factors if factor.kind is not FactorKind.BLOCKED)


def named_strategy(rule: Rule, names: Sequence[str | None], where: str) -> Strategy:
    """The strategy written with factor names. Raises StrategyError for a name that is no factor of the rule."""
    return tuple(_factor_index(rule, name, where) for name in names)


def _factor_index(rule: Rule, name: str | None, where: str) -> int | None:
    if name is None:
        return None
    if name not in rule.index:
        raise StrategyError(
            f"{where} ({rule.format()}) has no factor '{name}';"
            f" splittable factors: {', '.join(splittable(rule)) or 'none'}"
        )
    return rule.index[name]


def strategy_names(rule: Rule, strategy: Strategy) -> tuple[str | None, ...]:
    """The strategy with names for indices; the inverse of `named_strategy`."""
    return tuple(None if choice is None else rule.factors[choice].name for choice in strategy)


def tensor_shape(dims: Dims, extents: Sequence[int]) -> tuple[int, ...]:
    """Extent of each dim given the (local) extents of the factors."""
    return tuple(math.prod(extents[f] for f in factors) for factors in dims)
