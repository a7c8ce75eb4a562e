"""Times the steps of a run, term by term: with its own clocks at the ends of passes and of collectives, and with
PyTorch's profiler for one more step.

    step 1 2 | 3 4 5 ... n-1          | n
    warm-up  | terms: the middle half | under the profiler, by class of operators; not counted

Clocks cost a few microseconds for each pass, collective and update. On an accelerator the end of every pass also waits
for its work, so that launches of the next pass do not run ahead; the cost of that is included in the measured terms.

    rank 0   | forward |== all_reduce ==|        a collective ends on all ranks when the last one arrives: the least of
    rank 1   | forward      |= all_red. |        its seconds over ranks is communication, rank 0's remainder is waiting
"""

import contextlib
import datetime
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

import torch
import torch.distributed as dist

from hardware_profiles import OP_CLASSES, Seconds
from hardware_profiles.device import DeviceType
from hardware_profiles.run_record import (
    KIND,
    TERMS,
    VERSION,
    CollectiveCalls,
    MeasuredRun,
    RankTerms,
    RunMachine,
    middle_half,
)
from planner.plan.compare.kernel_names import class_of_operator
from planner.plan.compare.measured import run_plan
from planner.plan.plan import Plan
from runtime.comm.exchange import gather
from runtime.processes.this_machine import device_name, peak_memory
from runtime.step.training_step import TrainingStep
from runtime.waiting import Waits

WARM_UP = 2
"""Number of warm-up steps, which are not timed."""

FEWEST = WARM_UP + 3
"""Minimum steps of a measured run: two warm-up steps, two steps whose terms count, and the one under the profiler."""

_NANO = 10**9  # nanoseconds in a second

_MEMORY = ("weights", "gradients", "optimizer state")


@dataclass(kw_only=True)
class Recorder:
    """Collects the steps of one rank. `seconds` and `terms` are of the steps after the warm-up, in order."""

    plan: Plan
    step: TrainingStep
    seconds: list[Seconds] = field(default_factory=list)
    terms: list[dict[str, Seconds]] = field(default_factory=list)
    cpu: list[dict[str, Seconds]] = field(default_factory=list)
    calls: list[Mapping[tuple[str, str], tuple[int, Seconds, int]]] = field(default_factory=list)
    by_group: list[Mapping[dist.ProcessGroup, list[tuple[str, Seconds]]]] = field(default_factory=list)
    profiled: Seconds | None = None
    operators: dict[str, Seconds] = field(default_factory=dict)

    def add(self, seconds: Seconds, waits: Waits) -> None:
        """Add a step."""
        self.seconds.append(seconds)
        self.terms.append(terms_of(seconds, waits))
        self.cpu.append({name: cpu for name, (_, cpu) in waits.phases.items() if name in TERMS})
        self.by_group.append(waits.by_group)
        self.calls.append({key: (one.count, one.seconds, one.nbytes) for key, one in waits.calls.items()})

    @contextlib.contextmanager
    def profiling(self) -> Iterator[None]:
        """Profile a step with PyTorch's profiler."""
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
        """A function that waits for an accelerator's work; a no-op where calls return when their work is done."""
        device = self.step.place.device
        if device.type == "cpu":
            return lambda: None
        return lambda: torch.get_device_module(device).synchronize(device)

    def record(self) -> MeasuredRun | None:
        """The measured run, on rank 0; None on other ranks. Collective."""
        plan, device = self.plan, self.step.place.device
        counted = self.seconds[WARM_UP:] or self.seconds
        middle = middle_half(_of_rank_0(counted, device))
        places = [at + len(self.seconds) - len(counted) for at in middle]
        late = waiting_of(self.by_group, least_seconds(self.by_group, device))
        terms = [without_waiting(said, waited) for said, waited in zip(self.terms, late, strict=True)]
        mine = {name: statistics.fmean(terms[at][name] for at in places) for name in TERMS}
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
                *(self.operators.get(name, 0.0) for name in _CLASSES),
            ]
        )
        if dist.is_initialized() and dist.get_rank() != 0:
            return None
        first = 1 + len(TERMS) + len(_BUSY)
        return MeasuredRun(
            kind=KIND,
            schema_version=VERSION,
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
                for at, name in enumerate(_CLASSES)
                if (seconds := statistics.fmean(row[first + 1 + len(_MEMORY) + at] for row in rows))
            },
            collectives=_calls([self.calls[at] for at in places]),
            peak_kind=kind,
        )


_BUSY = ("forward", "backward", "update")
_CLASSES = (*OP_CLASSES, "recurrent")
"""Classes of the operators that PyTorch's profiler names."""


