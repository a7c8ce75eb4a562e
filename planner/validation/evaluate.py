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
from dataclasses import dataclass, replace
from itertools import accumulate
from multiprocessing import active_children, get_context

from costmodels import CostModelError
from hardware_profiles import TRAINED, Bytes, Cluster, HardwareProfileError, Software, is_known, spread_of
from planner.errors import PlannerError, RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.models.dimensions import TRACED_BATCH, Dimensions, build
from planner.plan.binding.bind import bind
from planner.plan.plan import INTERLEAVED, Plan, Prediction, Stage
from planner.plan.prediction.predict import predict
from planner.sharding.update import DEFAULT, PARAMETERS
from planner.strategy_search.job import given_job
from planner.strategy_search.objectives import plan_for
from planner.strategy_search.request.space import Pinned
from planner.validation.allocation import as_allocated
from planner.validation.cells import PeakKind
from planner.validation.configuration import Job, Run, run_of
from planner.validation.contradictions import refuse_peak, refuse_rate
from planner.validation.peak import (
    KIND_WORDS,
    Peaks,
    is_of_last_rank,
    kind_of_peak,
    least_needed,
    peak_ends,
    peak_of,
)
from planner.validation.rows import Row
from planner.validation.software import machine_of_run
from planner.validation.spared import fewest_recomputed, spared_plan
from planner.validation.unpriced import NAME, not_priced, words

CHUNK = 60
"""Rows that a process takes at once: tracing a model again costs as much as evaluating a few of its rows."""

FEW = 12
"""With this many rows or fewer, starting processes does not pay."""

_ENDLESS = 1e18  # bytes
_NARROW = ("deepspeed-zero3", "internevo")

