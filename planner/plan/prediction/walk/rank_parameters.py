"""The parameters of a pipeline rank: their memory, and what they take once a step."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hardware_profiles import Bytes
from planner.graph.fp8 import history_bytes
from planner.graph.operator_graph import TensorType
from planner.plan.layout.parameter_owners import Owner, longest_wait, owners_of, pushes_of
from planner.plan.layout.weight_offload import block_of_offloaded
from planner.plan.prediction.charges import charge
from planner.plan.prediction.memory.update import update_temporaries
from planner.plan.prediction.walk.price_book import ParameterKind
from planner.plan.prediction.walk.rank_transfers import RankTransfers
from planner.plan.prediction.walk.stage_cost import ACCUMULATION, StageCost
from planner.pricing import ParameterPrices, price_parameter
from planner.pricing.message import Message
from planner.pricing.redistribution_price import PricedRoute
from planner.sharding.layout import local_share
from planner.sharding.matrices import optimizer_of
from planner.sharding.stored import StoredParameter

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk


class RankParameters:
    """Adds the parameters of a rank to its sums. `first` has the operator that reads each name first."""

    def __init__(self, walk: "Walk", cost: StageCost, transfers: RankTransfers, first: Mapping[str, int]) -> None:
        self.walk, self.cost, self.transfers, self.first = walk, cost, transfers, first
        self.bound, self.update = walk.bound, walk.update
        self.used = {name: walk.chunk_of[at] for name, at in first.items()}  # the chunk that reads each name first
        self.owners: Mapping[str, Owner] = owners_of(self.bound, self.used)  # of whole optimizer states
        self._middle = self.bound.plan.mesh.coordinate(self.bound.plan.mesh.size // 2)  # the device that is counted
        # in a fixed order, so that sums do not depend on hashes
        self.names = [one.name for one in self.bound.graph.parameters if one.name in self.used]
        read = [name for name in self.used if name in self.bound.parameters]
        self.offloaded = block_of_offloaded(self.bound, read)  # the block of each parameter whose weight is offloaded
        self._priced = {name: self._prices(name) for name in self.names}

    def launch_accumulation(self) -> None:
        """Launch the accumulation of every gradient in the backward pass of the block of its first reader."""
        for name in self.names:
            prices, _ = self._priced[name]
            if prices.launches[0]:
                at = self.first[name]
                launches = self.cost.launches[self.walk.chunk_of[at], self.bound.blocks.block_of(at), "backward"]
                late = float(prices.late[0])
                launches.add(float(prices.accumulation[0]) + late, late, float(prices.launches[0]))

    def add(self, at_once: dict[int, Bytes]) -> None:
        """Add all parameters; `at_once` gets the bytes of offloaded weights that are on the device while their block
        runs."""
        for name in self.names:
            self._add(name)
            if name in self.offloaded:
                block = self.offloaded[name]
                at_once[block] = at_once.get(block, 0.0) + float(self._priced[name][0].visiting[0])
        self._wait_for_owners()
        if self.bound.plan.training.optimizer == "lamb":  # one kernel updates the others, or chunks of few elements
            self.cost.updating = self._temporaries()

    def _wait_for_owners(self) -> None:
        """All wait for the owner that updates longest, which may be another one than that with the largest states."""
        if self.owners:
            seconds = {name: float(self._prices_of(name, 1.0)[0].update[0]) for name in self.owners}
            sizes = self.bound.plan.mesh.sizes
            self.cost.once["optimizer"] += longest_wait(self.owners, seconds, sizes, self._middle)

    def _temporaries(self) -> Bytes:
        """Bytes of temporaries while the parameters are updated on a device."""
        graph, sizes, pieces = self.bound.graph, self.bound.plan.mesh.sizes, dict[str, float]()
        for name in self.names:
            tensor, stored, owner = graph.types[name], self.bound.parameters[name], self.owners.get(name)
            if name in graph.differentiable and not (owner is not None and self.update.served):
                pieces[name] = tensor.numel * local_share(tensor.shape, stored.state, sizes)
        return update_temporaries(self.bound, pieces, (), fused=True)

    def keep_unread(self) -> None:
        """Count the weights that no operator reads; the first pipeline rank has them (`runtime.parameters.shards`)."""
        readers = self.bound.graph.consumers
        for one in self.bound.graph.parameters:
            if one.name not in readers:
                self.cost.memory["weights"] += float(self._prices(one.name)[0].weight[0])

    def _prices(self, name: str) -> tuple[ParameterPrices, ParameterKind]:
        """The prices of a parameter, and a key that parameters with equal prices share."""
        owner = self.owners.get(name)
        return self._prices_of(name, None if owner is None else float(owner.at(self._middle)))

    def _prices_of(self, name: str, share: float | None) -> tuple[ParameterPrices, ParameterKind]:
        """The same for a device that has this share of a state with an owner."""
        plan, graph = self.bound.plan, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        local = bool(self.update.local_parameters) and self.update.is_local(name)
        optimizer, precision = optimizer_of(graph, plan.training.optimizer, name), plan.training.precision
        kind = (id(tensor), trainable, id(stored), local, share, optimizer)
        known = self.walk.once.parameters
        if kind not in known:
            found = price_parameter(
                tensor, trainable, [stored], precision, optimizer, self.walk.pricers, self.update, local, share,
                trains=graph.trains,
            )  # fmt: skip
            known[kind] = (found, stored)
        return known[kind][0], kind

    def _add(self, name: str) -> None:
        cost, graph = self.cost, self.bound.graph
        tensor, stored, trainable = graph.types[name], self.bound.parameters[name], name in graph.differentiable
        chunk = cost.chunks[self.used[name]]
        prices, kind = self._priced[name]
        if name in self.walk.scaled:
            cost.memory["optimizer state"] += history_bytes(self.bound.plan.training.fp8, self.walk.scaled[name])
        if trainable and not (self.update.local_parameters and self.update.is_local(name)):
            self._update(name, tensor, stored, prices, kind)
        added = float(prices.accumulation[0] + prices.late[0])
        cost.micro_batch[ACCUMULATION] += added
        chunk.pass_of(later=name in self.walk.deferred_weight_gradients).add(work=added)
        cost.once["optimizer"] += float(prices.update[0])
        cost.memory["weights"] += float(prices.weight[0])
        cost.memory["gradients"] += float(prices.gradient[0])
        cost.memory["optimizer state"] += float(prices.state[0])
        if stored.state_home != "device" and trainable:
            cost.offload(name, prices, stored.state_home)
        if name in self.offloaded:
            cost.offload_weight(self.offloaded[name], prices, stored.weight_home)
        if not self.walk.flushes and trainable and tensor.dtype == "float32":  # master weights are separate there
            sizes = self.bound.plan.mesh.sizes
            cost.memory["optimizer state"] += tensor.nbytes * local_share(tensor.shape, stored.state, sizes)

    def _update(
        self, name: str, tensor: TensorType, stored: StoredParameter, prices: ParameterPrices, kind: ParameterKind
    ) -> None:
        """Charge its collectives once a step: the gradient goes to the state, and the new weight back."""
        cost, chunk, book = self.cost, self.cost.chunks[self.used[name]], self.walk.once
        if kind not in self.walk.travels:
            self.walk.travels[kind] = (
                *book.route("sums", book.summed(tensor), stored.gradient, stored.state),
                *book.route("updated", tensor, stored.state, stored.weight),
            )
        sums, hidden, gathered, below = self.walk.travels[kind]
        owner = self.owners.get(name)
        if owner is not None:
            cost.once["weight gathering"] += float(prices.gather[0])
            if self.update.served:
                whole, steps = book.summed(tensor).nbytes, pushes_of(self.bound, name, owner)
                messages = (Message(kind=s.kind, axis=s.axis, nbytes=s.fraction * whole) for s in steps)
                seconds = float(prices.synchronisation[0])
                sums = PricedRoute(seconds=seconds, sent=seconds, messages=tuple(messages))
                cost.offloaded["host"] += float(prices.served[0])
        for part, route in (("gradient reduction", sums), ("weight gathering", gathered)):
            cost.once[part] += route.seconds
            cost.copied += route.copies if route is sums else 0.0
            for message in () if self.walk.bucketed else route.messages:
                charge(cost.messages, part, "", message, {"update": 1})
        chunk.reductions += hidden
        chunk.weights += below
        if name in self.walk.tied:
            share = local_share(tensor.shape, stored.state, self.bound.plan.mesh.sizes)
            self.transfers.tie(name, share * book.summed(tensor).nbytes)
