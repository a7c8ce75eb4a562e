"""What `plan`, `estimate`, `show`, `verify`, `export`, `import` and `report` say of a plan."""

from typing import Any, Literal

from pydantic import Field

from planner.cli.schemas.form import Number, Strict, Text


class Degrees(Strict):
    data: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    replicated: int


class Axis(Strict):
    axis: str
    size: int
    role: str


class Choices(Strict):
    degrees: Degrees
    virtual_stages: int
    schedule: str
    slices: int
    interleave: int
    tensor_overlap: dict[str, tuple[int, int, int]]
    expert_overlap: dict[str, int]
    sequence_parallel: bool
    optimizer_sharding: str
    micro_batches: int
    recomputation: str
    offload: str


class GroupRun(Strict):
    group: str
    first_stage: int
    stages: int
    first_device: int
    devices: int
    blocks: list[int]


class PlanContent(Choices):
    """What is said of a plan."""

    schema_version: Literal[3]
    model: str
    parameters: int
    hardware: str
    cluster: Text
    software: str
    devices: int
    groups: list[GroupRun] | None
    sequence_length: int | None
    global_batch: int
    precision: str
    optimizer: str
    update: dict[str, Any]
    step_seconds: float
    objective_seconds: float
    low_seconds: Number
    high_seconds: Number
    peak_bytes: float
    high_peak_bytes: Number
    capacity_bytes: float
    tokens_per_second_per_device: Number
    samples_per_second: float
    model_flops_utilisation: float
    mesh: list[Axis]
    time_seconds: dict[str, float]
    memory_bytes: dict[str, float]
    offloaded_bytes: dict[str, float]


class Certificate(Strict):
    solver: str
    status: str
    busy_seconds: float
    bound_seconds: float
    gap: float
    variables: int
    seconds: float


class Simpler(Strict):
    """Why a plan is not the fastest that was found."""

    fastest_step_seconds: float
    fastest_objective_seconds: float
    slower: float
    decisions: list[str]
    fastest_decisions: list[str]


class Search(Strict):
    algorithm: str
    status: Literal["optimal", "feasible"]
    gap: float
    bound_seconds: float
    usual_gap: float | None
    less_known: Literal["v", "slices", "unequal", "unequal, v", "unequal, slices"] | None
    assumed: list[Literal["1f1b", "forward", "in order", "offload"]]
    covered: bool
    configurations: int
    evaluated: int
    solved: int
    search_seconds: float
    total_seconds: float
    placements: int
    stopped: bool
    certificate: Certificate | None
    simpler: Simpler | None = None


class Listed(Choices):
    step_seconds: float
    objective_seconds: float
    peak_bytes: float
    gap: Number
    devices: int
    mesh: list[int]
    plan_file: Text


class NextBest(Strict):
    step_seconds: float
    peak_bytes: float
    differences: dict[str, dict[str, str]]


class Explanation(Strict):
    seconds: dict[str, float]
    memory_binds: bool
    seconds_per_byte: float
    free_bytes: float
    slowest_rank: int
    fullest_rank: int
    next_best: NextBest | None


class Engine(Strict):
    """Of a plan for an engine: what would be possible without it."""

    name: str
    possible_seconds: float
    possible_bytes: float
    slower: float
    differences: dict[str, dict[str, str]]


class Context(Strict):
    ring: int | None
    heads: int | None
    seconds: Number
    bound: Number
    least: Number


class Neighbour(Strict):
    devices: int
    global_batch: int
    step_seconds: float
    samples_per_second: float
    gain: float


class Choice(Strict):
    name: str
    value: str
    why: str


class Answer(PlanContent):
    """`plan`, `plan estimate --model`."""

    objective: str
    search: Search
    plans: list[Listed]
    explanation: Explanation | None
    contexts: list[Context] = Field(default_factory=list)
    neighbours: list[Neighbour] = Field(default_factory=list)
    engine: Engine | None = None
    discovered: list[dict[str, Any]] = Field(default_factory=list)
    choices: list[Choice] = Field(default_factory=list)
    plan_file: Text


class Repriced(PlanContent):
    """`plan estimate PLAN`."""

    step_seconds_in_file: float
    plan_file: Text


class Shown(PlanContent):
    """`plan show`."""

    fits: bool
    remarks: list[str]


class StageOfRank(Strict):
    stage: int
    first_block: int
    blocks: int


class Peers(Strict):
    name: str
    role: str
    ranks: list[int]


class HeldInput(Strict):
    name: str
    shape: list[int]
    piece: list[list[tuple[int, int]]]


class HeldParameter(Strict):
    name: str
    shape: list[int]
    weight: list[list[tuple[int, int]]]
    gradient: list[list[tuple[int, int]]]
    state: list[list[tuple[int, int]]]
    partial: list[str]


class ShownRank(Strict):
    """`plan show --rank`."""

    schema_version: Literal[3]
    rank: int
    devices: int
    pipeline_rank: int
    coordinate: dict[str, int]
    stages: list[StageOfRank]
    peers: list[Peers]
    inputs: list[HeldInput]
    parameters: list[HeldParameter]


class WorkBound(Strict):
    """The least step time by work alone: the sum of `work_seconds`, by class of operators."""

    seconds: float
    gap: float
    devices: int
    work_seconds: dict[str, float]


class Verified(Strict):
    """`plan verify`."""

    schema_version: Literal[3]
    fits: bool
    as_stated: bool
    step_seconds: float
    peak_bytes: float
    capacity_bytes: float
    remarks: list[str]
    gap_in_file: Number
    bound: WorkBound | None
    no_bound: Text


class GivenUp(Strict):
    what: str
    here: str
    there: str
    step_seconds: Number
    peak_bytes: Number


class Hosts(Strict):
    """Hosts of one of several kinds of devices, as engines count nodes."""

    profile: str
    first: int
    count: int


class Exported(Strict):
    """`plan export`."""

    schema_version: Literal[3]
    engine: str
    about: str
    model: str
    devices: int
    step_seconds: float
    peak_bytes: float
    fits: bool
    plan_step_seconds: float
    plan_peak_bytes: float
    searched: bool
    why: list[str] | None
    software: str
    given_up: list[GivenUp]
    hosts: list[Hosts] | None
    folder: str
    files: list[str]


class BlocksRunAlike(Strict):
    blocks: int
    recomputation: str
    kept: list[str]


class ExportedOperators(Strict):
    """For engines that take the strategy of every operator. `training` is the section of the plan file."""

    schema_version: Literal[3]
    engine: str
    about: str
    model: str
    devices: int
    sequence_length: int | None
    training: dict[str, Any]
    schedule: str
    slices: int
    blocks: list[BlocksRunAlike]
    folder: str
    files: list[str]


class Imported(PlanContent):
    """`plan import`."""

    fits: bool
    unmodelled: list[str]
    notes: list[str]
    unread: list[str]
    plan_file: Text
