"""What one pipeline rank costs, summed up while the judge walks over its operators."""

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from costmodels import Visit, collective_time, visits_time
from hardware_profiles import PYTORCH, Bytes, Cluster, Group, Seconds, Software
from planner.graph.operator_graph import TensorType
from planner.plan.layout.weight_offload import waited_for
from planner.plan.prediction.charges import Charges
from planner.plan.prediction.step import ChunkCost, Launches
from planner.plan.schedule import NO_MOMENT, Moment
from planner.pricing import ParameterPrices
from planner.sharding.mesh import Mesh

FORWARD = "forward"
"""Computation of forward passes, a micro-batch."""

COMMUNICATION = "communication"
"""Messages between operators that are waited for, a micro-batch."""

GATHERING = "parameter gathering"
"""Weights that are gathered for their use, a micro-batch."""

REDUCING = "gradient reduction of micro-batches"
"""Gradients that are reduced behind the use of their weights, a micro-batch; the rest is once a step."""

ACCUMULATION = "gradient accumulation"
"""Gradients that are added to those of micro-batches before, a micro-batch."""

TRANSFER = "stage transfer"
"""What comes from other stages, a micro-batch."""

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
"""What optimizer states that are offloaded take beside their updates, once a step; in plans that offload any."""

ACTIVATIONS = "activation offload"
"""What it takes to offload what flows into recomputed blocks, or what others save, and to bring it back, a
micro-batch."""

FETCHED = "weight offload"
"""What it takes to bring offloaded weights for the two passes of a micro-batch."""

RETURNED = "weights going back"
"""What it takes to bring new weights to where they are offloaded, once a step."""

MEMORY = ("weights", "gradients", "optimizer state", "activations", "transient")


