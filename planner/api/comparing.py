"""Compares one training on several hardware, device counts and software: time, cost, and which is best.

    found = planner.compare("llama70b", ["h100", "h200"], devices=[32, 64], tokens=15e12, price={"h100": 2.5})
    pandas.DataFrame(found.to_rows())

Every combination is a case with its own search; a case that does not work has a reason instead of numbers. Days are
tokens / (tokens per second), with failures as in `costmodels.goodput`; their interval is that of the step. Scaling
efficiency is tokens/s per device relative to the fewest devices, all else equal.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Unpack

from costmodels.goodput import DAY, Goodput
from hardware_profiles import Cluster, Machine
from hardware_profiles.network import capacity_of
from hardware_profiles.nicknames import full_profile
from planner.api.checks import number, public
from planner.api.jobs import HARDWARE, TracedModel, machine_given
from planner.api.requesting import checked
from planner.api.search_options import SearchOptions
from planner.api.searching import search, trace
from planner.errors import PlannerError, RequestError, StoppedBy
from planner.graph.fp8 import WORD
from planner.plan.plan import Plan
from planner.strategy_search.job import default_precision
from planner.strategy_search.result import Progress

Interval = tuple[float, float, float]
"""A prediction with its 80% interval: (middle, low, high)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One combination; each field is a dimension of the comparison."""

    model: str
    hardware: str
    devices: int
    software: str = "pytorch"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A case with its plan, or why there is none.

    Attributes:
        tokens: tokens of the whole training; None where not asked for.
        price: money per device-hour; None where not given.
        slowdown: expected time over training alone, by failures.
        efficiency: of scaling; None where it is compared with nothing.
        stopped_by: what ended the search before its end, so that the plan is the best so far; None if nothing did.
    """

    case: Case
    plan: Plan | None
    reason: str = ""
    tokens: float | None = None
    price: float | None = None
    slowdown: float = 1.0
    efficiency: float | None = None
    stopped_by: StoppedBy | None = None

    @property
    def step(self) -> Interval | None:
        """Seconds of a step."""
        if self.plan is None:
            return None
        found = self.plan.prediction
        middle = found.step_seconds
        return middle, found.low_seconds or middle, found.high_seconds or middle

    @property
    def step_tokens(self) -> int | None:
        """Tokens of a step; None for models without sequences."""
        length = None if self.plan is None else self.plan.model.sequence_length
        return None if self.plan is None or length is None else length * self.plan.training.global_batch

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step is None or self.step_tokens is None else self.step_tokens / self.step[0]

    @property
    def days(self) -> Interval | None:
        """Days of the whole training, including failures."""
        if self.tokens is None or self.step is None or self.step_tokens is None:
            return None
        low, middle, high = (
            one * self.tokens / self.step_tokens * self.slowdown / DAY
            for one in (self.step[1], self.step[0], self.step[2])
        )
        return (middle, low, high) if math.isfinite(high) else None

    @property
    def device_hours(self) -> Interval | None:
        return self._times(24.0 * self.case.devices)

    @property
    def cost(self) -> Interval | None:
        return None if self.price is None else self._times(24.0 * self.case.devices * self.price)

    def _times(self, factor: float) -> Interval | None:
        return None if self.days is None else (self.days[0] * factor, self.days[1] * factor, self.days[2] * factor)

    @property
    def memory_left(self) -> float | None:
        """Bytes of the fullest device that the prediction leaves free."""
        return None if self.plan is None else self.plan.prediction.capacity_bytes - self.plan.prediction.peak_bytes

    def row(self) -> dict[str, object]:
        """For pandas and JSON."""
        step, plan = self.step, self.plan
        return {
            "model": self.case.model,
            "hardware": self.case.hardware,
            "devices": self.case.devices,
            "software": self.case.software,
            **_ends("step_seconds", step),
            "tokens_per_second": self.tokens_per_second,
            "model_flops_utilisation": None if plan is None else plan.prediction.model_flops_utilisation,
            **_ends("days", self.days),
            **_ends("device_hours", self.device_hours),
            **_ends("cost", self.cost),
            "slowdown_by_failures": self.slowdown if math.isfinite(self.slowdown) else None,
            "memory_left_bytes": self.memory_left,
            "scaling_efficiency": self.efficiency,
            "reason": self.reason or None,
            "stopped_by": self.stopped_by,
        }


