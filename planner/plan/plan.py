"""The plan: everything that is decided about a training step, as plain immutable data.

A plan stands between the code that makes plans and the code that uses them. It is bound to a graph by
`planner.plan.binding.bind`, priced and checked by `planner.plan.compare.verify`, written and read by
`planner.plan.file`.

Operators and parameters are listed in groups: what comes before the repeated blocks, the blocks, what comes after. A
group of blocks lists the names of its first block; the others follow it. A person who wants one block to differ splits
the group: "recompute 12 of 20 blocks" is two groups.
"""

from dataclasses import dataclass, field
from typing import Literal

from costmodels import SCHEDULES, Schedule
from hardware_profiles import TRAINED, Home
from planner.graph.expert_load import EVEN
from planner.graph.fp8 import NO_FP8, Fp8
from planner.graph.operator_graph import WrittenRule
from planner.sharding.layout import Layout
from planner.sharding.mesh import Alltoall, Mesh
from planner.sharding.stored import StoredParameter
from planner.sharding.update import PLAIN, Update

SCHEMA_VERSION = 2
PLANNER_VERSION = "0.1.0"  # written into plans; equals the version of the distribution
RECOMPUTATION = ("none", "selective", "full")
PRECISIONS = {name: dtype.weights for name, dtype in TRAINED.items()}
"""Precisions of training, and the dtype of weights for each."""
OPTIMIZERS = ("adamw", "sgd", "lamb", "muon")
SLACK = "allocator slack and reserved"
"""The class of a predicted memory that no tensor takes."""
MOST_CHUNKS = 64
"""Most chunks that a collective of tensor parallelism is split into; more never pay."""


INTERLEAVED = next(name for name, schedule in SCHEDULES.items() if schedule.interleaved)
SLICED = next(name for name, schedule in SCHEDULES.items() if schedule.sliced)


