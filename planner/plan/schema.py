"""The form of a plan file: its sections with their keys, and the words and numbers that may stand there."""

from typing import Annotated, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from costmodels import SCHEDULES
from hardware_profiles.foreign import form_fault
from planner.errors import PlanFileError
from planner.fp8_recipes import HISTORY
from planner.graph.expert_load import EVEN
from planner.nearest import divisors, nearest_words
from planner.plan.binding.machine import groups_of_ranks
from planner.plan.carried import LONGEST
from planner.plan.plan import MOST_CHUNKS, OPTIMIZERS, PRECISIONS, RECOMPUTATION, ClusterReference
from planner.plan.refusing import refuse_plan
from planner.plan.samples import parts_fault
from planner.sharding.discover.content import RuleContent
from planner.sharding.mesh import ORDERS
from planner.sharding.update import MOST_BUCKET

LARGEST = 2**31  # of any count in a plan
Chunks = Annotated[int, Field(ge=1, le=MOST_CHUNKS)]
Count = Annotated[int, Field(ge=1, le=LARGEST)]
Index = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[float, Field(gt=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


_Form = TypeVar("_Form", bound=_Strict)


class OutlineSection(_Strict):
    inputs: dict[str, str]
    parameters: dict[str, str]
    operators: str


class ModelSection(_Strict):
    reference: Annotated[str, Field(max_length=4096)]
    sequence_length: Count | None
    parameters: Annotated[int, Field(ge=0)]
    fingerprint: str
    batch: Count | None = None
    outline: OutlineSection | None = None
    graph: Annotated[str, Field(max_length=LONGEST)] | None = None


class TrainingSection(_Strict):
    global_batch: Count
    micro_batches: Count
    precision: str
    optimizer: str
    interleave: Count = 1
    gradients: str = "mean"
    gradient_dtype: str = "mixed"
    master_weights: bool = True
    moment_dtype: str = "fp32"
    clip_norm: float | None = None
    broadcast: bool = False
    buckets: str | Annotated[int, Field(ge=1, le=MOST_BUCKET)] | list[Count] | dict[str, Index] = "none"
    gathers: str = "each"
    zero_by: str = "slices"
    local_parameters: list[str] = []
    placed: dict[str, str] = {}
    padded: dict[str, Count] = {}
    padding_samples: Index = 0
    per_replica: list[str] = []
    replicas: Index = 0
    imbalance: float = EVEN
    tokens_once: bool = False
    fp8: str = ""
    fp8_left_out: list[str] = []
    fp8_gathered: bool = False
    fp8_experts: bool = False
    fp8_dispatch: bool = False
    fp8_history: Count = HISTORY
    fp8_margin: int = 0
    tensor_overlap: dict[str, tuple[Chunks, Chunks] | tuple[Chunks, Chunks, Count]] = {}
    expert_overlap: dict[str, Index] = {}


class ClusterSection(_Strict):
    profile: str
    digest: str
    devices: Count
    composition: str = ""
    software: str = "pytorch"


class AxisSection(_Strict):
    name: str
    size: Count
    stride: Count
    bandwidth: Positive
    order: str = "contiguous"
    alltoall: bool = True


class StageSection(_Strict):
    first_block: Index
    blocks: Index
    group: str = ""


class StoredSection(_Strict):
    weight: str
    gradient: str
    state: str
    state_home: str = "device"
    weight_home: str = "device"


class GroupSection(_Strict):
    name: str
    first_block: Index
    blocks: Index
    recomputation: str
    kept: list[str]
    activations_home: str = "device"
    operators: dict[str, str]
    parameters: dict[str, StoredSection]


class StagePredictionSection(_Strict):
    micro_batch_seconds: float
    once_seconds: float
    peak_bytes: float
    ahead_seconds: float = 0.0


class PredictionSection(_Strict):
    step_seconds: Positive
    objective_seconds: Positive | None = None
    low_seconds: Positive | None = None
    high_seconds: Positive | None = None
    peak_bytes: Positive
    high_peak_bytes: Positive | None = None
    capacity_bytes: Positive
    model_flops: float
    model_flops_utilisation: float
    samples_per_second: float
    time: dict[str, float]
    memory: dict[str, float]
    stages: list[StagePredictionSection]
    offloaded: dict[str, float] = {}


class ProvenanceSection(_Strict):
    planner: str
    search: str
    status: str
    gap: float


class CandidateSection(_Strict):
    step_seconds: float
    peak_bytes: float
    words: dict[str, str]


class PlanFile(_Strict):
    """All that a plan file has."""

    schema_version: int
    model: ModelSection
    training: TrainingSection
    cluster: ClusterSection
    mesh: list[AxisSection]
    stages: Annotated[list[StageSection], Field(min_length=1)]
    virtual_stages: Count
    slices: Count = 1
    schedule: str
    inputs: dict[str, str]
    groups: list[GroupSection]
    rules: dict[str, RuleContent] = {}
    prediction: PredictionSection
    provenance: ProvenanceSection
    alltoall: Literal["node", "none"] | None = None
    candidates: list[CandidateSection] = []


def validated(kind: type[_Form], text: str) -> _Form:
    """The file content. Raises PlanFileError with the first place that does not have the form."""
    try:
        return kind.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise PlanFileError(f"{form_fault(error)}; undo the edit or plan again") from error


def check_words(file: PlanFile) -> None:
    """Raise PlanFileError for a word that is not known, and for counts of one section that contradict another."""
    for place, word, known in (
        ("training.precision", file.training.precision, tuple(PRECISIONS)),
        ("training.optimizer", file.training.optimizer, OPTIMIZERS),
        ("schedule", file.schedule, SCHEDULES),
        *((f"mesh.{at}.order", axis.order, ORDERS) for at, axis in enumerate(file.mesh)),
        *((f"groups.{at}.recomputation", group.recomputation, RECOMPUTATION) for at, group in enumerate(file.groups)),
    ):
        if word not in known:
            raise PlanFileError(f"{place}: '{word}' is not one of {', '.join(known)}")
    held = next((axis.name for axis in file.mesh if axis.alltoall and axis.size > 1), None)
    if file.alltoall == "none" and held is not None:
        raise PlanFileError(
            f"alltoall: 'none', but axis '{held}' of the mesh has it; give that axis \"alltoall\": false, or leave"
            " alltoall out"
        )
    training = file.training
    refuse_plan(parts_fault(training.micro_batches, training.global_batch, training.padding_samples))
    if len({axis.name for axis in file.mesh}) != len(file.mesh):
        raise PlanFileError(f"mesh: the axes need different names, not {', '.join(axis.name for axis in file.mesh)}")
    size = 1
    for axis in reversed(file.mesh):
        if axis.stride != size:
            raise PlanFileError(f"mesh: axis '{axis.name}' has stride {axis.stride}; the axes after it make it {size}")
        size *= axis.size
    pipeline, rest = divmod(len(file.stages), file.virtual_stages)
    if rest:
        raise PlanFileError(
            f"virtual_stages: {file.virtual_stages} on each pipeline rank do not divide {len(file.stages)} stages;"
            f" {nearest_words(file.virtual_stages, divisors(len(file.stages)))}"
        )
    if size * pipeline != file.cluster.devices:
        raise PlanFileError(
            f"mesh: {size} devices in each of {pipeline} stages make {size * pipeline}, "
            f"cluster.devices is {file.cluster.devices}"
        )
    groups = groups_of_ranks(ClusterReference(**file.cluster.model_dump()), pipeline)
    for number, stage in enumerate(file.stages):
        rank = SCHEDULES[file.schedule].rank_of(number, pipeline)
        if stage.group != groups[rank]:
            found = f"'{stage.group}'" if stage.group else "not said"
            raise PlanFileError(
                f"stages.{number}.group is {found}; by cluster.profile, {file.cluster.profile}, it is '{groups[rank]}'"
            )
