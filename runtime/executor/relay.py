"""Prefetch across the passes of a rank: the first gather of the next pass starts under the last block of the running
pass, and the running pass's last gradients arrive under the next pass (see `runtime.executor.prefetch`).

    F0 | ..  block 2  block 3 |  F1 | block 0 ..            B0 | ..  block 1   block 0  |  F4 | block 0     block 1 ..
               [gather 3]  [gather 0 of F1]                       [reduce 2]  [reduce 1 | reduce 0]    lands

So only the first gather of a step and the last reduction are exposed. The first gather of a step starts before the rank
waits for the previous stage. The schedule says which pass is next. Weights must not change in between, so schedules
without a flush do not use this. Where two passes run together, both are the next one: for whichever ends first.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from costmodels import Turn
from runtime.comm.async_collectives import Groups
from runtime.comm.device_mesh import RankMesh
from runtime.executor.block_gathers import Bundle, Gathered
from runtime.executor.prefetch import Prefetch, Returning, land
from runtime.observer import Observer, gathering

Weights = Callable[[], Mapping[str, torch.Tensor]]
"""This rank's pieces of its weights, by name."""

_Key = tuple[int, int, int]  # chunk, micro-batch, slice


@dataclass(kw_only=True, eq=False)
class Relay:
    """Connects the passes of one rank: `bundles` has for each chunk the bundles of its sections."""

    weights: Weights
    place: RankMesh
    lanes: Groups
    bundles: Sequence[Sequence[Sequence[Bundle]]] = ()
    _next: Sequence[Turn] = ()  # passes whose first gathers have not started
    _forward: Turn | None = None  # the running forward pass, if any
    _entered: int = 0  # number of its sections that have begun
    _trips: dict[_Key, Prefetch] = field(default_factory=dict)  # forward passes whose backward pass is still to come
    _coming: dict[int, tuple[int, list[Gathered]]] = field(default_factory=dict)  # started gathers, by chunk
    _returning: list[Returning] = field(default_factory=list)

    def start(self, passes: Sequence[Sequence[Turn]], observer: Observer | None) -> None:
        """A step of these passes begins; a pass is one turn, or two that run together."""
        self._forward = None
        self._trips, self._coming, self._returning = {}, {}, []  # an aborted step may have left some
        self._next = passes[0] if passes else ()
        self.depart(observer)

    def begin(self, turns: Sequence[Turn], following: Sequence[Turn], observer: Observer | None) -> None:
        """A pass of one turn, or of two that run together, is next; `following` is the pass after it, empty at the
        end."""
        self._next, self._entered = following, 0
        self._forward = next((turn for turn in turns if turn.kind == "forward"), None)
        trips = [self._trips.pop(_key(turn), None) for turn in turns if turn.kind != "forward"]
        sets_out = any(trip is not None and trip.comes_again for trip in trips)
        if self._forward is not None:
            sets_out |= any(self.bundles[self._forward.chunk])
        if not sets_out:  # this pass will gather nothing
            self.depart(observer)

    def take_in(self, trip: Prefetch) -> None:
        """A forward pass has begun; the backward pass of its micro-batch will follow."""
        if self._forward is None:  # outside of a step
            return
        trip.relay, trip.returning = self, self._returning
        if torch.is_grad_enabled():
            self._trips[_key(self._forward)] = trip
        if self._forward.chunk in self._coming:
            section, ways = self._coming.pop(self._forward.chunk)
            trip.coming[section] = ways

    def entered(self) -> None:
        """A section of a forward pass begins. When the second begins, wait for the gradients of the pass before."""
        self._entered += 1
        if self._entered == 2:
            land(self._returning)

    def end(self) -> None:
        """The last pass of the step is over: wait for the gradients in flight. That pass may have none of its own,
        where its weights are frozen or whole on every rank."""
        land(self._returning)

    def depart(self, observer: Observer | None) -> None:
        """The running pass gathers nothing more: start the gathers with which the next pass begins."""
        following, self._next = self._next, ()
        for turn in following:
            if turn.kind != "forward":
                if _key(turn) in self._trips:
                    self._trips[_key(turn)].set_out_back()
            else:
                self._set_out(turn.chunk, observer)

    def _set_out(self, chunk: int, observer: Observer | None) -> None:
        """Start the gathers with which a forward pass through a chunk begins."""
        own = self.bundles[chunk]
        section = next((at for at, bundles in enumerate(own) if any(bundle.sent for bundle in bundles)), None)
        if section is None:
            return
        tensors = self.weights()
        ways = [Gathered(bundle, section, tensors, observer, self.place, self.lanes) for bundle in own[section]]
        self._coming[chunk] = section, ways
        with gathering(observer, "forward"):
            for way in ways:
                way.start()


def _key(turn: Turn) -> _Key:
    return turn.chunk, turn.micro_batch, turn.slice
