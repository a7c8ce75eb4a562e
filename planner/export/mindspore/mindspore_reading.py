"""What a MindSpore strategy file says about a model: operators and parameters by name, and a mesh for all of them.

    names     unchanged; or without the names of the cells around the network ("net.w1"), or with those of the model
    mesh      each dev_matrix cuts the devices of a stage at some strides; the strides of all of them make the axes
    products  a parameter may be transposed with respect to the model: its shape tells, or the cuts of the reduction
    cells     operators that are named by their cell are counted in it, in the order of their numbers

Parts without a place in the model are listed. Contradictions to the model (another shape, devices that do not divide, a
stage that begins inside a block) are refused.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

from planner.export.description import ExportError
from planner.export.mindspore.mindspore_files import Cuts, Item, Row, parsed
from planner.export.mindspore.mindspore_names import Names
from planner.export.target import OperatorReading, Wish
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.sharding.layout import REPLICATE, Layout, shard
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of

BIAS = "BiasAdd"
_CLASSES = {"MatMul": "matmul", "BatchMatMul": "matmul", "Dense": "matmul", "Gather": "embedding"}
_CALLS = {
    "Add": "add", "GeLU": "gelu", "LayerNorm": "layer_norm", "Mul": "mul", "ReLU": "relu", "ReduceMean": "mean",
    "ReduceSum": "sum", "RmsNorm": "rms_norm", "SiLU": "silu", "Sigmoid": "sigmoid", "Softmax": "softmax",
    "Tanh": "tanh", "Transpose": "transpose",
}  # fmt: skip
PRIMITIVE_OF = {call: primitive for primitive, call in _CALLS.items()}
"""The MindSpore primitive for a call of the model, for operators that are found by their call."""

_PRODUCT = 2  # operands of a product
_NUMBER = re.compile(r"(?<![^._/-])\d+(?![^._/-])")


def read(file: bytes, graph: OperatorGraph, blocks: Blocks, devices: int | None) -> OperatorReading:
    """What a file says about a graph of plans. Raises ExportError if it is for another model."""
    items, rows = parsed(file)
    pipeline = 1 + max((item.stage for item in items), default=0)
    mesh = _mesh(items, rows, pipeline, devices)
    found = _Found(graph=graph, names=Names.of(graph, items, rows), mesh=mesh)
    for row in rows:
        found.take_layout(row)
    for owner in _by_cell(items):
        found.take_cell(owner)
    for item in items:
        if item.number is None:
            found.take(item)
    if not found.cuts and not found.rows:
        raise ExportError(
            "none of its names is one of the model's:"
            f" {_listed(dict.fromkeys((*(row.name for row in rows), *(item.owner for item in items))))}; the model has"
            f" {_listed(p.name for p in graph.parameters)}"
        )
    return OperatorReading(
        mesh=mesh,
        pipeline=pipeline,
        stages=_stages(found.stages, graph, blocks, pipeline),
        operators={at: found.wish(at) for at in sorted(found.cuts)},
        parameters={name: found.layout(name) for name in sorted(found.rows)},
        notes=tuple(found.notes()),
    )


def call_of(operator: Operator) -> str:
    """The name of a call without its number: `rms_norm` of `norm/rms_norm_2`."""
    return operator.name.rpartition("/")[2].rstrip("0123456789").rstrip("_")


def _mesh(items: Sequence[Item], rows: Sequence[Row], pipeline: int, devices: int | None) -> tuple[int, ...]:
    """Axes at which everything in the file can cut, slowest first."""
    totals = {math.prod(row.matrix) for row in rows}
    if len(totals) > 1:
        raise ExportError(f"dev_matrix of parameters have {' and '.join(map(str, sorted(totals)))} devices")
    matrices = [row.matrix for row in rows]
    if devices is not None and totals and devices != next(iter(totals)) * pipeline:
        raise ExportError(
            f"dev_matrix has {next(iter(totals))} devices in each of {pipeline} stages, --devices says {devices}"
        )
    if not totals:
        if devices is None or devices % pipeline:
            raise ExportError(f"it does not say on how many devices each of {pipeline} stages is; give --devices")
        totals, found = {devices // pipeline}, [_cut_sizes(item.cuts) for item in items]
        matrices = [sizes for sizes in found if math.prod(sizes) == devices // pipeline]
    total = next(iter(totals))
    ends = {end for row in rows for stride, count in row.sharing for end in (stride, stride * count)}
    strides = sorted({1, total, *ends, *(math.prod(m[at:]) for m in matrices for at in range(len(m)))})
    for low, high in pairwise(strides):
        if high % low:
            words = " and ".join(sorted({"x".join(map(str, m)) for m in matrices}))
            raise ExportError(f"no mesh has axes for {words} at once: {low} does not divide {high}")
    sizes = [high // low for low, high in pairwise(strides)]
    return tuple(reversed(sizes))


def _cut_sizes(cuts: Cuts) -> tuple[int, ...]:
    """The device matrix of an operator: pieces of its dims, with the reduction of a product counted once."""
    rows = [*cuts[0], *(cuts[1][1:] if len(cuts) == _PRODUCT and cuts[0][-1] == cuts[1][0] else ())] if cuts else []
    return tuple(pieces for pieces in rows if pieces > 1)


def _by_cell(items: Iterable[Item]) -> list[list[Item]]:
    """Operators of one kind in one cell, in the order of their numbers."""
    numbered = [item for item in items if item.number is not None]

    def place(item: Item) -> tuple[str, str]:
        return item.owner, item.primitive

    return [
        sorted(one, key=lambda item: item.number or 0) for _, one in groupby(sorted(numbered, key=place), key=place)
    ]


@dataclass(kw_only=True)
class _Found:
    """What was found so far, and what was not."""

    graph: OperatorGraph
    names: Names
    mesh: tuple[int, ...]
    cuts: dict[int, Cuts] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)
    stages: dict[int, tuple[int, str]] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)
    lacking: dict[str, list[str]] = field(default_factory=dict)

    def take_layout(self, row: Row) -> None:
        """Note the layout of a parameter."""
        name = self.names.of_model(row.name)
        if name not in self.graph.parameter_names:
            self._miss("the model has no such parameter", row.name)
            return
        shape = self.graph.types[name].shape
        row = _of_dims(row, shape) or _of_dims(row, shape[::-1]) or row
        if row.shape not in (shape, shape[::-1]):
            ours = "x".join(map(str, shape))
            theirs = "x".join(map(str, row.shape)) if row.shape is not None else f"of {len(row.map)} dims"
            raise ExportError(f"{row.name}: its shape is {theirs}, that of the model's {name} is {ours}: another model")
        self.rows[name] = row

    def take(self, item: Item) -> None:
        """Note the strategy of the operators that read a parameter."""
        name = self.names.of_model(item.owner)
        if name not in self.graph.parameter_names:
            self._miss("the model has no such parameter", item.text)
            return
        readers = sorted(set(self.graph.consumers.get(name, ())))
        if item.primitive == BIAS:
            self._take_bias(item, name, readers)
            return
        at = [at for at in readers if self._is(item.primitive, at)]
        if not at:
            self._miss(f"no operator of the model that reads the parameter is known as {item.primitive}", item.text)
        for one in at:
            self._take(one, item)

    def take_cell(self, items: Sequence[Item]) -> None:
        """Note strategies of the operators of one kind in a cell."""
        module, primitive = self.names.of_model(items[0].owner), items[0].primitive
        if primitive not in (*_CLASSES, *_CALLS):
            reason = "primitives that are not read; their strategies follow from the others"
        elif module is None:
            reason = "the model has no such module"
        else:
            inside = [
                at for at, op in enumerate(self.graph.operators) if op.module == module and self._is(primitive, at)
            ]
            if len(inside) == len(items):
                for at, item in zip(inside, items, strict=True):
                    self._take(at, item)
                return
            reason = f"the module has {len(inside)} operators known as {primitive}, the file {len(items)}"
        for item in items:
            self._miss(reason, item.text)

    def layout(self, name: str) -> tuple[Layout, tuple[bool, ...]]:
        """The layout of a parameter on the mesh, and the axes on which states are cut."""
        row = self.rows[name]
        dims = row.map[::-1] if self._lies_turned(name, False) else row.map
        placed, layout = {len(row.matrix) - 1 - axis: dim for dim, axes in enumerate(dims) for axis in axes}, []
        sharing = {axis for low, count in row.sharing for axis in self._between(low, low * count)}
        for axis in range(len(self.mesh)):
            stride = math.prod(self.mesh[axis + 1 :])
            theirs = next(at for at in range(len(row.matrix)) if math.prod(row.matrix[at + 1 :]) <= stride)
            layout.append(shard(placed[theirs]) if theirs in placed else REPLICATE)
        states = tuple(placement.is_shard or axis in sharing for axis, placement in enumerate(layout))
        return tuple(layout), states

    def wish(self, at: int) -> Wish:
        """What the file says about an operator: its cuts; and its axes, as far as the layout of its weight determines
        them."""
        rule, op = rule_of(self.graph, self.graph.operators[at]), self.graph.operators[at]
        axes = ["*"] * len(self.mesh)
        for operand, name in enumerate(op.operands):
            cuts = self.cuts[at]
            if name not in self.rows or operand >= len(cuts) or len(cuts[operand]) != len(rule.operands[operand]):
                continue
            layout, _ = self.layout(name)
            stored = [
                math.prod(size for size, placement in zip(self.mesh, layout, strict=True) if placement == shard(dim))
                for dim in range(len(cuts[operand]))
            ]
            if tuple(stored) == cuts[operand]:
                for axis, placement in enumerate(layout):
                    if placement.is_shard and len(rule.operands[operand][placement.dim]) == 1:
                        axes[axis] = rule.factors[rule.operands[operand][placement.dim][0]].name
        return Wish(cuts=self.cuts[at], axes=tuple(axes))

    def notes(self) -> list[str]:
        """What was not found, and what the file does not mention."""
        found = self.names.words()
        found += [f"not taken over: {reason}: {_listed(names)}" for reason, names in self.lacking.items()]
        weighted = [
            op.name
            for at, op in enumerate(self.graph.operators)
            if at not in self.cuts and self.graph.parameter_names.intersection(op.operands)
        ]
        return [*found, *([f"not in the file, so found by the search: {_listed(weighted)}"] if weighted else [])]

    def _take(self, at: int, item: Item) -> None:
        rule = rule_of(self.graph, self.graph.operators[at])
        cuts = self._product(at, rule, item) if rule.op_class == "matmul" else item.cuts
        if self.cuts.setdefault(at, cuts) != cuts:
            self._miss("the file says something else of the same operator", item.text)
        self.stages.setdefault(at, (item.stage, item.text))

    def _product(self, at: int, rule: Rule, item: Item) -> Cuts:
        """The cuts of a product in the order of the model's operands, and of its weight's dims."""
        main = [i for i in range(len(rule.operands)) if i not in rule.addends]
        cuts = [*item.cuts[: len(main)]]
        if len(cuts) != len(main) or not all(cuts):
            raise ExportError(f"{item.text}: a product has cuts of {len(main)} inputs")
        names = self.graph.operators[at].operands
        weight = next((n for n, i in enumerate(main) if names[i] in self.graph.parameter_names), None)
        if weight is not None and len(cuts[weight]) == _PRODUCT:
            turned = [cut[::-1] if n == weight else cut for n, cut in enumerate(cuts)]
            if self._lies_turned(names[main[weight]], _agree(rule, main, turned) and not _agree(rule, main, cuts)):
                cuts = turned
            if not _agree(rule, main, cuts):
                raise ExportError(
                    f"{item.text}: its inputs are cut {list(map(list, item.cuts))}, which are different numbers of"
                    " pieces of the dim that they are multiplied along"
                )
        by_operand = dict(zip(main, cuts, strict=True))
        rest = self._added(rule, main, cuts)
        return tuple(by_operand.get(i, rest) for i in range(len(rule.operands)))

    @staticmethod
    def _added(rule: Rule, main: Sequence[int], cuts: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The cuts of an operand that is added to a product: those of the product's columns."""
        if not rule.addends:
            return ()
        dims, weight = rule.operands[rule.addends[0]], rule.operands[main[-1]]
        pieces = dict(zip(weight, cuts[-1], strict=False))
        return tuple(pieces.get(factors, 1) for factors in dims)

    def _lies_turned(self, name: str, by_cuts: bool) -> bool:
        """Whether a weight is transposed in the file: its shape tells, or else the cuts."""
        row = self.rows.get(name)
        if row is not None and row.shape is not None and row.shape != row.shape[::-1]:
            return row.shape != self.graph.types[name].shape
        if by_cuts:
            self.turned.add(name)
        return name in self.turned

    def _take_bias(self, item: Item, name: str, readers: Sequence[int]) -> None:
        """Note a bias: the model's product that reads it also adds it, and cuts it as its columns."""
        if not readers or not item.cuts:
            self._miss("the model adds no such bias", item.text)
            return
        at = readers[0]
        self.stages.setdefault(at, (item.stage, item.text))
        operand = self.graph.operators[at].operands.index(name)
        known = self.cuts.get(at)
        if known is not None and (operand >= len(known) or known[operand] != item.cuts[-1]):
            self._miss("a bias is cut as the columns of its product", item.text)

    def _is(self, primitive: str, at: int) -> bool:
        op = self.graph.operators[at]
        if primitive in _CLASSES:
            return rule_of(self.graph, op).op_class == _CLASSES[primitive]
        return call_of(op) == _CALLS.get(primitive)

    def _between(self, low: int, high: int) -> frozenset[int]:
        """Axes of the mesh whose devices are `low` to `high` apart."""
        return frozenset(axis for axis in range(len(self.mesh)) if low <= math.prod(self.mesh[axis + 1 :]) < high)

    def _miss(self, reason: str, name: str) -> None:
        self.lacking.setdefault(reason, []).append(name)


