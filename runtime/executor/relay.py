"""What the passes of a rank do for each other: weights that the next one begins with set out under the last block of
the running one, and its last gradients land under the next one (see `runtime.executor.prefetch`).

    F0 | ..  block 2  block 3 |  F1 | block 0 ..            B0 | ..  block 1   block 0  |  F4 | block 0     block 1 ..
               [gather 3]  [gather 0 of F1]                       [reduce 2]  [reduce 1 | reduce 0]    lands

So the first gather of a step is waited for, and the last reduction. The first of a step sets out before the rank waits
for what the stage before sends. Which pass is next, the schedule says; weights do not change in between, so schedules
without a flush have none of this. Where two passes run together both are next, for whoever is through first.
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
"""The pieces of a rank of its weights, by name."""

_Key = tuple[int, int, int]  # chunk, micro-batch, slice


@dataclass(kw_only=True, eq=False)
class Relay:
    """Of the passes of one rank: `bundles` has for each chunk what its sections gather together."""

    weights: Weights
    place: RankMesh
    lanes: Groups
    bundles: Sequence[Sequence[Sequence[Bundle]]] = ()
    _next: Sequence[Turn] = ()  # whose weights are still to set out
    _forward: Turn | None = None  # the pass forward that runs, if any does
    _entered: int = 0  # sections of it
    _trips: dict[_Key, Prefetch] = field(default_factory=dict)  # that will come back
    _coming: dict[int, tuple[int, list[Gathered]]] = field(default_factory=dict)  # by chunk, for a section
    _returning: list[Returning] = field(default_factory=list)

    def start(self, passes: Sequence[Sequence[Turn]], observer: Observer | None) -> None:
        """A step of so many passes begins, each one turn, or two that run together."""
        self._forward = None
        self._trips, self._coming, self._returning = {}, {}, []  # a step that was aborted may have left some
        self._next = passes[0] if passes else ()
        self.depart(observer)

    def begin(self, turns: Sequence[Turn], following: Sequence[Turn], observer: Observer | None) -> None:
        """A pass of one turn, or of two that run together, is next; behind it these `following`, none in the end."""
        self._next, self._entered = following, 0
        self._forward = next((turn for turn in turns if turn.kind == "forward"), None)
        trips = [self._trips.pop(_key(turn), None) for turn in turns if turn.kind != "forward"]
        sets_out = any(trip is not None and trip.comes_again for trip in trips)
        if self._forward is not None:
            sets_out |= any(self.bundles[self._forward.chunk])
        if not sets_out:  # nobody will
            self.depart(observer)

    def take_in(self, trip: Prefetch) -> None:
        """A pass forward has begun; its micro-batch will come back."""
        if self._forward is None:  # of no step
            return
        trip.relay, trip.returning = self, self._returning
        if torch.is_grad_enabled():
            self._trips[_key(self._forward)] = trip
        if self._forward.chunk in self._coming:
            section, ways = self._coming.pop(self._forward.chunk)
            trip.coming[section] = ways

    def entered(self) -> None:
        """A section of a pass forward begins. When the first is through, the gradients of the pass before land."""
        self._entered += 1
        if self._entered == 2:
            land(self._returning)

    def end(self) -> None:
        """No pass of the step is left: the gradients land that are still on their way. The last pass may have none of
        its own, where its weights are frozen, or whole on every rank."""
        land(self._returning)

    def depart(self, observer: Observer | None) -> None:
        """The running pass gathers nothing more: let the weights come with which the next begins."""
        following, self._next = self._next, ()
        for turn in following:
            if turn.kind != "forward":
                if _key(turn) in self._trips:
                    self._trips[_key(turn)].set_out_back()
            else:
                self._set_out(turn.chunk, observer)

    def _set_out(self, chunk: int, observer: Observer | None) -> None:
        """Let the weights come with which a pass forward through a chunk begins."""
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
