"""What strategy files do not state: `plan export` writes it beside them, and `plan import` reads it.

training           the section of a plan file: batch, micro-batches, precision, optimizer, gradients
schedule, slices   in which order pipeline ranks take their turns
blocks             what is recomputed: of how many blocks, "none", "full" or "selective", and what these keep
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels import SCHEDULES
from planner.errors import PlanFileError
from planner.export.description import ExportError
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import OperatorGraph
from planner.plan.file import parse_training, training_content
from planner.plan.plan import RECOMPUTATION, Plan, Training

Running = tuple[str, tuple[int, ...]]
"""How a block runs: its recomputation, and the indexes in it of operators whose results are kept nevertheless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What stands beside a file. `blocks` has groups of blocks that run alike: their number, how, and the names of what
    they keep."""

    sequence_length: int | None
    training: Training
    schedule: str
    slices: int
    blocks: tuple[tuple[int, str, tuple[str, ...]], ...]

    def running(self, graph: OperatorGraph, blocks: Blocks) -> tuple[Running, ...]:
        """How every block runs. Raises ExportError if the model has other blocks."""
        found: list[Running] = []
        for count, recomputation, kept in self.blocks:
            first = len(found)
            if first + count > blocks.count:
                break
            names = [graph.operators[at].name for at in blocks.operators(first)]
            missing = [name for name in kept if name not in names]
            if missing:
                raise ExportError(f"export.json: blocks: block {first} of the model has no operator '{missing[0]}'")
            found += [(recomputation, tuple(names.index(name) for name in kept))] * count
        if sum(count for count, _, _ in self.blocks) != blocks.count:
            raise ExportError(
                f"export.json: blocks: {sum(count for count, _, _ in self.blocks)} are run in its ways, the model has"
                f" {blocks.count}"
            )
        return tuple(found)


def sidecar_content(plan: Plan) -> dict[str, Any]:
    """The sidecar of a plan, as it is in `export.json`."""
    return {
        "sequence_length": plan.model.sequence_length,
        "training": training_content(plan.training),
        "schedule": plan.schedule,
        "slices": plan.slices,
        "blocks": [
            {"blocks": group.blocks, "recomputation": group.recomputation, "kept": list(group.kept)}
            for group in plan.groups
            if group.blocks
        ],
    }


def sidecar_of(content: Mapping[str, Any]) -> Sidecar:
    """The inverse of `sidecar_content`. Raises ExportError for other content."""
    try:
        training = parse_training(content.get("training"))
    except PlanFileError as error:
        raise ExportError(f"export.json: training: {error}") from error
    length, slices, schedule = (content.get(key) for key in ("sequence_length", "slices", "schedule"))
    if (
        not isinstance(schedule, str)
        or schedule not in SCHEDULES
        or type(slices) is not int
        or not (length is None or type(length) is int)
    ):
        raise ExportError("export.json: sequence_length, schedule or slices are none of a plan; export again")
    return Sidecar(
        sequence_length=length,
        training=training,
        schedule=schedule,
        slices=slices,
        blocks=_blocks(content.get("blocks")),
    )


def _blocks(content: object) -> tuple[tuple[int, str, tuple[str, ...]], ...]:
    rows = content if isinstance(content, Sequence) else ()
    good = all(
        isinstance(row, dict)
        and type(row.get("blocks")) is int
        and row.get("recomputation") in RECOMPUTATION
        and isinstance(row.get("kept"), list)
        for row in rows
    )
    if not isinstance(content, list) or not good:
        raise ExportError("export.json: blocks say how blocks are recomputed; export again")
    return tuple((row["blocks"], row["recomputation"], tuple(row["kept"])) for row in rows)
