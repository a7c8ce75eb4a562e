"""A global batch with samples of weight zero at its end, so that devices divide a batch that they would not divide.

    97 samples on 4 devices, 1 micro-batch      100 samples, the last 3 of weight zero: 25 on each device
    97 samples on 4 devices, 2 micro-batches    104 samples: 52, and 52 of which the last 7 have weight zero

All shapes stay those of an even batch. The graph gets one more input, `SAMPLE_WEIGHTS`, one number per sample and
micro-batch: P / N for each of the N samples of the batch, 0 for each of the P - N that were added. It is cut along the
samples like any other input. The batch dim is followed through the rules, and every operator that sums over it is
told which samples count. For a micro-batch of s samples, n of which belong to the batch, let w be the weights and c the
mean of w over the micro-batch, c = n P / (s N):

    sum of x             sum of (x where w > 0, else 0)
    mean of x            mean of x (w / c)                  w / c is s / n, or 0: the mean of n samples
    cross entropy        targets are ignore_index where w = 0
    pair loss            its elements, then the sum or mean as above
    loss of the graph    loss c                             the mean over micro-batches is that over samples

So every value without a batch dim is what the model computes from the n samples alone, and gradients are those of the
mean loss over all samples. Any other operator that looks at several samples at once (batch norm, a cross entropy whose
classes are samples) is refused by name. Added samples are copies of the last one, so that the model can compute with
their numbers; they take their share of time and memory, and are priced and executed like any others.

Source: PyTorch's `DistributedSampler` (`drop_last=False`) fills up batches alike, but there the copies count.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.errors import RequestError
from planner.graph.operator_graph import Argument, Operator, OperatorGraph, TensorType, TorchConstant, ValueRef
from planner.graph.random_ops import CHANCES
from planner.sharding.rescale import Growth, batch_growths, grown_factors
from planner.sharding.rule import FactorKind, Rule
from planner.sharding.rules import rule_of
from planner.sharding.rules.losses import PairLoss
from planner.sharding.rules.table import RULES
from planner.sharding.update import Update

SAMPLE_WEIGHTS = "planner.sample_weights"
"""The input of the graph that says which samples count, and how much."""

MEAN_WEIGHT = f"{SAMPLE_WEIGHTS}.mean"
"""The mean of the sample weights over a micro-batch, by which its loss is multiplied."""

_DTYPE = "float32"
_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers for the reductions of a loss
_TARGETS: Mapping[str, int] = {"aten.cross_entropy_loss.default": 4, "aten.nll_loss_nd.default": 4}
"""Losses that leave out some targets, and the place of the argument that says which."""
_IGNORED = -100
_SUMS = ("aten.sum.default", "aten.sum.dim_IntList")
_MEANS = ("aten.mean.default", "aten.mean.dim")


def with_sample_weights(graph: OperatorGraph, batch: int) -> OperatorGraph:
    """`graph`, whose inputs have `batch` samples, with the input `SAMPLE_WEIGHTS`, by which samples count.

    Raises RequestError for an operator that looks at several samples at once in another way than by a sum or a mean.
    """
    return _Weighted(graph=graph, batch=batch, growths=batch_growths(graph, batch)).made()


def weighted_of(update: Update, batch: int) -> int:
    """The samples of an example of `batch` if an update weights them; else 0."""
    return batch if update.padding_samples else 0


def sample_weights(samples: int, padding: int) -> list[float]:
    """The weight of every sample of a batch of `samples`, and of `padding` more behind them."""
    return [(samples + padding) / samples] * samples + [0.0] * padding


@dataclass(kw_only=True)
class _Weighted:
    """The graph while operators are added to it. `known` has the values made from the weights, by what they are."""

    graph: OperatorGraph
    batch: int
    growths: Mapping[str, tuple[Growth, ...]]
    operators: list[Operator] = field(default_factory=list)
    types: dict[str, TensorType] = field(default_factory=dict)
    known: dict[tuple[object, ...], str] = field(default_factory=dict)

    def made(self) -> OperatorGraph:
        graph = self.graph
        if not graph.batched_inputs(self.batch):
            raise RequestError("pad batch: no input of the model has samples; leave it out")
        self.types = {**graph.types, SAMPLE_WEIGHTS: TensorType(shape=(self.batch,), dtype=_DTYPE)}
        for op in graph.operators:
            self._weigh(op)
        loss = self._call("loss", "aten.mul.Tensor", (ValueRef(graph.loss), ValueRef(self._mean())), self._wide())
        return replace(
            graph,
            types=self.types,
            inputs=(*graph.inputs, SAMPLE_WEIGHTS),
            operators=tuple(self.operators),
            loss=loss,
        )

    def _wide(self) -> TensorType:
        """Type of the loss times a number in fp32."""
        loss = self.graph.types[self.graph.loss]  # of one element, in any number of dims
        wider = loss.dtype == "float64" or bool(loss.shape)
        return TensorType(shape=loss.shape, dtype=loss.dtype if wider else _DTYPE)

    def _weigh(self, op: Operator) -> None:
        """Add an operator, behind those that tell it which samples count."""
        rule = rule_of(self.graph, op)
        grown = grown_factors(rule, op, self.growths)
        summed = {f for f in grown if _joins(rule, f)}
        if not summed or op.name not in self.graph.live:
            self._check_place(op, rule, grown)
            self.operators.append(op)
        elif op.op in _TARGETS:
            self._without_targets(op, _TARGETS[op.op])
        elif isinstance(RULES.get(op.op), PairLoss):
            self._by_elements(op)
        elif op.op in (*_SUMS, *_MEANS):
            weighed = self._weighed(op, op.operands[0], op.op in _MEANS)
            self.operators.append(replace(op, arguments=(ValueRef(weighed), *op.arguments[1:])))
        else:
            raise _refusal(op, "computes something of several samples together")

    def _check_place(self, op: Operator, rule: Rule, grown: Mapping[int, Growth]) -> None:
        """Check that added samples, which are behind the others, do not change which elements are dropped: dropout
        decides by an element's place."""
        chance = CHANCES.get(op.op)
        if chance is None or not chance.of(op.arguments, dict(op.keywords)):
            return
        for dims in rule.results[:1]:
            for at, factors in enumerate(dims):
                inside = [f for f in factors if f in grown]
                outer = self.growths[next(r for r in op.results if r is not None)][at].outer
                if inside and (outer != 1 or any(one for one in dims[:at])):
                    raise _refusal(op, "drops elements by their place, and samples are not its outermost dim")

    def _without_targets(self, op: Operator, place: int) -> None:
        """A cross entropy that ignores the targets of added samples."""
        target = op.operands[1]
        kind, arguments = self.types[target], list(op.arguments)
        ignored = _argument(op, place, "ignore_index", _IGNORED)
        if kind.floating or not isinstance(arguments[1], ValueRef) or not isinstance(ignored, int):
            raise _refusal(op, "has a probability for each class as its target, none of which can be ignored")
        if self.growths[op.operands[0]][1] != Growth():  # in-batch negatives
            raise _refusal(op, "has samples for its classes")
        mask = self._shaped(op, target, "left_out")
        filled = (ValueRef(target), ValueRef(mask), ignored)
        arguments[1] = ValueRef(self._call(f"{op.name}_targets", "aten.masked_fill.Scalar", filled, kind, op.module))
        self.operators.append(replace(op, arguments=tuple(arguments)))

    def _by_elements(self, op: Operator) -> None:
        """A loss of pairs, computed as its elements and then their sum or mean."""
        spec = RULES[op.op]
        assert isinstance(spec, PairLoss)
        reduction = _argument(op, spec.reduction, "reduction", _MEAN)
        source, result = self.types[op.operands[0]], op.results[0]
        assert result is not None, "a loss makes a tensor"
        if reduction not in (_MEAN, _SUM):
            raise _refusal(op, f"has the reduction {reduction}")
        elements = self._apart(op, spec.reduction, f"{op.name}_elements", source)
        self.growths = {**self.growths, elements: self.growths[op.operands[0]]}
        weighed = self._weighed(op, elements, mean=reduction == _MEAN)
        joined = "aten.mean.default" if reduction == _MEAN else "aten.sum.default"
        self.operators.append(replace(op, op=joined, arguments=(ValueRef(weighed),), keywords=(), results=(result,)))

    def _apart(self, op: Operator, place: int, name: str, kind: TensorType) -> str:
        """The elements of a loss."""
        arguments, keywords = list(op.arguments), tuple(word for word in op.keywords if word[0] != "reduction")
        if len(arguments) > place:
            arguments[place] = _NONE
        else:
            keywords = (*keywords, ("reduction", _NONE))
        return self._call(name, op.op, tuple(arguments), replace(kind, contiguous=True), op.module, keywords)

    def _weighed(self, op: Operator, source: str, mean: bool) -> str:
        """A value whose added samples are zero; with `mean`, scaled so that its mean over all is that over the
        others."""
        kind = self.types[source]
        if not mean:
            fill = 0.0 if kind.floating else 0
            left_out = ValueRef(self._shaped(op, source, "left_out"))
            return self._call(
                f"{op.name}_counted", "aten.masked_fill.Scalar", (ValueRef(source), left_out, fill), kind, op.module
            )
        shares = self._shaped(op, source, "shares")
        if kind.dtype != _DTYPE:
            dtype = TorchConstant("dtype", kind.dtype)
            narrow = replace(self.types[shares], dtype=kind.dtype)
            shares = self._call(f"{op.name}_shares", "aten.to.dtype", (ValueRef(shares), dtype), narrow, op.module)
        weighed = (ValueRef(source), ValueRef(shares))
        return self._call(f"{op.name}_counted", "aten.mul.Tensor", weighed, kind, op.module)

    def _shaped(self, op: Operator, source: str, what: str) -> str:
        """The operand `what` (which samples count, or their shares of a mean) in a shape that broadcasts to a value."""
        growths, shape = self.growths[source], self.types[source].shape
        dims = [dim for dim, growth in enumerate(growths) if growth != Growth()]
        if len(dims) != 1 or growths[dims[0]].outer != 1:
            raise _refusal(op, "has samples in several dims, or inside of another loop")
        inner = shape[dims[0]] // self.batch
        rows = self._rows(what, inner)
        wanted = tuple(extent if dim == dims[0] else 1 for dim, extent in enumerate(shape))
        if wanted == self.types[rows].shape:
            return rows
        key = (what, inner, len(shape), dims[0])
        if key not in self.known:
            kind = replace(self.types[rows], shape=wanted)
            number = sum(len(known) == 4 for known in self.known)
            self.known[key] = self._call(
                _name(what, "shaped", number), "aten.view.default", (ValueRef(rows), wanted), kind
            )
        return self.known[key]

    def _rows(self, what: str, inner: int) -> str:
        """The same for the rows of a dim in which every sample has `inner` of them."""
        key = (what, inner)
        if key in self.known:
            return self.known[key]
        weights = TensorType(shape=(self.batch,), dtype=_DTYPE)
        if inner == 1 and what == "left_out":
            kind = replace(weights, dtype="bool")
            self.known[key] = self._call(what, "aten.eq.Scalar", (ValueRef(SAMPLE_WEIGHTS), 0), kind)
        elif inner == 1:
            arguments = (ValueRef(SAMPLE_WEIGHTS), ValueRef(self._mean()))
            self.known[key] = self._call(what, "aten.div.Tensor", arguments, weights)
        else:
            one = self._rows(what, 1)
            number = sum(len(known) == 2 and known[0] == what for known in self.known)  # of another length likewise
            name, kind = _name(what, "rows", number), self.types[one]
            column = self._call(
                f"{name}_column", "aten.unsqueeze.default", (ValueRef(one), 1), replace(kind, shape=(self.batch, 1))
            )
            wide = replace(kind, shape=(self.batch, inner), contiguous=False)
            spread = self._call(f"{name}_spread", "aten.expand.default", (ValueRef(column), (self.batch, inner)), wide)
            flat = replace(kind, shape=(self.batch * inner,))
            self.known[key] = self._call(name, "aten.reshape.default", (ValueRef(spread), flat.shape), flat)
        return self.known[key]

    def _mean(self) -> str:
        """The mean of the weights of a micro-batch."""
        if MEAN_WEIGHT not in self.types:
            kind = TensorType(shape=(), dtype=_DTYPE)
            self._call("mean", "aten.mean.default", (ValueRef(SAMPLE_WEIGHTS),), kind)
        return MEAN_WEIGHT

    def _call(
        self,
        name: str,
        op: str,
        arguments: tuple[Argument, ...],
        kind: TensorType,
        module: str = "",
        keywords: tuple[tuple[str, Argument], ...] = (),
    ) -> str:
        """Add a call; returns the name of its result."""
        full = f"{SAMPLE_WEIGHTS}.{name}"
        assert full not in self.types, f"two values would be called {full}"
        self.types[full] = kind
        self.operators.append(
            Operator(name=full, op=op, arguments=arguments, keywords=keywords, results=(full,), module=module)
        )
        return full


def _joins(rule: Rule, factor: int) -> bool:
    """Whether an operator computes something from all steps of a loop together."""
    kind = rule.factors[factor].kind
    return kind in (FactorKind.REDUCTION, FactorKind.COMBINED)


def _argument(op: Operator, place: int, name: str, default: Argument) -> Argument:
    if len(op.arguments) > place:
        return op.arguments[place]
    return dict(op.keywords).get(name, default)


def _name(*parts: object) -> str:
    return "_".join(str(part) for part in parts)


def _refusal(op: Operator, why: str) -> RequestError:
    return RequestError(
        f"pad batch: operator '{op.name}' ({op.op}){op.at} {why}, and samples that were added would count; take a"
        " global batch that divides"
    )
