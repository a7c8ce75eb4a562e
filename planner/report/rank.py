"""One rank of a plan on a terminal."""

import re
from collections.abc import Sequence

from rich.console import Console

from planner.plan.layout.rank_view import HeldParameter, RankView, Runs
from planner.report.console import styled
from planner.report.table import table_of

_NUMBER = re.compile(r"\.(\d+)\.")
_MANY = 8
"""Maximum number of ranks of a group that are all listed."""


def print_rank(console: Console, view: RankView, axes: Sequence[str], devices: int) -> None:
    """Print the place of a rank, its groups, and the pieces that it holds."""
    place = ", ".join(f"{name} {at}" for name, at in zip(axes, view.coordinate, strict=True))
    console.print(styled((f"\nRank {view.rank}", "bold"), f" of {devices}", f": {place}" if place else ""))
    for number, first, blocks in view.stages:
        which = f"blocks {first} to {first + blocks - 1}" if blocks else "no blocks"
        console.print(f"stage {number}: {which}")
    if view.peers:
        table = table_of("\nTalks to", "group", "role", "ranks")
        for peers in view.peers:
            table.add_row(peers.name, peers.role, _ranks(peers.ranks))
        console.print(table)
    if view.inputs:
        table = table_of("\nReads of a micro-batch", "input", "shape", "piece")
        for one in view.inputs:
            table.add_row(one.name, _shape(one.shape), piece_text(one.shape, one.piece))
        console.print(table)
    table = table_of(
        "\nHolds (* stands for the numbers of blocks)", "parameter", "shape", "weight", "gradient", "state"
    )
    for name, held in _alike(view.parameters):
        gradient = piece_text(held.shape, held.gradient)
        gradient += f" (a part of the sum on {', '.join(held.partial)})" if held.partial else ""
        pieces = (piece_text(held.shape, held.weight), gradient, piece_text(held.shape, held.state))
        table.add_row(name, _shape(held.shape), *pieces)
    console.print(table)


def piece_text(shape: Sequence[int], piece: Sequence[Runs]) -> str:
    """Runs as Python writes slices: `0:512, :` is the first 512 rows, whole."""
    return ", ".join(
        ":" if runs == ((0, extent),) else "+".join(f"{start}:{stop}" for start, stop in runs) or "nothing"
        for extent, runs in zip(shape, piece, strict=True)
    )


def _alike(parameters: Sequence[HeldParameter]) -> list[tuple[str, HeldParameter]]:
    """Parameters of blocks that are held alike, once, with their number."""
    found: dict[tuple[object, ...], list[HeldParameter]] = {}
    for one in parameters:
        key = (_NUMBER.sub(".*.", one.name), one.shape, one.weight, one.gradient, one.state, one.partial)
        found.setdefault(key, []).append(one)
    return [(f"{key[0]} ({len(same)})" if len(same) > 1 else same[0].name, same[0]) for key, same in found.items()]


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MANY:
        return ", ".join(map(str, ranks))
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]} ({len(ranks)})"


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"
