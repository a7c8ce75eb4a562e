"""Searches that run while a page looks at them.

    asked ─▶ traced ─▶ the best plan within `QUICK` seconds ─▶ the best plan ─▶ plans with less memory, in turn
                              shown                               shown             points of the front

One search runs at a time: another one that is asked for stops it first. All of it happens in a thread of its own, which
the page asks how far it is.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hardware_profiles import HardwareProfileError
from planner.api.callers import from_command
from planner.api.jobs import TracedModel
from planner.api.searching import search, trace
from planner.errors import InfeasibleError, LimitError, PlannerError, RequestError
from planner.models.nicknames import full_model
from planner.models.zoo import is_of_zoo
from planner.strategy_search.job import default_precision, machine_from
from planner.strategy_search.result import Progress, SearchResult
from planner.ui.content import PINNED, Content, Shown, plan_content

QUICK = 3.0
"""Seconds after which a first plan is shown."""

FRONT = (0.85, 0.7, 0.55, 0.4)
"""Of the memory that the best plan takes, what other plans are searched within."""

FRONT_SECONDS = 20.0
"""That each of these searches may take."""

JOBS, TRACED = 16, 4  # that are kept

_FIELDS = {"model": str, "hardware": str, "devices": int, "seq_len": int, "global_batch": int}
MOST = {"devices": 2**20, "seq_len": 2**24, "global_batch": 2**24}
"""Of what a page may ask for: larger numbers only take long."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a page asks for: `pinned` are degrees, `shard` strategies by operator."""

    model: str
    hardware: str
    devices: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    pinned: Mapping[str, int] = field(default_factory=dict)
    shard: Mapping[str, str] = field(default_factory=dict)


def asked_of(content: Any, own_model: str | None) -> Asked:
    """What the JSON of a page asks for. Raises RequestError: names of models are those of the zoo, and the one that the
    server was started with, so that no page has code imported or files read."""
    if not isinstance(content, dict):
        raise RequestError("a request is an object with model and hardware")
    unknown = sorted(set(content) - {*_FIELDS, "pinned", "shard"})
    if unknown:
        raise RequestError(f"unknown key of a request: {', '.join(unknown)[:80]}")
    values: dict[str, Any] = {}
    for name, kind in _FIELDS.items():
        value = content.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise RequestError(f"{name}: give {'a whole number' if kind is int else 'text'}")
        if isinstance(value, int) and not 1 <= value <= MOST[name]:
            raise RequestError(f"{name}: give a number from 1 to {MOST[name]}")
        values[name] = value
    for name in ("model", "hardware"):
        if not values[name]:
            raise RequestError(f"{name} is missing")
    if values["model"] != own_model:
        values["model"] = full_model(values["model"]) if "/" not in values["model"] else values["model"]
        if not is_of_zoo(values["model"]):
            raise RequestError(
                f"model '{values['model']:.80}' is none of the zoo; start `plan ui --model NAME` for one of your own"
            )
    if any(sign in values["hardware"] for sign in ("/", "\\", ".")):
        raise RequestError("hardware: give the name of a profile")
    pinned, shard = content.get("pinned") or {}, content.get("shard") or {}
    if not isinstance(pinned, dict) or not all(type(n) is int and name in PINNED for name, n in pinned.items()):
        raise RequestError(f"pinned: give numbers of {', '.join(PINNED)}")
    if not isinstance(shard, dict) or not all(isinstance(one, str) for one in shard.values()):
        raise RequestError("shard: give a strategy by operator, as text")
    return Asked(**values, pinned=pinned, shard=shard)