@dataclass(frozen=True, kw_only=True)
class CaseComparison:
    """Cases side by side. `stopped`: some cases were not searched."""

    outcomes: tuple[Outcome, ...]
    stopped: bool = False

    def __repr__(self) -> str:
        works = sum(one.plan is not None for one in self.outcomes)
        return f"CaseComparison({works} of {len(self.outcomes)} cases work)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas, in the order in which the cases were given."""
        return [one.row() for one in self.outcomes]

    @property
    def fastest(self) -> Outcome | None:
        """The case with most tokens per second, or with the shortest step if there are no tokens."""
        known = [one for one in self.outcomes if one.step is not None]
        return min(known, key=_slowness, default=None)

    @property
    def cheapest(self) -> Outcome | None:
        """The case with the lowest cost if all working cases have a price; else the one with the fewest
        device-hours."""
        known = [one for one in self.outcomes if one.days is not None]
        priced = all(one.cost is not None for one in known)
        return min(known, key=lambda one: _first(one.cost if priced else one.device_hours), default=None)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """The number of devices that train a number of tokens in a number of days: `answer` is the searched case with the
    fewest devices that is fast enough, None if there is none. `looked_at` are all searched cases, by devices.
    `stopped`: other numbers were not searched."""

    days: float
    looked_at: tuple[Outcome, ...]
    stopped: bool = False

    @property
    def answer(self) -> Outcome | None:
        return next((one for one in self.looked_at if _in_time(one, self.days)), None)

    def __repr__(self) -> str:
        found = self.answer
        return f"Capacity({'none' if found is None else found.case.devices} for {self.days:g} days)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import rows_html

        return rows_html(self.to_rows())

    def to_rows(self) -> list[dict[str, object]]:
        """For pandas, by devices."""
        return [one.row() for one in self.looked_at]


