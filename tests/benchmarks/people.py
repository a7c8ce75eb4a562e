"""Training runs that people published (data/training_runs.csv), as requests to the planner.

A run is entered by hand: its degrees, ZeRO stage, micro-batch and recomputation are pinned, and the planner prices what
is left. What its source does not say is left to the search, which can only make the entered configuration better.
"""

import csv
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from planner import Pinned
from planner.api.searching import search
from planner.graph.operator_graph import OperatorGraph
from planner.models.dimensions import TRACED_BATCH, Dimensions
from planner.strategy_search.result import SearchResult
from planner.validation.pricing.priced_run import traced
from planner.validation.request.configuration import Job
from planner.validation.request.decoder import padded_vocabulary

DATA = Path(__file__).resolve().parent / "data" / "training_runs.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published run; `step_seconds` is None where the source gives no time."""

    id: str
    name: str
    source: str
    job: Job
    pinned: Pinned
    step_seconds: float | None


def load_runs() -> tuple[Run, ...]:
    """All runs of the file, in its order."""
    with DATA.open(newline="", encoding="utf-8") as file:
        return tuple(_run(row) for row in csv.DictReader(file))


def _run(row: dict[str, str]) -> Run:
    model = Dimensions(
        family=row["family"],  # one of the two words that there are
        layers=int(row["layers"]),
        hidden=int(row["hidden"]),
        ffn=int(row["ffn"]),
        heads=int(row["heads"]),
        kv_heads=int(row["kv_heads"]),
        vocabulary=padded_vocabulary(int(row["vocabulary"])),
        tied=row["tied"] == "1",
        sequence=int(row["sequence"]),
        precision=row["precision"],
    )
    pinned = Pinned(
        pipeline=int(row["pipeline"]),
        virtual_stages=int(row["virtual_stages"]),
        data=int(row["data"]),
        context=1,
        tensor=int(row["tensor"]),
        sequence_parallel=row["sequence_parallel"] == "1" if row["sequence_parallel"] else None,
        zero=int(row["zero"]) if row["zero"] else None,
        micro_batch=int(row["micro_batch"]),
        recompute=row["recompute"],  # one of the three words that there are
    )
    job = Job(model=model, profile=row["profile"], devices=int(row["devices"]), global_batch=int(row["global_batch"]))
    seconds = float(row["step_seconds"]) if row["step_seconds"] else None
    return Run(id=row["id"], name=row["model"], source=row["source"], job=job, pinned=pinned, step_seconds=seconds)


@lru_cache(maxsize=2)
def graph_of(model: Dimensions) -> OperatorGraph:
    """The graph of a model; the last ones are kept."""
    return traced(model)


def planned(job: Job, pinned: Pinned) -> SearchResult:
    """The best plan of a job with what is pinned."""
    return search(
        graph_of(job.model),
        job.profile,
        devices=job.devices,
        batch=TRACED_BATCH,
        global_batch=job.global_batch,
        precision=job.model.precision,
        pinned=pinned,
        simplicity=0.0,
    )


def space_of(runs: tuple[Run, ...]) -> Pinned:
    """What is left to the search so that its space holds these runs: virtual stages only where one of them has some."""
    return Pinned(virtual_stages=0 if any((run.pinned.virtual_stages or 1) > 1 for run in runs) else None)
