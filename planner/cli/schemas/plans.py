"""Answers about one plan: `plan`, `estimate`, `show`, `verify`, `export`, `import`."""

from typing import Any, Literal

from pydantic import Field

from planner.cli.schemas.form import Number, Strict, Text


class Degrees(Strict):
    """Degrees of parallelism. `data` x `tensor` x `context` x `pipeline` x `replicated` is the number of devices;
    `expert` divides data x context."""

    data: int
    tensor: int
    context: int
    expert: int
    pipeline: int
    replicated: int


class Axis(Strict):
    """An axis of the mesh inside a stage, slowest links first."""

    axis: str
    size: int
    role: str


class Choices(Strict):
    """The decisions of a plan. `tensor_overlap` has operators with their chunks, `expert_overlap` experts with the
    operators that run during their dispatch."""

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
    """Consecutive stages of a heterogeneous pipeline on devices of one profile (`group`), with the blocks of each
    stage."""

    group: str
    first_stage: int
    stages: int
    first_device: int
    devices: int
    blocks: list[int]


class PlanContent(Choices):
    """A plan and its prediction. Bytes are per device; `time_seconds` and `memory_bytes` sum to `step_seconds` and
    `peak_bytes`. `low_` and `high_` bound the 80% interval of the step, and the peak with its margin."""

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
    """`--certify`: what an integer program proved of the busy time of the slowest pipeline rank."""

    solver: str
    status: str
    busy_seconds: float
    bound_seconds: float
    gap: float
    variables: int
    seconds: float


class Simpler(Strict):
    """Why the plan is not the fastest that was found (`--simplicity`). `slower` is a share."""

    fastest_step_seconds: float
    fastest_objective_seconds: float
    slower: float
    decisions: list[str]
    fastest_decisions: list[str]


class Search(Strict):
    """How the plan was found and what is proved. `gap` is how far `bound_seconds` is below `step_seconds`, as a share;
    `assumed` is how the bound counts steps."""

    algorithm: str
    status: Literal["optimal", "feasible"]
    gap: float
    bound_seconds: float
    usual_gap: float | None
    less_known: Literal["v", "slices"] | None
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
    stopped_by: Literal["interrupt", "memory", "time"] | None = None


class Listed(Choices):
    """One of the plans of `--top` or `--pareto`."""

    step_seconds: float
    objective_seconds: float
    peak_bytes: float
    gap: Number
    devices: int
    mesh: list[int]
    plan_file: Text


class NextBest(Strict):
    """The second best plan. `differences` has the words of both plans, as `best` and `next`."""

    step_seconds: float
    peak_bytes: float
    differences: dict[str, dict[str, str]]


class Explanation(Strict):
    """`--explain`: seconds by resource, and the value of memory (`seconds_per_byte`: what one more byte on every device
    saves)."""

    seconds: dict[str, float]
    memory_binds: bool
    seconds_per_byte: float
    free_bytes: float
    slowest_rank: int
    fullest_rank: int
    next_best: NextBest | None


class Engine(Strict):
    """`--for`: the best plan without the limits of the engine, and by what share the engine's plan is slower."""

    name: str
    possible_seconds: float
    possible_bytes: float
    slower: float
    differences: dict[str, dict[str, str]]


class Context(Strict):
    """`--context-by`: a split of the context degree into `ring` and `heads` (Ulysses), its least objective and bound;
    `least` is the bytes of the leanest plan that does not fit."""

    ring: int | None
    heads: int | None
    seconds: Number
    bound: Number
    least: Number


class Neighbour(Strict):
    """A number of devices or samples nearby that divides better. `gain` is the gain in samples per second and device,
    as a share."""

    devices: int
    global_batch: int
    step_seconds: float
    samples_per_second: float
    gain: float


class Choice(Strict):
    """A decision that `plan estimate` made: its value, and why."""

    name: str
    value: str
    why: str


class Answer(PlanContent):
    """`plan`, `plan search`, `plan estimate --model`."""

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
    """`plan estimate PLAN`, `plan manual`: the plan priced now, and the step that the file states."""

    step_seconds_in_file: float
    plan_file: Text


class Shown(PlanContent):
    """`plan show`: the plan priced now. `remarks` are differences from the figures in the file."""

    fits: bool
    remarks: list[str]


class StageOfRank(Strict):
    """A pipeline stage of the rank: its blocks."""

    stage: int
    first_block: int
    blocks: int


class Peers(Strict):
    """The ranks with which a rank communicates along an axis, itself included."""

    name: str
    role: str
    ranks: list[int]


class HeldInput(Strict):
    """An input of the model and the piece that the rank reads: for each dim the ranges [start, stop]."""

    name: str
    shape: list[int]
    piece: list[list[tuple[int, int]]]


class HeldParameter(Strict):
    """A parameter and the pieces of weight, gradient and optimizer state that the rank holds: for each dim the ranges
    [start, stop]. The gradient is a partial sum on the axes `partial`."""

    name: str
    shape: list[int]
    weight: list[list[tuple[int, int]]]
    gradient: list[list[tuple[int, int]]]
    state: list[list[tuple[int, int]]]
    partial: list[str]


class ShownRank(Strict):
    """`plan show --rank`: where a rank stands, its peers, and what it holds."""

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
    """A lower bound of the step time from computation alone. `work_seconds`, by class of operators, sum to it."""

    seconds: float
    gap: float
    devices: int
    work_seconds: dict[str, float]


class Verified(Strict):
    """`plan verify`. `as_stated`: there are no remarks. `gap_in_file` is the gap that the search proved; `no_bound`
    says why there is no bound."""

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
    """A part of the plan that the engine cannot express: in the plan (`here`), in the engine (`there`), and the figures
    of the plan after the change."""

    what: str
    here: str
    there: str
    step_seconds: Number
    peak_bytes: Number


class Hosts(Strict):
    """Consecutive hosts with one kind of device, counted as engines count nodes."""

    profile: str
    first: int
    count: int


class Exported(Strict):
    """`plan export`. `plan_` figures are those of the plan file, the others those of the plan that the engine will run.
    `searched`: the best plan of the engine's space was searched; `why` says what the engine cannot express."""

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
    """Consecutive blocks with the same recomputation, and what they keep."""

    blocks: int
    recomputation: str
    kept: list[str]


class ExportedOperators(Strict):
    """`plan export` for engines that take the strategy of every operator. `training` is as in plan files."""

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
    """`plan import`. `unmodelled`: settings that change time or memory and are not priced; `notes`: settings that are
    priced as something else; `unread`: settings that are not part of a plan."""

    fits: bool
    unmodelled: list[str]
    notes: list[str]
    unread: list[str]
    plan_file: Text
