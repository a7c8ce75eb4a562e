"""The memory that a stage of a rank holds at a moment of its step, for `planner.plan.prediction.memory.live`."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from costmodels import Then, Turn
from hardware_profiles import Bytes
from planner.graph.operator_graph import DTYPE_BYTES
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.expert_overlap import expert_overlaps_of, replayed
from planner.plan.layout.micro_batch_turns import turns_of_stages
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.layout.stage_cut import StageCut
from planner.plan.layout.stage_tensors import StageTensors
from planner.plan.layout.strides import Strides
from planner.plan.prediction.memory.account import MemoryAccount, Piece, Storage, moved
from planner.plan.prediction.memory.buckets import BucketMemory
from planner.pricing.liveness import replays
from planner.pricing.parameter_price import summed
from planner.sharding.layout import Layout
from planner.sharding.redistribute import Step

WEIGHTS, GRADIENTS, STATES, OTHER = "weights", "gradients", "optimizer state", "activations and transient"

Values = dict[str, Piece]

VALUES, BACK = "values", "gradients"
"""What other stages send: values forward, gradients back."""


@dataclass(slots=True)
class Kept:
    """The tensors that autograd keeps for the backward pass of one operator; `extra` is its own memory beside them."""

    pieces: list[Storage] = field(default_factory=list)
    extra: Storage | None = None

    @property
    def everything(self) -> list[Storage]:
        return [*self.pieces, *([self.extra] if self.extra is not None else [])]


@dataclass(slots=True)
class Section:
    """Operators whose tensors are kept together: each keeps what its backward pass needs, or what recomputation
    needs."""

    operators: Sequence[int]
    kept: dict[int, Kept]
    reads: Values = field(default_factory=dict)
    results: dict[int, list[Storage]] = field(default_factory=dict)
    again: bool = False
    offloaded: list[Storage] = field(default_factory=list)
    number: int = 0
    gathered: dict[str, Storage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Product:
    """An operator whose weight gradients are deferred, and the tensors kept for them."""

    at: int
    kept: Sequence[Storage]


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective of coalesced weights, or of their gradients: its input and its output."""

    sends: Storage
    comes: Storage


@dataclass(kw_only=True)
class Held:
    """What the chunks of a rank share: the account, bytes of offloaded states, the gradients of the step, the buckets
    that reduce them, and tensors that are being sent; functions that wait for gradient reductions in progress, and that
    prefetch weights for the next pass."""

    account: MemoryAccount
    rows: Mapping[str, Bytes] = field(default_factory=dict)
    gradients: dict[str, Storage] = field(default_factory=dict)
    buckets: BucketMemory | None = None
    sent: list[Storage] = field(default_factory=list)
    visiting: dict[str, Storage] = field(default_factory=dict)
    returning: list[Callable[[], None]] = field(default_factory=list)
    following: Callable[[], None] | None = None
    passes: int = 0

    def depart(self) -> None:
        """Prefetch the weights with which the next pass begins, unless that has been done (`runtime.executor.relay`).
        `passes` more follow the current one."""
        following, self.following = self.following, None
        if following is not None:
            following()

    def visit(self, weights: Mapping[str, Bytes]) -> None:
        """Have these offloaded weights on the device, and no others."""
        for name in self.visiting.keys() - weights.keys():
            self.account.release(self.visiting.pop(name))
        for name in weights.keys() - self.visiting.keys():
            self.visiting[name] = self.account.new(weights[name], WEIGHTS)

    def send(self, storage: Storage, *, more: bool = False) -> None:
        """A sent tensor is held until the next one is sent: it has then arrived. With `more`, it is sent together with
        the previous one."""
        if not more:
            self.let_go()
        self.sent.append(self.account.hold(storage))

    def let_go(self) -> None:
        for storage in self.sent:
            self.account.release(storage)
        self.sent.clear()


