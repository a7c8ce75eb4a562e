"""Rows evaluated by the search with every decision pinned, so that it prices the one configuration that was run.

A configuration is evaluated on a machine with unlimited memory, so that no choice depends on what fits. A configuration
that does not fit by our memory model still has a time, and a peak that shows how far we are off.

Rows of one model share its traced graph. With several processes, rows are handed out in chunks of one model each.
Results come back in the order of the rows, whatever the number of processes.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, get_context

from costmodels import CostModelError
from hardware_profiles import TRAINED, Cluster, HardwareProfileError, is_known, spread_of
from planner.errors import PlannerError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.models.dimensions import TRACED_BATCH, Dimensions
from planner.plan.binding.bind import bind
from planner.plan.plan import Prediction
from planner.plan.prediction.predict import predict
from planner.validation.pricing.peak import (
    KIND_WORDS,
    Peaks,
    is_of_last_rank,
    kind_of_peak,
    least_needed,
    peak_ends,
    peak_of,
)
from planner.validation.pricing.priced_run import priced_run, traced
from planner.validation.pricing.unpriced import NAME, not_priced, words
from planner.validation.reading.cells import PeakKind
from planner.validation.reading.rows import Row
from planner.validation.request.configuration import Run, run_of
from planner.validation.request.contradictions import refuse_peak, refuse_rate
from planner.validation.results.evaluated import Evaluated
from planner.validation.stack.allocation import as_allocated
from planner.validation.stack.software import machine_of_run

CHUNK = 60
"""Rows that a process takes at once: tracing a model again costs as much as evaluating a few of its rows."""

FEW = 12
"""With this many rows or fewer, starting processes does not pay."""

_ENDLESS = 1e18  # bytes

_REFUSED = (PlannerError, HardwareProfileError, CostModelError)
"""What refuses a row, and no other one."""

Change = Callable[[Cluster], Cluster]
"""Makes another machine of the one on which a row ran; must be a function that pickles."""


def as_it_is(cluster: Cluster) -> Cluster:
    """No change."""
    return cluster


def evaluate_rows(
    rows: Sequence[Row],
    processes: int = 1,
    on_done: Callable[[int], None] = lambda _: None,
    change: Change = as_it_is,
) -> tuple[Evaluated, ...]:
    """Evaluate all rows; results are in their order.

    Args:
        rows: the rows.
        processes: number of processes.
        on_done: is called with the number of rows that were just finished.
        change: is applied to every machine.

    Raises:
        RequestError: a process was killed.
    """
    found: dict[int, Evaluated] = {}  # by line: of two rows with one name, the second is also there, as refused
    chunks = list(chunks_of(rows))
    if processes <= 1 or len(rows) <= FEW:
        for chunk in chunks:
            found.update((one.row.line, one) for one in evaluate_chunk(chunk, change))
            on_done(len(chunk))
    else:
        before = set(active_children())
        with ProcessPoolExecutor(
            min(processes, len(chunks)), get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
        ) as pool:
            waiting = {pool.submit(evaluate_chunk, chunk, change) for chunk in sorted(chunks, key=len, reverse=True)}
            try:
                for done in as_completed(waiting):
                    results = done.result()
                    found.update((one.row.line, one) for one in results)
                    on_done(len(results))
            except BrokenProcessPool as error:
                raise RequestError(
                    f"one of {processes} processes was killed, for want of memory perhaps; give --processes 1"
                ) from error
            except BaseException:  # else processes would first finish the rows that they have
                for process in set(active_children()) - before:
                    process.terminate()
                pool.shutdown(cancel_futures=True)  # the pool waits for them: of two waiters one may return early
                raise
    return tuple(found[row.line] for row in rows)


def evaluate_chunk(
    rows: Iterable[Row], change: Change = as_it_is, graphs: dict[Dimensions, OperatorGraph] | None = None
) -> list[Evaluated]:
    """Evaluate rows one after the other.

    The graph of a model is kept while the next rows have the same model; with `graphs` also across calls.
    """
    graphs = {} if graphs is None else graphs
    return [_evaluated(row, change, graphs) for row in rows]


def _evaluated(row: Row, change: Change, graphs: dict[Dimensions, OperatorGraph]) -> Evaluated:
    notes: tuple[str, ...] = ()
    if row.fault:
        return Evaluated(row=row, error=row.fault)
    try:
        run = run_of(row)
        notes = run.notes
        machine, notes = machine_of(row, run)
        refuse_peak(row, machine.device.memory)
        cluster = change(machine)
        if run.job.model not in graphs:
            graphs.clear()
            graphs[run.job.model] = traced(run.job.model)
        endless = replace(cluster, device=replace(cluster.device, memory=_ENDLESS))
        graph, software = graphs[run.job.model], cluster.software
        live = endless.with_software(as_allocated(row, software, run.pinned.zero or 0, run.states.optimizer))
        plan, prediction, more = priced_run(row, run, live, graph, cluster.device.memory)
        held = None if live.software == software else predict(bind(plan, graph, TRACED_BATCH), endless)
        notes = (*notes, *more)
        dtype = software.products or run.job.model.precision
        refuse_rate(row, prediction.model_flops, cluster.device.peak(dtype) * run.job.devices)
        kind = kind_of_peak(row)
    except _REFUSED as error:
        return Evaluated(row=row, notes=notes, error=str(error))
    return _beside(row, run, cluster, prediction, held, kind, notes)


def _beside(
    row: Row,
    run: Run,
    cluster: Cluster,
    prediction: Prediction,
    held: Prediction | None,
    kind: PeakKind | None,
    notes: tuple[str, ...],
) -> Evaluated:
    """A row beside the prediction of its run. `held` has the memory of the software itself, if memory was predicted as
    the row's own allocator counts it."""
    peaks, reported = Peaks.of(prediction, held), Peaks.of(prediction, held, last=is_of_last_rank(row))
    experts = run.job.model.experts is not None
    spread = spread_of(row.text("profile"), experts, known=is_known(row.text("source")))
    device, software = cluster.device, cluster.software
    low, high = peak_ends(reported, device, software, kind)
    beyond = not_priced(row, software.name, prediction.step_seconds)
    notes = (*notes, KIND_WORDS[kind]) if row.measured_peak_bytes is not None else notes
    return Evaluated(
        row=row,
        predicted_seconds=prediction.step_seconds + beyond,
        low_seconds=prediction.step_seconds * spread.low,
        high_seconds=prediction.step_seconds * spread.high,
        predicted_peak_bytes=peak_of(reported, device, software, kind),
        low_peak_bytes=low,
        high_peak_bytes=high,
        peak_kind=kind,
        needed_bytes=least_needed(peaks, device, software),
        capacity_bytes=device.memory,
        time=(*prediction.time, (NAME, beyond)) if beyond else prediction.time,
        notes=(*notes, *words(beyond)),
    )


