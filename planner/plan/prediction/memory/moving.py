"""Memory of redistributions in progress.

    source ─> cut dim first ─> output ─> in order        an all-gather along an inner dim has all four at once

The transient bytes of an operator are priced with its operands in the layouts that it needs. Redistributing them, and
their gradients, may need more memory: `runtime.comm.redistribute`, as `account.moved` follows it. The largest
moment of an operator counts: everything in progress, and its other operands or their gradients at that time. Stages of
a pipeline whose receives are posted ahead have memory for what the next pass of each chunk receives
(`runtime.step.receiving`). Software other than the runtime counts as measured.

Complexity: O(operators times operands), without those of repeated blocks; equal redistributions are followed once.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hardware_profiles import PYTORCH, Bytes, Cluster
from planner.graph.operator_graph import TensorType
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.layout.stage_cut import crossing_values
from planner.plan.plan import Plan
from planner.plan.prediction.memory.account import MemoryAccount, Piece, moved
from planner.plan.prediction.walk.stage_cost import StageCost
from planner.pricing.parameter_price import reduced
from planner.sharding.layout import Layout, local_fraction, local_shape, local_share
from planner.sharding.redistribute import is_view, redistribution

_OTHER = "transient"


def most_moving(
    bound: BoundPlan,
    repeated: Mapping[int, int] = MappingProxyType({}),
    overlapped: Collection[tuple[int, int]] | None = None,
) -> list[Bytes]:
    """For each pipeline rank the most bytes of a redistribution of its operators: operands, or gradients going back.
    `repeated` blocks equal earlier ones; `overlapped` are operands that overlap with products, if known."""
    found = [0.0] * bound.plan.pipeline
    if bound.plan.mesh.size == 1:
        return found
    if overlapped is None:
        overlapped = {(one.reader, one.place) for one in overlaps_of(bound)}
    moving = _Moving(bound=bound, overlapped=overlapped)
    stages, numbers = stage_of_operators(bound), bound.blocks.numbers
    of_blocks = defaultdict[int, Bytes](float)
    for at, op in enumerate(bound.operators):
        block = numbers.get(at, -1)
        if block in repeated:
            continue
        most, rank = max(*moving.moments(at, op), 0.0, 0.0), bound.plan.rank_of(stages[at])
        of_blocks[block] = max(of_blocks[block], most)
        found[rank] = max(found[rank], most)
    for block, like in repeated.items():
        rank = bound.plan.rank_of(stages[bound.blocks.borders[block]])
        found[rank] = max(found[rank], of_blocks[like])
    return found


def receive_buffers(bound: BoundPlan) -> list[Bytes]:
    """For each pipeline rank the bytes that one pass of each of its chunks receives from other ranks: values, and
    gradients of the values that it sends."""
    plan, graph = bound.plan, bound.graph
    found = [0.0] * plan.pipeline
    if plan.pipeline == 1:
        return found
    promised = bound.promised
    for stage, names in enumerate(crossing_values(bound)):
        source, target = plan.rank_of(max(0, stage - 1)), plan.rank_of(stage)
        if source == target:  # includes the first stage, which receives nothing
            continue
        for name in names:
            nbytes = graph.types[name].nbytes * local_fraction(promised[name].forward, plan.mesh.sizes)
            found[target] += nbytes
            found[source] += nbytes if graph.trains and name in graph.differentiable else 0.0
    return [plan.training.interleave * nbytes for nbytes in found]


def hold(cost: StageCost, moving: Bytes, received: Bytes, plan: Plan, cluster: Cluster) -> None:
    """Add memory for redistributions to the sums of a rank, if those of interleaved micro-batches need more than any
    operator, memory for what is received ahead, and that of temporaries of the update, if they need more than all
    activations before."""
    if cluster.software.name == PYTORCH.name:
        cost.memory[_OTHER] = max(cost.memory[_OTHER], moving * plan.training.interleave)
        cost.memory["activations"] += received
        cost.memory[_OTHER] += max(0.0, cost.updating - cost.memory["activations"] - cost.memory[_OTHER])


@dataclass(kw_only=True)
class _Moving:
    bound: BoundPlan
    overlapped: Collection[tuple[int, int]]
    _peaks: dict[object, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._promised = self.bound.promised
        self._together = self.bound.plan.training.update.by_block

    def moments(self, at: int, op: BoundOperator) -> Iterator[Bytes]:
        """Bytes while each operand of an operator is redistributed, and while each of their gradients goes back."""
        graph, update = self.bound.graph, self.bound.plan.training.update
        places = [
            place
            for place, name in enumerate(op.operator.operands)
            if (at, place) not in self.overlapped and not (name in self.bound.parameters and self._together)
        ]
        come = graded = 0.0
        for place in places:
            name, wanted = op.operator.operands[place], op.layouts.operands[place]
            tensor, made = graph.types[name], self._promised[name]
            if made.forward == wanted.forward:
                continue
            ways = made.forward, wanted.forward, self.bound.sequences.get(name, frozenset())
            yield come + self._peak(tensor, *ways, stored=name in self.bound.parameters)
            come += self._bytes(tensor, wanted.forward)
        gradients: list[tuple[Bytes, Bytes]] = []
        for place in places:
            name, wanted = op.operator.operands[place], op.layouts.operands[place]
            if graph.graded(op.operator)[place]:
                tensor, made = graph.types[name], self._promised[name]
                tensor = reduced(tensor, update) if name in self.bound.parameters else tensor
                own = self._bytes(tensor, wanted.gradient)
                graded += own
                if made.gradient != wanted.gradient:
                    ways = wanted.gradient, made.gradient, self.bound.sequences.get(name, frozenset())
                    gradients.append((own, self._peak(tensor, *ways)))
        for own, peak in gradients:
            yield graded - own + peak

    def _bytes(self, tensor: TensorType, layout: Layout) -> Bytes:
        return tensor.nbytes * local_share(tensor.shape, layout, self.bound.plan.mesh.sizes)

    def _peak(
        self, tensor: TensorType, source: Layout, target: Layout, sequences: frozenset[int], *, stored: bool = False
    ) -> Bytes:
        """The most bytes during a redistribution; without the source if it is `stored` anyway."""
        key = (tensor.shape, tensor.element_bytes, source, target, sequences, stored)
        if key not in self._peaks:
            mesh, account = self.bound.plan.mesh, MemoryAccount(now={_OTHER: 0.0})
            steps = redistribution(tensor.shape, mesh, source, target, sequences)
            begin = self._bytes(tensor, source)
            piece = Piece(account.new(begin, _OTHER), local_shape(tensor.shape, source, mesh.sizes))
            end = moved(account, piece, steps, mesh, mesh.coordinate(mesh.size // 2), tensor.element_bytes)
            if is_view(steps[-1]) and not stored:
                account.brief(self._bytes(tensor, target), _OTHER)
            account.release(end.storage)
            self._peaks[key] = account.peak - (begin if stored else 0.0)
        return self._peaks[key]