def products_in(precision: str) -> str:
    """The dtype of matrix products under a precision that applies to products only; empty under any other."""
    return precision if TRAINED[precision].operands else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What the traced graph looks like, to say how another graph differs (`planner.plan.outline`): types of the inputs
    and of the parameters, "float32 256x1024", with `*` for the numbers of modules that are alike; for every kind of
    operator, in the order of the graph, four hex digits of a digest."""

    inputs: tuple[tuple[str, str], ...]
    parameters: tuple[tuple[str, str], ...]
    operators: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """Which model: its name, and the fingerprint of the traced graph that the plan is for.

    A model of the zoo is built by that name; any other model is built only from what the person gives
    (`planner.plan.binding.model_of`). A plan for it carries the `graph` instead (`planner.plan.carried`), which is None
    for a model of the zoo. `batch` is the number of samples in the example inputs that it was traced with, on which the
    fingerprint depends; older files have None here and for `outline` and `graph`.
    """

    reference: str
    sequence_length: int | None
    parameters: int
    fingerprint: str
    batch: int | None = None
    outline: Outline | None = None
    graph: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """`global_batch` samples per optimizer step, in `micro_batches` equal parts one after the other; `update` says how
    their gradients update weights. A stage takes `interleave` micro-batches at a time, operator by operator in turn, so
    that one computes while another communicates; `interleave` divides `micro_batches`. `imbalance` is assumed of
    routers: maximum expert load of a device over the average (see `planner.graph.expert_load`). With `tokens_once` a
    token is sent once to each part of the outermost axis over which experts are exchanged, not once for each expert.
    Linear layers are computed in `fp8` where that has a recipe (see `planner.graph.fp8`); all else is in `precision`.
    `tensor_overlap` names the operators whose collectives of tensor parallelism run under products, with their chunks
    forward and backward, and how many of the products are in chunks, 0 for all (see
    `planner.plan.layout.overlapped_products`). `expert_overlap` names the experts whose exchange is overlapped, with
    the number of operators beside them that run during the dispatch (see `planner.plan.layout.expert_overlap`)."""

    global_batch: int
    micro_batches: int
    precision: str
    optimizer: str
    update: Update = PLAIN
    interleave: int = 1
    imbalance: float = EVEN
    tokens_once: bool = False
    fp8: Fp8 = NO_FP8
    tensor_overlap: tuple[tuple[str, int, int, int], ...] = ()
    expert_overlap: tuple[tuple[str, int], ...] = ()

    @property
    def turns(self) -> int:
        """How often a stage takes its micro-batches, forward and backward, in a step."""
        return self.micro_batches // self.interleave

    @property
    def padded_batch(self) -> int:
        """The number of samples of the global batch, with those of weight zero behind them."""
        return self.global_batch + self.update.padding_samples

    @property
    def part(self) -> int:
        """Samples of one micro-batch over all devices of a stage: the batch of the graph that the plan is for."""
        return self.padded_batch // self.micro_batches

    @property
    def parts(self) -> tuple[int, ...]:
        """How many samples of the global batch are in each micro-batch."""
        return tuple(min(self.part, self.global_batch - first * self.part) for first in range(self.micro_batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReference:
    """Which machine: profile, the digest of its content, and the number of devices used.

    `composition` makes its levels from those of the profile (see `hardware_profiles.compose`); empty: they are the
    profile's. With several kinds of devices `profile` lists the groups in pipeline order (see
    `hardware_profiles.mixed`). `software` is the training stack that the plan is priced for. `products` is the dtype of
    matrix products, if the training precision sets one that differs from the other tensors; plan files do not say it
    here.
    """

    profile: str
    digest: str
    devices: int
    composition: str = ""
    software: str = "pytorch"
    products: str = ""

    @property
    def machine(self) -> str:
        """The profile and how the machine differs from it, as people read it."""
        network = f" as {self.composition}" if self.composition else ""
        stack = "" if self.software == "pytorch" else f" under {self.software}"
        return f"{self.profile}{network}{stack}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the model, in model order: it has the blocks first_block ... first_block + blocks - 1; the first stage
    also what comes before the blocks, the last also what comes after. With virtual stages the devices of one pipeline
    rank hold several of them. `group` is the profile of its devices, where the plan is for several kinds of them.
    """

    first_block: int
    blocks: int
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Strategies of some operators and stored layouts of some parameters.

    `blocks` is 0 for what stands outside of the blocks. A strategy has the name of a factor, or None, for each mesh
    axis.

    `recomputation` says what happens to the activations of each block of the group between its forward and its backward
    pass: "none" keeps them, "full" keeps the inputs of the block and recomputes the rest, "selective" recomputes too,
    except the results of the operators in `kept` (names of the first block).
    `activations_home` is the offload target until then: of the inputs of a recomputed block
    (`planner.plan.layout.activation_offload`), or of what another block saves
    (`planner.plan.layout.saved_tensor_offload`).
    """

    name: str
    first_block: int = 0
    blocks: int = 0
    recomputation: str = "none"
    kept: tuple[str, ...] = ()
    activations_home: Home = "device"
    operators: tuple[tuple[str, tuple[str | None, ...]], ...]
    parameters: tuple[tuple[str, StoredParameter], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """What the cost model predicts for the devices of one pipeline rank: seconds for each micro-batch, or for each
    slice where a plan cuts these, part of which a host that launches ahead saves, seconds once a step, bytes that a
    device needs."""

    micro_batch_seconds: float
    once_seconds: float
    peak_bytes: float
    ahead_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model predicts. The parts of `time` sum to `step_seconds`, the parts of `memory` to `peak_bytes`.

    `offloaded` has the bytes that a device keeps outside of itself, by offload target, on the rank with most of them.

    `step_seconds` is the time of the step as its schedule runs it (`planner.plan.prediction.step`). `objective_seconds`
    is the objective: a sum in which all operators run one after the other and all communication is exposed, except
    gradients under the last backward pass and the overlapped communication of weights, of tensor parallelism and of
    experts; older files have one number for both. Time is that of the busiest pipeline rank, with its waiting for other
    ranks; memory that of the fullest rank, per device. `stages` has every pipeline rank; a file of version 1 has none.
    Four of five steps like this should be measured between `low_seconds` and `high_seconds`
    (`hardware_profiles.spread_of`); both are None in older files. So is `high_peak_bytes`, the end of the interval of
    the peak: its excess over `peak_bytes` is the margin that a plan keeps for the error of its prediction
    (`hardware_profiles.Software.peak_high`).
    """

    step_seconds: float
    objective_seconds: float
    peak_bytes: float
    capacity_bytes: float
    model_flops: float
    model_flops_utilisation: float
    samples_per_second: float
    time: tuple[tuple[str, float], ...]
    memory: tuple[tuple[str, float], ...]
    stages: tuple[StagePrediction, ...] = ()
    low_seconds: float | None = None
    high_seconds: float | None = None
    high_peak_bytes: float | None = None
    offloaded: tuple[tuple[str, float], ...] = ()

    @staticmethod
    def unknown() -> "Prediction":
        """The placeholder in a plan that is not priced yet."""
        nan = float("nan")
        return Prediction(
            step_seconds=nan,
            objective_seconds=nan,
            peak_bytes=nan,
            capacity_bytes=nan,
            model_flops=nan,
            model_flops_utilisation=nan,
            samples_per_second=nan,
            time=(),
            memory=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that a search has found, in a few words (`planner.plan.words`), with its step time and its peak."""

    step_seconds: float
    peak_bytes: float
    words: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who made the plan and how sure it is: `status` and `gap` are those of the search inside a stage for this mesh."""

    planner: str
    search: str
    status: str
    gap: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training step on one cluster, completely decided.

    With `virtual_stages` v > 1 each pipeline rank holds v of the stages: stage c is on rank c % pipeline, so that v
    rounds over the ranks make the model (Narayanan et al. 2021, section 2.2), or two rounds in a V (`rank_of`).
    `schedule` gives the order of the schedule steps of the ranks (`planner.plan.schedule`).

    With `slices` q > 1 a stage takes the sequence of a micro-batch in q equal parts, one after the other: it computes
    one slice while the next stage works on the slice before (Li et al. 2021, TeraPipe). That is schedule "seqpipe",
    with one stage on each rank or several.

    `rules` has the rules that were found by trial, by the text of the calls that they are for: whoever executes the
    plan uses just these, and searches for none.

    `alltoall` says on which links that collective may run where some lack it: those inside a node, or none. The axes of
    the mesh alone do not tell it: inside a node all of them have it, also where links between nodes lack it. None: no
    link is said to lack it, and the axes count.

    `candidates` are plans that the search has priced, this plan among them, fastest first; none where something was
    decided by hand.
    """

    model: ModelReference
    training: Training
    cluster: ClusterReference
    mesh: Mesh
    stages: tuple[Stage, ...]
    virtual_stages: int = 1
    slices: int = 1
    schedule: str
    inputs: tuple[tuple[str, Layout], ...]
    groups: tuple[Group, ...]
    prediction: Prediction
    provenance: Provenance
    rules: tuple[tuple[str, WrittenRule], ...] = ()
    candidates: tuple[Candidate, ...] = ()
    alltoall: Literal[False, "node"] | None = None
    schema_version: int = field(default=SCHEMA_VERSION)

    def __repr__(self) -> str:
        where = f"{self.cluster.devices} x {self.cluster.machine}"
        return f"Plan({self.model.reference!r} on {where}, {self.prediction.step_seconds:.3g} s a step)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import plan_html

        return plan_html(self)

    @property
    def schedule_kind(self) -> Schedule:
        """What the schedule does."""
        return SCHEDULES[self.schedule]

    @property
    def links_with_alltoall(self) -> Alltoall:
        """On which links the all-to-all may run: all, none, or those inside a node."""
        return self.mesh.links_with_alltoall if self.alltoall is None else self.alltoall

    @property
    def pipeline(self) -> int:
        """Pipeline ranks: the number of sets of devices, each with a mesh of its own, that share the stages."""
        return len(self.stages) // self.virtual_stages

    @property
    def stage_passes(self) -> int:
        """How often each stage runs forward in a step: for every slice of every micro-batch."""
        return self.training.micro_batches * self.slices

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that holds a stage."""
        return self.schedule_kind.rank_of(stage, self.pipeline)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in the order of its chunks."""
        kind, ranks = self.schedule_kind, self.pipeline
        return tuple(kind.stage_of(rank, chunk, ranks) for chunk in range(self.virtual_stages))
