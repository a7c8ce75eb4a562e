"""`plan models`, `plan profiles` and `plan stacks`: lists of what is available."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.errors import reporting
from planner.cli.fits import fit_content, print_fit
from planner.cli.output import write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_named, model_named
from planner.errors import RequestError

if TYPE_CHECKING:
    from hardware_profiles import Cluster, Fact, Software

SCHEMA_VERSION = 1  # of the objects that `plan models --json`, `plan profiles --json` and `plan stacks --json` print


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show one model with its dimensions and their source; changed: NAME+KEY=VALUE.",
            callback=model_named,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models of the zoo, or show the dimensions of one and their sources.

    plan models llama8b
    """
    with reporting(as_json):
        from planner.models.zoo import ZOO

        names = tuple(ZOO) if name is None else (name,)
        if as_json:
            found = [_model_content(one) for one in names]
            content = {"models": found} if name is None else found[0]
            write_json(
                "plan models" if name is None else "plan models NAME", {"schema_version": SCHEMA_VERSION, **content}
            )
        elif name is None:
            _print_models(names)
        else:
            _print_model(name)


def _model_content(name: str) -> dict[str, Any]:
    from planner.models.zoo import parameter_count, zoo_entry

    entry = zoo_entry(name)
    return {
        "model": name,
        "family": entry.family,
        "parameters": parameter_count(name),
        "dimensions": dict(entry.dimensions),
        "source": entry.source,
    }


def _print_models(names: tuple[str, ...]) -> None:
    from rich.table import Table

    from planner.models.zoo import parameter_count, zoo_entry
    from planner.report.units import count_text

    table = Table("model", "family", box=None, pad_edge=False, header_style="dim")
    for column in ("parameters", "layers", "hidden", "heads", "sequence"):
        table.add_column(column, justify="right")
    for name in names:
        entry = zoo_entry(name)
        shown = dict(entry.dimensions)
        sizes = [str(shown.get(key, "")) for key in ("num_layers", "hidden_size", "num_heads", "sequence_length")]
        table.add_row(name, entry.family, count_text(parameter_count(name)), *sizes)
    table.caption, table.caption_justify = "plan models NAME has the dimensions of a model and their source.", "left"
    console_of().print(table)


def _print_model(name: str) -> None:
    from rich.table import Table

    content = _model_content(name)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("model", content["model"])
    table.add_row("family", content["family"])
    table.add_row("parameters", f"{content['parameters']:,}")
    for key, value in content["dimensions"].items():
        table.add_row(key, _dimension_text(value))
    table.add_row("source", content["source"])
    console_of().print(table)


def _dimension_text(value: object) -> str:
    """A value in the form of `--set`."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return (
        ("yes" if value else "no")
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def profiles(
    name: Annotated[
        str | None,
        typer.Argument(help="Show one profile with the source of every number.", callback=hardware_named),
    ] = None,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Show its fitted numbers, how well they fit, and how far off training runs are."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the hardware profiles, or show one with its sources.

    plan profiles h100-80gb --fit
    """
    with reporting(as_json):
        from hardware_profiles import load_profile, profile_names

        if name is None:
            if fit:
                raise RequestError("--fit of which profile? name one of those that `plan profiles` lists")
            clusters = [load_profile(known) for known in profile_names()]
            content: dict[str, Any] = {"profiles": [_content(cluster) for cluster in clusters]}
        else:
            clusters = [load_profile(name)]
            content = _content(clusters[0])
            content |= fit_content(clusters[0]) if fit else {"facts": [asdict(fact) for fact in clusters[0].facts]}
        if as_json:
            command = "plan profiles" if name is None else "plan profiles NAME --fit" if fit else "plan profiles NAME"
            write_json(command, {"schema_version": SCHEMA_VERSION, **content})
        elif fit:
            print_fit(clusters[0])
        else:
            _print(clusters, facts=name is not None)


def stacks(
    name: Annotated[str | None, typer.Argument(help="Show one stack with the source of every number.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the training stacks that --software knows, or show one with its sources.

    plan stacks megatron
    """
    with reporting(as_json):
        from hardware_profiles import load_software, software_facts, software_names

        known = [load_software(one) for one in (software_names() if name is None else (name,))]
        if as_json:
            content: dict[str, Any] = {"stacks": [asdict(one) for one in known]}
            if name is not None:
                content = {**asdict(known[0]), "facts": [asdict(fact) for fact in software_facts(name)]}
            command = "plan stacks" if name is None else "plan stacks NAME"
            write_json(command, {"schema_version": SCHEMA_VERSION, **content})
        else:
            _print_stacks(known, None if name is None else software_facts(name))


def _print_stacks(known: "list[Software]", facts: "tuple[Fact, ...] | None") -> None:
    from planner.report.table import table_of

    columns = ("stack", "attention", "whole", "adds", "passes", "host", "tensor", "gathers", "reductions")
    table = table_of("", *columns)
    for one in known:
        yes = ["yes" if answer else "no" for answer in (one.whole_blocks, one.accumulates)]
        shares = [f"{share:.0%}" for share in (one.hidden.tensor, one.hidden.gathers, one.hidden.reductions)]
        table.add_row(one.name, one.attention, *yes, f"{one.passes:g}", f"{one.host:g}", *shares)
    console = console_of()
    console.print(table)
    if facts is None:
        console.print(
            "whole: recomputes blocks to their end; adds: gradients by a pass of its own; passes: traffic of"
            " elementwise kernels; host: launches, times the device's; then what is hidden of tensor parallel"
            " messages, gathers and reductions. plan stacks NAME has the sources."
        )
        return
    sources = table_of("", "number", "value", "kind", "source")
    for fact in facts:
        sources.add_row(fact.key, f"{fact.value:g}", fact.kind, fact.source)
    console.print()
    console.print(sources)


def _content(cluster: "Cluster") -> dict[str, Any]:
    """A profile in a few numbers, in SI units."""
    device = cluster.device
    return {
        "profile": cluster.name,
        "device": device.name,
        "memory_bytes": device.memory,
        "levels": [
            {"name": level.name, "fan_out": level.fan_out, "bytes_per_second": level.bandwidth}
            for level in cluster.levels
        ],
    }


def _measured(profile: str) -> str:
    """The errors of the model on runs measured on a machine."""
    from hardware_profiles import RunError, recorded

    known = next((one for one in recorded(RunError) if one.profile == profile), None)
    if known is None or known.mean_absolute is None or known.bias is None:
        return "No step of a training run on it was compared with a prediction."
    memory = "" if known.memory_mean_absolute is None else f", of peak memory {known.memory_mean_absolute:.0%}"
    return (
        f"Mean error of the step time of {known.timed} training runs measured on it {known.mean_absolute:.0%} (bias"
        f" {known.bias:+.0%}){memory}; plan profiles {profile} --fit has more."
    )


def _print(clusters: "list[Cluster]", *, facts: bool) -> None:
    from planner.report.table import table_of
    from planner.report.units import bytes_text

    if facts:
        table = table_of("", "number", "value", "kind", "source")
        for fact in clusters[0].facts:
            table.add_row(fact.key, f"{fact.value:g}", fact.kind, fact.source)
        table.caption, table.caption_justify = _measured(clusters[0].name), "left"
    else:
        table = table_of("", "profile", "device", "memory", "per node")
        for cluster in clusters:
            node = cluster.devices_per_node
            table.add_row(cluster.name, cluster.device.name, bytes_text(cluster.device.memory), str(node or "any"))
    console_of().print(table)
