"""The options that `plan` and `plan estimate` share, each stated once.

A command that takes `options: Options` and is decorated with `taking_options` gets one command line option for each
field: `Options` is read as a signature. `taking` does the same with other dataclasses.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from planner.cli import completion
from planner.cli.completion import completing

JOB = "What to plan"
HAND = "Degrees, decided by hand"
BLOCKS = "Blocks, decided by hand"
OPERATORS = "Operators, decided by hand"
GRADIENTS = "What becomes of gradients"
SEARCH = "Search"
OUTPUT = "Output"

DEFAULT_HARDWARE = "h100-80gb"


def _number(panel: str, text: str, default: str = "", least: int = 1, most: int | None = None) -> Any:
    return typer.Option(
        metavar="N", help=text, min=least, max=most, show_default=default or False, rich_help_panel=panel
    )


def _word(
    panel: str,
    metavar: str,
    text: str,
    default: str = "",
    *names: str,
    known: Callable[[], Iterable[str]] | None = None,
) -> Any:
    """`known` are the words that shells complete."""
    return typer.Option(
        *names,
        metavar=metavar,
        help=text,
        show_default=default or False,
        rich_help_panel=panel,
        autocompletion=None if known is None else completing(known),
    )


def _switch(panel: str, names: str, text: str) -> Any:
    return typer.Option(*names.split(), help=text, show_default=False, rich_help_panel=panel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line; None stands for what was not."""

    model: Annotated[
        str | None,
        _word(
            JOB,
            "NAME",
            "A model of the zoo (see `plan models`), a config.json, or package.module:factory.",
            known=completion.models,
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        _word(
            JOB,
            "KEY=VALUE",
            "Override a dimension of the model, as in num_layers=40. Repeatable.",
        ),
    ] = None
    devices: Annotated[int | None, _number(JOB, "Number of devices (default: those of the profile).", most=2**20)] = (
        None
    )
    hardware: Annotated[
        str | None,
        _word(
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
        _word(
            JOB,
            "LEVELS",
            "Override the network levels of the profile, innermost first: node=4,rack=8@50,cluster@25/2 means 4 devices"
            " per node, 8 nodes per rack at 50 GB/s per device and direction, and 25 GB/s beyond, with 2 devices per"
            " uplink. Levels keep what is left out.",
        ),
    ] = None
    software: Annotated[
        str | None,
        _word(
            JOB,
            "STACK",
            "The training stack that will run the plan. What it fuses, overlaps, keeps and launches changes time and"
            " memory. pytorch is our runtime; `plan stacks` lists the others.",
            "pytorch",
            known=completion.stacks,
        ),
    ] = None
    seq_len: Annotated[
        int | None, _number(JOB, "Sequence length in tokens (default: the model's own).", most=2**31)
    ] = None
    global_batch: Annotated[
        int | None, _number(JOB, "Global batch size in samples (default: 4 per device).", most=2**31)
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
        _word(
            JOB,
            "WORD",
            "Compute dtype: bf16, fp16 or fp32 (default: bf16, on CPUs fp32). Master weights are fp32.",
            known=completion.precisions,
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        _word(JOB, "WORD", "Optimizer: adamw, sgd (with momentum) or lamb.", "adamw", known=completion.optimizers),
    ] = None
    full_trace: Annotated[bool, _switch(JOB, "--full-trace", "Trace every repeated block. Slower, same graph.")] = False

    mode: Annotated[
        str | None,
        _word(
            HAND,
            "MODE",
            "Preset: stand_alone, data_parallel, semi_auto_parallel, hybrid_parallel or auto_parallel.",
            "auto_parallel",
            known=completion.modes,
        ),
    ] = None
    tensor: Annotated[int | None, _number(HAND, "Tensor-parallel degree.")] = None
    pipeline: Annotated[int | None, _number(HAND, "Pipeline-parallel degree.")] = None
    data: Annotated[int | None, _number(HAND, "Data-parallel degree.")] = None
    context: Annotated[int | None, _number(HAND, "Context-parallel degree (splits the sequence).")] = None
    context_by: Annotated[
        str | None,
        _word(
            HAND,
            "WORD",
            "Context parallelism: heads (Ulysses all-to-all), ring (ring attention), hybrid (Ulysses within a ring), or"
            " auto: compare them, and all degrees where --context is not given.",
            "heads",
            known=completion.contexts,
        ),
    ] = None
    ulysses: Annotated[
        int | None, _number(HAND, "Ulysses degree within --context, for --context-by hybrid or auto.")
    ] = None
    zigzag: Annotated[
        bool | None,
        _switch(
            HAND,
            "--zigzag/--no-zigzag",
            "Use zigzag order in causal ring attention, which balances its work (default: on).",
        ),
    ] = None
    expert: Annotated[int | None, _number(HAND, "Expert-parallel degree (divides data x context).")] = None
    zero: Annotated[
        int | None,
        _number(
            HAND,
            "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights.",
            least=0,
            most=3,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        _number(HAND, "HSDP: number of groups that each shard what --zero says."),
    ] = None
    micro_batch: Annotated[int | None, _number(HAND, "Micro-batch size, in samples per data-parallel rank.")] = None
    micro_batches: Annotated[int | None, _number(HAND, "Number of micro-batches per step.")] = None
    virtual_stages: Annotated[
        str | None,
        _word(HAND, "N|auto", "Virtual stages per pipeline rank (interleaved 1F1B).", "1"),
    ] = None
    schedule: Annotated[
        str | None,
        _word(
            HAND,
            "NAME",
            "Pipeline schedule: 1f1b, gpipe, interleaved_1f1b, zb_h1, seqpipe; asynchronous: pipedream, pipedream_2bw.",
            "the fastest of the first four",
            known=completion.schedules,
        ),
    ] = None
    interleave: Annotated[
        str | None,
        _word(HAND, "N|auto", "Interleaved micro-batches: one computes while another communicates.", "1"),
    ] = None
    slices: Annotated[
        str | None,
        _word(HAND, "N|auto", "Sequence slices per micro-batch (seqpipe).", "1"),
    ] = None
    mesh: Annotated[
        str | None,
        _word(HAND, "AxB", "Device mesh of a stage, slowest links first, as in 8x4; in place of degrees."),
    ] = None

    sequence_parallel: Annotated[
        bool | None,
        _switch(
            BLOCKS,
            "--sequence-parallel/--no-sequence-parallel",
            "Sequence parallelism: norms split the sequence over the tensor-parallel devices.",
        ),
    ] = None
    recompute: Annotated[
        str | None, _word(BLOCKS, "WORD", "Recomputation: none, selective or full.", known=completion.recomputation)
    ] = None
    offload: Annotated[
        str | None,
        _word(
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
        _word(
            OPERATORS,
            "PATTERN=STRATEGY",
            "Sharding of the operators that match. '*q_proj*=b,o' names a factor per mesh axis (- for none, * for any)."
            " '*q_proj*=((4,1,1),(2,1))' says how many pieces each dim of each operand is cut into. Repeatable.",
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        _word(
            OPERATORS,
            "PLAN[:PATTERN]",
            "Take shardings from a plan file, for the operators that match.",
        ),
    ] = None

    gradients: Annotated[
        str | None,
        _word(
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
        _word(
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
        _switch(
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
        _word(
            GRADIENTS,
            "WORD|SIZE|LIST",
            "Gradient buckets (also of gathered new weights): auto (a size that suits the links), none, a size as in"
            " 25MiB, 20,35 (parameters 0 to 19, 20 to 34, the rest), or '*attn*=0,*mlp*=1' (equal numbers together).",
            "auto",
        ),
    ] = None
    gathers: Annotated[
        str | None,
        _word(
            GRADIENTS,
            "each|block|ahead|auto",
            "All-gather of ZeRO-3 weights: each at its use; block coalesces those of a block; ahead prefetches them"
            " during the block before; auto searches with each of them and takes the fastest plan.",
            "each",
        ),
    ] = None
    broadcast: Annotated[bool, _switch(GRADIENTS, "--broadcast", "Broadcast the weights of rank 0 at the start.")] = (
        False
    )
    local_parameters: Annotated[
        list[str] | None,
        _word(
            GRADIENTS,
            "PATTERN",
            "Parameters that each device keeps for itself, without gradient reduction. Repeatable.",
        ),
    ] = None

    place: Annotated[
        list[str] | None,
        _word(
            OPERATORS,
            "PATTERN=WHERE",
            "Embedding tables off the devices: on the host (sharded over the ranks) or on parameter servers"
            " (docs/parameter-servers.md). Repeatable. auto: on the host where that is faster; none: on the devices"
            " (default: on the host where nothing fits otherwise).",
        ),
    ] = None

    search: Annotated[
        str | None,
        _word(
            SEARCH,
            "ALGORITHM",
            "Algorithm: dynamic_programming, recursive_programming, sharding_propagation, ilp or exhaustive.",
            "dynamic_programming",
            known=completion.algorithms,
        ),
    ] = None
    objective: Annotated[
        str | None,
        _word(
            SEARCH,
            "WORD",
            "Minimize: time of a step, memory per device, or cost (device-seconds; may use fewer devices).",
            "time",
            known=completion.objectives,
        ),
    ] = None
    top: Annotated[int | None, _number(SEARCH, "Show the N best plans.", "1", most=1000)] = None
    pareto: Annotated[bool, _switch(SEARCH, "--pareto", "Show the Pareto front of time against memory.")] = False
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
        str | None, _word(SEARCH, "SIZE", "Memory per device that the plan may use, as in 64GiB.")
    ] = None
    planner_memory: Annotated[
        str | None,
        _word(
            SEARCH,
            "SIZE",
            "Memory that the planner itself may use, as in 8GiB. Where it is reached, it answers with the best plan so"
            " far.",
            "most of what is available",
        ),
    ] = None
    rule_cache: Annotated[
        str | None,
        _word(
            SEARCH,
            "FOLDER",
            "Cache of sharding rules of operators that docs/operators.md does not list. They are found by trial, a"
            " second each; cached ones are verified.",
        ),
    ] = None
    certify: Annotated[
        bool, _switch(SEARCH, "--certify", "Check the slowest pipeline rank with an integer program.")
    ] = False

    explain: Annotated[
        bool, _switch(OUTPUT, "--explain", "Say what limits the plan, and what the next best would cost.")
    ] = False
    output: Annotated[str | None, _word(OUTPUT, "FILE", "Where to write the plan file.", "", "-o", "--output")] = None
    write_all: Annotated[
        bool,
        _switch(OUTPUT, "--write-all", "Write the other plans of --top and --pareto too, as NAME-2.json and so on."),
    ] = False
    as_json: Annotated[bool, _switch(OUTPUT, "--json", "Print the result as JSON on stdout and nothing else.")] = False
    quiet: Annotated[bool, _switch(OUTPUT, "--quiet -q", "Print neither progress nor report.")] = False
    verbose: Annotated[
        bool, _switch(OUTPUT, "--verbose -v", "Say on stderr what was evaluated, what was cut off, and why.")
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


Command = Callable[..., None]


def taking(parameter: str, kind: type[Any], options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Put one parameter for each of `options`, annotations by fields of a dataclass, in the place of the `parameter` of
    a command that takes that dataclass."""
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    fields = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=annotation)
        for name, annotation in options.items()
    ]

    def taking_them(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [
            one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own.parameters.values() if one.name != parameter
        ]

        def wrapper(**values: Any) -> None:
            given = kind(**{name: values.pop(name) for name in options})
            command(**{parameter: given}, **values)

        signature = own.replace(parameters=[*kept, *fields])
        wrapper.__name__, wrapper.__doc__ = command.__name__, _unwrapped(inspect.getdoc(command) or "")
        wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks at first
        wrapper.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        return wrapper

    return taking_them


taking_options = taking("options", Options, get_type_hints(Options, include_extras=True))


def _unwrapped(text: str) -> str:
    """Every paragraph on one line, so that terminals break lines where they end."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.split("\n\n"))
