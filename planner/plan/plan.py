"""The plan: everything that is decided about a training step, as plain immutable data.

A plan stands between those who make plans and those who use them. It is bound to a graph by `planner.plan.bind`, priced
and checked by `planner.plan.verify`, written and read by `planner.plan.file`.

Operators and parameters are listed in groups: what comes before the repeated blocks, the blocks, what comes after. A
group of blocks lists the names of its first block; the others follow it. A person who wants one block to differ splits
the group.
"""

from dataclasses import dataclass, field

from planner.sharding.layout import Layout
from planner.sharding.mesh import Mesh
from planner.sharding.stored import StoredParameter

SCHEMA_VERSION = 1
PLANNER_VERSION = "0.1.0"  # written into plans; equals the version of the distribution
RECOMPUTATION = ("none", "full")
PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
OPTIMIZERS = ("adamw", "sgd")
SCHEDULES = ("1f1b",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReference:
    """Which model: how to build it again, and the fingerprint of the traced graph that the plan is for."""

    reference: str
    sequence_length: int | None
    parameters: int
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """`global_batch` samples per optimizer step, in `micro_batches` equal parts one after the other."""

    global_batch: int
    micro_batches: int
    precision: str
    optimizer: str

    @property
    def part(self) -> int:
        """Samples of one micro-batch over all devices of a stage: the batch of the graph that the plan is for."""
        return self.global_batch // self.micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterReference:
    """Which machine: profile, the digest of its content, and the number of devices used."""

    profile: str
    digest: str
    devices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A pipeline stage has the blocks first_block ...

    first_block + blocks - 1; the first stage also what comes before the blocks, the last also what comes after.
    """

    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Strategies of some operators and stored layouts of some parameters.

    `blocks` is 0 for what stands outside of the blocks. A strategy has the name of a factor, or None, for each mesh
    axis.
    """

    name: str
    first_block: int = 0
    blocks: int = 0
    operators: tuple[tuple[str, tuple[str | None, ...]], ...]
    parameters: tuple[tuple[str, StoredParameter], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says. The parts of `time` sum to `step_seconds`, the parts of `memory` to `peak_bytes`.

    Time is that of the slowest stage plus what the pipeline adds; memory that of the fullest stage, per device.
    """

    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    model_flops: float
    model_flops_utilisation: float
    samples_per_second: float
    time: tuple[tuple[str, float], ...]
    memory: tuple[tuple[str, float], ...]

    @staticmethod
    def unknown() -> "Prediction":
        """Stands in a plan until it has been priced."""
        nan = float("nan")
        return Prediction(
            step_seconds=nan,
            peak_bytes=nan,
            capacity_bytes=nan,
            model_flops=nan,
            model_flops_utilisation=nan,
            samples_per_second=nan,
            time=(),
            memory=(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Who made the plan and how sure it is: `status` and `gap` are those of the search inside a stage for this mesh."""

    planner: str
    search: str
    status: str
    gap: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training step on one cluster, completely decided."""

    model: ModelReference
    training: Training
    cluster: ClusterReference
    mesh: Mesh
    stages: tuple[Stage, ...]
    schedule: str
    recomputation: str
    inputs: tuple[tuple[str, Layout], ...]
    groups: tuple[Group, ...]
    prediction: Prediction
    provenance: Provenance
    schema_version: int = field(default=SCHEMA_VERSION)
