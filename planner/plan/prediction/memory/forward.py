"""Memory of a forward pass: values until their last use, and tensors that autograd keeps."""

from collections.abc import Sequence

from planner.plan.binding.bind import BoundOperator
from planner.plan.layout.stage_tensors import viewed
from planner.plan.prediction.memory.account import Piece, Storage
from planner.plan.prediction.memory.chunks import (
    BACK,
    OTHER,
    VALUES,
    Kept,
    Section,
    Values,
)
from planner.plan.prediction.memory.gathers import GatherMemory


class ForwardMemory(GatherMemory):
    """A stage in its forward pass."""

    def _forward(self) -> tuple[list[Section], Values]:
        self._take(VALUES)
        received = {name: self._fresh(name, self.tensors.promised[name].forward) for name in self.cut.receives}
        self._post(VALUES)
        values = {name: Piece(self.account.hold(p.storage), p.shape, p.strides) for name, p in received.items()}
        found = []
        leaving: list[Storage] = []
        for number, segment in enumerate(self.tensors.segments):
            self.account.pause("border")
            again, operators, offloads = segment.recomputed, segment.operators, segment.offloads_activations
            if not offloads:
                self._leave(leaving)
                leaving = []
            self.held.visit({**self.tensors.visit(number), **self.tensors.ahead(number, number + 1)})
            section = Section(operators, {}, again=again, number=number)
            if number == 1:
                self._returned()  # of the previous pass
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
            self.held.send(values[name].storage, more=not self.first_in_turn)
        self._post(BACK)
        self._release([piece.storage for piece in values.values()])
        return found, received

    def _checkpoint(self, section: Section, values: Values) -> None:
        """The first run of a recomputed block: only its inputs, and the results of its kept operators, stay."""
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

    def _offloaded(self, section: Section, values: Values, flowing: Sequence[Storage]) -> list[Storage]:
        """The tensors that a block offloads as soon as the next block is done: its inputs (`flowing`) if it is
        recomputed, otherwise everything it keeps except these and the values it hands on."""
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

    def _compute(self, at: int, values: Values, section: Section | None = None, results: bool = True) -> Kept:
        """Run one operator. In a recomputed `section`, the tensors it has kept exist already. Without `results`, its
        operands are only moved to their layouts."""
        op = self.bound.operators[at]
        if self.thens.get(at) == "pause":
            self.account.pause("pause")
        operands = [self._operand(at, place, values) for place in range(len(op.operator.operands))]
        copies = self._folded(op, operands)
        kept = Kept()
        for place in self.tensors.saved(op):
            if section is not None or not self.tensors.gathered(at, place):  # otherwise it is gathered again
                kept.pieces.append(self.account.hold(copies.get(place, operands[place].storage)))
        if results:
            self._run(at, operands, values, kept, section)
        self._release([*copies.values(), *(operand.storage for operand in operands)])
        return kept

    def _folded(self, op: BoundOperator, operands: Sequence[Piece]) -> dict[int, Storage]:
        """Copies of operands of a product whose leading dims are not contiguous as one dim."""
        copied = self.tensors.copied(op, [(piece.shape, piece.lies) for piece in operands])
        return {
            place: self.account.new(self.tensors.bytes(op.operator.operands[place], shape), OTHER)
            for place, shape in copied
        }

    def _run(self, at: int, operands: Sequence[Piece], values: Values, kept: Kept, section: Section | None) -> None:
        op = self.bound.operators[at]
        names, graded = self.tensors.results(at), self.tensors.graded(op)
        self.account.brief(self.tensors.inner_scratch(op), OTHER)
        if self.tensors.remembers(op):
            self._write_down(at, op)
        there = section.results.get(at) if section is not None else None
        for place, name in enumerate(names):
            shape = self.tensors.shape(name, op.layouts.results[place].forward)
            lying = [(operand.shape, operand.lies) for operand in operands]
            if there is not None:
                values[name] = Piece(self.account.hold(there[place]), shape, self.tensors.strides(op, shape, lying))
                continue
            view = self.tensors.view(op, place, shape, lying)
            if view is not None:
                values[name] = Piece(self.account.hold(operands[viewed(op.operator, place)].storage), shape, view)
                continue
            strides = self.tensors.strides(op, shape, lying)
            values[name] = Piece(self.account.new(self.tensors.bytes(name, shape), OTHER), shape, strides)
        extra = self.tensors.saved_extra(op)
        if not self.bound.graph.trains:  # the kernel makes it anyway
            self.account.brief(extra, OTHER)
        if graded:
            if extra:
                kept.extra = self.account.hold(there[-1]) if there is not None else self.account.new(extra, OTHER)
            kept.pieces += [self.account.hold(values[names[place]].storage) for place in op.rule.saved_results]
        if op.rule.stepwise:
            self.account.brief(self.tensors.scratch(op), OTHER)

    def _write_down(self, at: int, op: BoundOperator) -> None:
        """Attention of a slice: memory for the keys and values of the whole sequence exists from the first slice on.
        The results with keys of earlier slices, and with its own, are combined."""
        key = self.now.micro_batch, at
        if key not in self.pasts:
            self.pasts[key] = [self.account.new(self.bound.plan.slices * self.tensors.keys(op), OTHER)]
        if self.now.slice and self.now.kind == "forward":
            self.account.brief(2.0 * self.tensors.result_bytes(at), OTHER)

    def _operand(self, at: int, place: int, values: Values, *, again: bool = False) -> Piece:
        name = self.bound.operators[at].operator.operands[place]
        move = self.tensors.move(at, place)
        piece = values[name] if name in values else self._standing(name)
        yields = move.yields(move.there, weight=name in self.bound.parameters) and not again
        found = self._moved(piece, move.there, name, then=self.thens.get(at, "work") if yields else None)
        if move.copies:
            copy = Piece(self.account.new(self.tensors.bytes(name, found.shape), OTHER), found.shape)
            self.account.release(found.storage)
            return copy
        return found