INFERRED = "recomputation inferred"
"""Start of the note that says what a run must have recomputed, because it does not fit otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A row and its prediction. Without a prediction, values are None and `error` is the reason.

    The step should be measured between `low_seconds` and `high_seconds`, multiples of the priced time, and the peak
    between `low_peak_bytes` and `high_peak_bytes`. `time` has the parts of the step. Peaks are counted as the row
    counts them (`peak_kind`). Only `needed_bytes` is not: with less than this of the device's `capacity_bytes`, the run
    would have stopped.
    """

    row: Row
    predicted_seconds: float | None = None
    low_seconds: float | None = None
    high_seconds: float | None = None
    predicted_peak_bytes: float | None = None
    low_peak_bytes: float | None = None
    high_peak_bytes: float | None = None
    peak_kind: PeakKind | None = None
    needed_bytes: float | None = None
    capacity_bytes: float | None = None
    time: tuple[tuple[str, float], ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def feasible(self) -> bool | None:
        """Whether it fits by our memory model; None if unknown."""
        if self.needed_bytes is None or self.capacity_bytes is None:
            return None
        return self.needed_bytes <= self.capacity_bytes

    @property
    def inferred(self) -> bool:
        """Whether the recomputation was inferred from the memory of the device alone."""
        return any(note.startswith(INFERRED) for note in self.notes)

    @property
    def ran(self) -> bool:
        """Whether the run was made and did not run out of memory."""
        row = self.row
        return not row.out_of_memory and (row.measured_seconds or row.measured_peak_bytes) is not None

    @property
    def seconds_error(self) -> float | None:
        """Relative error of the step time; positive if the prediction is too long. None if unknown."""
        return _relative(self.predicted_seconds, self.row.measured_seconds)

    @property
    def inside(self) -> bool | None:
        """Whether the measured time lies between the ends; None if either is unknown."""
        measured = self.row.measured_seconds
        if measured is None or self.low_seconds is None or self.high_seconds is None:
            return None
        return self.low_seconds <= measured <= self.high_seconds

    @property
    def memory_error(self) -> float | None:
        """Relative error of the peak; None if unknown."""
        return _relative(self.predicted_peak_bytes, self.row.measured_peak_bytes)

    @property
    def peak_inside(self) -> bool | None:
        """Whether the measured peak lies between the ends; None if either is unknown."""
        measured = self.row.measured_peak_bytes
        if measured is None or self.low_peak_bytes is None or self.high_peak_bytes is None:
            return None
        return self.low_peak_bytes <= measured <= self.high_peak_bytes


def _relative(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


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
    results = []
    for row in rows:
        notes: tuple[str, ...] = ()
        if row.fault:
            results.append(Evaluated(row=row, error=row.fault))
            continue
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
            plan, prediction, more = _priced(row, run, live, graph, cluster.device.memory)
            same = live.software == software
            held = None if same else predict(bind(plan, graph, TRACED_BATCH), endless)
            peaks = Peaks.of(prediction, held)
            reported = Peaks.of(prediction, held, last=is_of_last_rank(row))
            notes = (*notes, *more)
            dtype = cluster.software.products or run.job.model.precision
            refuse_rate(row, prediction.model_flops, cluster.device.peak(dtype) * run.job.devices)
            kind = kind_of_peak(row)
        except (PlannerError, HardwareProfileError, CostModelError) as error:
            results.append(Evaluated(row=row, notes=notes, error=str(error)))
            continue
        experts = run.job.model.experts is not None
        spread = spread_of(row.text("profile"), experts, known=is_known(row.text("source")))
        low, high = peak_ends(reported, cluster.device, software, kind)
        beyond = not_priced(row, cluster.software.name, prediction.step_seconds)
        notes = (*notes, KIND_WORDS[kind]) if row.measured_peak_bytes is not None else notes
        results.append(
            Evaluated(
                row=row,
                predicted_seconds=prediction.step_seconds + beyond,
                low_seconds=prediction.step_seconds * spread.low,
                high_seconds=prediction.step_seconds * spread.high,
                predicted_peak_bytes=peak_of(reported, cluster.device, software, kind),
                low_peak_bytes=low,
                high_peak_bytes=high,
                peak_kind=kind,
                needed_bytes=least_needed(peaks, cluster.device, software),
                capacity_bytes=cluster.device.memory,
                time=(*prediction.time, (NAME, beyond)) if beyond else prediction.time,
                notes=(*notes, *words(beyond)),
            )
        )
    return results


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


def traced(model: Dimensions) -> OperatorGraph:
    """The graph of a model with those dimensions and `TRACED_BATCH` samples."""
    from planner.graph.trace import trace

    module, args = build(model)
    return trace(module, args, {})


def chunks_of(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows grouped by model, in the order of the first row of each; rows without a model are a group."""
    groups: dict[Dimensions | None, list[Row]] = {}
    for row in rows:
        model = None
        with suppress(PlannerError):
            model = None if row.fault else run_of(row).job.model
        groups.setdefault(model, []).append(row)
    for group in groups.values():
        yield from (group[at : at + CHUNK] for at in range(0, len(group), CHUNK))


def _priced(
    row: Row, run: Run, cluster: Cluster, graph: OperatorGraph, memory: Bytes
) -> tuple[Plan, Prediction, tuple[str, ...]]:
    """The plan of a run on devices with `memory` bytes, its prediction on unlimited ones, and notes on inferred
    recomputation."""

    def fits(one: Prediction) -> bool:
        return least_needed(Peaks.of(one), cluster.device, cluster.software) <= memory

    def as_run(plan: Plan) -> tuple[Plan, Prediction]:
        if not run.spared.by_block:
            return plan, plan.prediction
        plan = spared_plan(plan, run.spared, graph, TRACED_BATCH)
        return plan, predict(bind(plan, graph, TRACED_BATCH), cluster)

    plan, prediction = as_run(_searched(run, cluster, graph))
    if not run.untold or row.out_of_memory or fits(prediction):
        return plan, prediction, ()
    found = fewest_recomputed(plan, graph, TRACED_BATCH, cluster, fits)
    if found is None:
        return plan, prediction, ("it does not fit with all blocks recomputed, either",)
    count, plan, prediction = found
    return plan, prediction, (f"{INFERRED}: {count} blocks of every pipeline rank, the fewest with which it fits",)


def _searched(run: Run, cluster: Cluster, graph: OperatorGraph) -> Plan:
    job: Job = run.job
    asked = given_job(graph, cluster, batch=TRACED_BATCH, global_batch=job.global_batch, precision=job.model.precision)
    summed = gradient_dtype(cluster.software, asked.precision, run.pinned.zero)
    update = replace(
        DEFAULT,
        gradient_dtype=summed if run.states.master_weights else "parameter",
        master_weights=run.states.master_weights,
        moment_dtype=run.states.moment_dtype,
        clip_norm=run.states.clip_norm,
        zero_by=shared_out_by(cluster.software, run.pinned),
    )
    request = asked.request(placing="fit", pinned=run.pinned, update=update, optimizer=run.states.optimizer)
    result = plan_for(request, lambda _: None, lambda: False)
    return result.plan if run.stages is None else _cut(result.plan, run.stages, graph, cluster)


def shared_out_by(software: Software, pinned: Pinned) -> str:
    """How a stack shards optimizer states under ZeRO 1: in slices, or by whole parameters.

    With replicas (HSDP) they are priced in slices, which is the same within a node.
    """
    whole = software.owns_whole and pinned.zero == 1 and (pinned.replicas or 1) == 1
    return PARAMETERS if whole else DEFAULT.zero_by


def gradient_dtype(software: Software, precision: str, zero: int | None = None) -> str:
    """The dtype in which a stack accumulates and reduces gradients, as a word of a plan's update.

    It is the dtype of parameters in fp16 if the stack keeps nothing wider (`Stored.fp16`). DeepSpeed ZeRO 3 and
    InternEvo do the same in bf16 (`Stored.bf16`). Else it is the default of plans. (NVIDIA's recipes also reduce in
    bf16, but their overlapped shares were fitted to messages in fp32.) In Megatron ZeRO 2 reduces fp32 gradients of
    every micro-batch (Megatron-LLaMA@25306de megatron/optimizer/overlapped_dist_optimizer.py: `collect_param_grad`).
    """
    kept = {"fp16": software.stored.fp16, "bf16": software.stored.bf16 if software.name in _NARROW else None}
    narrow = kept.get(precision) == TRAINED[precision].nbytes
    if not narrow and zero == 2 and software.name == "megatron" and software.stored.bf16 == TRAINED["fp32"].nbytes:
        return "fp32"
    return "parameter" if narrow else DEFAULT.gradient_dtype


def _cut(plan: Plan, layers: tuple[int, ...], graph: OperatorGraph, cluster: Cluster) -> Plan:
    """A plan with one stage per rank, cut into other stages of `layers` layers each."""
    firsts = (0, *accumulate(layers))
    virtual = len(layers) // plan.pipeline
    moved = replace(
        plan,
        stages=tuple(Stage(first_block=first, blocks=count) for first, count in zip(firsts, layers, strict=False)),
        virtual_stages=virtual,
        schedule=INTERLEAVED if virtual > 1 else plan.schedule,
    )
    return replace(moved, prediction=predict(bind(moved, graph, TRACED_BATCH), cluster))
