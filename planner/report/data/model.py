"""The model as a plan runs it: blocks, their variants, and every operator of each variant.

stage 0   before  A A A A B B        a variant is a group of blocks with equal strategies, equal stored layouts and the
stage 1           B B B B B  after   same recomputation; what stands before and after the blocks are variants too
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hardware_profiles import Bytes, Seconds
from planner.graph.per_replica import called
from planner.plan.binding.bind import BoundPlan, stage_of_operators
from planner.plan.compare.dissection import OperatorCost, RankDissection
from planner.plan.layout.patterns import Patterns
from planner.plan.layout.roles import call_word, roles
from planner.plan.plan import Group
from planner.report.words import short_name, strategy_words
from planner.sharding.layout import format_layout, local_share

BEFORE, AFTER = "before the blocks", "after the blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorView:
    """One operator: `patterns` has the name of what each mesh axis does, `kept_as` that of how its first parameter is
    kept (`planner.plan.layout.patterns`), `splits` what each axis splits, "-" for nothing; layouts of
    operands and results are those of the forward pass, weight, gradient and state those of its first parameter (""
    without one). Seconds are of one micro-batch, by part of the prediction; `result_bytes` are local, `kept_bytes` what
    all micro-batches in flight keep
    because of it."""

    name: str
    short: str
    op: str
    op_class: str
    patterns: tuple[str, ...]
    kept_as: str
    splits: tuple[str, ...]
    operands: tuple[str, ...]
    results: tuple[str, ...]
    weight: str
    gradient: str
    state: str
    seconds: tuple[tuple[str, Seconds], ...]
    result_bytes: Bytes
    kept_bytes: Bytes

    @property
    def total(self) -> Seconds:
        return sum(seconds for _, seconds in self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Blocks that run alike, named by a letter, and their operators as in `first_block`. What stands before and after
    the blocks is a variant, too, without a block. `seconds` are of one micro-batch through one block. `unlike` names
    the operators that are sharded or stored differently in the first variant for blocks of this kind."""

    name: str
    words: str
    unlike: tuple[str, ...]
    blocks: int
    first_block: int | None
    recomputation: str
    operators: tuple[OperatorView, ...]
    seconds: Seconds
    kept_bytes: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """A block of the model: its stage, its pipeline rank, and its variant."""

    number: int
    stage: int
    rank: int
    variant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Mesh axes, numbers of stages and pipeline ranks, the rank of the last stage (the first one of a V), slices of a
    micro-batch, of one of which seconds and bytes are, the variants in the order of the model, and all blocks."""

    axes: tuple[str, ...]
    ranks: int
    stages: int
    last_rank: int
    slices: int
    variants: tuple[Variant, ...]
    blocks: tuple[BlockView, ...]


def model_of(bound: BoundPlan, ranks: Sequence[RankDissection]) -> Model:
    """The blocks of a plan; `ranks` have the costs of its pipeline ranks."""
    views = _Views(bound, {one.at: one for rank in ranks for one in rank.operators})
    blocks, stages = bound.blocks, stage_of_operators(bound)
    by_block = {block: group for group in bound.plan.groups for block in _covered(group)}
    letters: dict[object, str] = {}
    variants, found = [], []
    for block in range(blocks.count):
        group = by_block[block]
        signature = _signature(bound, group, block)
        if signature not in letters:
            letters[signature] = _letter(len(letters))
            alike = sum(_signature(bound, by_block[other], other) == signature for other in range(blocks.count))
            variants.append(views.variant(letters[signature], blocks.operators(block), block, alike, group))
        stage = stages[blocks.borders[block]]
        found.append(BlockView(number=block, stage=stage, rank=bound.plan.rank_of(stage), variant=letters[signature]))
    before = views.variant(BEFORE, range(blocks.start), None, 0, None)
    after = views.variant(AFTER, range(blocks.stop, len(bound.operators)), None, 0, None)
    return Model(
        axes=bound.plan.mesh.names,
        ranks=bound.plan.pipeline,
        stages=len(bound.plan.stages),
        last_rank=bound.plan.rank_of(len(bound.plan.stages) - 1),
        slices=bound.plan.slices,
        variants=tuple(variant for variant in (before, *variants, after) if variant.operators),
        blocks=tuple(found),
    )


def _covered(group: Group) -> range:
    return range(group.first_block, group.first_block + group.blocks)


def _signature(bound: BoundPlan, group: Group, block: int) -> object:
    """A key that is equal for blocks that run alike, whatever groups the plan lists them in."""
    strategies = tuple(strategy for _, strategy in group.operators)
    stored = tuple(layouts for _, layouts in group.parameters)
    first = bound.blocks.borders[group.first_block]
    names = {bound.graph.operators[at].name: at - first for at in bound.blocks.operators(group.first_block)}
    kept = tuple(sorted(names[name] for name in group.kept))
    return bound.blocks.kinds[block], strategies, stored, group.recomputation, kept


def _letter(number: int) -> str:
    """A, B, ..., Z, A1, B1, ..."""
    turn, place = divmod(number, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


class _Views:
    """The operators of a plan, for people."""

    def __init__(self, bound: BoundPlan, costs: Mapping[int, OperatorCost]) -> None:
        self.bound, self.costs = bound, costs
        self.named = Patterns(bound=bound, roles=tuple(axis.role for axis in roles(bound).axes))
        self.firsts: dict[int, tuple[OperatorView, ...]] = {}

    def variant(self, name: str, operators: range, block: int | None, blocks: int, group: Group | None) -> Variant:
        views = tuple(self.operator(at) for at in operators)
        recomputation = "none" if group is None else group.recomputation
        return Variant(
            name=name,
            words=self._words(recomputation, group),
            unlike=self._unlike(views, block),
            blocks=blocks,
            first_block=block,
            recomputation=recomputation,
            operators=views,
            seconds=sum(view.total for view in views),
            kept_bytes=sum(view.kept_bytes for view in views),
        )

    def _words(self, recomputation: str, group: Group | None) -> str:
        """`nothing recomputed`, `recomputed fully`, `recomputed, keeping attention and o_proj`."""
        if group is None or recomputation == "none":
            return "nothing recomputed"
        if recomputation == "full":
            return "recomputed fully"
        inside = self.bound.blocks.operators(group.first_block)
        classes = {self.bound.operators[at].operator.name: self.bound.operators[at].rule.op_class for at in inside}
        kept = dict.fromkeys(call_word(name, classes[name]) for name in group.kept)
        return f"recomputed, keeping {', '.join(kept)}"

    def _unlike(self, views: tuple[OperatorView, ...], block: int | None) -> tuple[str, ...]:
        if block is None:
            return ()
        first = self.firsts.setdefault(self.bound.blocks.kinds[block], views)
        unlike = (view.short for view, other in zip(views, first, strict=True) if _lying(view) != _lying(other))
        return tuple(dict.fromkeys(unlike))

    def operator(self, at: int) -> OperatorView:
        bound, cost = self.bound.operators[at], self.costs[at]
        op, layouts = bound.operator, bound.layouts
        names = [name for name in op.operands if name in self.bound.parameters]
        stored = [self.bound.parameters[name] for name in names]
        results = [name for name in op.results if name is not None]
        sizes = self.bound.plan.mesh.sizes
        return OperatorView(
            name=op.name,
            short=short_name(op),
            op=called(op),
            op_class=bound.rule.op_class,
            patterns=self.named.of_operator(at),
            kept_as=self.named.of_parameter(names[0]) if names else "",
            splits=strategy_words(bound, self.named.labels[at]),
            operands=tuple(format_layout(duplex.forward) for duplex in layouts.operands),
            results=tuple(format_layout(duplex.forward) for duplex in layouts.results),
            weight=stored[0].weight_words if stored else "",
            gradient=format_layout(stored[0].gradient) if stored else "",
            state=stored[0].state_words if stored else "",
            seconds=cost.seconds,
            result_bytes=sum(
                self.bound.graph.types[name].nbytes
                * local_share(self.bound.graph.types[name].shape, duplex.forward, sizes)
                for name, duplex in zip(results, layouts.results, strict=True)
            ),
            kept_bytes=cost.kept,
        )


def _lying(view: OperatorView) -> tuple[object, ...]:
    return view.splits, view.weight, view.gradient, view.state
