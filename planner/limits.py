"""Limits of the planner itself: how long a request may take, and how much memory of this machine.

    with limited(seconds=10.0, memory=8 * 2**30):       once for a request
        trace ─> discover ─> fold ─> tables ─> pieces ─> eliminate ─> price
                                every loop whose body may be long:  check()

`check` raises LimitError where a limit is reached. The search catches it and goes on with what it has found, under
limits that leave a plan the time to be priced (`finishing`); where that takes longer than this, the search ends
`sooner`. Limits belong to the context that they were set in, a
thread or a task, as deadlines do in Go and cancel scopes in Trio: a function five calls down need not be given what
the functions between do not use. An inner limit only tightens an outer one. Without any limit `check` does nothing.

Time is asked at every check. Memory is what the process has resident, read every `_EVERY` seconds at most; a table
whose size is known before it is made is asked for first (`room`), as one allocation may take more than all before.

Code that is not ours never calls `check`. `interrupting` starts a thread that watches while it runs and, once a limit
is passed by `GRACE` seconds, raises in the thread that set it. A signal would do that in the main thread alone; a child
process would have to be forked with the threads and devices of whoever calls the library, or be sent a model that may
not be pickled. As with Ctrl-C, the code that is interrupted may leave its own state unfinished. The import of a library
is not interrupted: half of it would stay, and break whatever uses it next.
"""

import contextlib
import ctypes
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from hardware_profiles.units import bytes_text
from planner.errors import LimitError, StoppedBy

SHARE = 0.75
"""Of the memory that is available when a request begins, the planner takes so much where nothing is said."""

LONGEST_IMPORT = 60.0
"""Seconds for which the import of a library is waited for, past a limit."""

_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})

GRACE = 0.5
"""Seconds past a limit after which code that never checks is interrupted."""

FINISH = 0.2
"""Of the time limit, what pricing the best plans may take after it, relatively."""

LATE = FINISH / 2
"""Of the time limit, by how much a search may begin too late, relatively: its first plan takes a part of `FINISH`."""

_MORE: Mapping[StoppedBy, str] = MappingProxyType(
    {
        "interrupt": "let it go on until its first plan",
        "memory": "let the planner have more memory (--planner-memory)",
        "time": "give it more time (--time-limit)",
    }
)

_FINISH_SECONDS = 1.0  # but so long at least
_EVERY = 0.02  # seconds between two readings of the memory
_LARGE = 2**24  # bytes from which a table is asked for before it is made
_POLL = 0.1  # seconds between two looks of the watching thread
_AGAIN = 2.0  # and between two interruptions


@dataclass(slots=True, kw_only=True)
class Limits:
    """Until when, and how much memory. `clock` and `resident` are those of the machine; tests give others.

    Attributes:
        ends: reading of the clock at which time is over; infinite for no limit.
        seconds: the time limit that was asked for, for messages.
        memory: bytes that the process may have resident; infinite for no limit.
        read: reading of the clock when its memory was last looked at.
    """

    ends: float = math.inf
    seconds: float = math.inf
    memory: float = math.inf
    clock: Callable[[], float] = time.monotonic
    resident: Callable[[], float] = field(default_factory=lambda: resident_bytes)
    read: float = -math.inf

    def check(self, now: float | None = None) -> None:
        """Raise LimitError where a limit is reached; `now` is what the clock says, where it has been read."""
        now = self.clock() if now is None else now
        if now > self.ends:
            raise self.late()
        if self.memory < math.inf and now - self.read >= _EVERY:
            self.read = now
            if (held := self.resident()) > self.memory:
                raise LimitError(f"the planner holds {bytes_text(held)}, and {self._memory_words()}", by="memory")

    def reached(self) -> StoppedBy | None:
        """The limit that is reached; None if none is."""
        try:
            self.check()
        except LimitError as error:
            return error.by
        return None

    def ask(self, nbytes: float, what: str) -> None:
        """Raise LimitError where there is no room for so many bytes more."""
        if nbytes > self.left():
            raise LimitError(f"{what} would take {bytes_text(nbytes)}, and {self._memory_words()}", by="memory")

    def left(self) -> float:
        """Bytes that may still be taken."""
        return math.inf if self.memory == math.inf else max(0.0, self.memory - self.resident())

    def spare(self) -> float:
        """Seconds past the end in which what was found is priced."""
        return max(_FINISH_SECONDS, FINISH * self.seconds) if self.seconds < math.inf else math.inf

    def late(self) -> LimitError:
        return LimitError(f"the time limit of {self.seconds:g} s is reached")

    def _memory_words(self) -> str:
        return f"the memory of the planner is limited to {bytes_text(self.memory)}"