@dataclass(kw_only=True)
class ChunkMemory:
    """A stage of the rank: how memory is taken and freed."""

    bound: BoundPlan
    cut: StageCut
    held: Held

    def __post_init__(self) -> None:
        self.account, self.gradients = self.held.account, self.held.gradients
        graph, blocks = self.bound.graph, self.bound.blocks
        self.tensors = StageTensors(bound=self.bound, cut=self.cut)
        self.update = self.bound.plan.training.update
        self.coordinate = self.bound.plan.mesh.coordinate(self.bound.plan.mesh.size // 2)
        self.results = {*self.cut.sends, *((graph.loss,) if self.cut.last else ())}
        running = [at for segment in self.tensors.segments for at in segment.operators]
        self.last_use = {name: at for at in running for name in graph.operators[at].operands}
        self.uses = Counter(name for at in self.cut.operators for name in graph.operators[at].operands)
        self.replays = replays(graph, blocks)
        overlaps = overlaps_of(self.bound)
        experts = expert_overlaps_of(self.bound, overlaps, self.cut.operators)
        self.replayed = replayed(self.bound, experts, overlaps)
        self.in_parts = {one.at for one in experts}
        self.pending: Counter[str] = Counter()
        self.lying: dict[str, Strides | None] = {}  # strides of gradients; None if contiguous
        self.flying: dict[tuple[int, int], tuple[list[Section], Values]] = {}
        self.now = Turn("forward", 0)
        self.thens = turns_of_stages(self.bound, [self.tensors.segments])
        self.first_in_turn = True  # of interleaved micro-batches
        self.pasts: dict[tuple[int, int], list[Storage]] = {}  # keys of attention, by micro-batch and operator
        self.waiting: dict[int, list[Product]] = {}
        self.products: list[Product] = []
        self.coming: dict[
            tuple[int, bool], list[Sent | None]
        ] = {}  # prefetched weights, by section, and whether for the backward pass
        self.posted: dict[str, list[Storage]] = {VALUES: [], BACK: []}  # receive buffers of one pass
        self.expected = dict.fromkeys(self.posted, 0)  # passes of the step whose receives are still to be posted

    def expect(self, order: Sequence[Turn]) -> None:
        """Count the passes of a step that receive from other ranks (`runtime.step.receiving`), and post the receives of
        the first forward pass."""
        rank_of, stage = self.bound.plan.rank_of, self.cut.stage
        kinds = [turn.kind for turn in order]
        if stage and rank_of(stage - 1) != rank_of(stage):
            self.expected[VALUES] = kinds.count("forward")
        if not self.cut.last and rank_of(stage + 1) != rank_of(stage):
            self.expected[BACK] = len(kinds) - kinds.count("forward") - kinds.count("weight_gradient")
        self._post(VALUES)

    def _post(self, way: str) -> None:
        """Allocate memory for what the next pass receives, unless it exists already or no pass is left."""
        if self.posted[way] or not self.expected[way] or not self.first_in_turn:
            return
        self.expected[way] -= 1
        differentiable = self.bound.graph.differentiable
        names = self.cut.receives if way == VALUES else [name for name in self.cut.sends if name in differentiable]
        together = self.bound.plan.training.interleave
        nbytes = (together * self.tensors.bytes(name, self.tensors.made_shape(name)) for name in names)
        self.posted[way] = [self.account.new(one, OTHER) for one in nbytes]

    def _take(self, way: str) -> None:
        """Received values belong to the pass from now on, and are counted there. The receives of the next pass are
        posted later."""
        if self.first_in_turn:
            self._release(self.posted[way])
            self.posted[way] = []

    def _wanted(self, at: int, place: int) -> tuple[int, ...]:
        """Local shape of an operand as its operator needs it."""
        op = self.bound.operators[at]
        return self.tensors.shape(op.operator.operands[place], op.layouts.operands[place].forward)

    def _add(self, gradients: dict[str, Storage], name: str, new: Storage) -> None:
        """Sum the gradients of several uses, in place if nothing else holds the sum."""
        known = gradients.get(name)
        nbytes = self.tensors.bytes(name, self.tensors.shape(name, self.tensors.promised[name].gradient))
        if known is None:
            gradients[name] = new
        elif known.holders == 1 and known.nbytes >= nbytes:
            self.account.release(new)
        else:
            gradients[name] = self.account.new(max(known.nbytes, nbytes), OTHER)
            self._release([known, new])

    def _accumulate(self, name: str, leaf: Storage) -> None:
        """Add a gradient that autograd has left to the gradient of the step."""
        shape = self.tensors.shape(name, self.bound.parameters[name].gradient)
        nbytes = float(math.prod(shape) * summed(self.bound.graph.types[name], self.update).element_bytes)
        if name in self.gradients:
            self.account.release(leaf)  # a narrow gradient is widened while it is added
        elif leaf.nbytes == nbytes and leaf.holders == 1:
            self.gradients[name] = self.account.claim(leaf, GRADIENTS)
        else:
            self.gradients[name] = self.account.new(nbytes, GRADIENTS)
            self.account.release(leaf)
        if self.held.buckets is not None:
            self.held.buckets.arrived(name)

    def _moved(
        self, piece: Piece, steps: Sequence[Step], name: str, *, then: Then | None = None, gives: bool = False
    ) -> Piece:
        element, mesh = DTYPE_BYTES[self.bound.graph.types[name].dtype], self.bound.plan.mesh
        return moved(self.account, piece, steps, mesh, self.coordinate, element, then=then, gives=gives)

    def _standing(self, name: str) -> Piece:
        """A parameter, a buffer or an input: memory that always exists."""
        return Piece(Storage(0.0, OTHER, standing=True), self.tensors.made_shape(name))

    def _fresh(self, name: str, layout: Layout) -> Piece:
        shape = self.tensors.shape(name, layout)
        return Piece(self.account.new(self.tensors.bytes(name, shape), OTHER), shape)

    def _held(self, piece: Piece) -> Piece:
        self.account.hold(piece.storage)
        return piece

    def _release(self, storages: Sequence[Storage]) -> None:
        for storage in storages:
            self.account.release(storage)

    def _drop(self, at: int, values: Values) -> None:
        """Free values that no operator behind this one reads."""
        op = self.bound.operators[at].operator
        for name in dict.fromkeys((*op.operands, *self.tensors.results(at))):
            if name in values and name not in self.results and self.last_use.get(name, at) == at:
                self.account.release(values.pop(name).storage)
