"""`planner.pareto`: the plans between the fastest one and the one with the least memory, or the least cost."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, Unpack, get_args

from hardware_profiles import Bytes, Machine, Seconds
from planner.api.checks import callbacks, names, numbers, public, word
from planner.api.jobs import HARDWARE
from planner.api.requesting import checked, memory_of, request_of
from planner.api.search_options import JobOptions
from planner.errors import LimitError
from planner.limits import limited
from planner.plan.plan import Plan
from planner.strategy_search.objectives import front
from planner.strategy_search.result import Progress, SearchResult

Against: TypeAlias = Literal["memory", "cost"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """A plan of a Pareto front, and the search that found it.

    Attributes:
        result: of the search within the memory of this point, or on its number of devices.
    """

    result: SearchResult

    @property
    def plan(self) -> Plan:
        return self.result.plan

    @property
    def step_seconds(self) -> Seconds:
        """Seconds of a step."""
        return self.plan.prediction.step_seconds

    @property
    def peak_bytes(self) -> Bytes:
        """Bytes of the fullest device."""
        return self.plan.prediction.peak_bytes

    @property
    def device_seconds(self) -> Seconds:
        """Device-seconds of a step, its cost."""
        return self.step_seconds * self.plan.cluster.devices

    @property
    def gap(self) -> float:
        """By how much another plan within this memory, or on this number of devices, may be faster at most, as a
        share."""
        return self.result.gap

    def __repr__(self) -> str:
        devices = self.plan.cluster.devices
        on = f"{devices} device{'s' if devices > 1 else ''}"
        return f"Point({self.step_seconds:.3g} s a step, {self.peak_bytes / 2**30:.3g} GiB, {on}, gap {self.gap:.1%})"


@dataclass(frozen=True, kw_only=True)
class Front:
    """A Pareto front: every later point is slower, and takes less memory of a device, or fewer device-seconds.

    Attributes:
        against: "memory" or "cost".
        points: fastest first.
        stopped: whether it was stopped early, so that points may be missing.
    """

    against: Against
    points: tuple[Point, ...]
    stopped: bool

    @property
    def fastest(self) -> Point:
        return self.points[0]

    def __repr__(self) -> str:
        return f"Front({len(self.points)} plans, time against {self.against})"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas, fastest first: seconds of a step, bytes of a device, device-seconds, gap, and the plan in
        words."""
        return [
            {
                **one.result.to_rows()[0],
                "devices": one.plan.cluster.devices,
                "device_seconds": one.device_seconds,
                "gap": one.gap,
            }
            for one in self.points
        ]


@public
def pareto(
    model: Any,
    hardware: Machine | str | os.PathLike[str] = HARDWARE,
    *,
    against: Against = "memory",
    devices: int | None = None,
    software: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **options: Unpack[JobOptions],
) -> Front:
    """Search the Pareto front of step time against memory or cost, as `plan --pareto`.

    Args:
        model, hardware, devices, software: as for `search`.
        against: "memory": the fastest plan, then the fastest in 90% of the memory that this one takes, and so on until
            nothing fits. "cost": the fastest plan on all devices, then on each number of them that divides it, if that
            takes fewer device-seconds; the global batch stays.
        on_progress: called with a `Progress` after every configuration of every search.
        cancelled: asked between configurations; once it returns True the points so far are returned.
        options: those of `search`. `time_limit` is for all points together.

    Raises:
        RequestError: if the request contradicts itself, its numbers do not divide, or an argument has a wrong type; and
            where there are several kinds of devices.
        ModelError: where the model cannot be found or traced.
        RuleError: where an operator has no rule and cannot get one.
        InfeasibleError: if nothing fits; it says how much memory is missing.
        LimitError: where `time_limit` or `planner_memory` was reached, or it was cancelled, before there was a plan.
    """
    word("against", against, get_args(Against))
    numbers(devices=devices)
    names(software=software)
    callbacks(on_progress=on_progress, cancelled=cancelled)
    asked = checked(options)
    asked["objective"] = "cost" if against == "cost" else "time"
    asked["simplicity"] = 0.0
    stop = cancelled or (lambda: False)
    with limited(asked["time_limit"], memory_of(asked)):
        request = request_of(model, hardware, asked, devices=devices, software=software)
        found = front(request, on_progress or (lambda _: None), stop)
    if not found:
        raise LimitError("cancelled before there was a plan; let the search go on until its first plan", by="interrupt")
    stopped = stop() or any(one.statistics.stopped for one in found)
    return Front(against=against, points=tuple(Point(result=one) for one in found), stopped=stopped)
