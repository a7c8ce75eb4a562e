"""Memory of coalesced all-gathers of weights, and of their gradients (`planner.plan.layout.block_gathers`)."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from planner.plan.layout.block_gathers import BlockGather
from planner.plan.prediction.memory.account import Piece, Storage
from planner.plan.prediction.memory.chunks import (
    OTHER,
    ChunkMemory,
    Section,
    Sent,
    Values,
)
from planner.sharding.buckets import Bucket, Traveller
from planner.sharding.redistribute import COLLECTIVES


class GatherMemory(ChunkMemory):
    """A stage whose segments use coalesced all-gathers of weights."""

    def _gather(self, number: int, values: Values, *, again: bool = False) -> None:
        """Gather the weights of a section."""
        for one, landed in zip(self.tensors.segments[number].gathers, self._landing(number, again), strict=True):
            stay = [self._standing(name).storage for name in one.names]
            for name, use, storage in zip(one.names, one.uses, landed or stay, strict=True):
                values[name] = Piece(storage, self._wanted(*use))

    def _landing(self, number: int, again: bool) -> Iterator[list[Storage]]:
        coming = iter(self.coming.pop((number, again), ()))
        for one in self.tensors.segments[number].gathers:
            yield self._landed(one, next(coming, None)) if one.comes else []

    def _landed(self, one: BlockGather, sent: Sent | None) -> list[Storage]:
        """Weights after a coalesced all-gather: its output, a tensor for each weight made from it, and the needed part
        of that. Weights that are cast and not sent exist once they are cast."""
        if one.there.moves:
            message = self._arrived(one.there, sent or self._sent(one.there, 0))
            whole = [
                self.account.new(self._came(one, member, use), OTHER)
                for member, use in zip(one.there.members, one.uses, strict=True)
            ]
            self.account.release(message)
        else:
            if sent is not None:
                self.account.release(sent.comes)
            whole = [
                self.account.new(self._travelling_bytes(one, name, self._standing(name).shape), OTHER)
                for name in one.names
            ]
        found = []
        for storage, name, use in zip(whole, one.names, one.uses, strict=True):
            nbytes = self._travelling_bytes(one, name, self._wanted(*use))
            found.append(storage if nbytes == storage.nbytes else self.account.new(nbytes, OTHER))
            if found[-1] is not storage:
                self.account.release(storage)
        return found

    def _started(self, one: BlockGather) -> Sent:
        """Start to prefetch weights; those that are not sent are cast."""
        if one.there.moves:
            return self._sent(one.there, 0)
        cast = sum(self._travelling_bytes(one, name, self._standing(name).shape) for name in one.names)
        return Sent(self.account.new(0.0, OTHER), self.account.new(cast, OTHER))

    def _came(self, one: BlockGather, member: Traveller, use: tuple[int, int]) -> float:
        """Bytes of a gathered weight without padding, before it is cut, if it is."""
        if member.steps[-1].kind in COLLECTIVES:
            return self._travelling_bytes(one, member.name, self._wanted(*use))
        return member.nbytes[-1]

    def _travelling_bytes(self, one: BlockGather, name: str, shape: Sequence[int]) -> float:
        """Bytes of a piece of a weight in the dtype in which it is sent."""
        return float(math.prod(shape)) if one.narrow else self.tensors.bytes(name, shape)

    def _sent(self, bucket: Bucket, number: int) -> Sent:
        """One started collective."""
        (kind, axis), nbytes = bucket.moves[number], bucket.nbytes[number]
        rows = self.bound.plan.mesh.sizes[axis]
        shares = {"all_gather": (1 / rows, 1.0), "reduce_scatter": (1.0, 1 / rows), "all_reduce": (0.0, 1.0)}
        sends, comes = shares.get(kind, (1.0, 1.0))
        return Sent(self.account.new(sends * nbytes, OTHER), self.account.new(comes * nbytes, OTHER))

    def _arrived(self, bucket: Bucket, sent: Sent) -> Storage:
        """The output of the last collective, given that the first one has been started."""
        self.account.release(sent.sends)
        for number in range(1, len(bucket.moves)):
            before, sent = sent.comes, self._sent(bucket, number)
            self._release([before, sent.sends])
        return sent.comes

    def _set_out(self, numbers: Iterable[int], again: bool = False) -> None:
        """Prefetch the weights of the next of these sections that gathers any (with `again`: any that its backward pass
        needs). If there is none, prefetch those of the next pass."""
        if not self.update.ahead:
            return
        for number in numbers:
            wanted = again and not self.tensors.segments[number].recomputed
            ways = [one for one in self.tensors.segments[number].gathers if one.comes and (one.again or not wanted)]
            if ways:
                if (number, again) not in self.coming:
                    self.coming[number, again] = [self._started(one) for one in ways]
                return
        self.held.depart()

    def begin(self, *, again: bool) -> None:
        """Prefetch the weights with which a pass of this stage begins, forward or backward."""
        numbers = range(len(self.tensors.segments))
        self._set_out(reversed(numbers) if again else numbers, again)

    @property
    def comes_again(self) -> bool:
        """Whether a backward pass gathers any weights."""
        return any(
            one.comes and (one.again or segment.recomputed)
            for segment in self.tensors.segments
            for one in segment.gathers
        )

    def _needed_again(self, number: int, values: Values) -> dict[str, Storage]:
        """The weights of a section's coalesced all-gathers that its backward pass needs."""
        names = [name for one in self.tensors.segments[number].gathers if one.again for name in one.names]
        return {name: self.account.hold(values[name].storage) for name in names}

    def _gathered_together_again(self, section: Section) -> None:
        """Fill the memory of these weights again; it is freed as they are used."""
        if not section.gathered:
            return
        coming = iter(self.coming.pop((section.number, True), ()))
        for one in self.tensors.segments[section.number].gathers:
            if one.again and one.refills:
                message = self._arrived(one.there, next(coming, None) or self._sent(one.there, 0))
                for name in one.names:
                    self.account.take_back(section.gathered[name])
                self.account.release(message)
            elif one.again:
                for name, new in zip(one.names, self._landed(one, next(coming, None)), strict=True):
                    self.account.take_back(section.gathered[name])
                    self.account.release(new)
        self._release(list(section.gathered.values()))
        self._set_out(reversed(range(section.number)), again=True)

    def _reduce_together(self, section: Section, gradients: dict[str, Storage]) -> None:
        """Reduce the gradients of a section's coalesced weights together."""
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
            self.held.returning.append(partial(self._land, one, [name for name, _ in given], self._sent(one.back, 0)))
            self._release([*wide, *(storage for _, storage in given)])
            if not self.update.ahead:
                self._returned()

    def _returned(self) -> None:
        """Wait for gradient reductions in progress."""
        returning, self.held.returning = self.held.returning, []
        for land in returning:
            land()

    def _land(self, one: BlockGather, names: Sequence[str], sent: Sent) -> None:
        made = self._arrived(one.back, sent)
        for name in names:
            self._accumulate(name, self.account.hold(made))
        self.account.release(made)

    def _widened(self, one: BlockGather) -> bool:
        return one.back.members[0].dtype != self.bound.graph.types[one.names[0]].dtype
