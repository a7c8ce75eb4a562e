"""Brings the gradients of a step from the layout in which they are added up to that of the optimizer's state.

One by one when all micro-batches are through; or in buckets (`planner.sharding.buckets`), each of which starts when the
last of its gradients has arrived, in the backward pass of the last micro-batch:

    backward   .. block 2 ......... block 1 ......... block 0 ..  | step()
    reduce          bucket 0 ............  bucket 1 ........  bucket 2 .. | wait for all

Buckets start in their order, the same on every rank, on process groups of their own: what the backward pass sends
meanwhile cannot get between them. As many are under way as the room for them holds (`Starts.landed`), so that the
backward pass waits for one of them only where the memory of another is needed; those that would take too much wait for
the end of the pass. Only a step that was announced (`begin`) starts early; gradients that are looked at between
micro-batches, or checked before the update, stay where they are until `finish`.

Gradients of parameters on parameter servers (`planner.plan.layout.parameter_owners`) are pushed: reduced to the rank
that owns the parameter, and from its device to its host. The other ranks have none at the end.
"""

from collections.abc import Callable, Mapping

import torch

from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.parameter_owners import owners_of, pushes_of
from planner.plan.layout.per_step_communication import reduction_starts
from planner.plan.prediction.charges import Phase
from runtime.comm.async_collectives import Flight
from runtime.comm.collectives import all_reduce
from runtime.comm.device_mesh import RankMesh, axis_lines
from runtime.comm.redistribute import convert
from runtime.offload.storage import on_host
from runtime.parameters.padding import clear
from runtime.parameters.shards import LocalParameter


class Reduction:
    """The gradients of one rank, each of which arrives so many times a micro-batch (`arrivals`): once from every chunk
    that reads the parameter. Building it is collective."""

    def __init__(
        self,
        bound: BoundPlan,
        parameters: Mapping[str, LocalParameter],
        place: RankMesh,
        arrivals: Mapping[str, int],
    ) -> None:
        self._parameters, self._place = parameters, place
        turns = bound.plan.training.turns * bound.plan.slices
        self._expected = {name: turns * arrivals.get(name, 0) for name in parameters}
        update = bound.plan.training.update
        self.servers = owners_of(bound, parameters.keys()) if update.served else {}
        self._pushes = {name: pushes_of(bound, name, server) for name, server in self.servers.items()}
        self.crossed: Callable[[Phase, str, int], None] | None = None  # is told what goes to hosts and comes from them
        starts = reduction_starts(bound, parameters.keys())
        self.buckets, self._early, self._landed = starts.buckets, starts.early, starts.landed
        self._groups = axis_lines(place, "gradients") if update.bucketed else place.groups
        self._flights: list[Flight] = []
        self._waiting: dict[str, int] = {}
        self._missing = [0 for _ in self.buckets]  # members whose gradients have not all arrived
        self._bucket_of = {name: number for number, bucket in enumerate(self.buckets) for name in bucket.names}
        if self.buckets:
            for parameter in parameters.values():
                parameter.arrival = self._arrived

    def begin(self) -> None:
        """A step is about to accumulate all its micro-batches, and nothing else before `finish`."""
        if self.buckets:
            self._flights = []
            self._waiting = dict(self._expected)
            self._missing = [sum(self._waiting[name] > 0 for name in bucket.names) for bucket in self.buckets]

    def finish(self) -> dict[str, torch.Tensor]:
        """The gradients in the layouts of the state, by name, of parameters on servers those of this rank's; drops
        those that were added up. Collective."""
        self._waiting = {}
        while len(self._flights) < len(self.buckets):
            self._launch()
        found: dict[str, torch.Tensor] = {}
        for bucket, flight in zip(self.buckets, self._flights, strict=True):
            found.update(zip(bucket.names, flight.land(), strict=True))
        self._flights = []
        for name, parameter in self._parameters.items():
            if name not in found:
                found[name] = self._alone(parameter)
            if parameter.twins is not None and not parameter.local:
                found[name] = all_reduce(found[name], parameter.twins)
            if parameter.padded:
                clear(found[name], parameter.shape, parameter.own_shape, parameter.stored.state, self._place)
            if name in self.servers:
                gradient = found.pop(name)
                if self.servers[name].at(self._place.coordinate):
                    self.cross(name, gradient)
                    found[name] = on_host(gradient)
        return {name: found[name] for name in self._parameters if name in found}

    def cross(self, name: str, moved: torch.Tensor) -> None:
        """Tell of something of a parameter that crosses the link between this rank's host and its device."""
        if self.crossed is not None:
            self.crossed("update", name, moved.nbytes)

    def _alone(self, parameter: LocalParameter) -> torch.Tensor:
        gradient, stored, push = parameter.local_gradient(), parameter.stored, self._pushes.get(parameter.name)
        if push is not None:
            (gradient,) = Flight([list(push)], [gradient], self._place, self._place.groups).land()
        elif not parameter.local:
            gradient = convert(gradient, parameter.shape, stored.gradient, stored.state, self._place)
        parameter.gradient = None
        return gradient

    def _arrived(self, name: str) -> None:
        """The micro-batches of a turn have left the gradient of a parameter."""
        if not self._waiting:
            return
        self._waiting[name] -= 1
        if name in self._bucket_of and self._waiting[name] == 0:
            self._missing[self._bucket_of[name]] -= 1
        while len(self._flights) < self._early and self._missing[len(self._flights)] == 0:
            self._launch()

    def _launch(self) -> None:
        at = len(self._flights)
        for flight in self._flights[: self._landed[at]]:
            flight.land()
        bucket = self.buckets[at]
        members = [self._parameters[name] for name in bucket.names]
        pieces = [member.local_gradient() for member in members]
        for member in members:
            member.gradient = None
        steps = [member.steps for member in bucket.members]
        self._flights.append(Flight(steps, pieces, self._place, self._groups))  # pieces end with this call
