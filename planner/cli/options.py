"""The options that `plan` and `plan estimate` share, each stated once.

A command that takes `options: Options` and is decorated with `taking_options` gets one command line option for each
field: `Options` is read as a signature.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

JOB = "What to plan"
HAND = "Decided by hand (all else is searched)"
SEARCH = "Search"
OUTPUT = "Output"

DEFAULT_DEVICES = 8
DEFAULT_HARDWARE = "h100-80gb"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What was asked for on the command line; None and () stand for what was not."""

    model: Annotated[
        str | None,
        typer.Option(help="A model of the zoo (see `plan models`) or package.module:factory.", rich_help_panel=JOB),
    ] = None
    devices: Annotated[
        int | None,
        typer.Option(help="How many devices to plan for.", show_default="8", min=1, max=2**20, rich_help_panel=JOB),
    ] = None
    hardware: Annotated[
        str | None,
        typer.Option(
            help="A hardware profile (see `plan profiles`) or a TOML file.",
            show_default=DEFAULT_HARDWARE,
            rich_help_panel=JOB,
        ),
    ] = None
    seq_len: Annotated[
        int | None,
        typer.Option(help="Tokens per sample; the model's own where not given.", min=1, max=2**31, rich_help_panel=JOB),
    ] = None
    global_batch: Annotated[
        int | None,
        typer.Option(help="Samples per step; 4 per device where not given.", min=1, max=2**31, rich_help_panel=JOB),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="bf16, fp16 or fp32 compute, fp32 master weights; bf16 where not given, fp32 on CPUs.",
            rich_help_panel=JOB,
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(help="adamw or sgd (with momentum).", show_default="adamw", rich_help_panel=JOB),
    ] = None
    full_trace: Annotated[
        bool,
        typer.Option(
            "--full-trace",
            help="Trace every repeated block by itself; slower, the same graph.",
            rich_help_panel=JOB,
        ),
    ] = False
    mode: Annotated[
        str | None,
        typer.Option(
            help="A shortcut: stand_alone, data_parallel, semi_auto_parallel, hybrid_parallel or auto_parallel.",
            show_default="auto_parallel",
            rich_help_panel=HAND,
        ),
    ] = None
    tensor: Annotated[
        int | None, typer.Option(help="Tensor parallel degree: splits weights.", min=1, rich_help_panel=HAND)
    ] = None
    pipeline: Annotated[int | None, typer.Option(help="Pipeline stages.", min=1, rich_help_panel=HAND)] = None
    data: Annotated[
        int | None, typer.Option(help="Data parallel degree: splits the batch.", min=1, rich_help_panel=HAND)
    ] = None
    context: Annotated[
        int | None, typer.Option(help="Context parallel degree: splits the sequence.", min=1, rich_help_panel=HAND)
    ] = None
    expert: Annotated[int | None, typer.Option(help="Expert parallel degree.", min=1, rich_help_panel=HAND)] = None
    zero: Annotated[
        int | None,
        typer.Option(
            help="What data parallel groups share out: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too.",
            min=0,
            max=3,
            rich_help_panel=HAND,
        ),
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Whether norms split the sequence over the tensor parallel devices.",
            show_default=False,
            rich_help_panel=HAND,
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        typer.Option(help="Samples of a micro-batch in each data parallel group.", min=1, rich_help_panel=HAND),
    ] = None
    micro_batches: Annotated[int | None, typer.Option(help="Micro-batches per step.", min=1, rich_help_panel=HAND)] = (
        None
    )
    virtual_stages: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="Stages on each pipeline rank; more than 1 can be priced, not run.",
            show_default="1",
            rich_help_panel=HAND,
        ),
    ] = None
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Axes inside a stage, slowest links first, as in 8x4; in place of degrees.", rich_help_panel=HAND
        ),
    ] = None
    recompute: Annotated[
        str | None, typer.Option(help="Recomputation: none, selective or full.", rich_help_panel=HAND)
    ] = None
    shard: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=STRATEGY",
            help="How the operators that match are split: '*q_proj*=b,o' names a factor for each mesh axis (- for none,"
            " * for any), '*q_proj*=((4,1),(1,2))' the pieces of each dim. Repeat it for more.",
            rich_help_panel=HAND,
        ),
    ] = None
    shard_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLAN[:PATTERN]",
            help="Take the strategies of a plan file, of the operators that it lists and that match.",
            rich_help_panel=HAND,
        ),
    ] = None
    search: Annotated[
        str | None,
        typer.Option(
            metavar="ALGORITHM",
            help="dynamic_programming, recursive_programming, sharding_propagation, ilp or exhaustive.",
            show_default="dynamic_programming",
            rich_help_panel=SEARCH,
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(
            help="What to make least: time of a step, memory of a device, or cost (devices times time; may use fewer"
            " devices).",
            show_default="time",
            rich_help_panel=SEARCH,
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            metavar="K", help="Show the K best plans.", show_default="1", min=1, max=1000, rich_help_panel=SEARCH
        ),
    ] = None
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="Show the fastest plan for less and less memory.", rich_help_panel=SEARCH),
    ] = False
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Stop searching after that long, with the best plan so far and its gap.",
            min=0.0,
            rich_help_panel=SEARCH,
        ),
    ] = None
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Use at most this much memory of a device, as in 64GiB.",
            rich_help_panel=SEARCH,
        ),
    ] = None
    certify: Annotated[
        bool,
        typer.Option(
            "--certify", help="Have the slowest rank checked by an independent solver.", rich_help_panel=SEARCH
        ),
    ] = False
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Say what limits the plan, and what the next best costs.", rich_help_panel=OUTPUT
        ),
    ] = False
    output: Annotated[
        str | None, typer.Option("-o", "--output", help="Where to write the plan file.", rich_help_panel=OUTPUT)
    ] = None
    write_all: Annotated[
        bool,
        typer.Option(
            "--write-all",
            help="Write the other plans of --top and --pareto too, as NAME-2.json and so on.",
            rich_help_panel=OUTPUT,
        ),
    ] = False
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON on stdout and nothing else.", rich_help_panel=OUTPUT),
    ] = False
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print neither progress nor report.", rich_help_panel=OUTPUT)
    ] = False

    @property
    def device_count(self) -> int:
        """Devices to plan for."""
        return self.devices or DEFAULT_DEVICES

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


def taking_options(command: Callable[..., None]) -> Callable[..., None]:
    """Put one parameter for each field of `Options` in the place of the parameter `options` of a command."""
    hints = get_type_hints(Options, include_extras=True)
    own = inspect.signature(command, eval_str=True)
    fields = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(Options)
    ]
    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.parameters.items() if name != "options"]

    def wrapper(**values: Any) -> None:
        options = Options(**{parameter.name: values.pop(parameter.name) for parameter in fields})
        command(options=options, **values)

    signature = own.replace(parameters=[*kept, *fields])
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what inspect.signature looks at first
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return wrapper