def machine_of(row: Row, run: Run) -> tuple[Cluster, tuple[str, ...]]:
    """The machine of a row with the software that it used, and the run's notes with those on the software.

    Raises HardwareProfileError.
    """
    notes = list(run.notes)
    cluster = machine_of_run(row, run.job.devices, run.pinned.zero or 0, notes)
    software = replace(
        cluster.software,
        recomputed_in_backward=run.recomputed_in_backward,
        offloads_inputs=run.spared.offloaded > 0,
        remakes=run.spared.remade,
    )
    if not run.states.master_weights:  # only the weight itself is stored, in 16 bits
        narrow = TRAINED[run.job.model.precision].nbytes
        whole = software.name.startswith("fsdp") and run.pinned.zero == 2  # the gathered weight, beside its shard
        weight = 1.0 if whole and software.gathers_narrow else narrow
        software = replace(software, stored=replace(software.stored, weight=weight, master=0.0))
    return cluster.with_software(software), tuple(notes)


def chunks_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows grouped by model, in the order of the first row of each; rows without a model are a group."""
    groups: dict[Dimensions | None, list[Row]] = {}
    for row in rows:
        model = None
        with suppress(*_REFUSED):
            model = None if row.fault else run_of(row).job.model
        groups.setdefault(model, []).append(row)
    for group in groups.values():
        yield from (group[at : at + CHUNK] for at in range(0, len(group), CHUNK))