@dataclass(kw_only=True)
class StageCost:
    """Sums of one pipeline rank: seconds per micro-batch, seconds once a step, bytes.

    `launches` are of each chunk, block and pass; the additive sums charge every operator that is late for itself, and
    `ahead` is what of that a host saves which launches a block while its longer kernels still run.
    `messages` counts what the seconds of communication stand for, once a micro-batch or, in an update, once a step.
    `chunks` has the seconds once more, by the passes through each chunk, and what software hides. `beyond` is what
    buckets and norms take once a step beyond the additive sums (see `planner.plan.layout.per_step_communication`), and
    the row of offloaded states (`visits`, see `costmodels.offload`); `together` what weights that are gathered together
    take beyond them once a micro-batch, by part (see `planner.plan.layout.block_gathers`). `offloaded` are the bytes
    outside of the device by where they are, `rows` those of each parameter. `fetched` are the seconds in which the
    weights of each block come that offloads any, `away` those in which its activations come back and leave, by chunk
    and block. `fullest` is when the rank holds most activations. `copied` is what of the reduction of gradients are
    copies into and out of messages, which no pass covers.
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

    @property
    def all_once(self) -> dict[str, float]:
        """Seconds once a step, with what no single parameter is charged for."""
        return {part: seconds + self.beyond.get(part, 0.0) for part, seconds in self.once.items()}

    @property
    def all_micro_batch(self) -> dict[str, float]:
        """Seconds once a micro-batch, with what no single operator is charged for."""
        return {part: seconds + self.together.get(part, 0.0) for part, seconds in self.micro_batch.items()}

    def offload(self, name: str, prices: ParameterPrices, home: str) -> None:
        """Count a parameter whose state is offloaded."""
        self.once[OFFLOAD] = self.once.get(OFFLOAD, 0.0) + float(prices.offload[0])
        self.offloaded[home] += float(prices.offloaded[0])
        self.rows[name] = float(prices.offloaded[0])
        self.visits[name] = Visit(float(prices.fetch[0]), float(prices.update[0]), float(prices.store[0]))
        self.memory["transient"] = max(self.memory["transient"], float(prices.transient[0]))

    def offload_values(self, key: tuple[int, int], home: str, nbytes: Bytes, seconds: tuple[Seconds, Seconds]) -> None:
        """Count activations that a block of a chunk offloads of every micro-batch in flight, `nbytes` in all: they come
        back, and leave, in so many seconds."""
        self.micro_batch[ACTIVATIONS] = self.micro_batch.get(ACTIVATIONS, 0.0) + sum(seconds)
        self.offloaded[home] += nbytes
        fetch, store = self.away.get(key, (0.0, 0.0))
        self.away[key] = fetch + seconds[0], store + seconds[1]

    def end_values(self) -> None:
        """Activations leave and come under the work of a pass, but for those that nobody behind them brings back, until
        which have left nobody behind them computes."""
        for (number, block), (fetch, store) in self.away.items():
            chunk = self.chunks[number]
            waits = (number, block + 1) not in self.away
            chunk.forward.bring(store, waits=waits)
            chunk.backward.bring(fetch, waits=waits)

    def offload_weight(self, block: int, prices: ParameterPrices, home: str) -> None:
        """Count a weight of a block that is offloaded."""
        self.micro_batch[FETCHED] = self.micro_batch.get(FETCHED, 0.0) + float(prices.fetches[0])
        self.once[RETURNED] = self.once.get(RETURNED, 0.0) + float(prices.weight_store[0])
        self.offloaded[home] += float(prices.weight_offloaded[0])
        self.fetched[block] = self.fetched.get(block, 0.0) + float(prices.weight_fetch[0])

    def end_fetches(self, chunk: ChunkCost, blocks: Collection[int]) -> None:
        """The weights of these blocks of a chunk, which are all of it that offload any, come under the work of a pass,
        but for those that it waits for."""
        for block in blocks:
            for one, backward in ((chunk.forward, False), (chunk.backward, True)):
                waits = waited_for(blocks, block, backward=backward)
                one.bring(self.fetched[block], waits=waits)

    def end_visits(self, order: Sequence[str]) -> None:
        """What offloaded states take in this order, more or less than the sum of their paces."""
        if self.visits:
            visits = [self.visits[name] for name in order]
            seconds = visits_time(visits, before=self.once["optimizer"] - sum(visit.update for visit in visits))
            self.beyond[OFFLOAD] = seconds - self.once["optimizer"] - self.once[OFFLOAD]


def transfer_seconds(
    nbytes: float, links: Sequence[Group], software: Software = PYTORCH, holders: Group | None = None
) -> float:
    """Sending one tensor of `nbytes` per device to its like on another pipeline rank, over the slowest of the links
    between them (`hardware_profiles.links_of_ranks`). Where n `holders` have the same, each sends its part, which the
    receivers gather: t = send(nbytes / n) + all_gather(nbytes). A stage that waits for what it sends does so twice in
    a micro-batch, as often as for what it receives: 2 send(nbytes / n) + all_gather(nbytes)."""
    parts = 1 if holders is None else holders.size
    sent = max(float(collective_time("send_recv", nbytes / parts, group)) for group in links)
    gathered = 0.0 if holders is None else float(collective_time("all_gather", nbytes, holders))
    return (2 if software.waits_to_send else 1) * sent + gathered


def holders_of(nbytes: float, tensor: TensorType, mesh: Mesh, cluster: Cluster) -> Group | None:
    """The devices that hold the same `nbytes` of a tensor, each of which sends its part of them to another pipeline
    rank; None where each sends all. They are taken for neighbours, as those of tensor parallelism are."""
    held = round(nbytes * mesh.size / tensor.nbytes)
    return cluster.group(held, 1) if cluster.software.scatter_gather and held > 1 else None


def tied_seconds(nbytes: float, links: Sequence[Group]) -> float:
    """Summing the gradient of a parameter that two stages both hold, over the slowest of the links between them."""
    return max(float(collective_time("all_reduce", nbytes, group)) for group in links)
