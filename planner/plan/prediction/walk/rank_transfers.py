"""What a pipeline rank exchanges with others: values between stages, gradients of tied parameters, and the loss."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hardware_profiles import Bytes, Group, links_of_ranks
from planner.plan.prediction.charges import UNCHARGED, Phase, charge
from planner.plan.prediction.step import ChunkCost
from planner.plan.prediction.walk.stage_cost import StageCost, holders_of, tied_seconds, transfer_seconds
from planner.pricing.message import Message
from planner.sharding.layout import local_share, replicated

if TYPE_CHECKING:
    from planner.plan.prediction.walk.walk import Walk


class RankTransfers:
    """Charges the transfers of a rank to its sums."""

    def __init__(self, walk: "Walk", cost: StageCost, rank: int) -> None:
        self.walk, self.cost, self.rank = walk, cost, rank
        self.bound = walk.bound

    def cross(self, live: Sequence[int]) -> None:
        """The values that the stages of this rank receive, and the gradients of the values that they sent. A stage
        hands on what later stages read. `live` has the micro-batches in flight of every chunk."""
        graph, stages, held = self.bound.graph, len(self.bound.plan.stages), self.bound.plan.stages_of(self.rank)
        arriving = self.walk.arriving
        for number, (chunk, stage) in enumerate(zip(self.cost.chunks, held, strict=True)):
            for name in arriving[stage]:
                nbytes = self._transfer(chunk, "forward", name, stage)
                if not self._kept_by_block(name, stage):
                    self.cost.memory["activations"] += live[number] * nbytes
            for name in arriving[stage + 1] if stage + 1 < stages else ():
                if name in graph.differentiable:
                    self._transfer(chunk, "backward", name, stage + 1)

    def tie(self, name: str, nbytes: Bytes) -> None:
        """A parameter used on several pipeline ranks: its gradients, of `nbytes` on a device, are summed once a
        step."""
        ranks = sorted({self.walk.rank_of[at] for at in self.bound.graph.consumers[name]})
        seconds = tied_seconds(nbytes, self._links(ranks[0], ranks[-1]))
        self.cost.once["gradient reduction"] += seconds
        message = Message(kind="all_reduce", axis=None, nbytes=nbytes)
        charge(self.cost.messages, "gradient reduction", "", message, {"update": 1})

    def loss(self) -> None:
        """Every rank receives the loss: that of every micro-batch on the last stage, that of the step on the others."""
        graph, plan, messages = self.bound.graph, self.bound.plan, self.cost.messages
        if self.walk.rank_of[graph.producer[graph.loss]] == self.rank:
            made = self.walk.made(graph.loss).forward
            known = self.walk.pricers.activations.route(graph.types[graph.loss], made, replicated(len(plan.mesh.axes)))
            for message in known.messages:
                charge(messages, UNCHARGED, "", message, {"forward": 1})
        if plan.pipeline > 1:
            charge(messages, UNCHARGED, "", Message(kind="all_reduce", axis=None, nbytes=4.0), {"update": 1})

    def _transfer(self, chunk: ChunkCost, phase: Phase, name: str, stage: int) -> Bytes:
        """Charge a value that crosses from the previous stage into `stage`, or its gradient that goes back, in the pass
        that waits for it; returns its bytes on a device. Nothing is sent if both stages are on one rank."""
        plan, cluster = self.bound.plan, self.walk.cluster
        tensor, mesh = self.bound.graph.types[name], plan.mesh
        nbytes = tensor.nbytes * local_share(tensor.shape, self.walk.made(name).forward, mesh.sizes)
        source, target = plan.rank_of(stage - 1), plan.rank_of(stage)
        if source == target:
            return nbytes
        holders = holders_of(nbytes, tensor, mesh, cluster)
        seconds = transfer_seconds(nbytes, self._links(source, target), cluster.software, holders)
        self.cost.micro_batch["stage transfer"] += seconds
        into = chunk.forward if phase == "forward" else chunk.backward
        into.add(waits=seconds)
        into.transfers += seconds
        message = Message(kind="send_recv", axis=None, nbytes=nbytes)
        charge(self.cost.messages, "stage transfer", "", message, {phase: 1})
        return nbytes

    def _links(self, one: int, other: int) -> tuple[Group, ...]:
        """The links between two pipeline ranks."""
        plan = self.bound.plan
        return links_of_ranks(self.walk.whole_machine, one, other, plan.pipeline, plan.mesh.size)

    def _kept_by_block(self, name: str, stage: int) -> bool:
        """Whether a recomputed block of a stage reads a value that has gradients, and keeps it as its own input."""
        bound = self.bound
        return name in bound.graph.differentiable and any(
            self.walk.stage_of[use] == stage and bound.recompute_of(bound.blocks.block_of(use)) is not None
            for use in bound.graph.consumers[name]
        )
