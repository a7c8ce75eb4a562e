"""The memory of a rank at its fullest moment: the step of a plan is followed tensor by tensor, without tensors.

    forward     operand ─(moved)─> operator ─> results        held: values until their last use, what autograd keeps
    backward    gradients of results ─> operator ─(moved)─> gradients of operands        freed: what autograd has kept
    update      gradients ─(moved)─> optimizer ─(moved)─> weights

The search uses sums of the maxima of all parts: an upper bound that can be tabulated operator by operator. But not all
parts are at their maximum at the same moment. Here every moment is followed, as the runtime runs: in the order of the
plan's schedule, with redistributions in progress, with a recomputed block for as long as its backward pass takes, and
with gradients from the time when they first exist. Memory is counted, not tensors: a view holds all of the memory that
it is a view of.

Only tensors are counted. Rounding and caching of the allocator, and the memory of libraries, are not. Complexity: the
operators of a stage times the number of micro-batches followed, one more than are ever in flight.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from costmodels import PLACES, Turn, paired_turns
from hardware_profiles import Bytes
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.matrix_groups import matrix_groups
from planner.plan.layout.narrow_updates import narrow_moments, updated_in_chunks
from planner.plan.layout.offloaded import visiting_order
from planner.plan.layout.parameter_owners import broadcasts_of, owners_of
from planner.plan.layout.per_step_communication import gathering_buckets
from planner.plan.layout.stage_cut import cut_stage
from planner.plan.prediction.memory.account import MemoryAccount, MemoryTurn, Piece, Storage, moved
from planner.plan.prediction.memory.backward import BackwardMemory
from planner.plan.prediction.memory.buckets import BucketMemory, gather
from planner.plan.prediction.memory.chunks import GRADIENTS, OTHER, STATES, WEIGHTS, Held
from planner.plan.prediction.memory.update import update_temporaries
from planner.plan.schedule import orders, passes_of, relays, runs_in_pairs, telling_micro_batches
from planner.pricing.matrix_update import Stack, stack_bytes
from planner.pricing.parameter_price import summed
from planner.sharding.buckets import Bucket
from planner.sharding.redistribute import redistribution

NO_ROWS: Mapping[str, Bytes] = {}
_FP32 = 4  # bytes per element of a master weight


def live_memory(
    bound: BoundPlan,
    rank: int,
    stored: Mapping[str, Bytes],
    rows: Mapping[str, Bytes] = NO_ROWS,
    *,
    fused: bool = False,
) -> Mapping[str, Bytes]:
    """Bytes by class that a device in the middle of a pipeline rank holds at the fullest moment. `stored` has the bytes
    of weights and optimizer states, `rows` those of states outside of the device, by parameter (see
    `planner.plan.prediction.walk.stage_cost.StageCost`). `fused`: one kernel updates all weights."""
    interleave = bound.plan.training.interleave
    account = MemoryAccount(now={WEIGHTS: stored[WEIGHTS], GRADIENTS: 0.0, STATES: stored[STATES], OTHER: 0.0})
    held = Held(account=account, rows=rows)
    chunks = [Chunk(bound=bound, cut=cut_stage(bound, stage), held=held) for stage in bound.plan.stages_of(rank)]
    plan = bound.plan
    turns = telling_micro_batches(plan) // interleave
    order = orders(plan.schedule, plan.pipeline, turns, plan.virtual_stages, plan.slices)[rank]
    expected = Counter[str]()
    for at, chunk in enumerate(chunks):
        own = [turn for turn in order if turn.chunk == at]
        chunk.expect(own)
        passes = interleave * sum(turn.kind == "forward" for turn in own)
        expected.update(dict.fromkeys(chunk.trained, passes))
    if bound.graph.trains:
        held.buckets = BucketMemory(bound=bound, account=account, gradients=held.gradients, expected=expected)
    begins = _passes(bound, order, chunks, held)
    for at, turn in enumerate(order):
        begins(at)
        chunks[turn.chunk].in_turn(turn, interleave)
    held.let_go()
    chunks[0].end_step(fused=fused)
    return account.at_peak


def _passes(bound: BoundPlan, order: Sequence[Turn], chunks: Sequence["Chunk"], held: Held) -> Callable[[int], None]:
    """A function that is called before the turn at a place of the order, and lets the weights of the next pass be
    prefetched; those of the first pass are prefetched at once."""
    if not relays(bound.plan):
        return lambda at: None
    own = passes_of(order, paired_turns(order) if runs_in_pairs(bound.plan) else ())
    passes, places = [[order[at] for at in one] for one in own], {one[0]: number for number, one in enumerate(own)}

    def come(turns: Sequence[Turn]) -> None:
        for turn in turns:
            chunks[turn.chunk].begin(again=turn.kind != "forward")

    def begin(at: int) -> None:
        if at not in places:
            return
        number = places[at]
        held.passes = len(passes) - number - 1
        held.following = partial(come, passes[number + 1]) if held.passes else None
        if not any(turn.kind == "forward" or chunks[turn.chunk].comes_again for turn in passes[number]):
            held.depart()  # nothing else would do it

    come(passes[0])
    return begin


def _without(of: str, work: Sequence[MemoryTurn]) -> list[MemoryTurn]:
    """What some work takes of all other classes."""
    return [replace(turn, changes=[one for one in turn.changes if one[1] != of]) for turn in work]


class Chunk(BackwardMemory):
    """A stage, turn by turn, and the update of the rank."""

    @property
    def trained(self) -> frozenset[str]:
        """The parameters for which every backward pass of the stage makes gradients."""
        graph = self.bound.graph
        read = {name for at in self.cut.operators for name in graph.operators[at].operands}
        return frozenset(read & graph.parameter_names & graph.differentiable)

    def in_turn(self, turn: Turn, count: int) -> None:
        """A pass of `count` interleaved micro-batches. In a backward pass the last one begins, since autograd goes back
        through the recorded operations. Recomputation goes forward."""
        if count == 1:
            self.turn(turn)
            return
        numbers = [turn.micro_batch * count + own for own in range(count)]
        backward = turn.kind != "forward"
        works: list[list[MemoryTurn]] = []
        for number in reversed(numbers) if backward else numbers:
            self.first_in_turn = not works
            works.append(self.account.recorded(partial(self.turn, replace(turn, micro_batch=number))))
        works = [works[0], *(_without(WEIGHTS, work) for work in works[1:])]  # weights are gathered for all
        self.account.replayed(works[::-1] if backward else works, backward=backward)

    def turn(self, turn: Turn) -> None:
        """A pass of a micro-batch, or of a slice of one."""
        self.now, key = turn, (turn.micro_batch, turn.slice)
        if turn.kind == "forward" and not self.bound.graph.trains:
            _, received = self._forward()
            self._release([piece.storage for piece in received.values()])
        elif turn.kind == "forward":
            self.flying[key] = self._forward()
        elif turn.kind == "weight_gradient":
            self._weight_gradients(self.waiting.pop(turn.micro_batch))
        else:
            self.products = self.waiting[turn.micro_batch] = []
            self._backward(*self.flying.pop(key))
            if turn.slice == 0:
                for gone in [key for key in self.pasts if key[0] == turn.micro_batch]:
                    self._release(self.pasts.pop(gone))

    def end_step(self, *, fused: bool) -> None:
        """Reduce all gradients of the rank, update shard by shard, and gather the new weights."""
        graph, mesh = self.bound.graph, self.bound.plan.mesh
        pieces: dict[str, Piece] = {}
        names = (*self.gradients, *(self.held.buckets.members if self.held.buckets else ()))
        owners, groups = owners_of(self.bound, names), matrix_groups(self.bound, names, self.coordinate)
        pushed = owners if self.update.served else {}  # reduced in place
        if self.held.buckets is not None:
            self.held.buckets.finish()
            for name, storage in self.held.buckets.reduced.items():
                pieces[name] = Piece(storage, self.tensors.shape(name, self.bound.parameters[name].state))
        for name in [name for name in self.bound.parameters if name in self.gradients]:
            gradient, stored, tensor = self.gradients[name], self.bound.parameters[name], graph.types[name]
            piece = Piece(gradient, self.tensors.shape(name, stored.gradient))
            steps = redistribution(tensor.shape, mesh, stored.gradient, stored.state)
            element = summed(tensor, self.update).element_bytes
            steps = () if self.update.is_local(name) or name in pushed else steps
            pieces[name] = moved(self.account, piece, steps, mesh, self.coordinate, element)
            self.account.release(gradient)
        offloaded = visiting_order(self.bound, pieces)
        places = self._places(offloaded)
        for name in [name for name, owner in owners.items() if not owner.at(self.coordinate)]:
            self.account.release(pieces.pop(name).storage)
        stayed = [name for name in pieces if name not in offloaded]
        for name in stayed:
            pieces[name] = self._read(name, pieces[name])
        for group in groups:
            if narrow_moments(self.bound):  # the widened momentum
                self.account.brief(_FP32 * math.prod(pieces[group.names[0]].shape), OTHER)
            self._orthogonal(group.stack, pieces[group.names[0]].shape)
        grouped = {name for group in groups for name in group.names}
        self._temporaries({name: pieces[name] for name in stayed if name not in grouped}, fused=fused)
        together = {name: one for one in gathering_buckets(self.bound, pieces.keys()) for name in one.names}
        given: dict[str, Storage] = {}
        for name in offloaded:
            self._temporaries({name: pieces[name]}, fused=fused)
            self.account.release(pieces[name].storage)
            if name not in together:
                self._publish(name, pieces[name])
                continue
            given[name] = self._given(name, pieces[name])
            if given.keys() >= set(together[name].names):
                self._publish_together(together[name], given)
        self._release(places)
        self._release([pieces[name].storage for name in stayed])
        for bucket in dict.fromkeys(together[name] for name in stayed if name in together):
            narrow = [name for name in bucket.names if name not in given and self._narrow(name)]
            given.update({name: self._given(name, pieces[name]) for name in narrow})
            self._publish_together(bucket, given)
        for name in stayed:
            if name not in together and (name in pushed or not self._rounded_in_place(name)):
                self._publish(name, pieces[name])
        for broadcast in broadcasts_of(self.bound, owners):
            self.account.brief(broadcast.flat, OTHER)
        self.held.let_go()

    def _narrow(self, name: str) -> bool:
        """Whether the new weight is rounded from a wider master weight, in separate memory."""
        return self.update.master_weights and self.bound.graph.types[name].element_bytes < _FP32

    def _read(self, name: str, piece: Piece) -> Piece:
        """A gradient as the update reads it: a 16-bit one is widened in separate memory, unless it is widened in
        chunks."""
        narrow = summed(self.bound.graph.types[name], self.update).element_bytes < _FP32
        if not narrow or updated_in_chunks(self.bound, name):
            return piece
        wide = Piece(self.account.new(float(math.prod(piece.shape) * _FP32), OTHER), piece.shape)
        self.account.release(piece.storage)
        return wide

    def _orthogonal(self, stack: Stack, shape: Sequence[int]) -> None:
        """Make the updates of a stack orthogonal; each is a piece of this shape."""
        mesh, sizes = self.bound.plan.mesh, self.bound.plan.mesh.sizes
        if stack.size == 1:
            self.account.brief(stack_bytes(stack, sizes), OTHER)
            return
        element, whole = stack.tensor.element_bytes, stack.tensor.shape
        there, back = (redistribution(whole, mesh, *way) for way in (stack.ways, stack.ways[::-1]))
        pieces = Piece(self.account.new(math.prod(shape) * stack.size * element, OTHER), (stack.size, *shape))
        matrices = moved(self.account, pieces, there, mesh, self.coordinate, element)
        self.account.release(pieces.storage)
        self.account.brief(stack_bytes(stack, sizes) - math.prod(matrices.shape) * element, OTHER)
        again = moved(self.account, matrices, back, mesh, self.coordinate, element)
        for piece in (matrices, again):
            self.account.release(piece.storage)

    def _temporaries(self, pieces: Mapping[str, Piece], *, fused: bool) -> None:
        """The temporaries of an update of pieces of parameters."""
        ordered = [name for name in self.bound.parameters if name in pieces]
        counts = {name: float(math.prod(pieces[name].shape)) for name in ordered}
        strips = [name for name in pieces if self._in_strips(name)]
        self.account.brief(update_temporaries(self.bound, counts, strips, fused=fused), OTHER)

    def _in_strips(self, name: str) -> bool:
        """Whether the updated shard is a part of each row of the stored weight, which one kernel does not support."""
        stored = self.bound.parameters[name]
        apart = self._narrow(name) or stored.weight_offloaded or not self.bound.plan.schedule_kind.flushes
        return not apart and any(
            own != kept and own.dim > 0 for own, kept in zip(stored.state, stored.weight, strict=True)
        )

    def _rounded_in_place(self, name: str) -> bool:
        """Whether the new weight only has to be rounded to become the stored one."""
        stored = self.bound.parameters[name]
        return stored.state == stored.weight and not stored.weight_offloaded

    def _places(self, offloaded: Sequence[str]) -> list[Storage]:
        """Memory in which offloaded states are updated: one, and the next or the previous one."""
        longest = max((self.held.rows[name] for name in offloaded), default=0.0)
        return [self.account.new(longest, OTHER) for _ in offloaded[:PLACES]]

    def _given(self, name: str, piece: Piece) -> Storage:
        """A new weight in separate memory, in the layout of the update."""
        return self.account.new(self.tensors.bytes(name, piece.shape), OTHER)

    def _publish_together(self, bucket: Bucket, given: dict[str, Storage]) -> None:
        """Gather the new weights of a bucket into their stored layouts; those in `given` are in separate memory."""
        gather(bucket, self.bound, self.account, [given.pop(name) for name in bucket.names if name in given], OTHER)
        for name in bucket.names:
            stored = self.bound.parameters[name]
            if stored.weight_offloaded:
                new = self.account.new(self.tensors.bytes(name, self.tensors.shape(name, stored.weight)), OTHER)
                self.held.send(new)
                self.account.release(new)

    def _publish(self, name: str, piece: Piece) -> None:
        """Bring the new weight into its stored layout; `piece` has its shape in the layout of the update."""
        stored, tensor = self.bound.parameters[name], self.bound.graph.types[name]
        steps = redistribution(tensor.shape, self.bound.plan.mesh, stored.state, stored.weight)
        narrow = Piece(self._given(name, piece), piece.shape)
        new = self._moved(narrow, steps, name).storage
        if stored.weight_offloaded:
            self.held.send(new)
        self.account.release(new)
        self.account.release(narrow.storage)