class Job:
    """A search that was asked for."""

    def __init__(self, number: int, asked: Asked, models: "Models") -> None:
        self.number, self.asked, self._models = number, asked, models
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._changed = threading.Condition(self._lock)
        self.version = 0
        self.phase, self.progress = "waiting", None  # type: str, Progress | None
        self.error = ""
        self.shown: Shown | None = None
        self.points: list[Content] = []
        self.done = False
        self._content: tuple[Shown, Content] | None = None
        self._thread = threading.Thread(target=self._run, name=f"search {number}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the search at its next step."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with from_command():  # a thread does not know who started it
                self._search()
        except LimitError as error:
            if not self._stop.is_set():  # else whoever stopped it knows
                self._note(error=str(error))
        except (PlannerError, HardwareProfileError) as error:
            self._note(error=str(error))
        except Exception as error:  # a fault of ours, which the page has to be told
            self._note(error=f"a fault of the planner: {type(error).__name__}: {error}")
            raise
        finally:
            self._note(phase="stopped" if self._stop.is_set() else "done", done=True)

    def _search(self) -> None:
        asked = self.asked
        self._note(phase="tracing the model")
        machine = machine_from(asked.hardware, devices=asked.devices)
        model = self._models.traced(asked.model, asked.seq_len, default_precision(machine))
        rest: dict[str, Any] = {
            "global_batch": asked.global_batch,
            "pinned": dict(asked.pinned),
            "shard": dict(asked.shard),
            "on_progress": self._heard,
            "cancelled": self._stop.is_set,
        }
        self._note(phase="searching")
        result: SearchResult | None = None
        with contextlib.suppress(LimitError):
            result = search(model, machine, time_limit=QUICK, **rest)
        if result is None or result.statistics.stopped:
            if result is not None:
                self._show(result, final=False)
            if self._stop.is_set():
                return
            result = search(model, machine, **rest)
        self._show(result, final=True)
        most = result.plan.prediction.peak_bytes
        for share in FRONT:
            if self._stop.is_set():
                return
            self._note(phase=f"searching plans within {share:.0%} of its memory")
            try:
                lean = search(model, machine, memory_limit=most * share, time_limit=FRONT_SECONDS, **rest)
            except LimitError:
                continue
            except InfeasibleError:
                return
            self._note(points=[*self.points, _point(lean, best=False)])

    def _heard(self, progress: Progress) -> None:
        self._note(progress=progress)

    def _show(self, result: SearchResult, *, final: bool) -> None:
        self._note(shown=Shown(result=result, final=final), points=[_point(result, best=True)])

    def _note(self, **changes: Any) -> None:
        with self._changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.version += 1
            self._changed.notify_all()

    def state(self, seen: int, patience: float) -> Content:
        """How far it is, as soon as that is other than what was `seen`, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.version != seen or self.done, patience)
            shown, progress = self.shown, self.progress
            state: Content = {
                "job": self.number,
                "version": self.version,
                "phase": progress.phase if progress is not None and self.phase == "searching" else self.phase,
                "error": self.error,
                "done": self.done,
                "points": list(self.points),
                "evaluated": progress.done if progress is not None else 0,
                "total": progress.total if progress is not None else 0,
            }
        if shown is not None and (self._content is None or self._content[0] is not shown):
            self._content = shown, plan_content(shown)
        state["plan"] = self._content[1] if self._content is not None else None
        return state


def _point(result: SearchResult, *, best: bool) -> Content:
    """A plan of the front."""
    shown = plan_content(Shown(result=result, final=True))
    names = ("step_seconds", "peak_bytes", "step", "peak", "degrees")
    return {**{name: shown[name] for name in names}, "best": best}


class Models:
    """Traced models, the last few of them."""

    def __init__(self, graph_cache: str | None) -> None:
        self._kept: OrderedDict[tuple[str, int | None, str], TracedModel] = OrderedDict()
        self._cache, self._lock = graph_cache, threading.Lock()

    def traced(self, name: str, seq_len: int | None, precision: str) -> TracedModel:
        with self._lock:
            key = (name, seq_len, precision)
            if key not in self._kept:
                self._kept[key] = trace(name, seq_len=seq_len, precision=precision, graph_cache=self._cache)
                while len(self._kept) > TRACED:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


class Jobs:
    """All searches of a server: one runs, the last few are kept to be looked at."""

    def __init__(self, models: Models) -> None:
        self._models, self._lock = models, threading.Lock()
        self._kept: OrderedDict[int, Job] = OrderedDict()
        self._count = 0

    def begin(self, asked: Asked) -> Job:
        """Start a search in place of the one that runs."""
        with self._lock:
            for job in self._kept.values():
                job.stop()
            self._count += 1
            job = self._kept[self._count] = Job(self._count, asked, self._models)
            while len(self._kept) > JOBS:
                self._kept.popitem(last=False)
        job.start()
        return job

    def job(self, number: int) -> Job:
        """Raises RequestError where it is not kept."""
        with self._lock:
            if number not in self._kept:
                raise RequestError(f"search {number} is not kept any more; start it again")
            return self._kept[number]

    def stop(self) -> None:
        with self._lock:
            for job in self._kept.values():
                job.stop()
