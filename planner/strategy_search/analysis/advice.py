"""Changes that would make an infeasible request fit, and their cost: found by search, not by a rule of thumb.

Each change is tried alone, in steps where it has several (devices doubled, sequences halved, the next larger device),
until something fits; the leanest configurations are tried first. A change that fits is then searched for a few seconds,
to report the step time of a plan with it. The cheapest comes first, in device-seconds per token or sample.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hardware_profiles import Cluster, HardwareProfileError, MixedCluster, load_profile, profile_names
from planner.errors import LimitError, PlannerError
from planner.graph.placed import tables_of
from planner.limits import ended_by, limited
from planner.nearest import divisors
from planner.plan.plan import PRECISIONS
from planner.sharding.update import PLAIN
from planner.strategy_search.engine.families import Shared
from planner.strategy_search.request.offload import ANYTHING, parse_offload
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import FREE, Pinned
from planner.strategy_search.variants import variants_of
from planner.strategy_search.within import anything_fits, best_plans

_DOUBLINGS = 8  # doublings of the number of devices
_SHORTEST = 128  # tokens of the shortest sequence
_SEARCHED = 5.0
"""Seconds for which plans with a change that fits are searched."""

PATIENCE = 30.0
"""Seconds after which no further change is tried."""

Retrace = Callable[[int], SearchRequest]
Step = tuple[str, Callable[[], SearchRequest]]
"""A change in words, and a function that makes the request with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change that makes a plan possible, in words, and the plan found with it: seconds of a step, bytes on the
    device that holds most, devices, samples and tokens per second. `seconds` is None if there was no time to find a
    plan; `tokens` is None for models without sequences."""

    text: str
    devices: int
    seconds: float | None = None
    peak: float | None = None
    samples: float | None = None
    tokens: float | None = None

    @property
    def cost(self) -> float:
        """Device-seconds per token, or per sample for a model without sequences."""
        rate = self.tokens or self.samples
        return self.devices / rate if rate else math.inf


def changes(
    request: SearchRequest,
    needed: float | None = None,
    retrace: Retrace | None = None,
    patience: float = PATIENCE,
    cancelled: Callable[[], bool] = lambda: False,
    on_change: Callable[[str], None] = lambda _: None,
) -> tuple[Change, ...]:
    """Changes to an infeasible request with which something fits, the cheapest first.

    Args:
        request: the infeasible request.
        needed: bytes that the leanest plan needs on a device, if known.
        retrace: makes the same request for sequences of another length.
        patience: seconds after which no further change is tried.
        cancelled: asked repeatedly; if it returns True, the changes found so far are returned.
        on_change: receives each change that is tried, in words.
    """
    end = time.perf_counter() + patience
    plain = "sharding_propagation" if request.algorithm == "sharding_propagation" else "dynamic_programming"
    asked = replace(request, algorithm=plain, top=1, certify=False, time_limit=None)
    with limited(patience):
        return _changes(asked, needed, retrace, _Advisor(end=end, cancelled=cancelled, on_change=on_change))


def _changes(
    asked: SearchRequest, needed: float | None, retrace: Retrace | None, advisor: "_Advisor"
) -> tuple[Change, ...]:
    found = [change for ladder in _ladders(asked, needed, retrace) if (change := advisor.first(ladder))]
    if asked.pinned != FREE and not any(change.text.endswith("left out") for change in found):
        given_up = advisor.first(_all_given_up(asked))
        found += [given_up] if given_up else []
    return tuple(sorted(found, key=lambda change: change.cost))


@dataclass(frozen=True, kw_only=True)
class _Advisor:
    end: float
    cancelled: Callable[[], bool]
    on_change: Callable[[str], None]

    def late(self) -> bool:
        return time.perf_counter() > self.end or ended_by(self.cancelled) is not None

    def first(self, ladder: Sequence[Step]) -> Change | None:
        """The first step of a ladder that fits, and its cost."""
        for text, made in ladder:
            if self.late():
                return None
            self.on_change(text)
            try:
                request, shared = next(variants_of(made())), Shared()
                if anything_fits(request, self.late, shared):
                    return _priced(text, request, self.cancelled, shared)
            except (PlannerError, HardwareProfileError):  # nothing divides, too many devices, or no disk
                continue
        return None


def _priced(text: str, request: SearchRequest, cancelled: Callable[[], bool], shared: Shared) -> Change:
    """A change with the figures of its plan; without them where these take too long. `shared` is that of
    `anything_fits`. Raises InfeasibleError where no whole plan fits: what `anything_fits` counts may be less than a
    plan holds."""
    devices, length = request.cluster.devices, request.model.sequence_length
    try:
        plan = best_plans(replace(request, time_limit=_SEARCHED), cancelled=cancelled, shared=shared).plan
    except LimitError:
        return Change(text=text, devices=devices)
    prediction = plan.prediction
    return Change(
        text=text,
        devices=devices,
        seconds=prediction.step_seconds,
        peak=prediction.peak_bytes,
        samples=prediction.samples_per_second,
        tokens=None if length is None else prediction.samples_per_second * length,
    )


def _ladders(request: SearchRequest, needed: float | None, retrace: Retrace | None) -> Iterator[Sequence[Step]]:
    """Changes, each in steps; the first step that fits counts."""
    yield from _decisions(request)
    yield _offloaded(request)
    yield _placed(request)
    yield _more_devices(request)
    if retrace is not None and request.model.sequence_length is not None:
        yield _shorter(request.model.sequence_length, retrace)
    if request.memory_limit is None:
        yield _larger_devices(request, needed)
    if request.optimizer != "sgd":
        text = "SGD with momentum, which keeps less state (--optimizer sgd)"
        yield [(text, lambda: replace(request, optimizer="sgd"))]
    if request.update.moment_dtype == PLAIN.moment_dtype and not request.update.placed:
        text = "moments in 16 bits, which change training (--moment-dtype bf16)"
        yield [(text, lambda: replace(request, update=replace(request.update, moment_dtype="bf16")))]
    if PRECISIONS[request.precision] == PRECISIONS["fp32"]:
        yield [("16-bit compute (--precision bf16)", lambda: replace(request, precision="bf16"))]


def _offloaded(request: SearchRequest) -> list[Step]:
    """Optimizer states, and more, moved out of the devices: to the host, then to disks if there are any."""
    if "disk" in request.offload.stores:
        return []

    def made(word: str) -> Callable[[], SearchRequest]:
        return lambda: replace(request, pinned=replace(request.pinned, offload=parse_offload(word)))

    # tried without success, or no advice would be needed
    tried = request.pinned.offload in (None, ANYTHING) and request.space is None
    auto = [] if tried else [("offload to the host where that helps (--offload auto)", made("auto"))]
    return [
        *auto,
        ("optimizer states on disks (--offload optimizer:disk)", made("optimizer:disk")),
        (
            "optimizer states on disks and weights on the host (--offload optimizer:disk,weights)",
            made("optimizer:disk,weights"),
        ),
    ]


def _placed(request: SearchRequest) -> list[Step]:
    """Embedding tables moved out of the devices, if they are used only as tables."""
    patterns = tuple(dict.fromkeys(_NUMBER.sub("*", name) for name in tables_of(request.graph)))
    if request.update.placed or not patterns:
        return []

    def made(place: str) -> Callable[[], SearchRequest]:
        placed = tuple((pattern, place) for pattern in patterns)
        return lambda: replace(request, update=replace(request.update, placed=placed))

    def words(place: str) -> str:
        return " ".join(f"--place '{pattern}={place}'" for pattern in patterns)

    return [
        (f"tables on the host ({words('host')})", made("host")),
        (f"tables on servers ({words('servers')})", made("servers")),
    ]


_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.|$)")
_PINS = (
    "recompute",
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
    "replicas",
    "sequence_parallel",
    "schedule",
    "mesh",
)


def _decisions(request: SearchRequest) -> Iterator[Sequence[Step]]:
    """Decisions dropped one by one, or made leaner."""
    pinned = request.pinned

    def with_pins(text: str, **pins: object) -> Step:
        return text, lambda: replace(request, pinned=replace(pinned, **pins))  # type: ignore[arg-type]

    for name in _PINS:
        if getattr(pinned, name) is not None:
            yield [with_pins(f"--{name.replace('_', '-')} left out", **{name: None})]
    if pinned.micro_batch is not None:
        smaller = [size for size in reversed(divisors(pinned.micro_batch)) if size < pinned.micro_batch]
        ladder = [with_pins(f"--micro-batch {size}", micro_batch=size) for size in smaller]
        yield [*ladder, with_pins("--micro-batch left out", micro_batch=None)]
    if pinned.micro_batches is not None:
        more = [count for count in divisors(request.padded_batch) if count > pinned.micro_batches]
        ladder = [with_pins(f"--micro-batches {count}", micro_batches=count) for count in more]
        yield [*ladder, with_pins("--micro-batches left out", micro_batches=None)]
    if pinned.zero is not None:
        yield [with_pins(f"--zero {stage}", zero=stage) for stage in range(pinned.zero + 1, 4)]
    if request.memory_limit is not None:
        yield [("--memory-limit left out", lambda: replace(request, memory_limit=None))]
    if request.shards:
        yield [("--shard left out", lambda: replace(request, shards=()))]


def _all_given_up(request: SearchRequest) -> Sequence[Step]:
    pinned = request.pinned
    degrees = replace(FREE, recompute=pinned.recompute, micro_batches=pinned.micro_batches, schedule=pinned.schedule)
    steps: list[tuple[str, Pinned]] = [("degrees left to the search", degrees)] if degrees != pinned else []
    steps.append(("degrees, micro-batches and recomputation left to the search (plan --model ...)", FREE))
    return [(text, lambda free=free: replace(request, pinned=free)) for text, free in steps]  # type: ignore[misc]


def _more_devices(request: SearchRequest) -> list[Step]:
    """Doublings of the devices, with one whole node as a step; a batch of fewer samples than devices grows with
    them."""
    cluster, steps = request.cluster, list[Step]()
    if isinstance(cluster, MixedCluster):  # it is unknown which group should grow
        return steps
    devices, node = cluster.devices, cluster.devices_per_node or 1
    unpadded = replace(request.update, padding_samples=0)
    for _ in range(_DOUBLINGS):
        devices = devices * 2 if devices * 2 <= node or devices >= node else node
        grown = request.padded_batch < devices

        def made(devices: int = devices, grown: bool = grown) -> SearchRequest:
            more = replace(request, cluster=cluster.with_devices(devices))
            return replace(more, global_batch=devices, update=unpadded) if grown else more

        words, options = f"{devices} devices", f"--devices {devices}"
        if grown:
            words, options = f"{words} and as many samples", f"{options} --global-batch {devices}"
        steps.append((f"{words} ({options})", made))
    return steps


def _shorter(length: int, retrace: Retrace) -> list[Step]:
    lengths: list[int] = []
    while length % 2 == 0 and length // 2 >= _SHORTEST and len(lengths) < 3:
        length //= 2
        lengths.append(length)
    return [
        (f"sequences of {tokens} tokens (--seq-len {tokens})", lambda tokens=tokens: retrace(tokens))  # type: ignore[misc]
        for tokens in lengths
    ]


def _larger_devices(request: SearchRequest, needed: float | None) -> list[Step]:
    """Profiles of the same kind of device with more memory, the smallest first, and of equally large ones the fastest.
    Those that are slower in the precision of the request come last."""
    if isinstance(request.cluster, MixedCluster):
        return []
    here = request.cluster.device
    profiles = [load_profile(name) for name in profile_names()]
    larger = [one for one in profiles if one.device.memory > here.memory and one.device.device_type == here.device_type]
    enough = [one for one in larger if needed is None or one.device.memory > 0.9 * needed]

    def order(one: Cluster) -> tuple[bool, float, float]:
        own, there = (dict(device.peak_flops).get(request.precision, 0.0) for device in (here, one.device))
        return there < own, one.device.memory, -there

    def made(name: str) -> Callable[[], SearchRequest]:
        return lambda: replace(
            request,
            cluster=load_profile(name).with_software(request.cluster.software).with_devices(request.cluster.devices),
        )

    return [
        (f"{one.device.memory / 2**30:.0f} GiB of memory (--hardware {one.name})", made(one.name))
        for one in sorted(enough, key=order)
    ]
