"""Reduces the gradients of a step from the layout of accumulation to the layout of the optimizer state.

Either one by one after all micro-batches, or in buckets (`planner.sharding.buckets`). A bucket starts when its last
gradient has arrived, in the backward pass of the last micro-batch:

    backward   .. block 2 ......... block 1 ......... block 0 ..  | step()
    reduce          bucket 0 ............  bucket 1 ........  bucket 2 .. | wait for all

Buckets start in a fixed order, the same on every rank, on separate process groups, so that collectives of the backward
pass cannot come between them. As many are in flight as fit into their memory (`Starts.landed`), so the backward pass
waits for one only if another needs its memory; buckets that need too much wait for the end of the pass. Only a step
that was announced (`begin`) starts early; gradients that are read between micro-batches, or checked before the update,
stay where they are until `finish`.

Gradients of parameters on parameter servers (`planner.plan.layout.parameter_owners`) are pushed: reduced to the rank
that owns the parameter, and copied from its device to its host. The other ranks then have none.
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
    """The gradients of one rank; each arrives `arrivals` times per micro-batch, once from every chunk that reads the
    parameter. Building it is collective."""

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
        self.crossed: Callable[[Phase, str, int], None] | None = None  # called for transfers between host and device
        starts = reduction_starts(bound, parameters.keys())
        self.buckets, self._early, self._landed = starts.buckets, starts.early, starts.landed
        self._groups = axis_lines(place, "gradients") if update.bucketed else place.groups
        self._flights: list[Flight] = []
        self._waiting: dict[str, int] = {}
        self._missing = [0 for _ in self.buckets]  # per bucket: members whose gradients have not arrived
        self._bucket_of = {name: number for number, bucket in enumerate(self.buckets) for name in bucket.names}
        if self.buckets:
            for parameter in parameters.values():
                parameter.arrival = self._arrived

    def begin(self) -> None:
        """Announce a step that accumulates all its micro-batches, and does nothing else before `finish`."""
        if self.buckets:
            self._flights = []
            self._waiting = dict(self._expected)
            self._missing = [sum(self._waiting[name] > 0 for name in bucket.names) for bucket in self.buckets]

    def finish(self) -> dict[str, torch.Tensor]:
        """The gradients in the layouts of the state, by name; for parameters on servers, only those that this rank
        owns. Drops the accumulated gradients. Collective."""
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
        """Report a transfer of a parameter's data between this rank's host and its device."""
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
        """A turn's micro-batches have accumulated the gradient of a parameter."""
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
        self._flights.append(Flight(steps, pieces, self._place, self._groups))  # frees the pieces after this call