@public
def compare(
    model: str | TracedModel | Sequence[str],
    hardware: str | Sequence[str] = HARDWARE,
    *,
    devices: int | Sequence[int],
    software: str | Sequence[str] = "pytorch",
    tokens: float | None = None,
    price: float | Mapping[str, float] | None = None,
    failures: float = 0.0,
    checkpoint_seconds: float = 0.0,
    restart_seconds: float = 0.0,
    on_case: Callable[[Case], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **options: Unpack[SearchOptions],
) -> CaseComparison:
    """Search the best plan for every combination of models, hardware, devices and software, and set them side by side.

    Args:
        model: names as for `search`, one or several; or what `trace` returned.
        hardware, devices, software: one or several of each.
        tokens: of the whole training, for days, device-hours and cost.
        price: money per device-hour, for all hardware or by its name.
        failures: failures per device-day; with `checkpoint_seconds` and `restart_seconds` the days are those expected
            at the best interval of checkpoints (Daly 2006; `costmodels.goodput`).
        on_case: told what is searched next.
        on_progress, cancelled: as for `search`; after `cancelled` the cases that are done are returned.
        options: those of `search`, for all cases: seq_len, global_batch, pinned, ...

    Raises:
        RequestError: for an argument of another type, and where a model or hardware is not known.
    """
    models, names = _several("model", model), _several("hardware", hardware)
    counts, stacks = _several("devices", devices), _several("software", software)
    for count in counts:
        number("devices", count)
    losses, prices = _losses(failures, checkpoint_seconds, restart_seconds), _prices(price, names)
    _check_tokens(tokens)
    checked(options)
    stop, found = cancelled or _never, list[Outcome]()
    traced: dict[tuple[str, str], TracedModel] = {}
    for which, name, count, stack in product(models, names, counts, stacks):
        if stop():
            return CaseComparison(outcomes=_scaled(found), stopped=True)
        machine = machine_given(name, cluster=options.get("cluster"), software=stack, devices=count)
        case = Case(model=_name(which), hardware=machine.name, devices=count, software=stack)
        (on_case or _unheard)(case)
        try:
            known, left = _traced(which, machine, options, traced)
            outcome = _searched(case, known, machine, left, on_progress, stop)
        except KeyboardInterrupt:
            if not (found and stop()):
                raise
            break
        if outcome.plan is None and stop():  # the search was stopped before there was a plan
            break
        rate = prices.get(full_profile(name))
        found.append(replace(outcome, tokens=tokens, price=rate, slowdown=losses.slowdown(count)))
    return CaseComparison(outcomes=_scaled(found), stopped=stop())


@public
def capacity(
    model: str | TracedModel,
    hardware: str = HARDWARE,
    *,
    days: float,
    tokens: float,
    price: float | Mapping[str, float] | None = None,
    failures: float = 0.0,
    checkpoint_seconds: float = 0.0,
    restart_seconds: float = 0.0,
    most: int = 2**16,
    on_case: Callable[[Case], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cancelled: Callable[[], bool] | None = None,
    **options: Unpack[SearchOptions],
) -> Capacity:
    """Find the number of devices that train a number of tokens within a number of days.

    Whole nodes are looked at, 2^k and 3 x 2^k of them up to `most` devices. Fewer devices are taken to be slower, so
    that bisection finds the fewest of these; arguments are those of `compare`.
    """
    number("days", days, least=0, whole=False)
    if not days > 0:
        raise RequestError(f"days = {days}: nothing is trained in no time; give more than 0")
    _check_tokens(tokens)
    if "," in hardware and ":" not in hardware:
        raise RequestError(f"hardware = {hardware}: capacity looks at one profile; ask once for each of them")
    machine = machine_given(hardware, cluster=options.get("cluster"))
    if not isinstance(machine, Cluster):
        raise RequestError(f"hardware = {hardware}: groups say how many devices they have; give one profile")
    node, room = machine.devices_per_node or 8, min(most, capacity_of(machine.levels) or most)
    sizes = sorted({node * times * 2**k for times in (1, 3) for k in range(24) if node * times * 2**k <= room})
    if not sizes:
        raise RequestError(f"most = {most}: a node of {hardware} has {node} devices; give at least as many")
    looked: dict[int, Outcome] = {}
    low, high = -1, len(sizes)  # sizes[low] is too few, sizes[high] enough
    at = min(3, len(sizes) - 1)
    while high - low > 1 and not (cancelled or _never)():
        try:
            (outcome,) = compare(
                model, hardware, devices=sizes[at], tokens=tokens, price=price, failures=failures,
                checkpoint_seconds=checkpoint_seconds, restart_seconds=restart_seconds,
                on_case=on_case, on_progress=on_progress, cancelled=cancelled, **options,
            ).outcomes or (None,)  # fmt: skip
        except KeyboardInterrupt:
            if not (looked and (cancelled or _never)()):
                raise
            break
        if outcome is None:
            break
        if outcome.plan is not None and outcome.step_tokens is None:
            raise RequestError(
                f"tokens = {tokens:g}: {outcome.case.model} has no sequences, whose tokens are counted; compare numbers"
                " of devices (plan compare --model), whose steps are timed"
            )
        looked[sizes[at]] = outcome
        low, high = (low, at) if _in_time(outcome, days) else (at, high)
        guess = at + 2 if outcome.days is None else _near(sizes, sizes[at] * outcome.days[0] / days)
        at = min(max(guess, low + 1), high - 1, len(sizes) - 1)
    return Capacity(
        days=days, looked_at=tuple(looked[size] for size in sorted(looked)), stopped=(cancelled or _never)()
    )


def _near(sizes: Sequence[int], wanted: float) -> int:
    """The first size that is at least as large as wanted, else the last."""
    return next((at for at, size in enumerate(sizes) if size >= wanted), len(sizes) - 1)


def _in_time(outcome: Outcome, days: float) -> bool:
    return outcome.days is not None and outcome.days[0] <= days


def _searched(
    case: Case,
    model: TracedModel,
    machine: Machine,
    options: SearchOptions,
    on_progress: Callable[[Progress], None] | None,
    stop: Callable[[], bool],
) -> Outcome:
    try:
        found = search(model, machine, on_progress=on_progress, cancelled=stop, **options)
    except PlannerError as error:
        return Outcome(case=case, plan=None, reason=str(error))
    return Outcome(case=case, plan=found.plan, stopped_by=found.statistics.stopped_by)


def _traced(
    model: "str | TracedModel",
    machine: Machine,
    options: SearchOptions,
    known: dict[tuple[str, str], TracedModel],
) -> tuple[TracedModel, SearchOptions]:
    """The model, traced once for all hardware that computes in one precision, and the options that it and the machine
    do not have yet."""
    left: SearchOptions = {**options, "cluster": None}
    if isinstance(model, TracedModel):
        return model, left
    precision = None if (asked := options.get("precision")) == WORD else asked
    precision = precision or default_precision(machine)
    if (model, precision) not in known:
        known[model, precision] = trace(
            model, seq_len=options.get("seq_len"), precision=precision, graph_cache=options.get("graph_cache")
        )
    left["seq_len"], left["precision"] = None, WORD if asked == WORD else None
    return known[model, precision], left


def _scaled(found: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Add the scaling efficiency, where cases differ only in devices."""
    first: dict[Case, Outcome] = {}
    for one in sorted(found, key=lambda one: one.case.devices):
        if one.tokens_per_second is not None:
            first.setdefault(replace(one.case, devices=0), one)
    return tuple(_compared(one, first.get(replace(one.case, devices=0))) for one in found)


def _compared(one: Outcome, least: Outcome | None) -> Outcome:
    if least is None or least is one or one.tokens_per_second is None or least.tokens_per_second is None:
        return one
    share = one.tokens_per_second / one.case.devices / (least.tokens_per_second / least.case.devices)
    return replace(one, efficiency=share)


def _several(name: str, value: Any) -> tuple[Any, ...]:
    found = (value,) if isinstance(value, str | int | TracedModel) else tuple(value) if _listed(value) else ()
    if not found:
        raise RequestError(f"{name} = {value!r:.80}: give one, or a list")
    return found


def _listed(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, Mapping)


def _prices(price: object, names: Sequence[str]) -> dict[str, float]:
    known = {full_profile(name) for name in names}
    given = dict.fromkeys(known, price) if not isinstance(price, Mapping) else {}
    if isinstance(price, Mapping):
        given = {full_profile(str(name)): value for name, value in price.items()}
    for name, value in given.items():
        if name not in known:
            raise RequestError(f"price of {name}: that hardware is not compared; it is {', '.join(sorted(known))}")
        number(f"price of {name}", value, least=0, whole=False)
        _check_finite(f"price of {name}", value)
    return {name: float(value) for name, value in given.items() if isinstance(value, int | float)}


def _losses(failures: float, checkpoint: float, restart: float) -> Goodput:
    for name, value in (("failures", failures), ("checkpoint_seconds", checkpoint), ("restart_seconds", restart)):
        number(name, value, least=0, whole=False)
        _check_finite(name, value)
    if failures == 0 and (checkpoint or restart):
        raise RequestError("checkpoint_seconds and restart_seconds count with failures per device-day only: failures")
    return Goodput(failures_per_device_day=failures, checkpoint=checkpoint, restart=restart)


def _check_finite(name: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise RequestError(f"{name} = {value}: give a finite number")


def _check_tokens(tokens: float | None) -> None:
    number("tokens", tokens, least=1, whole=False)
    if tokens is not None and not math.isfinite(tokens):
        raise RequestError(f"tokens = {tokens}: give a number of tokens, as in 15e12")


def _name(model: "str | TracedModel") -> str:
    from planner.models.nicknames import full_model

    return full_model(model) if isinstance(model, str) else model.name


def _ends(name: str, interval: Interval | None) -> dict[str, object]:
    middle, low, high = interval or (None, None, None)
    return {name: middle, f"low_{name}": low, f"high_{name}": high}


def _first(interval: Interval | None) -> float:
    return math.inf if interval is None else interval[0]


def _slowness(one: Outcome) -> float:
    assert one.step is not None
    return one.step[0] if one.tokens_per_second is None else 1 / one.tokens_per_second


def _unheard(case: Case) -> None:
    """Does nothing: the default callback."""


def _never() -> bool:
    return False
