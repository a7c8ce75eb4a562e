"""The map of ranks to hosts: a row per host, a cell per rank, coloured by pipeline rank."""

from dataclasses import dataclass

from planner.report.data.hosts import Host, Hosts, Rank
from planner.report.html.colours import series
from planner.report.html.figure import Table
from planner.report.html.model import Cell, StageRow


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsView:
    """Rows of cells, their table, and a sentence on what is not shown."""

    rows: tuple[StageRow, ...]
    table: Table
    note: str


def hosts_view(hosts: Hosts) -> HostsView:
    """The cells of all hosts that are shown."""
    left = hosts.count - len(hosts.hosts)
    return HostsView(
        rows=tuple(StageRow(name=f"{hosts.level} {host.number}", cells=_cells(hosts, host)) for host in hosts.hosts),
        table=Table(
            caption="Ranks",
            columns=(hosts.level, "rank", "stage", *hosts.axes),
            rows=tuple(
                (f"{hosts.level} {host.number}", str(rank.number), str(rank.stage), *map(str, rank.places))
                for host in hosts.hosts
                for rank in host.ranks
            ),
        ),
        note=f"{left:,} more look the same." if left else "",
    )


def _cells(hosts: Hosts, host: Host) -> tuple[Cell, ...]:
    return tuple(
        Cell(text=str(rank.number), tip=_tip(hosts, host, rank), colour=series(rank.stage)) for rank in host.ranks
    )


def _tip(hosts: Hosts, host: Host, rank: Rank) -> str:
    places = [f"{axis}: {place}" for axis, place in zip(hosts.axes, rank.places, strict=True)]
    where = f"Rank {rank.number}, on {hosts.level} {host.number} ({host.profile})"
    return "\n".join([where, f"stage {rank.stage}", *places])
