"""The cost of one pipeline rank, summed up while the prediction walks over its operators."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from costmodels import Visit, collective_time, fullest_moment, visits_time
from hardware_profiles import PYTORCH, Bytes, Cluster, Group, Seconds, Software
from planner.graph.operator_graph import TensorType
from planner.plan.layout.weight_offload import waited_for
from planner.plan.prediction.charges import Charges
from planner.plan.prediction.step import ChunkCost, Launches
from planner.plan.schedule import NO_MOMENT, Moment
from planner.pricing import ParameterPrices
from planner.sharding.mesh import Mesh

FORWARD = "forward"
"""Computation of forward passes, per micro-batch."""

COMMUNICATION = "communication"
"""Exposed collectives between operators, per micro-batch."""

GATHERING = "parameter gathering"
"""Weights gathered for their use, per micro-batch."""

REDUCING = "gradient reduction of micro-batches"
"""Gradients reduced after the use of their weights, per micro-batch; all others are reduced once a step."""

ACCUMULATION = "gradient accumulation"
"""Gradients added to those of earlier micro-batches, per micro-batch."""

TRANSFER = "stage transfer"
"""Transfers from other stages, per micro-batch."""

TIME_PER_MICRO_BATCH = (
    FORWARD,
    "backward",
    "recomputation",
    COMMUNICATION,
    GATHERING,
    REDUCING,
    ACCUMULATION,
    TRANSFER,
)
TIME_PER_STEP = ("gradient reduction", "optimizer", "weight gathering")
OFFLOAD = "offload"
"""Seconds of offloaded optimizer states in addition to their updates, per step; in plans that offload any."""

ACTIVATIONS = "activation offload"
"""Seconds to offload activations (inputs of recomputed blocks, or saved tensors of others) and to bring them back, per
micro-batch."""

FETCHED = "weight offload"
"""Seconds to fetch offloaded weights for the passes of a micro-batch."""

RETURNED = "weights going back"
"""Seconds to write new weights back to where they are offloaded, per step."""

MEMORY = ("weights", "gradients", "optimizer state", "activations", "transient")


@dataclass(kw_only=True)
class StageCost:
    """Sums of one pipeline rank: seconds per micro-batch, seconds per step, bytes.

    Attributes:
        chunks: the seconds once more, by the passes through each chunk, with the overlap of the software.
        beyond: seconds per step in addition to the additive sums: of buckets and norms (see
            `planner.plan.layout.per_step_communication`), and of the sequence of offloaded states.
        micro_batch, once: the additive sums, per micro-batch and per step. Every operator is charged its own wait for
            its launch.
        memory: bytes.
        fullest: the moment at which the rank holds most activations.
        messages: the collectives behind the seconds of communication, once a micro-batch, or in an update once a step.
        launches: by chunk, block and pass.
        ahead: seconds that a host saves that launches a block while its longer kernels still run.
        copied: the part of gradient reduction for copies into and out of buckets, which no pass covers.
        together: seconds per micro-batch of coalesced all-gathers in addition to the additive sums, by part (see
            `planner.plan.layout.block_gathers`).
        offloaded: bytes outside of the device, by place.
        visits: the transfers of offloaded states (see `costmodels.offload`).
        rows: bytes of the offloaded state of each parameter.
        fetched: seconds to fetch the weights of each block that offloads any.
        away: seconds to bring back and to offload activations, by chunk and block.
        updating: bytes of temporaries of the update, when no activations are left.
    """

    chunks: list[ChunkCost]
    beyond: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_STEP, 0.0))
    micro_batch: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_MICRO_BATCH, 0.0))
    once: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PER_STEP, 0.0))
    memory: dict[str, float] = field(default_factory=lambda: dict.fromkeys(MEMORY, 0.0))
    fullest: Moment = NO_MOMENT
    messages: Charges = field(default_factory=Counter)
    launches: defaultdict[tuple[int, int | None, str], Launches] = field(default_factory=lambda: defaultdict(Launches))
    ahead: float = 0.0
    copied: float = 0.0
    together: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    offloaded: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    visits: dict[str, Visit] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    fetched: dict[int, float] = field(default_factory=dict)
    away: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    updating: Bytes = 0.0

    @property
    def all_once(self) -> dict[str, float]:
        """Seconds per step, including those that belong to no single parameter."""
        return {part: seconds + self.beyond.get(part, 0.0) for part, seconds in self.once.items()}

    @property
    def all_micro_batch(self) -> dict[str, float]:
        """Seconds per micro-batch, including those that belong to no single operator."""
        return {part: seconds + self.together.get(part, 0.0) for part, seconds in self.micro_batch.items()}

    def offload(self, name: str, prices: ParameterPrices, home: str) -> None:
        """Count a parameter with an offloaded state."""
        self.once[OFFLOAD] = self.once.get(OFFLOAD, 0.0) + float(prices.offload[0])
        self.offloaded[home] += float(prices.offloaded[0])
        self.rows[name] = float(prices.offloaded[0])
        self.visits[name] = Visit(float(prices.fetch[0]), float(prices.update[0]), float(prices.store[0]))
        self.memory["transient"] = max(self.memory["transient"], float(prices.transient[0]))

    def offload_values(
        self, key: tuple[int, int], home: str, nbytes: Bytes, live: int, seconds: tuple[Seconds, Seconds]
    ) -> None:
        """Count activations that a block of a chunk offloads, `nbytes` for each of `live` micro-batches in flight;
        `seconds` are those to bring them back and to offload them."""
        self.micro_batch[ACTIVATIONS] = self.micro_batch.get(ACTIVATIONS, 0.0) + sum(seconds)
        self.offloaded[home] += fullest_moment(live)[0] * nbytes
        fetch, store = self.away.get(key, (0.0, 0.0))
        self.away[key] = fetch + seconds[0], store + seconds[1]

    def end_values(self) -> None:
        """Activations are transferred under the work of a pass. Exposed are those of a block whose next block offloads
        none: no later block computes until they have left, and none brings them back."""
        for (number, block), (fetch, store) in self.away.items():
            chunk = self.chunks[number]
            waits = (number, block + 1) not in self.away
            chunk.forward.bring(store, waits=waits)
            chunk.backward.bring(fetch, waits=waits)

    def offload_weight(self, block: int, prices: ParameterPrices, home: str) -> None:
        """Count an offloaded weight of a block."""
        self.micro_batch[FETCHED] = self.micro_batch.get(FETCHED, 0.0) + float(prices.fetches[0])
        self.once[RETURNED] = self.once.get(RETURNED, 0.0) + float(prices.weight_store[0])
        self.offloaded[home] += float(prices.weight_offloaded[0])
        self.fetched[block] = self.fetched.get(block, 0.0) + float(prices.weight_fetch[0])

    def end_fetches(self, chunk: ChunkCost, blocks: Collection[int], *, trains: bool) -> None:
        """Fetch the weights of these blocks, which are all of the chunk that offload any, under the work of a pass;
        some are exposed."""
        passes = ((chunk.forward, False), (chunk.backward, True))
        for block in blocks:
            for one, backward in passes if trains else passes[:1]:
                waits = waited_for(blocks, block, backward=backward)
                one.bring(self.fetched[block], waits=waits)

    def end_visits(self, order: Sequence[str]) -> None:
        """The seconds of offloaded states in this order, relative to the sum of their single paces."""
        if self.visits:
            visits = [self.visits[name] for name in order]
            seconds = visits_time(visits, before=self.once["optimizer"] - sum(visit.update for visit in visits))
            self.beyond[OFFLOAD] = seconds - self.once["optimizer"] - self.once[OFFLOAD]


def transfer_seconds(
    nbytes: float, links: Sequence[Group], software: Software = PYTORCH, holders: Group | None = None
) -> float:
    """Seconds to send one tensor of `nbytes` per device to the corresponding device on another pipeline rank, over the
    slowest link between them (`hardware_profiles.links_of_ranks`).

    If n `holders` have the same tensor, each sends its part, and the receivers gather: t = send(nbytes / n) +
    all_gather(nbytes). A stage that waits for its sends does so as often as for its receives: 2 send(nbytes / n) +
    all_gather(nbytes)."""
    parts = 1 if holders is None else holders.size
    sent = max(float(collective_time("send_recv", nbytes / parts, group)) for group in links)
    gathered = 0.0 if holders is None else float(collective_time("all_gather", nbytes, holders))
    return (2 if software.waits_to_send else 1) * sent + gathered


def holders_of(nbytes: float, tensor: TensorType, mesh: Mesh, cluster: Cluster) -> Group | None:
    """The devices that hold the same `nbytes` of a tensor, and each send a part of them to another pipeline rank; None
    if each sends everything. They are assumed to be neighbours, like tensor-parallel devices."""
    held = round(nbytes * mesh.size / tensor.nbytes)
    return cluster.group(held, 1) if cluster.software.scatter_gather and held > 1 else None


def tied_seconds(nbytes: float, links: Sequence[Group]) -> float:
    """Seconds to sum the gradient of a parameter that two stages both hold, over the slowest link between them."""
    return max(float(collective_time("all_reduce", nbytes, group)) for group in links)