_Item = TypeVar("_Item")

_CURRENT: ContextVar[Limits | None] = ContextVar("planner_limits", default=None)


def check() -> None:
    """Raise LimitError where a limit of the request is reached."""
    limits = _CURRENT.get()
    if limits is not None:  # asked often: most times nothing is due
        now = limits.clock()
        if now > limits.ends or (limits.memory < math.inf and now - limits.read >= _EVERY):
            limits.check(now)


def checked(items: Iterable[_Item]) -> Iterator[_Item]:
    """The items, with a check before each."""
    for item in items:
        check()
        yield item


def check_late() -> None:
    """`check` where a search begins, with `LATE` more of the time limit: it first finds a plan that it can return."""
    limits = _CURRENT.get()
    if limits is not None:
        replace(limits, ends=limits.ends + LATE * limits.seconds).check()


def reached() -> StoppedBy | None:
    """The limit of the request that is reached; None if none is."""
    limits = _CURRENT.get()
    return None if limits is None else limits.reached()


def ended_by(cancelled: Callable[[], bool]) -> StoppedBy | None:
    """What ends a search now: its user, or a limit of the request that is reached; None if it goes on."""
    return "interrupt" if cancelled() else reached()


def limit_of(error: LimitError | MemoryError) -> StoppedBy:
    """The limit that an error is about."""
    return error.by if isinstance(error, LimitError) else "memory"


def more_of(by: StoppedBy) -> str:
    """What to do where a search was stopped too early."""
    return _MORE[by]


def room(nbytes: float, what: str) -> None:
    """Raise LimitError where something of so many bytes would not fit into the memory of the planner."""
    limits = _CURRENT.get()
    if limits is not None and nbytes >= _LARGE:
        limits.ask(nbytes, what)


def seconds_left() -> float:
    """Seconds until the time of the request is over; infinite without a limit."""
    limits = _CURRENT.get()
    return math.inf if limits is None else limits.ends - limits.clock()


def seconds_after() -> float:
    """Seconds that `finishing` gives; infinite without a limit."""
    limits = _CURRENT.get()
    return math.inf if limits is None else limits.spare()


def reading() -> float:
    """Of the clock of the limits: to measure, where time is limited, what something takes; 0 where it is not."""
    limits = _CURRENT.get()
    return 0.0 if limits is None or limits.ends == math.inf else limits.clock()


@contextlib.contextmanager
def limited(
    seconds: float | None = None,
    memory: float | None = None,
    *,
    spent: float = 0.0,
    clock: Callable[[], float] | None = None,
    resident: Callable[[], float] | None = None,
) -> Iterator[Limits]:
    """Limit what is done inside: seconds from now on, of which some are `spent` already, and bytes that the process may
    have resident. What an outer limit says holds too, and its clock and its way to read the memory where no other is
    given."""
    outer = _CURRENT.get() or Limits()
    found = Limits(clock=clock or outer.clock, resident=resident or outer.resident)
    found.ends, found.seconds, found.memory = outer.ends, outer.seconds, outer.memory
    if seconds is not None and (ends := found.clock() + seconds - spent) < found.ends:
        found.ends, found.seconds = ends, seconds
    if memory is not None:
        found.memory = min(found.memory, memory)
    with _within(found):
        yield found


