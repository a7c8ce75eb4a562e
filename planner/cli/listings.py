"""`plan models` and `plan profiles`: what there is."""

from typing import Annotated

import typer

from planner.cli.errors import reporting


def models() -> None:
    """List the models of the zoo."""
    from rich.console import Console
    from rich.table import Table

    from planner.models.zoo import ZOO

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("model", "family", "layers", "hidden", "heads", "sequence", "source"):
        table.add_column(column, overflow="fold")
    for name, entry in ZOO.items():
        shown = dict(entry.dimensions)
        sizes = [str(shown[key]) for key in ("num_layers", "hidden_size", "num_heads", "sequence_length")]
        table.add_row(name, entry.family, *sizes, entry.source)
    Console(highlight=False).print(table)


def profiles(
    name: Annotated[str | None, typer.Argument(help="Show one profile with the source of every number.")] = None,
) -> None:
    """List the hardware profiles, or show one with its sources."""
    from rich.console import Console
    from rich.table import Table

    from hardware_profiles import load_profile, profile_names
    from planner.report.units import bytes_text

    console = Console(highlight=False)
    with reporting():
        if name is None:
            table = Table("profile", "device", "memory", "per node", box=None, pad_edge=False, header_style="dim")
            for known in profile_names():
                cluster = load_profile(known)
                node = cluster.devices_per_node
                table.add_row(known, cluster.device.name, bytes_text(cluster.device.memory), str(node or "any"))
        else:
            cluster = load_profile(name)
            table = Table("number", "value", "kind", "source", box=None, pad_edge=False, header_style="dim")
            for fact in cluster.facts:
                table.add_row(fact.key, f"{fact.value:g}", fact.kind, fact.source)
        console.print(table)
