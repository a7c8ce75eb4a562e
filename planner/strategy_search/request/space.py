"""The outer space: everything that is chosen around the strategies inside a stage.

A configuration fixes the number of pipeline ranks, the number of stages on each, the shape of the mesh inside a stage,
and the number of micro-batches; with degrees given by the user also the role of each mesh axis. For each configuration,
`planner.strategy_search.engine` finds how blocks are divided over stages, which are recomputed and how, and how
parameters are stored. Configurations (listed by `configurations` beside this file) are tried in the order of a lower
bound on their step time, so that the search can stop early without missing the best one.
"""

from dataclasses import dataclass, replace
from typing import Literal

from costmodels import FORWARD, SCHEDULES
from planner.engines.space import SamplesBy
from planner.errors import RequestError
from planner.plan.layout.kept import NOTHING_KEPT, Kept
from planner.strategy_search.request.offload import Offload

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
        samples_by: what sequences must divide over (`planner.engines.space.sample_step`).
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
    samples_by: SamplesBy = "nothing"
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
            around the best plan (`planner.strategy_search.refinement.rings`).
        ulysses: the part of the context degree that is by heads, for "hybrid" and "auto"; None leaves it to the search.
        zigzag: whether a ring of causal attention cuts the sequence in zigzag order; None means yes.
        never_kept: classes of operators (`hardware_profiles.OP_CLASSES`) whose results a recomputed block never keeps;
            ("attention",) is selective recomputation as in Korthikanti et al. 2022. `EVERY_SECOND_PRODUCT` among them
            stands for the second, fourth, ... matrix product of a block, as in torchtitan's selective policy.
        even: whether all ranks of a pipeline hold equally many blocks, if the number of blocks is divisible.
        offload: what may be offloaded; None offloads if nothing fits on the devices alone
            (`planner.strategy_search.refinement.offloading`).
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