@contextlib.contextmanager
def _within(limits: Limits) -> Iterator[None]:
    token = _CURRENT.set(limits)
    try:
        yield
    finally:
        _CURRENT.reset(token)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Time, after a limit was reached, to price what was found. The limit of memory is lifted by a tenth, for once."""
    outer = _CURRENT.get()
    if outer is None:
        yield
        return
    memory = max(outer.memory, outer.resident()) * 1.1 if outer.memory < math.inf else math.inf
    inner = Limits(
        ends=max(outer.ends, outer.clock()) + outer.spare(),
        seconds=outer.seconds,
        memory=memory,
        clock=outer.clock,
        resident=outer.resident,
    )
    with _within(inner):
        yield


@contextlib.contextmanager
def sooner(seconds: float) -> Iterator[None]:
    """What is done inside ends so many seconds before the limit."""
    outer = _CURRENT.get()
    if outer is None or seconds <= 0:
        yield
        return
    with _within(replace(outer, ends=outer.ends - seconds)):
        yield


@contextlib.contextmanager
def sharing(parts: int) -> Iterator[None]:
    """What is done inside ends when so large a part of the time that is left is over: the first of so many things that
    are to be done within it."""
    left = seconds_left()
    with sooner(0.0 if left == math.inf else left * (1 - 1 / parts)):
        yield


class _Interrupted(BaseException):
    """Raised by the watching thread; no `except Exception` on the way catches it."""


@contextlib.contextmanager
def interrupting(doing: str) -> Iterator[None]:
    """While code runs that never checks, interrupt it where it passes a limit; LimitError says what was being done."""
    limits = _CURRENT.get()
    if limits is None or (limits.ends == math.inf and limits.memory == math.inf):
        yield
        return
    watch = _Watch(limits, threading.get_ident())
    try:
        try:
            watch.start()
            yield
        finally:
            watch.stop()
    except (_Interrupted, LimitError) as error:
        watch.stop()  # which may have been what was interrupted
        why = watch.why if watch.why is not None else error if isinstance(error, LimitError) else limits.late()
        raise _nothing_yet(doing, why) from None
    except Exception:
        if watch.why is not None:  # what was interrupted made another error of it
            raise _nothing_yet(doing, watch.why) from None
        raise


def _nothing_yet(doing: str, why: LimitError) -> LimitError:
    """The error where what comes before a search was interrupted."""
    return LimitError(f"{doing}: {why}, and nothing was searched; {more_of(why.by)}", by=why.by)


class _Watch(threading.Thread):
    """Raises `_Interrupted` in another thread; again where it was lost, as in a finalizer."""

    def __init__(self, limits: Limits, target: int) -> None:
        super().__init__(name="planner-limits", daemon=True)
        self.limits, self.target = limits, target
        self.why: LimitError | None = None
        self._over, self._lock = threading.Event(), threading.Lock()

    def run(self) -> None:
        grace = Limits(
            ends=self.limits.ends + GRACE,
            seconds=self.limits.seconds,
            memory=self.limits.memory,
            clock=self.limits.clock,
            resident=self.limits.resident,
        )
        pause = _POLL
        importing = 0.0
        while not self._over.wait(pause):
            try:
                grace.check()
            except LimitError as error:
                if importing < LONGEST_IMPORT and _imports_a_library(self.target):
                    importing += pause
                    continue
                pause = _AGAIN
                with self._lock:
                    if not self._over.is_set():
                        self.why = self.why or error
                        _raise_in(self.target, _Interrupted)

    def stop(self) -> None:
        """Called by the thread that is watched: what may be on its way to it is taken here."""
        with self._lock:
            self._over.set()
        if self.why is not None:
            _take_interruption(self.target)


def _imports_a_library(thread: int) -> bool:
    """Whether a thread is in the middle of the import of a module of Python's or of an installed package."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == "<frozen importlib._bootstrap>" and code.co_name == "_find_and_load":
            spec = getattr(sys.modules.get(str(frame.f_locals.get("name"))), "__spec__", None)
            if spec is not None and str(spec.origin).startswith(_LIBRARIES):
                return True
        frame = frame.f_back
    return False


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


def _take_interruption(thread: int) -> None:
    """Have an interruption of this thread raised now, in the place of one that may be on its way. To cancel that one
    instead leaves a flag of CPython 3.11 set, under which no function that a profiler looks at ever begins."""
    try:
        _raise_in(thread, _Interrupted)
        while True:  # until the interpreter looks, at the next jump
            pass
    except _Interrupted:
        return


def process_seconds() -> float:
    """Seconds since this process began; where the system does not say, those that it has computed for."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            began = int(file.read().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (AttributeError, OSError, IndexError, ValueError):
        return time.process_time()


def resident_bytes() -> float:
    """Bytes of memory that this process has resident; where the system does not say, the most that it ever had."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except OSError:
        import resource

        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def default_memory() -> float:
    """What the process may have resident where nothing is said: what it has, and most of what is available."""
    free = available_bytes()
    return math.inf if free is None else resident_bytes() + SHARE * free


def available_bytes(root: Path = Path("/")) -> float | None:
    """Bytes that this process could still take: of the machine, and of the control groups that it is in; None where the
    system does not say. `root` is that of the file system."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        found = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        groups = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except (OSError, StopIteration, ValueError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory") or "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            place = base / path.lstrip("/")
            for folder in (place, *place.parents):
                found = min(found, _room_of(folder, *names))
                if folder == base:
                    break
    return max(0.0, found)


def _room_of(folder: Path, limit: str, usage: str) -> float:
    """Bytes below the limit of a control group; what files are cached by counts as free."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        if most == "max":
            return math.inf
        used = float((folder / usage).read_text(encoding="ascii"))
        rows = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = next((float(row[1]) for row in rows if row[0] == "inactive_file"), 0.0)
        return float(most) - used + cached
    except (OSError, ValueError):
        return math.inf
