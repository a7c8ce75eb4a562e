"""A thread of each rank that answers where the rank is, while its main thread waits in a collective.

    main thread    at("step 7") ... all_reduce ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─
    this thread    asleep, asleep, asleep         asked? ── says where        (no question: asleep)

Ranks communicate over a *board*. On one machine it is the folder of notes: the process that started the ranks asks, and
writes the report. Under a launcher it is the store of the process group: the first rank that has made no progress for
`timeout` seconds asks, waits for the others and writes the report, and then all ranks exit. While there is progress the
thread does nothing, and it never slows an operator down.
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from hardware_profiles.foreign import ForeignTextError, parse_json
from runtime.processes.breakdown import report
from runtime.processes.wait_diagnosis import WaitDiagnosis, wait_diagnosis

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store as C10dStore

_T = TypeVar("_T")

ASKED = "asked"
"""The note that asks all ranks where they are."""

WHERE = "where"
"""The kind of note in which a rank answers."""

_TICK = 0.25  # seconds between two reads of a folder
_MOST_TICK = 5.0  # for a store, which all ranks of all hosts share
_PATIENCE = 3.0  # seconds to wait for the store
_ANSWER = 2.0  # seconds that ranks have to answer, beyond their sleep


class Board(Protocol):
    """Where a rank is asked, and where it answers."""

    def asked(self) -> bool: ...

    def say(self, where: WaitDiagnosis) -> None: ...


class Folder:
    """The board of ranks on one machine."""

    def __init__(self, folder: Path, say: Callable[[str, str], None]) -> None:
        self._asked, self._write = folder / ASKED, say

    def asked(self) -> bool:
        return self._asked.exists()

    def say(self, where: WaitDiagnosis) -> None:
        self._write(WHERE, json.dumps(asdict(where)))


def answer_of(text: str) -> WaitDiagnosis:
    """A rank's answer; if it ended while it wrote, an answer that says so."""
    try:
        return TypeAdapter(WaitDiagnosis).validate_python(parse_json(text))
    except (ForeignTextError, ValidationError) as error:
        return WaitDiagnosis(waits=False, text=f"has answered something that cannot be read ({error!s:.200})")


class Store:
    """The board of ranks under a launcher: the store, over a separate connection, because the main thread may block its
    own."""

    def __init__(self, store: "C10dStore", rank: int, world: int) -> None:
        from torch._C._distributed_c10d import PrefixStore

        self._store = PrefixStore("hang", store.clone())  # type: ignore[attr-defined]
        self.rank, self.world = rank, world
        self._lost = False

    def asked(self) -> bool:
        return self._within(lambda: bool(self._store.check([ASKED])))

    def ask(self) -> None:
        self._within(lambda: self._store.set(ASKED, ""))

    def say(self, where: WaitDiagnosis) -> None:
        self._within(lambda: self._store.set(f"{WHERE}{self.rank}", json.dumps(asdict(where))))

    def said(self) -> dict[int, WaitDiagnosis]:
        """The answers of all ranks so far."""
        keys = {rank: f"{WHERE}{rank}" for rank in range(self.world)}
        there = {rank: key for rank, key in keys.items() if self._within(lambda key=key: self._store.check([key]))}  # type: ignore[misc]
        return {
            rank: answer_of(self._within(lambda key=key: self._store.get(key)).decode())  # type: ignore[misc]
            for rank, key in there.items()
        }

    def first(self) -> bool:
        """Whether this rank writes the report: no other rank has started to."""
        return self._within(lambda: bool(self._store.add("reporter", 1) == 1))

    def _within(self, call: Callable[[], _T]) -> _T:
        """The store's answer. Raises RuntimeError if it does not come in time: the store's process may hang, and a
        connection has no deadline."""
        found: list[_T] = []

        def answered() -> None:
            with contextlib.suppress(RuntimeError):
                found.append(call())

        thread = threading.Thread(target=answered, name="question to the store", daemon=True)
        if not self._lost:
            thread.start()
            thread.join(_PATIENCE)
        if not found:
            self._lost = True
            raise RuntimeError("the store of the process group does not answer")
        return found[0]


class HangWatch:
    """Answers on a board while it is started. With a `timeout` it also asks, when this rank has made no progress for
    that long, and calls `end` with the report, or with None on all ranks but one."""

    def __init__(
        self,
        *,
        timeout: float | None = None,
        end: Callable[[str | None], None] = lambda report: None,
        answer: float = _ANSWER,
    ) -> None:
        self.board: Board | None = None
        self._timeout, self._end, self._answer = timeout, end, answer
        self.tick = _TICK if timeout is None else min(max(timeout / 20, 0.02), _MOST_TICK)
        self._progress, self._at = time.monotonic(), "the start"
        self._answered = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="where this rank is", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def progress(self, at: str) -> None:
        """Note progress, and what the rank does now."""
        self._progress, self._at, self._answered = time.monotonic(), at, False

    @property
    def patience(self) -> float:
        """Seconds that ranks have to answer."""
        return self._answer + 2 * self.tick

    def stop(self) -> None:
        """Stop; the rank's work is done."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self.tick):
            idle = time.monotonic() - self._progress
            if idle > 2 * self.tick and self._look(idle):
                return

    def _look(self, idle: float) -> bool:
        """Answer if this rank was asked; returns whether the rank must end."""
        board, late = self.board, self._timeout is not None and idle > self._timeout
        try:
            asked = board is not None and board.asked()
            if asked and not self._answered and board is not None:
                board.say(wait_diagnosis())
                self._answered = True
            if isinstance(board, Store) and late:
                self._report(board)
                return True
        except RuntimeError as error:  # the store is gone, or its process hangs
            if not late:
                return False
            self._end(f"{self._words()}: {self._own()}; the other ranks could not be asked: {error}")
            return True
        if late:
            self._end(f"{self._words()}: {self._own()}")
        return late

    def _report(self, board: Store) -> None:
        """Ask all ranks, wait until all that can have answered, and end; one rank ends with the report."""
        board.ask()
        board.say(wait_diagnosis())
        wait = threading.Event().wait
        ends = time.monotonic() + self.patience
        while time.monotonic() < ends and len(board.said()) < board.world:
            wait(min(self.tick, 0.2))
        if not board.first():
            wait(self._answer)
            self._end(None)
            return
        said = board.said()
        silent = WaitDiagnosis(waits=False, text="does not answer")
        self._end(f"{self._words()}: {report({rank: said.get(rank, silent) for rank in range(board.world)})}")

    def _words(self) -> str:
        return f"no progress in {self._timeout:g} s (--timeout) at {self._at}"

    def _own(self) -> str:
        own = int(os.environ.get("RANK", "0"))
        return report({own: wait_diagnosis()}).removeprefix("all ranks wait for each other; ")


def end_process(said: str | None) -> None:
    """Exit, with the report and the stack traces of all threads on stderr, because no other process would end this
    one."""
    if said is not None:
        sys.stderr.write(f"error: {said}\n")
        faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    os._exit(1)
