"""One micro-batch on its way through a stage and back: which weights are gathered when (see
`runtime.executor.block_gathers`).

    enter 0:  0 lands, 1 sets out      enter 1:  1 lands, 2 sets out      ...      the first of each pass is waited for
    leave 0:  memory of 0 goes         first gradient of what 1 has made:  1 lands again, 0 sets out

Sections that gather nothing are passed over: what sets out is for the next that does.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from planner.plan.prediction.charges import Phase
from runtime.comm.async_collectives import Flight, Groups
from runtime.comm.device_mesh import RankMesh
from runtime.executor.block_gathers import Bundle, Gathered
from runtime.executor.instruction import MicroBatch


class Collects(Protocol):
    """A parameter, or a version of one, that adds up its gradients."""

    def collect(self, gradient: torch.Tensor) -> None: ...


@dataclass(kw_only=True, eq=False)
class Prefetch:
    """The `bundles` of each section of a stage for one pass forward and one back; `recomputed` says of each whether it
    is computed again. `batch` has what is there before the first operator, and no values: these hold their nodes of
    autograd, which hold the trip. `parameters` take the gradients that are late. With `lanes`, process groups of their
    own, weights set out ahead and gradients land behind; without, each is waited for."""

    bundles: Sequence[Sequence[Bundle]]
    recomputed: Sequence[bool]
    batch: MicroBatch
    parameters: Mapping[str, Collects]
    place: RankMesh
    lanes: Groups | None = None
    _coming: dict[int, list[Gathered]] = field(default_factory=dict)  # have set out for their first use, or to be used
    _left: dict[int, list[Gathered]] = field(default_factory=dict)  # wait for their backward pass
    _returning: list[tuple[Gathered, Flight]] = field(default_factory=list)  # of one section
    _announced: bool = False  # whether somebody will say that the backward pass is over

    def enter(self, number: int, batch: MicroBatch, phase: Phase) -> Sequence[Gathered]:
        """Gather what a section begins with, as values of a batch; it runs "forward" or in "recomputation"."""
        ways = self._coming.pop(number) if number in self._coming else self._ways(number)
        for way in ways:
            with self._meanwhile(phase):
                leaves = [batch.stubs.get(name, batch.tensors[name]) for name in way.bundle.names]
                made = _Gather.apply(self, way, *leaves)  # type: ignore[no-untyped-call]
            batch.values.update(zip(way.bundle.names, made, strict=True))
            if not self.recomputed[number] and way.bundle.again and any(weight.requires_grad for weight in made):
                way.keep(made)
        if self.lanes is not None:
            self._set_out(number, phase)
        return ways

    def leave(self, number: int, ways: Sequence[Gathered], made: Iterable[torch.Tensor]) -> None:
        """A section is done, and has `made` what others read: its backward pass begins with the first of their
        gradients."""
        left = [way for way in ways if way.kept]
        for way in left:
            way.leave()
        if left:
            self._left[number] = left
            for tensor in made:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._back, number))  # type: ignore[no-untyped-call]

    def _back(self, number: int, gradient: torch.Tensor) -> None:
        """A gradient has come to what a section has made."""
        if number not in self._left:  # it is not the first
            return
        with self._meanwhile("backward"), torch.no_grad():
            for way in self._left.pop(number):
                way.come_again()
        if self.lanes is not None:
            self._set_out(number, "backward")

    def returned(self, way: Gathered, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """All gradients of a bundle are there. What autograd gets of them: where they are stored, or None where they
        are on their way."""
        with self._meanwhile("backward"):
            if self.lanes is None or not way.bundle.returns:
                return way.send_back(gradients).land()
            if self._returning and self._returning[0][0].section != way.section:
                self._land()
            self._returning.append((way, way.send_back(gradients)))
        if not self._announced:
            self._announced = True
            torch.autograd.Variable._execution_engine.queue_callback(self._passed)
        return [None for _ in gradients]

    def _passed(self) -> None:
        """The backward pass is over."""
        self._announced = False
        with self._meanwhile("backward"):
            self._land()

    def _land(self) -> None:
        returning, self._returning = self._returning, []
        observer = self.batch.observer
        for way, flight in returning:
            landed = flight.land()
            with nullcontext() if observer is None else observer.adding_up():
                for name, gradient in zip(way.bundle.names, landed, strict=True):
                    self.parameters[name].collect(gradient)

    def _ways(self, number: int) -> list[Gathered]:
        groups = self.place.groups if self.lanes is None else self.lanes
        return [Gathered(bundle, number, self.batch, self.place, groups) for bundle in self.bundles[number]]

    def _set_out(self, number: int, phase: Phase) -> None:
        """While a section runs, let the weights of the next that gathers any come; in a backward pass that is one
        before it."""
        if phase == "forward":
            following = (at for at in range(number + 1, len(self.bundles)) if self._sends(at))
        else:
            following = (at for at in reversed(range(number)) if at in self._left or self._recomputes(at))
        neighbour = next(following, None)
        if neighbour is None or neighbour in self._coming:
            return
        if phase != "forward":
            phase = "recomputation" if self.recomputed[neighbour] else "backward"
        ways = self._left[neighbour] if phase == "backward" else self._ways(neighbour)
        if phase != "backward":
            self._coming[neighbour] = ways
        with self._meanwhile(phase):
            for way in ways:
                way.start()

    def _sends(self, number: int) -> bool:
        return any(bundle.sent for bundle in self.bundles[number])

    def _recomputes(self, number: int) -> bool:
        return self.recomputed[number] and self._sends(number)

    def _meanwhile(self, phase: Phase) -> AbstractContextManager[None]:
        """What happens here is no operator's."""
        return nullcontext() if self.batch.observer is None else self.batch.observer.gathering(phase)


class _Gather(torch.autograd.Function):
    """A bundle is gathered forward, and its gradients, when the last of them is there, are reduced backward."""

    @staticmethod
    def forward(ctx: Any, trip: Prefetch, way: Gathered, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip, ctx.way = trip, way
        return tuple(way.bring())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.trip.returned(ctx.way, gradients)
