"""What the steps of a run took, term by term: own clocks at the ends of passes and of collectives, the profiler of
PyTorch for one step more.

    step 1 2 | 3 4 5 ... n-1          | n
    warm-up  | terms: the middle half | under the profiler, by class of operators; not counted

Clocks cost a few microseconds for each pass, collective and update. On an accelerator every end of a pass waits for its
work as well, so that launches of the next one are not ahead of it: what that costs is in the terms that it measures.
"""

import contextlib
import datetime
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist

from hardware_profiles import OP_CLASSES, Seconds
from hardware_profiles.device import DeviceType
from hardware_profiles.run_record import (
    KIND,
    TERMS,
    CollectiveCalls,
    MeasuredRun,
    RankTerms,
    RunMachine,
)
from planner.plan.compare.kernel_names import class_of_operator
from planner.plan.compare.measured import run_plan
from planner.plan.plan import Plan
from runtime.processes.this_machine import device_name, peak_memory
from runtime.step.training_step import TrainingStep
from runtime.waiting import Waits

WARM_UP = 2
"""Steps whose times do not count."""

FEWEST = WARM_UP + 3
"""Steps of a run that is measured: two to warm up, two whose terms count, and the one under the profiler."""

_MEMORY = ("weights", "gradients", "optimizer state")


@dataclass(kw_only=True)
class Recorder:
    """Collects the steps of one rank. `seconds` and `terms` are of the steps behind the warm-up, in their order."""

    plan: Plan
    step: TrainingStep
    seconds: list[Seconds] = field(default_factory=list)
    terms: list[dict[str, Seconds]] = field(default_factory=list)
    cpu: list[dict[str, Seconds]] = field(default_factory=list)
    calls: list[Mapping[tuple[str, str], tuple[int, Seconds, int]]] = field(default_factory=list)
    profiled: Seconds | None = None
    operators: dict[str, Seconds] = field(default_factory=dict)

    def add(self, seconds: Seconds, waits: Waits) -> None:
        """Count a step."""
        self.seconds.append(seconds)
        self.terms.append(terms_of(seconds, waits))
        self.cpu.append({name: cpu for name, (_, cpu) in waits.phases.items() if name in TERMS})
        self.calls.append({key: (one.count, one.seconds, one.nbytes) for key, one in waits.calls.items()})

    @contextlib.contextmanager
    def profiling(self) -> Iterator[None]:
        """Looks on at a step with the profiler of PyTorch."""
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self.step.place.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as found:
            yield
        on_device = len(activities) > 1
        for event in found.key_averages():
            own = event.self_device_time_total if on_device else event.self_cpu_time_total
            if event.key.startswith("aten::"):
                name = class_of_operator(event.key.removeprefix("aten::"))
                self.operators[name] = self.operators.get(name, 0.0) + own * 1e-6

    def settle(self) -> Callable[[], None]:
        """What waits for the work of an accelerator; nothing where calls return when their work is done."""
        device = self.step.place.device
        if device.type == "cpu":
            return lambda: None
        return lambda: torch.get_device_module(device).synchronize(device)

    def record(self) -> MeasuredRun | None:
        """The run, on rank 0; None elsewhere. Collective."""
        plan, device = self.plan, self.step.place.device
        counted = self.seconds[WARM_UP:] or self.seconds
        places = [at + len(self.seconds) - len(counted) for at in _middle(counted)]
        mine = {name: statistics.fmean(self.terms[at][name] for at in places) for name in TERMS}
        busy = {name: statistics.fmean(self.cpu[at].get(name, 0.0) for at in places) for name in _BUSY}
        kind, peak = peak_memory(device)
        held = _held(self.step)
        rows = _gathered(
            [
                float(self.step.place.stage),
                *(mine[name] for name in TERMS),
                *(busy[name] for name in _BUSY),
                peak,
                *(held[name] for name in _MEMORY),
                *(self.operators.get(name, 0.0) for name in OP_CLASSES),
            ],
            device,
        )
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        first = 1 + len(TERMS) + len(_BUSY)
        return MeasuredRun(
            kind=KIND,
            schema_version=1,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            plan=run_plan(plan),
            machine=RunMachine(
                name=device_name(device),
                device_type=cast(DeviceType, device.type),
                torch=torch.__version__,
                threads=torch.get_num_threads(),
            ),
            step_seconds=tuple(counted),
            profiled_seconds=self.profiled,
            ranks=tuple(
                RankTerms(
                    stage=int(row[0]),
                    seconds=dict(zip(TERMS, row[1:], strict=False)),
                    cpu_seconds=dict(zip(_BUSY, row[1 + len(TERMS) :], strict=False)),
                    peak_bytes=row[first],
                    memory=dict(zip(_MEMORY, row[first + 1 :], strict=False)),
                )
                for row in rows
            ),
            operators={
                name: seconds
                for at, name in enumerate(OP_CLASSES)
                if (seconds := statistics.fmean(row[first + 1 + len(_MEMORY) + at] for row in rows))
            },
            collectives=_calls([self.calls[at] for at in places]),
            peak_kind=kind,
        )


_BUSY = ("forward", "backward", "update")


def terms_of(seconds: Seconds, waits: Waits) -> dict[str, Seconds]:
    """A step of so many seconds, by its terms."""
    inside: dict[str, Seconds] = {}
    for (phase, _), one in waits.calls.items():
        inside[phase] = inside.get(phase, 0.0) + one.seconds
    own = {name: max(0.0, waits.phases.get(name, (0.0, 0.0))[0] - inside.get(name, 0.0)) for name in _BUSY}
    found = {
        **own,
        "communication": inside.get("forward", 0.0) + inside.get("backward", 0.0),
        "transfer": inside.get("", 0.0),
        "reduction": inside.get("update", 0.0),
    }
    return {name: {**found, "rest": seconds - sum(found.values())}[name] for name in TERMS}


def _middle(seconds: list[Seconds]) -> list[int]:
    """Places of the middle half of the steps by their times: outliers of a busy machine are at the ends."""
    order = sorted(range(len(seconds)), key=lambda at: seconds[at])
    quarter = len(order) // 4
    return sorted(order[quarter : len(order) - quarter])


def _held(step: TrainingStep) -> dict[str, float]:
    """Bytes of the pieces that this rank keeps, by class."""
    parameters = step.rank.parameters.values()
    return {
        "weights": float(sum(one.piece.nbytes for one in parameters)),
        "gradients": float(sum(one.leaf.numel() * one.sums.itemsize for one in parameters)),
        "optimizer state": float(sum(one.nbytes for one in step.rank.optimizer.states())),
    }


def _gathered(own: list[float], device: torch.device) -> list[list[float]]:
    """The rows of numbers of all ranks. Collective."""
    if not dist.is_initialized():
        return [own]
    found = torch.zeros(dist.get_world_size(), len(own), dtype=torch.float64, device=device)
    found[dist.get_rank()] = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(found)
    return [[float(value) for value in row] for row in found.tolist()]


def _calls(steps: list[Mapping[tuple[str, str], tuple[int, Seconds, int]]]) -> tuple[CollectiveCalls, ...]:
    """Calls of a step on this rank, in the mean of some."""
    keys = dict.fromkeys(key for step in steps for key in step)
    mean = {
        key: [sum(step.get(key, (0, 0.0, 0))[at] for step in steps) / len(steps) for at in range(3)] for key in keys
    }
    return tuple(
        CollectiveCalls(phase=phase, call=call, calls=calls, seconds=seconds, nbytes=nbytes)
        for (phase, call), (calls, seconds, nbytes) in mean.items()
    )