def _of_dims(row: Row, shape: tuple[int, ...]) -> Row | None:
    """A layout with the dims of a shape; None if they do not match.

    If several axes cut a dim, it is several dims in the file, all but the last as long as their axis has devices.
    """
    if row.shape is None:
        return replace(row, shape=shape) if len(row.map) == len(shape) else None
    at, found = 0, list[tuple[int, ...]]()
    for extent in shape:
        start, length = at, 1
        while at < len(row.shape) and (at == start or length < extent):
            length *= row.shape[at]
            at += 1
        axes = [axis for one in row.map[start:at] for axis in one]
        outer = zip(row.shape[start : at - 1], row.map[start : at - 1], strict=True)
        if length != extent or any(len(one) != 1 or row.matrix[-1 - one[0]] != size for size, one in outer):
            return None
        found.append(tuple(axes))
    return replace(row, map=tuple(found), shape=shape) if at == len(row.shape) else None


def _agree(rule: Rule, main: Sequence[int], cuts: Sequence[tuple[int, ...]]) -> bool:
    """Whether the operands of a product are cut into the same number of pieces along the factors that they share."""
    pieces: dict[int, set[int]] = {}
    for i, row in zip(main, cuts, strict=True):
        for factors, count in zip(rule.operands[i][::-1], row[::-1], strict=False):
            if len(factors) == 1 and (len(row) == len(rule.operands[i]) or factors == rule.operands[i][-1]):
                pieces.setdefault(factors[0], set()).add(count)
    return all(len(counts) == 1 for counts in pieces.values())


