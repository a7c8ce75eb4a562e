"""Memory of a backward pass: gradients, tensors that come back, and recomputation."""

import math
from collections import Counter
from collections.abc import Sequence

from costmodels import Then
from hardware_profiles import Bytes
from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import replay_of
from planner.plan.layout.strides import Strides, elementwise, folded, in_order, reshaped, spread_back
from planner.plan.prediction.memory.account import Piece, Storage, moved
from planner.plan.prediction.memory.chunks import (
    BACK,
    OTHER,
    Kept,
    Product,
    Section,
    Values,
)
from planner.plan.prediction.memory.forward import ForwardMemory
from planner.plan.prediction.walk.exchange_overlap import sent_rows
from planner.pricing.parameter_price import reduced
from planner.sharding.redistribute import Step


class BackwardMemory(ForwardMemory):
    """A stage in its backward pass."""

    def _backward(self, sections: list[Section], received: Values) -> None:
        gradients: dict[str, Storage] = {}
        self.lying.clear()
        self.pending = Counter(self.uses)
        self._take(BACK)
        for name in self.results & self.bound.graph.differentiable:
            gradients[name] = self.account.new(self.tensors.bytes(name, self.tensors.made_shape(name)), OTHER)
        self._post(BACK)
        begun = [
            self.account.hold(storage) for storage in gradients.values()
        ]  # the caller of autograd holds them until the end
        while sections:
            self.account.pause("border")
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
        if not self.held.passes:
            self._returned()  # otherwise during the next pass
        self.held.visit({})
        for name in self.cut.receives:
            if name in gradients:
                self.held.send(gradients[name], more=not self.first_in_turn)
        self._release([*gradients.values(), *begun])
        self._release([piece.storage for piece in received.values()])

    def _again(self, section: Section, sections: Sequence[Section]) -> None:
        """Recompute a block until everything that its backward pass needs exists."""
        self.account.pause("border", forward=True)
        self._come(section, sections)
        inside = {name: self._held(piece) for name, piece in section.reads.items()}
        self._gather(section.number, inside, again=True)
        self._set_out(reversed(range(section.number)), again=True)
        block = self.bound.blocks.block_of(section.operators[0])
        assert block is not None
        for at in section.operators:
            place, replay = replay_of(self.bound, at, block, self.replays, self.replayed)
            if place >= replay.moves:
                break
            runs = replay.runs(place, self.tensors.joined(self.bound.operators[at]))
            section.kept[at] = self._compute(at, inside, section, results=runs)
            if at in section.results:
                self._release(section.results.pop(at))
            self._drop(at, inside)
        self._release([piece.storage for piece in inside.values()])
        for at in section.operators:
            section.kept.setdefault(at, Kept())
        self.account.pause("border", forward=False)

    def _come(self, section: Section, sections: Sequence[Section]) -> None:
        """The tensors that a block has offloaded come back, together with those of the previous block."""
        before = sections[-1].offloaded if sections and section.offloaded else ()
        for storage in (*section.offloaded, *before):
            if storage.lent:
                self.account.take_back(storage)

    def _add_to_past(self, at: int, op: BoundOperator) -> None:
        """Gradients of the keys and values of all slices, from the last slice on; and those of a slice in progress."""
        key, nbytes = (self.now.micro_batch, at), self.tensors.keys(op)
        element = self.bound.graph.types[op.operator.operands[1]].element_bytes
        if self.now.slice and len(self.pasts[key]) == 1:
            self.pasts[key].append(self.account.new(self.bound.plan.slices * nbytes * max(4, element) / element, OTHER))
        if self.now.slice:
            self.account.brief(self.now.slice * nbytes + 2.0 * self.tensors.result_bytes(at), OTHER)

    def _differentiate(self, at: int, section: Section, gradients: dict[str, Storage]) -> None:
        """The backward pass of one operator: gradients of its operands, in the layouts that their producers need."""
        op, kept = self.bound.operators[at], section.kept.pop(at, Kept())
        given = [gradients.pop(name) for name in self.tensors.results(at) if name in gradients]
        lies = next((self.lying.pop(name, None) for name in self.tensors.results(at)), None)
        later = deferred_weight_gradients(self.bound, at)
        graded = [place for place in self.tensors.graded(op) if place not in later]
        made: dict[int, Piece] = {}
        if given and later:
            self._defer(at, section.again, later, kept, given)
        if given and graded:
            gathered = [] if section.again else self._gathered_again(at)
            self.account.brief(self.tensors.inner_scratch(op, backward=True), OTHER)
            if self.tensors.remembers(op):
                self._add_to_past(at, op)
            if op.rule.stepwise and kept.extra is not None:
                self.account.release(kept.extra)  # before the gradients of all steps exist
                kept.extra = None
            if op.rule.folds and lies is not None and not self._folds(op, lies):
                given.append(self.account.new(self._result_bytes(op), OTHER))
                self.account.release(given.pop(0))
                lies = None
            made = self._gradients(op, graded, given, kept, lies)
            rows = sent_rows(op, self.bound.plan.mesh) if at in self.in_parts else 0.0
            self.account.brief(self.tensors.scratch(op) + 2 * rows, OTHER)  # of results, and rows in progress
            self._release([piece.storage for piece in gathered])
        self._release(kept.everything)
        self._release(given)
        for place, name in reversed([*enumerate(op.operator.operands)]):  # in reverse order of the forward moves
            if place in made:
                move = self.tensors.move(at, place)
                yields = move.yields(move.back, weight=name in self.bound.parameters)
                then = self.thens.get(at, "work") if yields else None
                arrived = self._back(made[place], move.back, name, then=then)
                if name not in gradients:
                    self.lying[name] = arrived.strides
                self._add(gradients, name, arrived.storage)
            self.pending[name] -= 1
            if name in gradients and not self.pending[name]:
                self._arrive(name, gradients)
        if self.thens.get(at) == "pause":
            self.account.pause("pause")

    def _defer(self, at: int, again: bool, later: Sequence[int], kept: Kept, given: Sequence[Storage]) -> None:
        """Hold the inputs of an operator's weight gradients until these are computed."""
        op = self.bound.operators[at]
        places = [place for place in self.tensors.saved(op) if again or not self.tensors.gathered(at, place)]
        used = {place for place, needed_by in op.rule.saves if set(needed_by) & set(later)}
        held = [storage for place, storage in zip(places, kept.pieces, strict=False) if place in used]
        self.products.append(Product(at, [self.account.hold(storage) for storage in (*held, *given)]))

    def _weight_gradients(self, products: Sequence[Product]) -> None:
        """The deferred weight gradients of a micro-batch, from the last product to the first."""
        for product in products:
            op = self.bound.operators[product.at]
            made = {
                place: self._gradient(op, place, (), Kept(), None)
                for place in deferred_weight_gradients(self.bound, product.at)
            }
            self._release(product.kept)
            for place, piece in made.items():
                name = op.operator.operands[place]
                arrived = self._back(piece, self.tensors.move(product.at, place).back, name)
                self._accumulate(name, arrived.storage)

    def _arrive(self, name: str, gradients: dict[str, Storage]) -> None:
        """The gradient of a weight, or of a received value, is complete: autograd leaves it with the leaf, in separate
        memory."""
        if name in self.tensors.together:
            return  # it waits for the coalesced reduction
        if name in self.bound.parameters:
            self._accumulate(name, gradients.pop(name))
        elif name in self.cut.receives and gradients[name].holders > 1:
            shared = gradients[name]
            gradients[name] = self.account.new(shared.nbytes, OTHER)
            self.account.release(shared)

    def _back(self, gradient: Piece, steps: Sequence[Step], name: str, *, then: Then | None = None) -> Piece:
        """A gradient, which is given away, in the layout that its producer needs. That of a weight may be reduced in
        another dtype."""
        tensor = self.bound.graph.types[name]
        if not steps or name not in self.bound.parameters:
            return self._moved(gradient, steps, name, then=then, gives=True)
        wide = reduced(tensor, self.update)
        if wide.dtype == tensor.dtype:
            return self._moved(gradient, steps, name, then=then, gives=True)
        cast = Piece(self.account.new(float(math.prod(gradient.shape) * wide.element_bytes), OTHER), gradient.shape)
        self.account.release(gradient.storage)
        mesh, element = self.bound.plan.mesh, wide.element_bytes
        return moved(self.account, cast, steps, mesh, self.coordinate, element, then=then, gives=True)

    def _gathered_again(self, at: int) -> list[Piece]:
        places = self.tensors.saved(self.bound.operators[at])
        return [self._operand(at, place, {}, again=True) for place in places if self.tensors.gathered(at, place)]

    def _gradients(
        self,
        op: BoundOperator,
        graded: Sequence[int],
        given: Sequence[Storage],
        kept: Kept,
        lies: Strides | None,
    ) -> dict[int, Piece]:
        """Gradients of operands. Autograd makes them from the last to the first, and sums those of broadcast operands
        once all exist."""
        made, wholes = dict[int, Piece](), list[Storage]()
        for place in reversed(graded):
            whole = self._whole(op, place)
            if whole is None:
                made[place] = self._gradient(op, place, given, kept, lies)
            else:
                wholes.append(self.account.new(whole, OTHER))
            self.account.brief(self.tensors.gradient_scratch(op, place), OTHER)
        summed = [place for place in graded[::-1] if place not in made]
        for place, storage in zip(summed, wholes, strict=True):
            made[place] = self._gradient(op, place, given, kept, lies)
            self.account.release(storage)
        return made

    def _whole(self, op: BoundOperator, place: int) -> Bytes | None:
        """Bytes of the gradient of an operand before it is summed; None if it needs no sum."""
        if not op.rule.makes_whole_gradients or place in op.rule.handed:
            return None
        name, result = op.operator.operands[place], op.operator.results[0]
        assert result is not None, op.operator.name
        types = self.bound.graph.types
        shape = self.tensors.shape(result, op.layouts.results[0].gradient)
        same = shape == self.tensors.shape(name, op.layouts.operands[place].forward)
        return None if same and types[name].dtype == types[result].dtype else self.tensors.bytes(result, shape)

    def _gradient(
        self, op: BoundOperator, place: int, given: Sequence[Storage], kept: Kept, lies: Strides | None
    ) -> Piece:
        """Memory of the gradient of an operand: its own, or that of the tensor it replaces, whose strides are
        `lies`."""
        name = op.operator.operands[place]
        shape = self.tensors.shape(name, op.layouts.operands[place].forward)
        nbytes = self.tensors.bytes(name, shape)
        if op.rule.op_class == "cross_entropy" and kept.extra is not None and kept.extra.nbytes == nbytes:
            return Piece(self.account.hold(kept.extra), shape)
        passed = op.rule.op_class == "view" or op.rule.passes or place in op.rule.handed
        if len(given) == 1 and (op.rule.spread or (passed and nbytes in (given[0].nbytes, self._result_bytes(op)))):
            strides = self._lies_back(op, place, shape, lies)
            if strides is not None:
                return Piece(self.account.hold(given[0]), shape, strides)
        strides = None
        if op.rule.pointwise and lies is not None and shape == self._given_shape(op):
            strides = elementwise(shape, [(shape, lies)])
        return Piece(self.account.new(nbytes, OTHER), shape, strides)

    def _lies_back(self, op: BoundOperator, place: int, shape: tuple[int, ...], lies: Strides | None) -> Strides | None:
        """Strides of the gradient of an operand as a view of that of the result; None if it must be copied."""
        result = self._given_shape(op)
        strides = in_order(result) if lies is None else lies
        if op.rule.local_form == "reshape":
            return reshaped(result, strides, shape)
        if op.rule.spread or op.rule.op_class == "view":
            return spread_back(op.rule, place, strides)
        return strides if shape == result else in_order(shape)

    def _folds(self, op: BoundOperator, lies: Strides) -> bool:
        """Whether the leading dims of the gradient of a product are contiguous as one dim."""
        second = self.bound.graph.types[op.operator.operands[1]].shape
        return folded(self._given_shape(op), lies, kept=min(2, max(1, len(second) - 1)))

    def _given_shape(self, op: BoundOperator) -> tuple[int, ...]:
        """Shape of the gradient of the first result."""
        name = op.operator.results[0]
        assert name is not None, op.operator.name
        return self.tensors.shape(name, op.layouts.results[0].gradient)

    def _result_bytes(self, op: BoundOperator) -> Bytes:
        """Bytes of the gradient of an operator's result, which may be a slice of a larger memory."""
        name = op.operator.results[0]
        assert name is not None, op.operator.name
        return self.tensors.bytes(name, self._given_shape(op))
