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
            JOB, "NAME", "A model of the zoo (see `plan models`) or package.module:factory.", known=completion.models
        ),
    ] = None
    set: Annotated[
        list[str] | None,
        _word(
            JOB,
            "KEY=VALUE",
            "Another value of a dimension of a zoo model or of a config.json, as in num_layers=40. Repeat it for more.",
        ),
    ] = None
    devices: Annotated[
        int | None, _number(JOB, "How many devices to plan for; those of the profile where not given.", most=2**20)
    ] = None
    hardware: Annotated[
        str | None,
        _word(
            JOB,
            "PROFILE",
            "A hardware profile (see `plan profiles`) or a TOML file. Several kinds of devices are groups,"
            " h100-80gb:32,a100-80gb:32,between@12.5: a pipeline of 32 H100 and 32 A100, with 12.5 GB/s per device from"
            " one group to the other (that of the slower network where it is not said).",
            DEFAULT_HARDWARE,
            known=completion.profiles,
        ),
    ] = None
    cluster: Annotated[
        str | None,
        _word(
            JOB,
            "LEVELS",
            "Levels of the network where they differ from the profile, innermost first: node=4,rack=8@50,cluster@25/2"
            " has 4 devices a node, 8 nodes a rack with 50 GB/s per device and direction, and 25 GB/s beyond, where two"
            " devices share an uplink. What is left out of a level is the profile's.",
        ),
    ] = None
    software: Annotated[
        str | None,
        _word(
            JOB,
            "STACK",
            "The training stack that will run the plan: what it fuses, hides, keeps and launches changes its time and"
            " its memory. pytorch is our runtime; `plan stacks` lists the others.",
            "pytorch",
            known=completion.stacks,
        ),
    ] = None
    seq_len: Annotated[int | None, _number(JOB, "Tokens per sample; the model's own where not given.", most=2**31)] = (
        None
    )
    global_batch: Annotated[int | None, _number(JOB, "Samples per step; 4 per device where not given.", most=2**31)] = (
        None
    )
    imbalance: Annotated[
        float | None,
        typer.Option(
            metavar="TIMES",
            help="Rows of the device with the most of them over the average, where experts are divided among devices:"
            " its products, its messages and what it keeps are that much more. 1, a router that gives all the same,"
            " where not given.",
            rich_help_panel=JOB,
        ),
    ] = None
    precision: Annotated[
        str | None,
        _word(
            JOB,
            "WORD",
            "bf16, fp16 or fp32 compute, fp32 master weights; bf16 where not given, fp32 on CPUs.",
            known=completion.precisions,
        ),
    ] = None
    optimizer: Annotated[
        str | None, _word(JOB, "WORD", "adamw, sgd (with momentum) or lamb.", "adamw", known=completion.optimizers)
    ] = None
    full_trace: Annotated[
        bool, _switch(JOB, "--full-trace", "Trace every repeated block by itself; slower, the same graph.")
    ] = False

    mode: Annotated[
        str | None,
        _word(
            HAND,
            "MODE",
            "A shortcut: stand_alone, data_parallel, semi_auto_parallel, hybrid_parallel or auto_parallel.",
            "auto_parallel",
            known=completion.modes,
        ),
    ] = None
    tensor: Annotated[int | None, _number(HAND, "Tensor parallel degree: splits weights.")] = None
    pipeline: Annotated[int | None, _number(HAND, "Pipeline ranks, one stage each.")] = None
    data: Annotated[int | None, _number(HAND, "Data parallel degree: splits the batch.")] = None
    context: Annotated[int | None, _number(HAND, "Context parallel degree: splits the sequence.")] = None
    context_by: Annotated[
        str | None,
        _word(
            HAND,
            "WORD",
            "How attention is split among the devices of --context: heads (all-to-all, as Ulysses), ring (keys and"
            " values come round), hybrid (by heads inside of a ring), or auto: the search compares them, and degrees"
            " where --context is not given.",
            "heads",
            known=completion.contexts,
        ),
    ] = None
    ulysses: Annotated[
        int | None, _number(HAND, "Of the devices of --context those by heads, for --context-by hybrid or auto.")
    ] = None
    zigzag: Annotated[
        bool | None,
        _switch(
            HAND,
            "--zigzag/--no-zigzag",
            "Whether a ring of causal attention cuts the sequence in zigzag order, which balances its work; it does.",
        ),
    ] = None
    expert: Annotated[int | None, _number(HAND, "Into how many parts experts are cut, over data and context.")] = None
    zero: Annotated[
        int | None,
        _number(
            HAND,
            "What data parallel groups share out: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.",
            least=0,
            most=3,
        ),
    ] = None
    replicas: Annotated[
        int | None,
        _number(HAND, "Groups of data parallel devices that share out, each for itself, what --zero says (HSDP)."),
    ] = None
    micro_batch: Annotated[int | None, _number(HAND, "Samples of a micro-batch in each data parallel group.")] = None
    micro_batches: Annotated[int | None, _number(HAND, "Micro-batches per step.")] = None
    virtual_stages: Annotated[
        str | None,
        _word(HAND, "N|auto", "Stages on each pipeline rank (interleaved).", "1"),
    ] = None
    schedule: Annotated[
        str | None,
        _word(
            HAND,
            "NAME",
            "Order of a pipeline's turns: 1f1b, gpipe, interleaved_1f1b, zb_h1, seqpipe; without a flush: pipedream,"
            " pipedream_2bw.",
            "the fastest of the first four",
            known=completion.schedules,
        ),
    ] = None
    copies: Annotated[
        str | None,
        _word(HAND, "N|auto", "Micro-batches at a time, of which one computes while another communicates.", "1"),
    ] = None
    slices: Annotated[
        str | None,
        _word(HAND, "N|auto", "Parts of the sequence that a stage takes one after the other (seqpipe).", "1"),
    ] = None
    mesh: Annotated[
        str | None,
        _word(HAND, "AxB", "Axes inside a stage, slowest links first, as in 8x4; in place of degrees."),
    ] = None

    sequence_parallel: Annotated[
        bool | None,
        _switch(
            BLOCKS,
            "--sequence-parallel/--no-sequence-parallel",
            "Whether norms split the sequence over the tensor parallel devices.",
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
            "What is kept outside of the device while it is not needed: optimizer (its states), activations (those that"
            " flow into recomputed blocks), saved (those that other blocks save for their backward pass), weights (of"
            " repeated blocks), on the host or, as in optimizer:disk, on a disk; auto: what makes the step fastest;"
            " none. Several are joined by commas.",
            "none",
            known=completion.offload,
        ),
    ] = None
    shard: Annotated[
        list[str] | None,
        _word(
            OPERATORS,
            "PATTERN=STRATEGY",
            "How the operators that match are split. '*q_proj*=b,o' names a factor for each mesh axis: - for none, *"
            " for any. '*q_proj*=((4,1,1),(2,1))' says into how many pieces each dim of each operand is cut."
            " Repeat it for more.",
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        _word(
            OPERATORS,
            "PLAN[:PATTERN]",
            "Take the strategies of a plan file, of the operators that it lists and that match.",
        ),
    ] = None

    gradients: Annotated[
        str | None,
        _word(
            GRADIENTS,
            "WORD",
            "mean: of the mean loss over the global batch; sum: that times micro-batches and pieces of the samples.",
            "mean",
            known=completion.gradients,
        ),
    ] = None
    gradient_dtype: Annotated[
        str | None,
        _word(
            GRADIENTS,
            "WORD",
            "Of sums over micro-batches and devices: fp32, parameter (that of the weights), or mixed: fp32, but what"
            " ZeRO 2 and 3 reduce in each micro-batch in that of the weights.",
            "mixed",
            known=completion.gradient_dtypes,
        ),
    ] = None
    master_weights: Annotated[
        bool | None,
        _switch(
            GRADIENTS, "--master-weights/--no-master-weights", "Whether 16-bit weights have an fp32 copy; they do."
        ),
    ] = None
    clip_norm: Annotated[
        float | None,
        typer.Option(
            metavar="NORM", help="Shorten gradients whose global norm is more than that.", rich_help_panel=GRADIENTS
        ),
    ] = None
    buckets: Annotated[
        str | None,
        _word(
            GRADIENTS,
            "WORD|SIZE|LIST",
            "Gradients, and new weights, that are sent as one message: auto (a size that suits the links, or none where"
            " that is no slower), none, a size as in 25MiB, 20,35 (parameters 0 to 19, 20 to 34, the rest), or"
            " '*attn*=0,*mlp*=1' (equal numbers together).",
            "auto",
        ),
    ] = None
    gathers: Annotated[
        str | None,
        _word(
            GRADIENTS,
            "each|block|ahead|auto",
            "Weights that are gathered for their use: each when it is used; those of a block together when it begins,"
            " and their gradients together when all are there; or the same ahead, while the block before it runs."
            " auto searches with each of them and takes the fastest plan.",
            "each",
        ),
    ] = None
    broadcast: Annotated[
        bool, _switch(GRADIENTS, "--broadcast", "Send the weights of rank 0 to all others at the start.")
    ] = False
    local_parameters: Annotated[
        list[str] | None,
        _word(
            GRADIENTS,
            "PATTERN",
            "Parameters that every device has for itself, and whose gradients are not reduced. Repeat it for more.",
        ),
    ] = None

    place: Annotated[
        list[str] | None,
        _word(
            OPERATORS,
            "PATTERN=WHERE",
            "Tables of embeddings that are not on the devices: on the host, shared out over the ranks, or on servers"
            " (docs/parameter-servers.md). Repeat it for more. auto: on the host where that is faster; none: all on the"
            " devices; where nothing is said, on the host where nothing fits otherwise.",
        ),
    ] = None

    search: Annotated[
        str | None,
        _word(
            SEARCH,
            "ALGORITHM",
            "dynamic_programming, recursive_programming, sharding_propagation, ilp or exhaustive.",
            "dynamic_programming",
            known=completion.algorithms,
        ),
    ] = None
    objective: Annotated[
        str | None,
        _word(
            SEARCH,
            "WORD",
            "What to make least: time of a step, memory of a device, or cost (devices times time; may use fewer"
            " devices).",
            "time",
            known=completion.objectives,
        ),
    ] = None
    top: Annotated[int | None, _number(SEARCH, "Show the N best plans.", "1", most=1000)] = None
    pareto: Annotated[bool, _switch(SEARCH, "--pareto", "Show the fastest plan for less and less memory.")] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop after that long, tracing and pricing among it, with the best plan so far and its gap.",
            min=0.0,
            rich_help_panel=SEARCH,
        ),
    ] = None
    memory_limit: Annotated[
        str | None, _word(SEARCH, "SIZE", "Use at most this much memory of a device, as in 64GiB.")
    ] = None
    planner_memory: Annotated[
        str | None,
        _word(
            SEARCH,
            "SIZE",
            "Memory of this machine that the planner itself may take, as in 8GiB; --memory-limit is that of a device"
            " of the plan. Where it is reached, the best plan so far is the answer.",
            "most of what is available",
        ),
    ] = None
    rule_cache: Annotated[
        str | None,
        _word(
            SEARCH,
            "FOLDER",
            "Keep in this folder the rules of operators that docs/operators.md does not list. They are found by"
            " trial, which takes a second each; what is read is proved again.",
        ),
    ] = None
    certify: Annotated[
        bool, _switch(SEARCH, "--certify", "Have the slowest pipeline rank checked by an integer program.")
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
