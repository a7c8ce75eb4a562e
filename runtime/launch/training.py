"""Trains the model of a plan for some steps, and compares with the unsharded model.

Every rank builds the plan's model from the same seed, keeps its pieces, and gets the same batches, synthetic or from a
dataset. Rank 0 trains the unsharded model beside it. The losses of the two agree up to rounding; `TOLERANCE` is the
allowed difference by precision.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hardware_profiles import DTYPES, Seconds
from hardware_profiles.run_record import dump_run_record
from planner.errors import RequestError
from planner.models.zoo import BuiltModel
from planner.plan.binding.model_of import build_planned
from planner.plan.plan import PRECISIONS, Plan
from planner.plan.writing import write_atomically
from planner.sharding.matrices import matrices_of
from runtime.checkpoint.folder import finished
from runtime.comm.device_mesh import Communicators, RankMesh, current_device, local_rank
from runtime.comm.exchange import gather
from runtime.data.datasets import DatasetBatches, dataset_batches, synthetic_batches
from runtime.launch.checkpointing import Position, RunCheckpoints, restore_plain
from runtime.launch.evaluating import unsharded_loss, validation_of
from runtime.launch.rollback import WayBack
from runtime.ops.randomness import dropping
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.processes.progress import NoticeReport, Report, RunSummary, StepReport
from runtime.processes.rank import At
from runtime.processes.stragglers import LEAST_STEPS, slow_ranks
from runtime.processes.this_machine import elsewhere, peak_memory, predicted_memory
from runtime.profiling.recording import FEWEST, WARM_UP, Recorder
from runtime.reference.per_replica import forward_per_replica
from runtime.reference.unsharded import UnshardedStep
from runtime.run_settings import RunSettings
from runtime.servers.addresses import Addresses
from runtime.step.arguments import Arguments
from runtime.step.same_fp8 import recipes_of
from runtime.step.training_step import TrainingStep, parallelize
from runtime.waiting import timing_waits

TOLERANCE = {name: dtype.tolerance for name, dtype in DTYPES.items() if dtype.tolerance is not None}
"""Largest relative difference at which losses count as equal. Assumed, not derived: float32 sums in another order
differ by about 1e-6 at first and drift with the steps; 16-bit activations have 8 (bf16) or 11 (fp16) bits."""

_WARM_UP = 2  # steps that are not timed


def tolerance_of(precision: str, *, fp8: bool) -> float:
    """The allowed relative difference of losses in a precision. With fp8 products it is at least that of fp16, whatever
    the precision of the rest: sums in another order round single elements the other way, by one part in 16 of them."""
    return max(TOLERANCE[precision], TOLERANCE["fp16"]) if fp8 else TOLERANCE[precision]


def train(
    plan: Plan,
    settings: RunSettings,
    at: At = lambda what: None,
    optimizer: OptimizerSettings | None = None,
    leave: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """The reports of the training steps, one by one, and the summary. Collective. `at` is told what comes next. In an
    elastic run, rank 0 asks after every step whether to `leave`; if so, the run ends with a checkpoint and without a
    summary. A run that resumes after its last step has no reports at all.

    Raises PlannerError where the plan cannot be executed (see `runtime.parallelize`) or the dataset is too small.
    """
    if finished(settings) is not None:
        return
    only_model = settings.steps == 0 or not plan.schedule_kind.trains
    with contextlib.closing(RunCheckpoints(settings, at, only_model=only_model)) as checkpoints:
        yield from _trained(plan, settings, at, optimizer, leave, checkpoints)


def _trained(
    plan: Plan,
    settings: RunSettings,
    at: At,
    optimizer: OptimizerSettings | None,
    leave: Callable[[], bool],
    checkpoints: RunCheckpoints,
) -> Iterator[Report]:
    """The reports of `train`, for a run whose folder is open."""
    device = current_device(local_rank())
    _check_measured(settings)
    at("building the model")
    built = _build(plan, settings)
    at("tracing the model and building the step")
    way_back = WayBack(settings, checkpoints) if settings.guard().rolls_back else None
    step = _parallelized(plan, settings, optimizer, built, device)
    source = checkpoints.restore(step)
    yield from (NoticeReport(text=note) for note in checkpoints.notes)
    if settings.check and not _compares(plan, settings):
        yield NoticeReport(text=_incomparable(plan))
    plain = _plain(built, step, settings, device)
    if plain is not None and source is not None:
        restore_plain(plain, step.rank, source, at)
    if way_back is not None:
        way_back.begin(step, plain)
    run = _Run(plan=plan, settings=settings, step=step, plain=plain, checkpoints=checkpoints, way_back=way_back)
    at("opening the data")
    _check_data(settings, checkpoints)
    validation = validation_of(settings, step, plain, compares=_compares(plan, settings))
    seconds, busy, worst = [], [], 0.0
    if settings.steps == 0 or (validation is not None and not plan.schedule_kind.trains):
        assert validation is not None, "launching has looked"
        only = validation.report(checkpoints.loaded_step, at)
        yield only
        yield run.summary([], [], only.difference if _compares(plan, settings) else None)
        return
    data = _data(built, step, settings, checkpoints.position, at)
    if not plan.schedule_kind.trains:
        yield from _evaluated(run, data, at)
        return
    recorder = Recorder(plan=plan, step=step) if settings.measure is not None else None
    settle = (lambda: None) if recorder is None else recorder.settle()
    for read, call, whole in _timed(data.batches):
        number = step.steps + 1
        at(f"step {number}")
        looking = recorder.profiling() if recorder is not None and number == settings.steps else None
        with looking or contextlib.nullcontext(), timing_waits(settle) as waits:
            report = run.step_report(number, call, whole)
        if recorder is not None and report.trouble is None:
            if looking is None:
                recorder.add(report.seconds, waits)
            else:
                recorder.profiled = report.seconds
        if report.trouble is None and looking is None:
            seconds.append(report.seconds)
            busy.append(report.seconds - waits.seconds + (0.0 if _compares(plan, settings) else read))
        worst = max(worst, report.difference)
        yield report
        if step.steps < number:  # the batch made no step
            continue
        if way_back is not None:
            way_back.keep(step, plain)
        leaving = settings.elastic is not None and number < settings.steps and _said_by_first(leave(), device)
        checkpoints.save(step, data.position(), leaving=leaving)
        if validation is not None and validation.due(number):
            evaluation = validation.report(number, at)
            worst = max(worst, evaluation.difference)
            yield evaluation
        if leaving:
            checkpoints.wait()
            return
        if number == settings.steps:
            break
        at(f"reading the batch of step {number + 1}")
    at("summing up")
    checkpoints.wait()
    if recorder is not None and (record := recorder.record()) is not None:
        write_atomically(Path(str(settings.measure)), dump_run_record(record))
    yield run.summary(seconds, busy, worst if _compares(plan, settings) else None)


def _evaluated(run: "_Run", data: "_Data", at: At) -> Iterator[Report]:
    """The reports of a forward-only plan: one batch after the other, and the summary."""
    seconds, busy, worst = list[float](), list[float](), 0.0
    for number, (read, call, whole) in enumerate(_timed(data.batches), 1):
        at(f"batch {number}")
        with timing_waits() as waits:
            report = run.step_report(number, call, whole)
        seconds.append(report.seconds)
        busy.append(report.seconds - waits.seconds + (0.0 if _compares(run.plan, run.settings) else read))
        worst = max(worst, report.difference)
        yield report
        if number == run.settings.steps:
            break
    at("summing up")
    yield run.summary(seconds, busy, worst if _compares(run.plan, run.settings) else None)


def _check_measured(settings: RunSettings) -> None:
    """Raise RequestError where too few steps would be measured."""
    if settings.measure is not None and settings.steps < FEWEST:
        raise RequestError(
            f"--measure {settings.measure}: --steps {settings.steps} is too few: {WARM_UP} warm up and the last one is"
            f" profiled; give --steps {FEWEST} or more"
        )


def _build(plan: Plan, settings: RunSettings) -> BuiltModel:
    """The model on the CPU, with the same weights on every rank."""
    torch.manual_seed(settings.seed)
    return build_planned(plan, settings.model, device="cpu")


def _parallelized(
    plan: Plan, settings: RunSettings, optimizer: OptimizerSettings | None, built: BuiltModel, device: torch.device
) -> TrainingStep:
    """The training step of this rank, ready to run."""
    folder = settings.server_folder
    step = parallelize(
        built.module,
        plan,
        optimizer=optimizer,
        device=device,
        known=Communicators(settings.timeout),
        seed=settings.seed,
        guard=settings.guard(),
        rollback=lambda step: None,  # the report rolls back, after the unsharded model has seen the batch
        servers=None if folder is None else Addresses(folder=Path(folder), count=settings.servers),
        lowered=not settings.general,
        compiled=settings.compile,
    )
    step.prepare(*built.args, **built.kwargs)
    return step


def _check_data(settings: RunSettings, checkpoints: RunCheckpoints) -> None:
    """Raise RequestError where a run on a dataset would resume with synthetic data."""
    if settings.dataset is None and checkpoints.position is not None:
        raise RequestError(
            f"{checkpoints.resumed} was trained on a dataset and would continue on synthetic data; give its --dataset,"
            " or start from its weights with --weights"
        )


def _plain(built: BuiltModel, step: TrainingStep, settings: RunSettings, device: torch.device) -> UnshardedStep | None:
    """The unsharded model, on the first rank, if requested."""
    if not (_compares(step.plan, settings) and _is_first(step.place)):
        return None
    pieces = step.pieces
    batched = frozenset(number for number, name in enumerate(step.matcher.names) if name in pieces.batched)
    return UnshardedStep(
        built.module.to(device),
        step.plan.training,
        step.optimizer.settings,
        batched,
        step.rank.pieces,
        dropping=dropping(step.rank.bound.graph),
        recipes=recipes_of(step.rank.bound.graph.operators),
        matrices=matrices_of(step.rank.bound.graph),
        cuts=step.rank.bound.graph.cuts,
        seed=settings.seed,
        forward=forward_per_replica(built.module, step.plan, *step.traced, step.matcher.names, step.place),
    )


def _compares(plan: Plan, settings: RunSettings) -> bool:
    """Whether losses can be compared: a model whose devices have parameters of their own has no unsharded version, and
    training with stale weights has other losses."""
    stale = not plan.schedule_kind.flushes
    return settings.check and not plan.training.update.local_parameters and not stale


def _incomparable(plan: Plan) -> str:
    """Why a run compares no losses, though it was asked to."""
    local = ", ".join(plan.training.update.local_parameters)
    why = f"each device has its own {local}" if local else f"schedule '{plan.schedule}' trains with older weights"
    return f"losses are not compared with those of the unsharded model, which differ: {why}"


def _said_by_first(word: bool, device: torch.device) -> bool:
    """Rank 0's value, on every rank. Collective."""
    said = torch.tensor([word], dtype=torch.uint8, device=device)
    if dist.is_initialized():
        dist.broadcast(said, src=0)
    return bool(said.item())


