"""How much memory a rank needs when it needs most: the step of a plan followed tensor by tensor, without tensors.

    forward     operand ─(moved)─> operator ─> results        held: values until their last use, what autograd keeps
    backward    gradients of results ─> operator ─(moved)─> gradients of operands        let go: what it has kept
    update      gradients ─(moved)─> optimizer ─(moved)─> weights

The figures that the search minimises under are sums of what each part needs at its most, an upper bound that can be
tabulated operator by operator; not everything is at its most at the same moment. Here the moments are followed, as the
runtime runs them: in the order of the plan's schedule, with what is on the way of every redistribution, a recomputed
block for as long as its backward pass takes, and gradients from when they are first there. What lives is memory, not
tensors: a view holds all of what it is a view of.

Counted are tensors. What an allocator rounds up or keeps for later, and what libraries take for themselves, is not.
Complexity: the operators of a stage times the micro-batches that are followed, one more than are ever in flight.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from costmodels import PLACES, Turn
from hardware_profiles import Bytes
from planner.graph.operator_graph import DTYPE_BYTES
from planner.plan.binding.bind import BoundOperator, BoundPlan
from planner.plan.layout.block_gathers import BlockGather
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.offloaded import visiting_order
from planner.plan.layout.stage_cut import StageCut, cut_stage
from planner.plan.layout.stage_tensors import StageTensors
from planner.plan.prediction.memory_account import MemoryAccount, Piece, Storage, moved
from planner.plan.schedule import orders, telling_micro_batches
from planner.pricing.liveness import replays
from planner.pricing.parameter_price import reduced, summed
from planner.sharding.buckets import Bucket
from planner.sharding.layout import Layout
from planner.sharding.redistribute import Step, redistribution
from planner.sharding.rule import loop_extents

WEIGHTS, GRADIENTS, STATES, OTHER = "weights", "gradients", "optimizer state", "activations and transient"
NO_ROWS: Mapping[str, Bytes] = {}
_UPDATED = 2  # temporaries of an update, in pieces of the parameter that is updated


def live_memory(
    bound: BoundPlan, rank: int, stored: Mapping[str, Bytes], rows: Mapping[str, Bytes] = NO_ROWS
) -> Mapping[str, Bytes]:
    """Bytes of each class that a device in the middle of a pipeline rank holds when it holds most. `stored` has those
    of the weights and of the states of the optimizer, `rows` those of states outside of the device, by parameter (see
    `planner.plan.prediction.stage_cost.StageCost`)."""
    account = MemoryAccount(now={WEIGHTS: stored[WEIGHTS], GRADIENTS: 0.0, STATES: stored[STATES], OTHER: 0.0})
    held = _Held(account=account, rows=rows)
    stages = range(rank, len(bound.plan.stages), bound.plan.pipeline)
    chunks = [_Chunk(bound=bound, cut=cut_stage(bound, stage), held=held) for stage in stages]
    plan, interleave = bound.plan, bound.plan.training.interleave
    turns = telling_micro_batches(plan) // interleave
    for turn in orders(plan.schedule, plan.pipeline, turns, plan.virtual_stages, plan.slices)[rank]:
        chunks[turn.chunk].turn(turn)
    held.let_go()
    chunks[0].end_step()
    return {
        **account.at_peak,
        OTHER: interleave * account.at_peak[OTHER],
    }  # micro-batches in turn hold alike at the same moment


Values = dict[str, Piece]


@dataclass(slots=True)
class _Kept:
    """What autograd keeps for the backward pass of one operator, and of that its own memory beside the tensors."""

    pieces: list[Storage] = field(default_factory=list)
    extra: Storage | None = None

    @property
    def everything(self) -> list[Storage]:
        return [*self.pieces, *([self.extra] if self.extra is not None else [])]


@dataclass(slots=True)
class _Section:
    """Operators that are kept together: each what its backward pass needs, or what it takes to compute them again."""

    operators: Sequence[int]
    kept: dict[int, _Kept]
    reads: Values = field(default_factory=dict)
    results: dict[int, list[Storage]] = field(default_factory=dict)
    again: bool = False
    offloaded: list[Storage] = field(default_factory=list)
    number: int = 0
    gathered: dict[str, Storage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Product:
    """An operator whose weight gradients are put off, and what is kept for them."""

    at: int
    kept: Sequence[Storage]


@dataclass(frozen=True, slots=True)
class _Sent:
    """Weights that go together, or their gradients, in one of their collectives: what is sent, and what comes."""

    sends: Storage
    comes: Storage


@dataclass(kw_only=True)
class _Held:
    """What the chunks of a rank have together: the account, what is offloaded, the gradients of the step, what is being
    sent."""

    account: MemoryAccount
    rows: Mapping[str, Bytes] = field(default_factory=dict)
    gradients: dict[str, Storage] = field(default_factory=dict)
    sent: list[Storage] = field(default_factory=list)
    visiting: dict[str, Storage] = field(default_factory=dict)

    def visit(self, weights: Mapping[str, Bytes]) -> None:
        """Have these offloaded weights on the device, and no others."""
        for name in self.visiting.keys() - weights.keys():
            self.account.release(self.visiting.pop(name))
        for name in weights.keys() - self.visiting.keys():
            self.visiting[name] = self.account.new(weights[name], WEIGHTS)

    def send(self, storage: Storage) -> None:
        """What is sent is held until the next is, when it has gone."""
        self.let_go()
        self.sent.append(self.account.hold(storage))

    def let_go(self) -> None:
        for storage in self.sent:
            self.account.release(storage)
        self.sent.clear()


@dataclass(kw_only=True)
class _Chunk:
    """A stage of the rank."""

    bound: BoundPlan
    cut: StageCut
    held: _Held

    def __post_init__(self) -> None:
        self.account, self.gradients = self.held.account, self.held.gradients
        graph, blocks = self.bound.graph, self.bound.blocks
        self.tensors = StageTensors(bound=self.bound, cut=self.cut)
        self.update = self.bound.plan.training.update
        self.coordinate = self.bound.plan.mesh.coordinate(self.bound.plan.mesh.size // 2)
        self.results = {*self.cut.sends, *((graph.loss,) if self.cut.last else ())}
        self.last_use = {name: at for at in self.cut.operators for name in graph.operators[at].operands}
        self.uses = Counter(name for at in self.cut.operators for name in graph.operators[at].operands)
        self.replays = replays(graph, blocks)
        self.pending: Counter[str] = Counter()
        self.flying: dict[tuple[int, int], tuple[list[_Section], Values]] = {}
        self.now = Turn("forward", 0)
        self.pasts: dict[tuple[int, int], list[Storage]] = {}  # of attention, by micro-batch and operator
        self.waiting: dict[int, list[_Product]] = {}
        self.products: list[_Product] = []
        self.coming: dict[int, list[_Sent]] = {}  # weights that have set out, by section
        self.returning: list[tuple[BlockGather, Sequence[str], _Sent]] = []  # gradients that have

    def turn(self, turn: Turn) -> None:
        """A pass of a micro-batch, or of a slice of one."""
        self.now, key = turn, (turn.micro_batch, turn.slice)
        if turn.kind == "forward":
            self.flying[key] = self._forward()
        elif turn.kind == "weight_gradient":
            self._weight_gradients(self.waiting.pop(turn.micro_batch))
        else:
            self.products = self.waiting[turn.micro_batch] = []
            self._backward(*self.flying.pop(key))
            if turn.slice == 0:
                for gone in [key for key in self.pasts if key[0] == turn.micro_batch]:
                    self._release(self.pasts.pop(gone))

    # forward

    def _forward(self) -> tuple[list[_Section], Values]:
        received = {name: self._fresh(name, self.tensors.promised[name].forward) for name in self.cut.receives}
        values = {name: Piece(self.account.hold(p.storage), p.shape, p.contiguous) for name, p in received.items()}
        found = []
        leaving: list[Storage] = []
        for number, segment in enumerate(self.tensors.segments):
            again, operators, offloads = segment.recomputed, segment.operators, segment.offloads_activations
            if not offloads:
                self._leave(leaving)
                leaving = []
            self.held.visit({**self.tensors.visit(number), **self.tensors.ahead(number, number + 1)})
            section = _Section(operators, {}, again=again, number=number)
            flowing = [values[name].storage for name in segment.reads if name in values] if offloads else []
            if again:
                self._checkpoint(section, values)
            else:
                self._gather(number, values)
                self._set_out(range(number + 1, len(self.tensors.segments)))
                section.gathered = self._needed_again(number, values)
                for at in operators:
                    section.kept[at] = self._compute(at, values)
                    self._drop(at, values)
                self._leave([*section.gathered.values()])
            if offloads:
                self._leave(leaving)
                leaving = section.offloaded = self._offloaded(section, values, flowing)
            found.append(section)
            self.held.visit(self.tensors.ahead(number, number + 1))
        self._leave(leaving)
        for name in self.cut.sends:
            self.held.send(values[name].storage)
        self._release([piece.storage for piece in values.values()])
        return found, received

    def _gather(self, number: int, values: Values) -> None:
        """Bring the weights that a section gathers together."""
        for one, landed in zip(self.tensors.segments[number].gathers, self._landing(number), strict=True):
            stay = [self._standing(name).storage for name in one.names]
            for name, use, storage in zip(one.names, one.uses, landed or stay, strict=True):
                values[name] = Piece(storage, self._wanted(*use))

    def _landing(self, number: int) -> Iterator[list[Storage]]:
        coming = iter(self.coming.pop(number, ()))
        for one in self.tensors.segments[number].gathers:
            yield self._landed(one, next(coming, None)) if one.there.moves else []

    def _landed(self, one: BlockGather, sent: _Sent | None) -> list[Storage]:
        """Weights as they come together: the message, out of it a tensor for each, and of that what is wanted."""
        message = self._arrived(one.there, sent or self._sent(one.there, 0))
        whole = [self.account.new(member.nbytes[-1], OTHER) for member in one.there.members]
        self.account.release(message)
        found = []
        for storage, name, use in zip(whole, one.names, one.uses, strict=True):
            nbytes = self.tensors.bytes(name, self._wanted(*use))
            found.append(storage if nbytes == storage.nbytes else self.account.new(nbytes, OTHER))
            if found[-1] is not storage:
                self.account.release(storage)
        return found

    def _sent(self, bucket: Bucket, number: int) -> _Sent:
        """One of the collectives, which has been started."""
        (kind, axis), nbytes = bucket.moves[number], bucket.nbytes[number]
        rows = self.bound.plan.mesh.sizes[axis]
        shares = {"all_gather": (1 / rows, 1.0), "reduce_scatter": (1.0, 1 / rows), "all_reduce": (0.0, 1.0)}
        sends, comes = shares.get(kind, (1.0, 1.0))
        return _Sent(self.account.new(sends * nbytes, OTHER), self.account.new(comes * nbytes, OTHER))

    def _arrived(self, bucket: Bucket, sent: _Sent) -> Storage:
        """What comes in the last of the collectives, of which the first has been started."""
        self.account.release(sent.sends)
        for number in range(1, len(bucket.moves)):
            before, sent = sent.comes, self._sent(bucket, number)
            self._release([before, sent.sends])
        return sent.comes

    def _set_out(self, numbers: Iterable[int], again: bool = False) -> None:
        """The next of these sections that gathers weights (`again`: that its backward pass needs) lets them come."""
        if not self.update.ahead:
            return
        for number in numbers:
            wanted = again and not self.tensors.segments[number].recomputed
            ways = [
                one for one in self.tensors.segments[number].gathers if one.there.moves and (one.again or not wanted)
            ]
            if ways:
                if number not in self.coming:
                    self.coming[number] = [self._sent(one.there, 0) for one in ways]
                return

    def _wanted(self, at: int, place: int) -> tuple[int, ...]:
        """Local shape of an operand as its operator wants it."""
        op = self.bound.operators[at]
        return self.tensors.shape(op.operator.operands[place], op.layouts.operands[place].forward)

    def _needed_again(self, number: int, values: Values) -> dict[str, Storage]:
        """Of the weights that a section has gathered together, those that its backward pass needs."""
        names = [name for one in self.tensors.segments[number].gathers if one.again for name in one.names]
        return {name: self.account.hold(values[name].storage) for name in names}

    def _gathered_together_again(self, section: _Section) -> None:
        """Fill the memory of these weights once more; it is let go as they are used."""
        if not section.gathered:
            return
        coming = iter(self.coming.pop(section.number, ()))
        for one in self.tensors.segments[section.number].gathers:
            if one.again:
                for name, new in zip(one.names, self._landed(one, next(coming, None)), strict=True):
                    self.account.take_back(section.gathered[name])
                    self.account.release(new)
        self._release(list(section.gathered.values()))
        self._set_out(reversed(range(section.number)), again=True)

    def _reduce_together(self, section: _Section, gradients: dict[str, Storage]) -> None:
        """Bring back the gradients of the weights that a section gathers together, as one."""
        gathers = self.tensors.segments[section.number].gathers
        if any(one.back.moves for one in gathers):
            self._returned()
        for one in reversed(gathers):
            given = [(name, gradients.pop(name)) for name in one.names if name in gradients]
            if not one.back.moves:
                for name, storage in given:
                    self._accumulate(name, storage)
                continue
            wide = [self.account.new(sum(one.back.nbytes[:1]), OTHER)] if self._widened(one) else []
            self.returning.append((one, [name for name, _ in given], self._sent(one.back, 0)))
            self._release([*wide, *(storage for _, storage in given)])
            if not self.update.ahead:
                self._returned()

    def _returned(self) -> None:
        """Wait for gradients that are on their way."""
        returning, self.returning = self.returning, []
        for one, names, sent in returning:
            made = self._arrived(one.back, sent)
            for name in names:
                self._accumulate(name, self.account.hold(made))
            self.account.release(made)

    def _widened(self, one: BlockGather) -> bool:
        return one.back.members[0].dtype != self.bound.graph.types[one.names[0]].dtype

    def _checkpoint(self, section: _Section, values: Values) -> None:
        """The first time through a recomputed block: only what flows in, and what its kept operators make, stays."""
        flowing = self.tensors.segments[section.number].reads
        section.reads = {name: self._held(values[name]) for name in flowing if name in values}
        inside = {name: self._held(piece) for name, piece in section.reads.items()}
        self._gather(section.number, inside)
        self._set_out(range(section.number + 1, len(self.tensors.segments)))
        for at in section.operators:
            kept = self._compute(at, inside)
            if self.bound.is_kept(at):
                made = [inside[name].storage for name in self.tensors.results(at)]
                made += [kept.extra] if kept.extra is not None else []
                section.results[at] = [self.account.hold(storage) for storage in made]
            self._release(kept.everything)
            self._drop(at, inside)
        for name, piece in inside.items():
            if name not in values and (name in self.results or self.last_use[name] > section.operators[-1]):
                values[name] = self._held(piece)
            self.account.release(piece.storage)
        for at in section.operators:
            self._drop(at, values)

    def _offloaded(self, section: _Section, values: Values, flowing: Sequence[Storage]) -> list[Storage]:
        """Memory of what a block offloads, as soon as the next one is done: of what is `flowing` into it where it is
        recomputed, otherwise of what it keeps beside that and what it hands on."""
        if section.again:
            names = self.tensors.segments[section.number].offloads
            found = [section.reads[name].storage for name in names if name in section.reads]
        else:
            staying = {id(storage) for storage in (*flowing, *(piece.storage for piece in values.values()))}
            kept = (storage for one in section.kept.values() for storage in one.everything)
            found = [one for one in kept if id(one) not in staying and not one.standing and one.nbytes]
        return list({id(one): one for one in found}.values())

    def _leave(self, leaving: Sequence[Storage]) -> None:
        for storage in leaving:
            self.account.lend(storage)

    def _compute(self, at: int, values: Values, section: _Section | None = None, results: bool = True) -> _Kept:
        """Run one operator; in a recomputed `section` what it has kept is there. Without `results` its operands are
        brought to where it wants them and that is all."""
        op = self.bound.operators[at]
        operands = [self._operand(at, place, values) for place in range(len(op.operator.operands))]
        kept = _Kept()
        for place in self.tensors.saved(op):
            if section is not None or not self.tensors.gathered(at, place):  # else it is gathered again
                kept.pieces.append(self.account.hold(operands[place].storage))
        if results:
            self._run(at, operands, values, kept, section)
        self._release([operand.storage for operand in operands])
        return kept

    def _run(self, at: int, operands: Sequence[Piece], values: Values, kept: _Kept, section: _Section | None) -> None:
        op = self.bound.operators[at]
        names, graded = self.tensors.results(at), self.tensors.graded(op)
        self.account.brief(self.tensors.inner_scratch(op), OTHER)
        if self.tensors.remembers(op):
            self._write_down(at, op)
        there = section.results.get(at) if section is not None else None
        for place, name in enumerate(names):
            shape = self.tensors.shape(name, op.layouts.results[place].forward)
            if there is not None:
                values[name] = Piece(self.account.hold(there[place]), shape)
            elif self.tensors.shares(op, operands[0].contiguous if operands else False):
                values[name] = Piece(self.account.hold(operands[0].storage), shape, self.tensors.contiguous(name))
            else:
                values[name] = Piece(self.account.new(self.tensors.bytes(name, shape), OTHER), shape)
        if graded:
            extents = loop_extents(op.rule, op.strategy, self.bound.plan.mesh)
            extra = sum(w.coefficient * math.prod(extents[f] for f in w.factors) for w in op.rule.saved_extra)
            if extra:
                kept.extra = self.account.hold(there[-1]) if there is not None else self.account.new(extra, OTHER)
            kept.pieces += [self.account.hold(values[names[place]].storage) for place in op.rule.saved_results]

    def _write_down(self, at: int, op: BoundOperator) -> None:
        """Attention of a slice: keys and values of the whole sequence are there from the first slice on; what was
        computed with those of earlier slices, and with its own, is combined."""
        key = self.now.micro_batch, at
        if key not in self.pasts:
            self.pasts[key] = [self.account.new(self.bound.plan.slices * self.tensors.keys(op), OTHER)]
        if self.now.slice and self.now.kind == "forward":
            self.account.brief(2.0 * self.tensors.result_bytes(at), OTHER)

    def _add_to_past(self, at: int, op: BoundOperator) -> None:
        """Gradients of the keys and values of all slices, from the last one on; and those of a slice on their way."""
        key, nbytes = (self.now.micro_batch, at), self.tensors.keys(op)
        element = self.bound.graph.types[op.operator.operands[1]].element_bytes
        if self.now.slice and len(self.pasts[key]) == 1:
            self.pasts[key].append(self.account.new(self.bound.plan.slices * nbytes * max(4, element) / element, OTHER))
        if self.now.slice:
            self.account.brief(self.now.slice * nbytes + 2.0 * self.tensors.result_bytes(at), OTHER)

    def _operand(self, at: int, place: int, values: Values) -> Piece:
        name = self.bound.operators[at].operator.operands[place]
        move = self.tensors.move(at, place)
        piece = values[name] if name in values else self._standing(name)
        found = self._moved(piece, move.there, name)
        if move.copies:
            copy = Piece(self.account.new(self.tensors.bytes(name, found.shape), OTHER), found.shape)
            self.account.release(found.storage)
            return copy
        return found

    # backward

    def _backward(self, sections: list[_Section], received: Values) -> None:
        gradients: dict[str, Storage] = {}
        self.pending = Counter(self.uses)
        for name in self.results & self.bound.graph.differentiable:
            gradients[name] = self.account.new(self.tensors.bytes(name, self.tensors.made_shape(name)), OTHER)
        begun = [
            self.account.hold(storage) for storage in gradients.values()
        ]  # who calls autograd has them till the end
        while sections:
            section = sections.pop()
            number = len(sections)
            self.held.visit({**self.tensors.visit(number), **self.tensors.ahead(number, number - 1)})
            self._gathered_together_again(section)
            if not section.again:
                self._come(section, sections)
            for at in reversed(section.operators):
                if section.again and at not in section.kept and self.tensors.keeps(at):
                    self._again(section, sections)
                self._differentiate(at, section, gradients)
            self._reduce_together(section, gradients)
            self._release([piece.storage for piece in section.reads.values()])
        self._returned()
        self.held.visit({})
        for name in self.cut.receives:
            if name in gradients:
                self.held.send(gradients[name])
        self._release([*gradients.values(), *begun])
        self._release([piece.storage for piece in received.values()])

    def _again(self, section: _Section, sections: Sequence[_Section]) -> None:
        """Compute a block once more, until all that its backward pass needs is there."""
        self._come(section, sections)
        inside = {name: self._held(piece) for name, piece in section.reads.items()}
        self._gather(section.number, inside)
        self._set_out(reversed(range(section.number)), again=True)
        blocks = self.bound.blocks
        block = blocks.block_of(section.operators[0])
        assert block is not None
        again = self.replays[blocks.kinds[block]]
        for place, at in enumerate(section.operators[: again.moves]):
            section.kept[at] = self._compute(at, inside, section, results=place < again.works)
            if at in section.results:
                self._release(section.results.pop(at))
            self._drop(at, inside)
        self._release([piece.storage for piece in inside.values()])
        for at in section.operators:
            section.kept.setdefault(at, _Kept())

    def _come(self, section: _Section, sections: Sequence[_Section]) -> None:
        """What a block has offloaded comes back, and with it what the block before it has."""
        before = sections[-1].offloaded if sections and section.offloaded else ()
        for storage in (*section.offloaded, *before):
            if storage.lent:
                self.account.take_back(storage)

    def _differentiate(self, at: int, section: _Section, gradients: dict[str, Storage]) -> None:
        """The backward pass of one operator: gradients of its operands, in the layouts that their makers want."""
        op, kept = self.bound.operators[at], section.kept.pop(at, _Kept())
        given = [gradients.pop(name) for name in self.tensors.results(at) if name in gradients]
        later = deferred_weight_gradients(self.bound, at)
        graded = [place for place in self.tensors.graded(op) if place not in later]
        made: dict[int, Piece] = {}
        if given and later:
            self._defer(at, section.again, later, kept, given)
        if given and graded:
            gathered = [] if section.again else self._gathered_again(at)
            self.account.brief(self.tensors.inner_scratch(op), OTHER)
            if self.tensors.remembers(op):
                self._add_to_past(at, op)
            made = {place: self._gradient(op, place, given, kept) for place in graded}
            self.account.brief(self.tensors.scratch(op), OTHER)
            self._release([piece.storage for piece in gathered])
        self._release(kept.everything)
        self._release(given)
        for place, name in reversed([*enumerate(op.operator.operands)]):  # the last that was moved there is first back
            if place in made:
                arrived = self._back(made[place], self.tensors.move(at, place).back, name)
                self.account.release(made[place].storage)
                self._add(gradients, name, arrived.storage)
            self.pending[name] -= 1
            if name in gradients and not self.pending[name]:
                self._arrive(name, gradients)

    def _defer(self, at: int, again: bool, later: Sequence[int], kept: _Kept, given: Sequence[Storage]) -> None:
        """Hold what the weight gradients of an operator are made of until their turn."""
        op = self.bound.operators[at]
        places = [place for place in self.tensors.saved(op) if again or not self.tensors.gathered(at, place)]
        used = {place for place, needed_by in op.rule.saves if set(needed_by) & set(later)}
        held = [storage for place, storage in zip(places, kept.pieces, strict=False) if place in used]
        self.products.append(_Product(at, [self.account.hold(storage) for storage in (*held, *given)]))

    def _weight_gradients(self, products: Sequence[_Product]) -> None:
        """The turn of the weight gradients of a micro-batch, from the last product to the first."""
        for product in products:
            op = self.bound.operators[product.at]
            made = {
                place: self._gradient(op, place, (), _Kept())
                for place in deferred_weight_gradients(self.bound, product.at)
            }
            self._release(product.kept)
            for place, piece in made.items():
                name = op.operator.operands[place]
                arrived = self._back(piece, self.tensors.move(product.at, place).back, name)
                self.account.release(piece.storage)
                self._accumulate(name, arrived.storage)

    def _arrive(self, name: str, gradients: dict[str, Storage]) -> None:
        """All of the gradient of a weight, or of what was received, is there: autograd leaves it with the leaf, in
        memory of its own."""
        if name in self.tensors.together:
            return  # it waits for the others
        if name in self.bound.parameters:
            self._accumulate(name, gradients.pop(name))
        elif name in self.cut.receives and gradients[name].holders > 1:
            shared = gradients[name]
            gradients[name] = self.account.new(shared.nbytes, OTHER)
            self.account.release(shared)

    def _back(self, gradient: Piece, steps: Sequence[Step], name: str) -> Piece:
        """A gradient as its maker wants it; that of a weight may be reduced in another dtype."""
        tensor = self.bound.graph.types[name]
        if not steps or name not in self.bound.parameters:
            return self._moved(gradient, steps, name)
        wide = reduced(tensor, self.update)
        if wide.dtype == tensor.dtype:
            return self._moved(gradient, steps, name)
        cast = Piece(self.account.new(float(math.prod(gradient.shape) * wide.element_bytes), OTHER), gradient.shape)
        mesh = self.bound.plan.mesh
        arrived = moved(self.account, cast, steps, mesh, self.coordinate, wide.element_bytes)
        self.account.release(cast.storage)
        return arrived

    def _gathered_again(self, at: int) -> list[Piece]:
        places = self.tensors.saved(self.bound.operators[at])
        return [self._operand(at, place, {}) for place in places if self.tensors.gathered(at, place)]

    def _gradient(self, op: BoundOperator, place: int, given: Sequence[Storage], kept: _Kept) -> Piece:
        """Memory of the gradient of an operand: its own, or that of what it takes the place of."""
        name = op.operator.operands[place]
        shape = self.tensors.shape(name, op.layouts.operands[place].forward)
        nbytes = self.tensors.bytes(name, shape)
        if op.rule.op_class == "cross_entropy" and kept.extra is not None and kept.extra.nbytes == nbytes:
            return Piece(self.account.hold(kept.extra), shape)
        if (op.rule.op_class == "view" or op.rule.passes) and len(given) == 1 and given[0].nbytes == nbytes:
            return Piece(self.account.hold(given[0]), shape)
        return Piece(self.account.new(nbytes, OTHER), shape)

    def _add(self, gradients: dict[str, Storage], name: str, new: Storage) -> None:
        """Sum the gradients of several uses, in place where nobody else holds the sum."""
        known = gradients.get(name)
        if known is None:
            gradients[name] = new
        elif known.holders == 1:
            self.account.release(new)
        else:
            gradients[name] = self.account.new(known.nbytes, OTHER)
            self._release([known, new])

    def _accumulate(self, name: str, leaf: Storage) -> None:
        """Add what autograd has left to the gradient of the step."""
        shape = self.tensors.shape(name, self.bound.parameters[name].gradient)
        nbytes = float(math.prod(shape) * summed(self.bound.graph.types[name], self.update).element_bytes)
        if name in self.gradients:
            if leaf.nbytes != nbytes:
                self.account.brief(nbytes, OTHER)
            self.account.release(leaf)
        elif leaf.nbytes == nbytes and leaf.holders == 1:
            self.gradients[name] = self.account.claim(leaf, GRADIENTS)
        else:
            self.gradients[name] = self.account.new(nbytes, GRADIENTS)
            self.account.release(leaf)

    # update

    def end_step(self) -> None:
        """Reduce all gradients of the rank, update piece by piece, and bring the weights back."""
        graph, mesh = self.bound.graph, self.bound.plan.mesh
        pieces: dict[str, Piece] = {}
        for name, gradient in self.gradients.items():
            stored, tensor = self.bound.parameters[name], graph.types[name]
            piece = Piece(gradient, self.tensors.shape(name, stored.gradient))
            steps = redistribution(tensor.shape, mesh, stored.gradient, stored.state)
            element = summed(tensor, self.update).element_bytes
            steps = () if self.update.is_local(name) else steps
            pieces[name] = moved(self.account, piece, steps, mesh, self.coordinate, element)
            self.account.release(gradient)
        offloaded = visiting_order(self.bound, pieces)
        places = self._places(offloaded)
        for name in pieces.keys() - set(offloaded):
            self.account.brief(_UPDATED * pieces[name].storage.nbytes, OTHER)
        for name in offloaded:
            self.account.brief(_UPDATED * pieces[name].storage.nbytes, OTHER)
            self.account.release(pieces[name].storage)
            self._publish(name, pieces[name])
        self._release(places)
        self._release([piece.storage for name, piece in pieces.items() if name not in offloaded])
        for name, piece in pieces.items():
            if name not in offloaded:
                self._publish(name, piece)
        self.held.let_go()

    def _places(self, offloaded: Sequence[str]) -> list[Storage]:
        """Where offloaded states are updated: one, and the next or the last."""
        longest = max((self.held.rows[name] for name in offloaded), default=0.0)
        return [self.account.new(longest, OTHER) for _ in offloaded[:PLACES]]

    def _publish(self, name: str, piece: Piece) -> None:
        """Bring the new weight, which has the shape of this piece where it was updated, to where it is kept."""
        stored, tensor = self.bound.parameters[name], self.bound.graph.types[name]
        steps = redistribution(tensor.shape, self.bound.plan.mesh, stored.state, stored.weight)
        narrow = Piece(self.account.new(self.tensors.bytes(name, piece.shape), OTHER), piece.shape)
        new = self._moved(narrow, steps, name).storage
        if stored.weight_offloaded:
            self.held.send(new)
        self.account.release(new)
        self.account.release(narrow.storage)

    # memory that is held and let go

    def _moved(self, piece: Piece, steps: Sequence[Step], name: str) -> Piece:
        element = DTYPE_BYTES[self.bound.graph.types[name].dtype]
        return moved(self.account, piece, steps, self.bound.plan.mesh, self.coordinate, element)

    def _standing(self, name: str) -> Piece:
        """A parameter, a buffer or an input: memory that is there all the time."""
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
        """Let go of what nothing after an operator reads."""
        op = self.bound.operators[at].operator
        for name in dict.fromkeys((*op.operands, *self.tensors.results(at))):
            if name in values and name not in self.results and self.last_use.get(name, at) == at:
                self.account.release(values.pop(name).storage)