def _stages(
    found: Mapping[int, tuple[int, str]], graph: OperatorGraph, blocks: Blocks, pipeline: int
) -> tuple[int, ...]:
    """Blocks of every stage, in the order of the model."""
    if pipeline == 1:
        return (blocks.count,)
    ranks: list[int] = []
    for block in range(blocks.count):
        said = {found[at] for at in blocks.operators(block) if at in found}
        stages = {stage for stage, _ in said}
        if len(stages) != 1:
            words = " and ".join(sorted(f"{text} (stage {stage})" for stage, text in said)) or "nothing is said of it"
            raise ExportError(f"block {block} is not in one stage: {words}; plans cut a model between its blocks")
        ranks += stages
    runs = [(rank, len(list(same))) for rank, same in groupby(ranks)]
    outside = [
        *((at, 0) for at in range(blocks.start)),
        *((at, pipeline - 1) for at in range(blocks.stop, len(graph.operators))),
    ]
    for at, wanted in outside:
        stage, text = found.get(at, (wanted, ""))
        if stage != wanted:
            raise ExportError(
                f"{text} is in stage {stage}; plans have what comes before the blocks in the first stage, and what"
                " comes after them in the last"
            )
    if [rank for rank, _ in runs] != [n % pipeline for n in range(len(runs))] or len(runs) % pipeline:
        raise ExportError(
            f"the stages of the blocks are {', '.join(str(rank) for rank, _ in runs)}: no pipeline of {pipeline} ranks"
        )
    return tuple(count for _, count in runs)


def _listed(names: Iterable[str]) -> str:
    """Names, with those that differ only in numbers given once: `layers.*.w1 (4 times)`."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_NUMBER.sub("*", name), []).append(name)
    words = [f"{pattern} ({len(same)} times)" if len(same) > 1 else same[0] for pattern, same in alike.items()]
    return ", ".join(words) or "none"