def _is_first(place: RankMesh) -> bool:
    return place.rank == 0 and place.stage == 0


def _data(built: BuiltModel, step: TrainingStep, settings: RunSettings, position: Position, at: At) -> "_Data":
    """The training data of the run, from a position in its dataset on."""
    if settings.dataset is None:
        used = step.rank.samples // step.plan.training.global_batch
        drawn = synthetic_batches(built, step.plan, step.place.device, settings.seed, used)
        return _Data(batches=((one, one) for one in drawn))
    wanted = _compares(step.plan, settings) and _is_first(step.place)
    dtype = PRECISIONS[step.plan.training.precision]
    found = dataset_batches(settings, step, position=position, dtype=dtype, whole=wanted, at=at)
    return _Data(batches=iter(found), dataset=found)


@dataclass(frozen=True, kw_only=True)
class _Data:
    """For each step this rank's inputs, and the whole batch where the unsharded model needs it; and their dataset, if
    any."""

    batches: Iterator[tuple[Arguments, Arguments | None]]
    dataset: DatasetBatches | None = None

    def position(self) -> Position:
        """The position after the last batch that was returned."""
        return None if self.dataset is None else self.dataset.state()


def _timed(
    batches: Iterator[tuple[Arguments, Arguments | None]],
) -> Iterator[tuple[Seconds, Arguments, Arguments | None]]:
    """Each batch, preceded by the seconds that reading it took."""
    started = time.perf_counter()
    for call, whole in batches:
        yield time.perf_counter() - started, call, whole
        started = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class _Run:
    """The data from which the reports are made."""

    plan: Plan
    settings: RunSettings
    step: TrainingStep
    plain: UnshardedStep | None
    checkpoints: RunCheckpoints
    way_back: WayBack | None

    def step_report(self, number: int, call: Arguments, whole: Arguments | None) -> StepReport:
        if _compares(self.plan, self.settings) and dist.is_initialized():
            dist.barrier()  # the others are ahead of the first rank, which runs two models
        started = time.perf_counter()
        trains = self.plan.schedule_kind.trains
        loss = self.step(*call.args, **call.kwargs) if trains else self.step.evaluate(*call.args, **call.kwargs)
        seconds = time.perf_counter() - started
        samples = self.plan.training.global_batch
        length = self.plan.model.sequence_length
        unsharded = None if self.plain is None or whole is None else self._unsharded(self.plain, whole)
        back = self.step.trouble is not None and self.step.trouble.action == "rollback"
        if back:
            assert self.way_back is not None, "the settings ask for it"
            self.way_back.go_back(self.step, self.plain)
        return StepReport(
            step=number,
            steps=self.settings.steps,
            loss=loss,
            unsharded=unsharded,
            trouble=None if self.step.trouble is None else self.step.trouble.message,
            back_to=self.step.steps if back else None,
            seconds=seconds,
            samples=samples,
            tokens=None if length is None else samples * length,
        )

    def _unsharded(self, plain: UnshardedStep, whole: Arguments) -> float:
        if not self.plan.schedule_kind.trains:
            return unsharded_loss(self.step, plain, whole)
        device, matcher = self.step.place.device, self.step.matcher
        given = matcher.arguments(whole.args, whole.kwargs)
        moved = given.with_tensors([tensor.to(device) for tensor in given.tensors()])
        return plain(moved.args, moved.kwargs, update=self.step.trouble is None)

    def summary(self, seconds: list[float], busy: list[float], worst: float | None) -> RunSummary:
        plan, device = self.plan, self.step.place.device
        length, counted = plan.model.sequence_length, seconds[_WARM_UP:]
        kind, peak = peak_memory(device)
        usual, by_rank = statistics.median(counted) if counted else None, self._busy(busy[_WARM_UP:])
        return RunSummary(
            steps=len(seconds),
            resumed=self.checkpoints.resumed,
            saved=self.checkpoints.saved,
            data="synthetic" if self.settings.dataset is None else self.settings.dataset,
            seconds=usual,
            samples=plan.training.global_batch,
            tokens=None if length is None else plan.training.global_batch * length,
            predicted_seconds=plan.prediction.step_seconds,
            low_seconds=plan.prediction.low_seconds,
            high_seconds=plan.prediction.high_seconds,
            profile=plan.cluster.machine,
            elsewhere=elsewhere(plan.cluster, device),
            busy_seconds=by_rank,
            slow=slow_ranks(by_rank, usual, plan) if usual is not None and len(counted) >= LEAST_STEPS else (),
            peak_bytes=_of_every_rank(peak),
            peak_kind=kind,
            predicted_peak_bytes=predicted_memory(plan.prediction, device),
            precision=plan.training.precision,
            difference=worst,
            tolerance=tolerance_of(plan.training.precision, fp8=bool(plan.training.fp8)),
        )

    def _busy(self, counted: list[float]) -> tuple[float, ...]:
        """The median of each rank, on a CPU only: an accelerator's calls return at once, so host seconds say
        nothing."""
        device = self.step.place.device
        return _of_every_rank(statistics.median(counted)) if counted and device.type == "cpu" else ()


def _of_every_rank(own: float) -> tuple[float, ...]:
    """The numbers of all ranks. Collective."""
    return tuple(gather(float(own), float)) if dist.is_initialized() else (own,)