def terms_of(seconds: Seconds, waits: Waits) -> dict[str, Seconds]:
    """The terms of a step that took `seconds`."""
    inside: dict[str, Seconds] = {}
    for (phase, _), one in waits.calls.items():
        inside[phase] = inside.get(phase, 0.0) + one.seconds
    own = {name: max(0.0, waits.phases.get(name, (0.0, 0.0))[0] - inside.get(name, 0.0)) for name in _BUSY}
    found = {**own, "communication": 0.0, "transfer": 0.0, "reduction": 0.0, "waiting": 0.0}
    for phase, took in inside.items():
        found[_CALLED_IN[phase]] += took
    return {name: {**found, "rest": seconds - sum(found.values())}[name] for name in TERMS}


_GroupCalls: TypeAlias = Sequence[Mapping[dist.ProcessGroup, Sequence[tuple[str, Seconds]]]]
"""Calls on each group with their phases and seconds, in order, step by step."""


def least_seconds(steps: _GroupCalls, device: torch.device) -> dict[dist.ProcessGroup, list[Seconds]]:
    """The minimum seconds of each call over the ranks of its group, over all steps in order. Collective: all ranks
    process groups in the order of their members, so that no deadlock occurs."""
    found = {}
    groups = {group: None for step in steps for group in step}
    for group in sorted(groups, key=lambda one: (dist.get_process_group_ranks(one), one.group_name)):
        own = [seconds for step in steps for _, seconds in step.get(group, ())]
        counts = torch.tensor([len(own), -len(own)], device=device)
        dist.all_reduce(counts, dist.ReduceOp.MIN, group)
        assert counts[0] == -counts[1], "the ranks of a group make the same calls on it"
        whole = [int(seconds * _NANO) for seconds in own]
        least = torch.tensor(whole, dtype=torch.int64, device=device)  # HCCL reduces no float64
        dist.all_reduce(least, dist.ReduceOp.MIN, group)
        found[group] = [nanoseconds / _NANO for nanoseconds in least.tolist()]
    return found


def waiting_of(steps: _GroupCalls, least: Mapping[dist.ProcessGroup, Sequence[Seconds]]) -> list[dict[str, Seconds]]:
    """Seconds of waiting in each step, by phase: the time of calls beyond the minimum in their group."""
    left = {group: iter(seconds) for group, seconds in least.items()}
    found = []
    for step in steps:
        waited: dict[str, Seconds] = {}
        for group, calls in step.items():
            for phase, seconds in calls:
                waited[phase] = waited.get(phase, 0.0) + seconds - next(left[group])
        found.append(waited)
    return found


_CALLED_IN: Mapping[str, str] = {
    "forward": "communication",
    "backward": "communication",
    "update": "reduction",
    "": "transfer",
}
"""The term that includes the calls of each phase."""


def without_waiting(terms: Mapping[str, Seconds], waited: Mapping[str, Seconds]) -> dict[str, Seconds]:
    """The terms of a step, with waiting, given by phase, moved to a separate term; their sum is unchanged."""
    found = dict(terms)
    for phase, seconds in waited.items():
        found[_CALLED_IN[phase]] -= seconds
        found["waiting"] += seconds
    return found


def _of_rank_0(seconds: list[Seconds], device: torch.device) -> list[Seconds]:
    """The step seconds of rank 0, so that all ranks use terms of the same steps. Collective."""
    if not dist.is_initialized():
        return seconds
    found = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.broadcast(found, src=0)
    return [float(one) for one in found.tolist()]


def _held(step: TrainingStep) -> dict[str, float]:
    """Bytes of this rank's stored pieces, by class."""
    parameters = step.rank.parameters.values()
    return {
        "weights": float(sum(one.piece.nbytes for one in parameters)),
        "gradients": float(sum(one.leaf.numel() * one.sums.itemsize for one in parameters)),
        "optimizer state": float(sum(one.nbytes for one in step.rank.optimizer.states())),
    }


def _gathered(own: list[float]) -> list[list[float]]:
    """The rows of numbers of all ranks. Collective."""
    return gather([float(one) for one in own], list[float]) if dist.is_initialized() else [own]


def _calls(steps: list[Mapping[tuple[str, str], tuple[int, Seconds, int]]]) -> tuple[CollectiveCalls, ...]:
    """This rank's calls per step, averaged over steps."""
    keys = dict.fromkeys(key for step in steps for key in step)
    mean = {
        key: [sum(step.get(key, (0, 0.0, 0))[at] for step in steps) / len(steps) for at in range(3)] for key in keys
    }
    return tuple(
        CollectiveCalls(phase=phase, call=call, calls=calls, seconds=seconds, nbytes=nbytes)
        for (phase, call), (calls, seconds, nbytes) in mean.items()
    )
