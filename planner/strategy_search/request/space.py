"""The outer space: everything that is chosen around the strategies inside a stage.

A configuration fixes the number of pipeline ranks, the number of stages on each, the shape of the mesh inside a stage,
and the number of micro-batches; with degrees given by the user also the role of each mesh axis. For each configuration,
evaluation.py finds how blocks are divided over stages, which are recomputed and how, and how parameters are stored.
Configurations are tried in the order of a lower bound on their step time, so that the search can stop early without
missing the best one.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from costmodels import FORWARD, SCHEDULES
from planner.errors import RequestError
from planner.limits import checked
from planner.nearest import divisors
from planner.plan.layout.kept import NOTHING_KEPT, Kept
from planner.plan.plan import INTERLEAVED
from planner.plan.schedule_checks import PASSES
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.strategy_search.request.attention_degrees import attention_fault, heads_of, key_heads_of
from planner.strategy_search.request.offload import Offload
from planner.strategy_search.request.template import Template

Role = Literal["replica", "data", "nodes", "expert", "ring", "context", "tensor"]
"""The purpose of an axis. "replica": a part of data parallelism over which ZeRO shards nothing. "expert": a part of
data parallelism on which experts are cut. "nodes": another such part, where a token is sent once to each place. "ring"
and "context" split the sequence; attention uses a ring on the former, and heads (Ulysses) on the latter."""
EXPERTS = "experts"  # the class of operators that route to experts
ContextBy = Literal["heads", "ring", "hybrid", "auto"]
Running = Literal["none", "selective", "full"]  # ways to run a block: what it keeps for its backward pass
Counts = Literal["any", "equal"]  # the numbers of recomputed blocks in the stages of a pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One pattern for all operators, as training engines have it (Shoeybi et al. 2019, see
    `planner.sharding.usual_pattern`), with at most one way to recompute blocks.

    Attributes:
        vocabulary: whether a tensor axis cuts the embedding and the head along the vocabulary.
        whole_logits: whether each tensor-parallel device computes the loss over all words instead of its own part.
        counts: whether every stage may recompute any number of its blocks, or all stages the same number, or all
            blocks.
        shards: the least number of devices over which ZeRO shards.
        interleaved: whether a rank may hold several stages.
        piped: whether there must be a pipeline.
        filled: whether there must be at least as many micro-batches as pipeline ranks.
        divided: whether the number of ranks must divide the number of blocks.
        selective: whether recomputed blocks may keep the results of some operators.
        kept: the operators whose results all recomputed blocks keep; None if they keep none.
        over_context: whether experts that are cut over more than tensor-parallel devices must be cut over a whole
            context.
    """

    vocabulary: bool = True
    whole_logits: bool = False
    counts: Counts = "any"
    shards: int = 1
    interleaved: bool = True
    piped: bool = False
    filled: bool = False
    divided: bool = False
    selective: bool = False
    kept: Kept | None = None
    over_context: bool = False

    def runs(self, blocks: int, pipeline: int, micro_batches: int) -> bool:
        """Whether this number of ranks is possible with these numbers of blocks and micro-batches."""
        if self.piped and pipeline == 1:
            return False
        return not (self.filled and micro_batches < pipeline) and not (self.divided and blocks % pipeline)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of the outer space.

    Attributes:
        pipeline: ranks of the pipeline, each a set of devices with its own mesh.
        virtual_stages: stages on each rank.
        mesh: sizes of the axes inside a stage, slowest links first.
        roles: the purpose of each axis; empty if every operator may use every axis freely.
        micro_batches: sequential parts of the global batch.
        schedule: the pipeline schedule (`planner.plan.plan.SCHEDULES`).
        uneven: whether virtual stages hold unequal numbers or kinds of blocks.
        even: whether the ranks hold equally many blocks, if the number of blocks is divisible.
        zigzag: whether rings cut the sequence in zigzag order.
        order: numbers of the groups of devices of the request, in pipeline order; empty if there is one group.
        decided: further decisions for this configuration, which replace those of the request: only about ZeRO, experts,
            norms, recomputation and the pattern of operators.
    """

    pipeline: int
    virtual_stages: int = 1
    mesh: tuple[int, ...]
    roles: tuple[Role, ...] = ()
    micro_batches: int
    schedule: str = "1f1b"
    uneven: bool = False
    even: bool = False
    zigzag: bool = False
    order: tuple[int, ...] = ()
    decided: "Pinned | None" = None

    @property
    def zigzag_axes(self) -> frozenset[int]:
        """Axes that cut sequences in zigzag order."""
        return frozenset(at for at, role in enumerate(self.roles) if self.zigzag and role == "ring")

    @property
    def context(self) -> tuple[int, int]:
        """The number of devices of a ring, and of those over which heads are split (Ulysses)."""
        degrees = dict(zip(self.roles, self.mesh, strict=False))
        return degrees.get("ring", 1), degrees.get("context", 1)

    @property
    def stages(self) -> tuple[int, bool]:
        """The number of stages on each rank, and whether they hold unequal blocks."""
        return self.virtual_stages, self.uneven

    @property
    def family(self) -> tuple[object, ...]:
        """A key: configurations with equal keys share their candidates, prices, and ways to run blocks."""
        return self.pipeline, self.mesh, self.roles, self.order, self.decided

    @property
    def priced_alike(self) -> tuple[object, ...]:
        """A key: configurations with equal keys share their candidates and prices."""
        decided = self.decided
        if decided is not None:
            cut = decided.pattern is None or decided.pattern.vocabulary
            decided = replace(decided, recompute=None, pattern=Pattern(vocabulary=cut))
        return self.pipeline, self.mesh, self.roles, self.order, decided

    @property
    def computed_alike(self) -> tuple[object, ...]:
        """A key: operators of configurations with equal keys have the same candidates and prices. How parameters are
        stored between their uses is not part of it."""
        any_zero = self if self.decided is None else replace(self, decided=replace(self.decided, zero=None))
        return (*any_zero.priced_alike, self.zigzag)

    def under(self, pinned: "Pinned") -> "Pinned":
        """The decisions for this configuration, if the request has decided `pinned`."""
        return pinned if self.decided is None else self.decided

    @property
    def tie(self) -> tuple[object, ...]:
        """The order of configurations that are equally good."""
        d, own = self.decided, tuple[object, ...]()
        if d is not None:
            pattern = d.pattern or PLAIN_PATTERN
            own = (
                d.zero or 0,
                d.replicas or 1,
                d.expert or 0,
                bool(d.whole_experts),
                bool(d.sequence_parallel),
                d.recompute or "",
            )
            kept = pattern.kept or NOTHING_KEPT
            own += (pattern.vocabulary, pattern.counts, kept.calls, kept.but)
        return self.pipeline, *self.stages, self.micro_batches, self.mesh, self.roles, self.order, own


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """The user's decisions; None leaves a choice to the search.

    Attributes:
        pipeline, virtual_stages: pipeline ranks, and stages on each; 0 for the latter means None.
        schedule: the pipeline schedule. None compares schedules of whole stages, and interleaved 1F1B; "forward" plans
            the forward pass alone.
        interleave: micro-batches that a rank runs at a time, alternating operator by operator. None tries some numbers
            on the best plan, 0 on all plans close to it.
        slices: parts of the sequence that a stage processes one after the other ("seqpipe"); None and 0 as for
            `interleave`.
        tensor_overlap: chunks in which tensor-parallel collectives overlap with their products; 1 leaves them exposed.
            None tries some on the best plan, but not on CPUs; 0 on CPUs, too.
        expert_overlap: whether the exchange of experts overlaps with other work: wherever possible, or nowhere; None
            where it saves time.
        data, context, tensor: degrees of parallelism. With any of these, or of the next five, every axis of the mesh
            has one purpose for all operators ("manual mode"); the product of all degrees is the device count.
        expert: the expert-parallel degree, which divides data x context: a part of the context and data axes, innermost
            first. It is not a further factor of the device count.
        whole_experts: whether a tensor axis leaves experts whole and is one of the axes over which they are
            distributed, instead of splitting each of them. Needs `expert`; None means no.
        zero: 0 to 3, what is sharded over the data (and context) axes: nothing, optimizer states, gradients too,
            weights too.
        replicas: groups of data-parallel devices; each group shards within itself, and the groups hold replicas (hybrid
            sharding, HSDP). None means 1.
        sequence_parallel: whether norms and the like split the sequence over the tensor axis.
        micro_batch: samples of a micro-batch on each data-parallel group.
        micro_batches: micro-batches per step. Only one of the two may be given.
        mesh: axes inside a stage, slowest links first.
        node: devices of a node. Experts that are cut into more parts are cut on a separate axis within a node.
        recompute: how blocks are run; "selective" decides per operator.
        context_by: how attention is split among the devices of a context: by "heads", after an all-to-all of
            activations (Ulysses); by a "ring" that passes keys and values to the queries; "hybrid", by heads inside of
            a ring. "auto" leaves it to the search, and the degree too if that is not given, together with meshes on
            which every operator splits freely. None means by heads; if nothing else is decided either, rings are tried
            around the best plan (`planner.strategy_search.rings`).
        ulysses: the part of the context degree that is by heads, for "hybrid" and "auto"; None leaves it to the search.
        zigzag: whether a ring of causal attention cuts the sequence in zigzag order; None means yes.
        never_kept: classes of operators (`hardware_profiles.OP_CLASSES`) whose results a recomputed block never keeps;
            ("attention",) is selective recomputation as in Korthikanti et al. 2022. `EVERY_SECOND_PRODUCT` among them
            stands for the second, fourth, ... matrix product of a block, as in torchtitan's selective policy.
        even: whether all ranks of a pipeline hold equally many blocks, if the number of blocks is divisible.
        offload: what may be offloaded; None offloads if nothing fits on the devices alone
            (`planner.strategy_search.offloading`).
        pattern: the pattern of an engine, for all operators.
    """

    pipeline: int | None = None
    virtual_stages: int | None = None
    schedule: str | None = None
    interleave: int | None = None
    slices: int | None = None
    tensor_overlap: int | None = None
    expert_overlap: bool | None = None
    data: int | None = None
    context: int | None = None
    tensor: int | None = None
    expert: int | None = None
    whole_experts: bool | None = None
    zero: int | None = None
    replicas: int | None = None
    sequence_parallel: bool | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    mesh: tuple[int, ...] | None = None
    node: int = 1
    recompute: Running | None = None
    never_kept: tuple[str, ...] = ()
    context_by: ContextBy | None = None
    ulysses: int | None = None
    zigzag: bool | None = None
    even: bool = False
    offload: Offload | None = None
    pattern: Pattern | None = None

    @property
    def manual(self) -> bool:
        """Whether axes may have one purpose each."""
        return self.context_by == "auto" or self._degrees

    @property
    def free(self) -> bool:
        """Whether every operator may use axes freely."""
        split = (self.ulysses, self.zigzag) if self.context_by == "auto" else ()
        return not self._degrees and all(value is None for value in split)

    @property
    def _degrees(self) -> bool:
        """Whether a degree, or an option that goes with degrees, is decided."""
        degrees = (self.data, self.context, self.tensor, self.expert)
        decided = (*degrees, self.zero, self.replicas, self.sequence_parallel, self.micro_batch)
        return any(value is not None for value in decided)

    @property
    def forward_only(self) -> bool:
        """Whether only the forward pass is planned: nothing is trained."""
        return self.schedule == FORWARD

    @property
    def in_a_v(self) -> bool:
        """Whether the requested schedule has two stages on each rank, in a V."""
        kind = SCHEDULES.get(self.schedule or "")
        return kind is not None and kind.v_shaped

    @property
    def searched_schedule(self) -> str:
        """The schedule for which the search computes its objective. Whatever that objective does not cover is decided
        after the search."""
        kind = SCHEDULES[self.schedule or "1f1b"]
        whole = self.slices is None and not kind.sliced and kind.flushes
        return (self.schedule or "1f1b") if whole else "1f1b"

    @property
    def kept(self) -> Kept | None:
        """What recomputed blocks keep, if that is decided."""
        return None if self.pattern is None else self.pattern.kept

    @property
    def recomputation(self) -> tuple[Running, ...]:
        """Ways to run a block that may be used."""
        if self.forward_only:
            return ("none",)
        if self.pattern is not None and self.pattern.kept is not None:
            return ("none", "selective") if self.recompute is None else ("selective",)
        if self.recompute is None:
            kept = self.pattern is None or self.pattern.selective
            return ("none", "selective", "full") if kept else ("none", "full")
        return (
            ("none",) if self.recompute == "none" else ("full",) if self.recompute == "full" else ("selective", "full")
        )


PLAIN_PATTERN = Pattern()
FREE = Pinned()
"""Everything is left to the search."""


def forward_pinned(pinned: Pinned) -> Pinned:
    """The same decisions for the forward pass alone. Raises RequestError if they include a schedule of training."""
    if pinned.schedule not in (None, FORWARD):
        raise RequestError(f"forward_only: schedule = {pinned.schedule} is one of training; leave either out")
    return replace(pinned, schedule=FORWARD)


def context_splits(pinned: Pinned, context: int) -> Iterator[tuple[int, int]]:
    """The possible numbers of devices in a ring and by heads whose product is the context degree."""
    if context == 1:
        yield 1, 1
    elif pinned.context_by in (None, "heads", "ring"):
        yield (context, 1) if pinned.context_by == "ring" else (1, context)
    else:
        least = 2 if pinned.context_by == "hybrid" else 1
        for heads in divisors(context):
            if pinned.ulysses in (None, heads) and heads >= least and context // heads >= least:
                yield context // heads, heads


def _divides_attention(
    attention: Sequence[Rule], roles: tuple[Role, ...], mesh: tuple[int, ...], pinned: Pinned
) -> bool:
    """Whether a context that is left to the search divides the attention of the model, so that no two devices do the
    same work."""
    degrees = dict(zip(roles, mesh, strict=False))
    ring, heads = degrees.get("ring", 1), degrees.get("context", 1)
    if pinned.context_by not in ("hybrid", "auto") or ring * heads == 1:
        return True
    within = heads * degrees.get("tensor", 1) if heads > 1 else 1
    turns = pinned.zigzag is not False
    return all(
        attention_fault(rule, ring, heads, turns) is None and (heads_of(rule) % within == 0) for rule in attention
    )


def configurations(
    template: Template, devices: int, global_batch: int, pinned: Pinned, padding: int = 0, replicas: int = 1
) -> Iterator[Configuration]:
    """All configurations that divide evenly: the devices into ranks and axes, and the batch into micro-batches. Each
    micro-batch has real samples, not only the `padding` at the end of the batch, and equally many for each of the
    `replicas`. The decisions have been checked (`planner.strategy_search.request.checks`).

    Virtual stages need a number of micro-batches that is a multiple of the number of ranks. They hold equal blocks.
    Unequal ones are tried where equal ones are not possible, or where equal ones leave the ranks at the ends busier
    than others.
    """
    zigzag = template.causal_ring and pinned.zigzag is not False
    rules = (rule_of(template.graph, op) for op in template.graph.operators)
    attention = [rule for rule in rules if rule.op_class == "attention"]
    for pipeline in divisors(devices):
        if pinned.pipeline not in (None, pipeline) or not _cuts(template, pipeline):
            continue
        for mesh, roles, degree in _meshes(devices // pipeline, pinned):
            if not _divides_attention(attention, roles, mesh, pinned):
                continue
            if not _fits_pattern(attention, roles, mesh, pinned):
                continue
            for micro_batches in checked(divisors(global_batch)):
                if pinned.micro_batches not in (None, micro_batches) or padding * micro_batches >= global_batch:
                    continue
                if global_batch // micro_batches % replicas:
                    continue
                if pinned.micro_batch is not None and micro_batches * pinned.micro_batch * degree != global_batch:
                    continue
                if roles and global_batch // micro_batches % degree:
                    continue
                if pinned.pattern and not pinned.pattern.runs(template.blocks.count, pipeline, micro_batches):
                    continue
                if micro_batches % (pinned.interleave or 1) or (pipeline > 1 and pipeline * micro_batches > PASSES):
                    continue
                if pinned.schedule == "pipedream_2bw" and micro_batches < pipeline:
                    continue
                for virtual, uneven in _virtual_stages(template, pipeline, micro_batches, pinned):
                    yield Configuration(
                        pipeline=pipeline,
                        virtual_stages=virtual,
                        uneven=uneven,
                        mesh=mesh,
                        roles=roles,
                        micro_batches=micro_batches,
                        schedule=INTERLEAVED if virtual > 1 else pinned.searched_schedule,
                        even=pinned.even and pipeline > 1,
                        zigzag=zigzag and "ring" in roles,
                    )


def shares_configurations(pinned: Pinned) -> Pinned:
    """The decisions, without those that do not change which configurations exist."""
    pattern = pinned.pattern
    if pattern is not None:
        pattern = replace(pattern, vocabulary=True, counts="any", selective=False, kept=None)
    return replace(pinned, zero=None if pinned.zero is None else 0, recompute=None, pattern=pattern)


def decided_apart(configuration: Configuration, pinned: Pinned) -> Pinned:
    """The decisions beside the degrees for configurations with these axes, without decisions that have no meaning
    there."""
    tensor = "tensor" in configuration.roles
    shards = any(role not in ("tensor", "replica") for role in configuration.roles)
    pattern = pinned.pattern
    return Pinned(
        zero=(pinned.zero or 0) if shards else 0,
        sequence_parallel=bool(pinned.sequence_parallel) and tensor,
        expert=pinned.expert,
        whole_experts=bool(pinned.whole_experts) and tensor if pinned.expert is not None else None,
        replicas=pinned.replicas,
        recompute=pinned.recompute,
        pattern=None
        if pattern is None
        else Pattern(vocabulary=pattern.vocabulary or not tensor, counts=pattern.counts, kept=pattern.kept),
    )


def _fits_pattern(attention: Sequence[Rule], roles: tuple[Role, ...], mesh: tuple[int, ...], pinned: Pinned) -> bool:
    """Whether enough devices take part in ZeRO sharding, and heads divide evenly over all devices that split them."""
    if pinned.pattern is None:
        return True
    degrees = dict(zip(roles, mesh, strict=False))
    by_heads = degrees.get("tensor", 1) * degrees.get("context", 1)
    whole = all(heads_of(rule) % by_heads == 0 and key_heads_of(rule) % by_heads == 0 for rule in attention)
    shards = math.prod(size for role, size in degrees.items() if role not in ("tensor", "replica"))
    if "replica" in degrees and degrees.keys().isdisjoint(
        ("data", "nodes", "expert")
    ):  # nothing is sharded over a context alone
        return False
    return whole and shards >= pinned.pattern.shards


def _cuts(template: Template, pipeline: int) -> bool:
    return pipeline == 1 or (template.pipelines and pipeline <= template.blocks.count)


_FEW = 8
"""A number of equal stages on each rank that leaves a small bubble. If this many or fewer are possible, the same
numbers of unequal stages are tried if ranks are not equally busy with equal stages. Of other numbers those of
`_UNEQUAL` are tried that divide the blocks into stages of as many blocks, but of other kinds."""

_UNEQUAL = (2, 4)
"""Numbers of unequal stages on each rank that are tried if no such number of equal ones is possible."""


EMPTY = 2
"""Stages that may hold no block: the first and the last."""


def may_be_uneven(pinned: Pinned) -> bool:
    """Whether virtual stages may hold unequal numbers of blocks."""
    return not pinned.even and (pinned.pattern is None or not pinned.pattern.divided)


def _virtual_stages(
    template: Template, pipeline: int, micro_batches: int, pinned: Pinned
) -> tuple[tuple[int, bool], ...]:
    """Numbers of stages on each rank, and whether they hold unequal blocks."""
    plain = ((1, False),)
    if pipeline == 1 and (pinned.schedule not in (None, "1f1b", FORWARD) or pinned.slices not in (None, 0, 1)):
        return ()
    if pinned.in_a_v:  # searched with one stage per rank, cut in two after the search
        return plain if 2 * pipeline <= template.blocks.count else ()
    interleaved = pinned.schedule == INTERLEAVED
    sliced = pinned.slices is not None or (pinned.interleave or 1) > 1
    wanted = int(sliced and not interleaved) if pinned.virtual_stages is None else pinned.virtual_stages
    if wanted == 1 or pipeline == 1 or (wanted == 0 and pinned.schedule not in (None, INTERLEAVED)):
        return plain if wanted in (0, 1) else ()
    blocks, pattern, equal, uneven = template.blocks.count, pinned.pattern, list[int](), list[int]()
    if pattern is not None and not pattern.interleaved:
        return plain if wanted in (0, 1) else ()
    if micro_batches % (pipeline * (pinned.interleave or 1)) == 0:
        if blocks % pipeline == 0:
            equal += [v for v in divisors(blocks // pipeline)[1:] if _equal(template.blocks.kinds, pipeline * v)]
        if may_be_uneven(pinned):
            few = [v for v in equal if v <= _FEW]
            tried = few if template.heavy_ends else []
            unlike = [v for v in _UNEQUAL if v not in equal and blocks % (pipeline * v) == 0]
            uneven += (wanted,) if wanted else (*tried, *unlike) if few else _UNEQUAL
    most = blocks + (EMPTY if wanted else 0)
    possible = (*plain, *((v, False) for v in equal), *((v, True) for v in uneven if pipeline * v <= most))
    return tuple((v, cut) for v, cut in possible if wanted in (0, v) and not (interleaved and v == 1))


def _equal(kinds: tuple[int, ...], stages: int) -> bool:
    """Whether all of this number of stages hold the same kinds of blocks in the same order."""
    size = len(kinds) // stages
    return kinds == kinds[:size] * stages


def _meshes(devices: int, pinned: Pinned) -> Iterator[tuple[tuple[int, ...], tuple[Role, ...], int]]:
    """Meshes, the roles of their axes, and the data-parallel degree where it is known."""
    if pinned.mesh is not None:
        if math.prod(pinned.mesh) == devices:
            yield pinned.mesh, (), 1
        return
    if pinned.free:
        yield from ((mesh, (), 1) for mesh in mesh_shapes(devices))
    if pinned.manual:
        for data in divisors(devices):
            for context in checked(divisors(devices // data)):
                degrees: dict[Role, int] = {"data": data, "context": context, "tensor": devices // data // context}
                if all(getattr(pinned, name) in (None, degree) for name, degree in degrees.items()):
                    parts = _rest(pinned, degrees["tensor"], context)
                    for ring, heads in context_splits(pinned, context) if parts is not None else ():
                        replicas = pinned.replicas or 1
                        if parts is None or data % (parts * replicas):
                            continue
                        shards = data // parts // replicas
                        nodes = parts // pinned.node if parts % pinned.node == 0 and pinned.node > 1 else 1
                        inside: dict[Role, int] = {"nodes": nodes, "expert": parts // nodes}
                        inside |= {"ring": ring, "context": heads}
                        degrees = {**degrees, "replica": replicas, "data": shards, **inside}
                        real = tuple((name, degrees[name]) for name in get_args(Role) if degrees[name] > 1)
                        yield tuple(degree for _, degree in real), tuple(name for name, _ in real), data


def _rest(pinned: Pinned, tensor: int, context: int) -> int | None:
    """The part of the expert-parallel degree that is left for the data axis; None if it does not divide evenly, or if
    an engine does not support it."""
    parts = pinned.expert or 1
    if pinned.whole_experts:
        if parts % tensor:
            return None
        parts //= tensor
    if pinned.pattern is not None and pinned.pattern.over_context and parts > 1 and parts % context:
        return None
    return parts // context if parts % context == 0 else parts


def experts_cut(pinned: Pinned, roles: tuple[Role, ...], sizes: tuple[int, ...]) -> tuple[bool | None, ...]:
    """For each role of an axis whether experts are cut on it; None if the search decides."""
    if pinned.expert is None:
        return (None,) * len(roles)
    degrees = dict(zip(roles, sizes, strict=True))
    within = pinned.expert // (degrees.get("tensor", 1) if pinned.whole_experts else 1)
    along = within % (degrees.get("ring", 1) * degrees.get("context", 1)) == 0
    cut: dict[Role, bool] = {
        "replica": False,
        "data": False,
        "nodes": True,
        "expert": True,
        "ring": along,
        "context": along,
        "tensor": bool(pinned.whole_experts),
    }
    return tuple(cut[role] for role in roles)


def mesh_shapes(devices: int) -> tuple[tuple[int, ...], ...]:
    """Meshes of one or two axes over that many devices; a single device has no axes."""
    if devices == 1:
        return ((),)
    pairs = tuple((outer, devices // outer) for outer in divisors(devices) if 1 < outer < devices)
    return ((devices,), *pairs)
