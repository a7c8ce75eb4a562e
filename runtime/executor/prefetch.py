"""One micro-batch on its way through a stage and back: when weights are gathered (see
`runtime.executor.block_gathers`).

    enter 0:  0 arrives, start 1       enter 1:  1 arrives, start 2   ...   enter n:  n arrives, start the next pass's 0
    leave 0:  free the memory of 0     first gradient of a result of 1:  1 arrives again, start 0

Sections that gather nothing are skipped: a prefetch is for the next section that gathers. After the last section of a
pass, it is for the next pass of the rank (see `runtime.executor.relay`). Without a relay the first gather of each pass
is exposed.
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
    """A parameter, or a version of one, that accumulates its gradients."""

    def collect(self, gradient: torch.Tensor) -> None: ...


@dataclass(kw_only=True, eq=False)
class Prefetch:
    """The `bundles` of each section of a stage, for one forward pass and, in training, one backward pass; `recomputed`
    says which sections are recomputed. `batch` has the tensors from before the first operator but no values: values
    hold their autograd nodes, which hold this object. `parameters` receive overlapped gradients. With `lanes` (separate
    process groups), gathers are prefetched and gradient reductions overlap with later sections; without, each is waited
    for. `relay` knows the passes before and after."""

    bundles: Sequence[Sequence[Bundle]]
    recomputed: Sequence[bool]
    batch: MicroBatch
    parameters: Mapping[str, Collects]
    place: RankMesh
    lanes: Groups | None = None
    relay: "Relay | None" = None
    coming: dict[int, list[Gathered]] = field(default_factory=dict)  # gathers started early, or about to be used
    returning: "list[Returning]" = field(default_factory=list)  # gradients of one section in flight
    _left: dict[int, list[Gathered]] = field(default_factory=dict)  # sections whose backward pass is still to come
    _announced: bool = False  # whether the end of the backward pass will be reported

    def enter(self, number: int, batch: MicroBatch, phase: Phase) -> None:
        """Gather the weights of a section, as values of a batch; it runs "forward" or in "recomputation"."""
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
        """A section is done and has `made` the values that others read. Its backward pass begins with the first
        gradient of one of them."""
        for way in self._left.get(number, ()):
            way.leave()
        if number in self._left:
            for tensor in made:
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._back, number))  # type: ignore[no-untyped-call]

    def _back(self, number: int, gradient: torch.Tensor) -> None:
        """A gradient of a section's result has arrived."""
        if number not in self._left:  # it is not the first
            return
        with self._meanwhile("backward"), torch.no_grad():
            for way in self._left.pop(number):
                way.come_again()
        if self.lanes is not None:
            self._set_out(number, "backward")

    def returned(self, way: Gathered, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """All gradients of a bundle have been computed. Returns the gradients for autograd, in the stored layout, or
        Nones where they are in flight."""
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
        """The backward pass is over, and no next pass is known that could overlap with its last gradients."""
        self._announced = False
        land(self.returning)

    def take(self, way: Gathered, flight: Flight) -> None:
        """Add gradients to their parameters once they have arrived."""
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
        """Start the gathers with which the backward pass begins."""
        self._set_out(len(self.bundles), "backward")

    def _set_out(self, number: int, phase: Phase) -> None:
        """While a section runs, prefetch the weights of the next section that gathers any; in a backward pass that is
        an earlier section."""
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
        """What happens inside of this context belongs to no operator."""
        return gathering(self.batch.observer, phase)


@dataclass(frozen=True, slots=True)
class Returning:
    """Gradients of a section in flight to where they are stored."""

    trip: Prefetch
    way: Gathered
    flight: Flight


def land(returning: list[Returning]) -> None:
    """Wait for all gradients in flight."""
    flights = returning[:]
    returning.clear()
    for one in flights:
        one.trip.take(one.way, one.flight)


class _Gather(torch.autograd.Function):
    """Gathers a bundle forward; backward it reduces the bundle's gradients, once the last of them is computed."""

    @staticmethod
    def forward(ctx: Any, trip: Prefetch, way: Gathered, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.trip, ctx.way = trip, way
        return tuple(way.bring())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.trip.returned(ctx.way, ctx.way.wide(gradients))
