"""One micro-batch on its way through a stage and back: which weights are gathered when (see
`runtime.executor.block_gathers`).

    enter 0:  0 lands, 1 sets out      enter 1:  1 lands, 2 sets out      ...      enter n:  n lands, the next pass's 0
    leave 0:  memory of 0 goes         first gradient of what 1 has made:  1 lands again, 0 sets out

Sections that gather nothing are passed over: what sets out is for the next that does. Behind the last of a pass it is
for the next pass of the rank (see `runtime.executor.relay`); where none says which that is, the first of each pass is
waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from planner.plan.prediction.charges import Phase
from runtime.comm.async_collectives import Flight, Groups
from runtime.comm.device_mesh import RankMesh
from runtime.executor.block_gathers import Bundle, Gathered
from runtime.executor.instruction import MicroBatch
from runtime.observer import gathering

if TYPE_CHECKING:
    from runtime.executor.relay import Relay


class Collects(Protocol):
    """A parameter, or a version of one, that adds up its gradients."""

    def collect(self, gradient: torch.Tensor) -> None: ...


@dataclass(kw_only=True, eq=False)
class Prefetch:
    """The `bundles` of each section of a stage for one pass forward and, where it trains, one back; `recomputed` says
    of each whether it is computed again. `batch` has what is there before the first operator, and no values: these hold
    their nodes of autograd, which hold the trip. `parameters` take the gradients that are late. With `lanes`, process
    groups of their own, weights set out ahead and gradients land behind; without, each is waited for. `relay` knows the
    passes before and behind."""

    bundles: Sequence[Sequence[Bundle]]
    recomputed: Sequence[bool]
    batch: MicroBatch
    parameters: Mapping[str, Collects]
    place: RankMesh
    lanes: Groups | None = None
    relay: "Relay | None" = None
    coming: dict[int, list[Gathered]] = field(default_factory=dict)  # have set out for their first use, or to be used
    returning: "list[Returning]" = field(default_factory=list)  # gradients of one section
    _left: dict[int, list[Gathered]] = field(default_factory=dict)  # wait for their backward pass
    _announced: bool = False  # whether somebody will say that the backward pass is over

    def enter(self, number: int, batch: MicroBatch, phase: Phase) -> None:
        """Gather what a section begins with, as values of a batch; it runs "forward" or in "recomputation"."""
        if self.relay is not None and phase == "forward":
            self.relay.entered()
        ways = self.coming.pop(number) if number in self.coming else self._ways(number)
        for way in ways:
            with self._meanwhile(phase):
                leaves = [batch.stubs.get(name, batch.tensors[name]) for name in way.bundle.names]
                made = _Gather.apply(self, way, *leaves)  # type: ignore[no-untyped-call]
                way.with_gradients(made)
            batch.values.update(zip(way.bundle.names, made, strict=True))
            if not self.recomputed[number] and way.bundle.again and any(weight.requires_grad for weight in made):
                way.keep(made)
        if left := [way for way in ways if way.kept]:
            self._left[number] = left
        if self.lanes is not None:
            self._set_out(number, phase)

    def leave(self, number: int, made: Iterable[torch.Tensor]) -> None:
        """A section is done, and has `made` what others read: its backward pass begins with the first of their
        gradients."""
        for way in self._left.get(number, ()):
            way.leave()
        if number in self._left:
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
            if self.returning and (self.returning[0].trip, self.returning[0].way.section) != (self, way.section):
                land(self.returning)
            self.returning.append(Returning(self, way, way.send_back(gradients)))
        if self.relay is None and not self._announced:
            self._announced = True
            torch.autograd.Variable._execution_engine.queue_callback(self._passed)
        return [None for _ in gradients]

    def _passed(self) -> None:
        """The backward pass is over, and nobody knows of a next one under which its last gradients could land."""
        self._announced = False
        land(self.returning)

    def take(self, way: Gathered, flight: Flight) -> None:
        """Add gradients to their parameters when they have landed."""
        observer = self.batch.observer
        with self._meanwhile("backward"), torch.no_grad():
            landed = flight.land()
            with nullcontext() if observer is None else observer.adding_up():
                for name, gradient in zip(way.bundle.names, landed, strict=True):
                    self.parameters[name].collect(gradient)

    def _ways(self, number: int) -> list[Gathered]:
        groups = self.place.groups if self.lanes is None else self.lanes
        tensors, observer = self.batch.tensors, self.batch.observer
        return [Gathered(bundle, number, tensors, observer, self.place, groups) for bundle in self.bundles[number]]

    @property
    def comes_again(self) -> bool:
        """Whether the backward pass gathers anything."""
        return any(self._again(at) for at in range(len(self.bundles)))

    def set_out_back(self) -> None:
        """Let the weights come with which the backward pass begins."""
        self._set_out(len(self.bundles), "backward")

    def _set_out(self, number: int, phase: Phase) -> None:
        """While a section runs, let the weights of the next that gathers any come; in a backward pass that is one
        before it."""
        if phase == "forward":
            following = (at for at in range(number + 1, len(self.bundles)) if self._sends(at))
        else:
            following = (at for at in reversed(range(number)) if self._again(at))
        neighbour = next(following, None)
        if neighbour is None and self.relay is not None:
            self.relay.depart(self.batch.observer)
        if neighbour is None or neighbour in self.coming:
            return
        if phase != "forward":
            phase = "recomputation" if self.recomputed[neighbour] else "backward"
        ways = self._left[neighbour] if phase == "backward" else self._ways(neighbour)
        if phase != "backward":
            self.coming[neighbour] = ways
        with self._meanwhile(phase):
            for way in ways:
                way.start()

    def _sends(self, number: int) -> bool:
        return any(bundle.sent for bundle in self.bundles[number])

    def _again(self, number: int) -> bool:
        return number in self._left or (self.recomputed[number] and self._sends(number))

    def _meanwhile(self, phase: Phase) -> AbstractContextManager[None]:
        """What happens here is no operator's."""
        return gathering(self.batch.observer, phase)


@dataclass(frozen=True, slots=True)
class Returning:
    """Gradients of a section on their way to where they are stored."""

    trip: Prefetch
    way: Gathered
    flight: Flight


def land(returning: list[Returning]) -> None:
    """Wait for gradients that are on their way, all of them."""
    flights = returning[:]
    returning.clear()
    for one in flights:
        one.trip.take(one.way, one.flight)


class _Gather(torch.autograd.Function):
    """A bundle is gathered forward, and its gradients, when the last of them is there, are reduced backward."""

    @staticmethod
    def forward(ctx: Any, trip: Prefetch, way: Gathered, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip, ctx.way = trip, way
        return tuple(way.bring())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.trip.returned(ctx.way, ctx.way.wide(gradients))
