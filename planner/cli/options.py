"""The options that `plan` and `plan estimate` share, each stated once: one long list, in the order of `--help`.

A command that takes `options: Options` and is decorated with `taking_options` gets one command line option for each
field: `Options` is read as a signature. `planner.cli.taking` does the same with other dataclasses.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, get_type_hints

import typer

from planner.cli import completion
from planner.cli.option_kinds import BLOCKS, GRADIENTS, HAND, JOB, OPERATORS, OUTPUT, SEARCH, number, switch, word
from planner.cli.taking import taking

DEFAULT_HARDWARE = "h100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line; None stands for what was not."""

    model: Annotated[
        str | None,
        word(
            JOB,
            "NAME",
            "A model of the zoo (see `plan models`), a config.json, or package.module:factory.",
            known=completion.models,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        word(
            JOB,
            "KEY=VALUE",
            "Override a dimension of the model, as in num_layers=40. Repeatable.",
        ),
    ] = None
    devices: Annotated[int | None, number(JOB, "Number of devices (default: those of the profile).", most=2**20)] = None
    hardware: Annotated[
        str | None,
        word(
            JOB,
            "PROFILE",
            "A hardware profile (see `plan profiles`) or a TOML file. A heterogeneous pipeline lists its groups,"
            " h100-80gb:32,a100-80gb:32,between@12.5: 32 H100 and 32 A100 with 12.5 GB/s per device between them"
            " (default: that of the slower network).",
            DEFAULT_HARDWARE,
            known=completion.profiles,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        word(
            JOB,
            "LEVELS",
            "Override the network levels of the profile, innermost first: node=4,rack=8@50,cluster@25/2 means 4 devices"
            " per node, 8 nodes per rack at 50 GB/s per device and direction, and 25 GB/s beyond, with 2 devices per"
            " uplink. Levels keep what is left out.",
        ),
    ] = None
    software: Annotated[
        str | None,
        word(
            JOB,
            "STACK",
            "The training stack that will run the plan. What it fuses, overlaps, keeps and launches changes time and"
            " memory. pytorch is our runtime; `plan stacks` lists the others.",
            "pytorch",
            known=completion.stacks,
        ),
    ] = None
    seq_len: Annotated[int | None, number(JOB, "Sequence length in tokens (default: the model's own).", most=2**31)] = (
        None
    )
    global_batch: Annotated[
        int | None, number(JOB, "Global batch size in samples (default: 4 per device).", most=2**31)
    ] = None
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="TIMES",
            help="Maximum expert load: tokens of the busiest device over the mean, under expert parallelism (default:"
            " 1, a balanced router). Scales its compute, communication and activations.",
            rich_help_panel=JOB,
        ),
    ] = None
    precision: Annotated[
        str | None,
        word(
            JOB,
            "WORD",
            "Compute dtype: bf16, fp16 or fp32 (default: bf16, on CPUs fp32). Master weights are fp32.",
            known=completion.precisions,
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        word(JOB, "WORD", "Optimizer: adamw, sgd (with momentum) or lamb.", "adamw", known=completion.optimizers),
    ] = None
    full_trace: Annotated[bool, switch(JOB, "--full-trace", "Trace every repeated block. Slower, same graph.")] = False

    mode: Annotated[
        str | None,
        word(
            HAND,
            "MODE",
            "Preset: stand_alone, data_parallel, semi_auto_parallel, hybrid_parallel or auto_parallel.",
            "auto_parallel",
            known=completion.modes,
        ),
    ] = None
    tensor: Annotated[int | None, number(HAND, "Tensor-parallel degree.")] = None
    pipeline: Annotated[int | None, number(HAND, "Pipeline-parallel degree.")] = None
    data: Annotated[int | None, number(HAND, "Data-parallel degree.")] = None
    context: Annotated[int | None, number(HAND, "Context-parallel degree (splits the sequence).")] = None
    context_by: Annotated[
        str | None,
        word(
            HAND,
            "WORD",
            "Context parallelism: heads (Ulysses all-to-all), ring (ring attention), hybrid (Ulysses within a ring), or"
            " auto: compare them, and all degrees where --context is not given.",
            "heads",
            known=completion.contexts,
        ),
    ] = None
    ulysses: Annotated[
        int | None, number(HAND, "Ulysses degree within --context, for --context-by hybrid or auto.")
    ] = None
    zigzag: Annotated[
        bool | None,
        switch(
            HAND,
            "--zigzag/--no-zigzag",
            "Use zigzag order in causal ring attention, which balances its work (default: on).",
        ),
    ] = None
    expert: Annotated[int | None, number(HAND, "Expert-parallel degree (divides data x context).")] = None
    zero: Annotated[
        int | None,
        number(
            HAND,
            "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights.",
            least=0,
            most=3,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        number(HAND, "HSDP: number of groups that each shard what --zero says."),
    ] = None
    micro_batch: Annotated[int | None, number(HAND, "Micro-batch size, in samples per data-parallel rank.")] = None
    micro_batches: Annotated[int | None, number(HAND, "Number of micro-batches per step.")] = None
    virtual_stages: Annotated[
        str | None,
        word(HAND, "N|auto", "Virtual stages per pipeline rank (interleaved 1F1B).", "auto"),
    ] = None
    schedule: Annotated[
        str | None,
        word(
            HAND,
            "NAME",
            "Pipeline schedule: 1f1b, gpipe, interleaved_1f1b, zb_h1, seqpipe; asynchronous: pipedream, pipedream_2bw.",
            "the fastest of the first four",
            known=completion.schedules,
        ),
    ] = None
    interleave: Annotated[
        str | None,
        word(HAND, "N|auto", "Interleaved micro-batches: one computes while another communicates.", "1"),
    ] = None
    slices: Annotated[
        str | None,
        word(HAND, "N|auto", "Sequence slices per micro-batch (seqpipe).", "1"),
    ] = None
    mesh: Annotated[
        str | None,
        word(HAND, "AxB", "Device mesh of a stage, slowest links first, as in 8x4; in place of degrees."),
    ] = None

    sequence_parallel: Annotated[
        bool | None,
        switch(
            BLOCKS,
            "--sequence-parallel/--no-sequence-parallel",
            "Sequence parallelism: norms split the sequence over the tensor-parallel devices.",
        ),
    ] = None
    recompute: Annotated[
        str | None, word(BLOCKS, "WORD", "Recomputation: none, selective or full.", known=completion.recomputation)
    ] = None
    offload: Annotated[
        str | None,
        word(
            BLOCKS,
            "WHAT[:WHERE]",
            "Offload to the host, or with :disk to a disk: optimizer (states), activations (inputs of recomputed"
            " blocks), saved (tensors saved for backward by other blocks), weights (of repeated blocks). Join several"
            " by commas; auto takes what makes the step fastest; none.",
            "none",
            known=completion.offload,
        ),
    ] = None
    shard: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=STRATEGY",
            "Sharding of the operators that match. '*q_proj*=b,o' names a factor per mesh axis (- for none, * for any)."
            " '*q_proj*=((4,1,1),(2,1))' says how many pieces each dim of each operand is cut into. Repeatable.",
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PLAN[:PATTERN]",
            "Take shardings from a plan file, for the operators that match.",
        ),
    ] = None

    gradients: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "mean: gradients of the mean loss over the global batch; sum: that times micro-batches and data-parallel"
            " degree.",
            "mean",
            known=completion.gradients,
        ),
    ] = None
    gradient_dtype: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD",
            "Dtype of gradient accumulation and reduction: fp32, parameter (that of the weights), or mixed (fp32, but"
            " ZeRO 2 and 3 reduce each micro-batch in that of the weights).",
            "mixed",
            known=completion.gradient_dtypes,
        ),
    ] = None
    master_weights: Annotated[
        bool | None,
        switch(
            GRADIENTS,
            "--master-weights/--no-master-weights",
            "Keep fp32 master weights of 16-bit weights (default: on).",
        ),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(metavar="NORM", help="Clip gradients to this global norm.", rich_help_panel=GRADIENTS),
    ] = None
    buckets: Annotated[
        str | None,
        word(
            GRADIENTS,
            "WORD|SIZE|LIST",
            "Gradient buckets (also of gathered new weights): auto (a size that suits the links), none, a size as in"
            " 25MiB, 20,35 (parameters 0 to 19, 20 to 34, the rest), or '*attn*=0,*mlp*=1' (equal numbers together).",
            "auto",
        ),
    ] = None
    gathers: Annotated[
        str | None,
        word(
            GRADIENTS,
            "each|block|ahead|auto",
            "All-gather of ZeRO-3 weights: each at its use; block coalesces those of a block; ahead prefetches them"
            " during the block before; auto takes whichever makes the fastest plan.",
            "auto",
        ),
    ] = None
    broadcast: Annotated[bool, switch(GRADIENTS, "--broadcast", "Broadcast the weights of rank 0 at the start.")] = (
        False
    )
    local_parameters: Annotated[
        list[str] | None,
        word(
            GRADIENTS,
            "PATTERN",
            "Parameters that each device keeps for itself, without gradient reduction. Repeatable.",
        ),
    ] = None

    place: Annotated[
        list[str] | None,
        word(
            OPERATORS,
            "PATTERN=WHERE",
            "Embedding tables off the devices: on the host (sharded over the ranks) or on parameter servers"
            " (docs/parameter-servers.md). Repeatable. auto: on the host where that is faster; none: on the devices"
            " (default: on the host where nothing fits otherwise).",
        ),
    ] = None

    search: Annotated[
        str | None,
        word(
            SEARCH,
            "ALGORITHM",
            "Algorithm: dynamic_programming, recursive_programming, sharding_propagation, ilp or exhaustive.",
            "dynamic_programming",
            known=completion.algorithms,
        ),
    ] = None
    objective: Annotated[
        str | None,
        word(
            SEARCH,
            "WORD",
            "Minimize: time of a step, memory per device, or cost (device-seconds; may use fewer devices).",
            "time",
            known=completion.objectives,
        ),
    ] = None
    top: Annotated[int | None, number(SEARCH, "Show the N best plans.", "1", most=1000)] = None
    pareto: Annotated[bool, switch(SEARCH, "--pareto", "Show the Pareto front of time against memory.")] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop after this many seconds, tracing included, with the best plan so far and its gap.",
            min=0.0,
            rich_help_panel=SEARCH,
        ),
    ] = None
    memory_limit: Annotated[
        str | None, word(SEARCH, "SIZE", "Memory per device that the plan may use, as in 64GiB.")
    ] = None
    memory_margin: Annotated[
        str | None,
        word(
            SEARCH,
            "SHARE",
            "Share of the predicted peak that is left free for its error, as in 5%; 0% fills the device.",
            "by the errors of measured runs with the training stack",
        ),
    ] = None
    planner_memory: Annotated[
        str | None,
        word(
            SEARCH,
            "SIZE",
            "Memory that the planner itself may use, as in 8GiB. Where it is reached, it answers with the best plan so"
            " far.",
            "most of what is available",
        ),
    ] = None
    rule_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of sharding rules of operators that docs/operators.md does not list. They are found by trial, a"
            " second each; cached ones are verified.",
        ),
    ] = None
    graph_cache: Annotated[
        str | None,
        word(
            SEARCH,
            "FOLDER",
            "Cache of traced graphs of zoo models, keyed by sources and versions; none keeps none, as does"
            " PLAN_GRAPH_CACHE=none.",
            "~/.cache/parallel-planner/graphs",
        ),
    ] = None
    certify: Annotated[
        bool, switch(SEARCH, "--certify", "Check the slowest pipeline rank with an integer program.")
    ] = False

    explain: Annotated[
        bool, switch(OUTPUT, "--explain", "Say what limits the plan, and what the next best would cost.")
    ] = False
    output: Annotated[str | None, word(OUTPUT, "FILE", "Where to write the plan file.", "", "-o", "--output")] = None
    write_all: Annotated[
        bool,
        switch(OUTPUT, "--write-all", "Write the other plans of --top and --pareto too, as NAME-2.json and so on."),
    ] = False
    as_json: Annotated[bool, switch(OUTPUT, "--json", "Print the result as JSON on stdout and nothing else.")] = False
    quiet: Annotated[bool, switch(OUTPUT, "--quiet -q", "Print neither progress nor report.")] = False
    verbose: Annotated[
        bool, switch(OUTPUT, "--verbose -v", "Say on stderr what was evaluated, what was cut off, and why.")
    ] = False

    @property
    def reference(self) -> str:
        """The model to plan, with what is changed of it."""
        from planner.models.overrides import changed_reference

        assert self.model is not None
        return changed_reference(self.model, self.set or ())

    @property
    def device_count(self) -> int:
        """Devices to plan for."""
        from planner.cli.machines import devices_of

        return self.devices or devices_of(self.profile)

    @property
    def profile(self) -> str:
        """The hardware to plan for."""
        return self.hardware or DEFAULT_HARDWARE

    @property
    def speaks(self) -> bool:
        """Whether people read along."""
        return not (self.as_json or self.quiet)

    def given(self) -> tuple[str, ...]:
        """Names of the fields that were given on the command line."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) not in (f.default, [], ()))


def flag(field: str) -> str:
    """How a field is spelled on the command line."""
    return "--json" if field == "as_json" else "--" + field.replace("_", "-")


taking_options = taking("options", Options, get_type_hints(Options, include_extras=True))
