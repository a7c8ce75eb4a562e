"""Finds the cause of a failed run, in one line, from the notes of its ranks and how they ended.

A rank that fails takes others with it: its peers fail later, in a collective. So an error that a rank raised on purpose
comes first, then a rank that was ended by a signal, then the first failure. If nothing happens, every rank is asked
where it is; ranks that wait in a collective are victims, and the others are named.
"""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware_profiles.foreign import ForeignTextError, parse_json, read_text
from runtime.processes.wait_diagnosis import WaitDiagnosis, is_library

_TAIL_LINES = 5
_LARGEST = 2**20  # maximum bytes of a note
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_TORCH = f"{os.sep}torch{os.sep}"


class _Note(BaseModel):
    """The note of a rank that fails."""

    model_config = ConfigDict(strict=True)

    code: Annotated[int, Field(ge=0, le=255)]
    message: str


def failure_of(notes: Path, *, ended: Mapping[int, int], noise: str) -> tuple[int, str]:
    """Exit code and message. `ended` are the return codes of the ranks that ended by themselves, in order of time;
    `noise` is what the ranks wrote on stderr."""
    found: list[tuple[bool, int, int, str]] = []
    for path in notes.glob("rank*.json"):
        note = _note(path)
        found.append((note.code < 2, path.stat().st_mtime_ns, note.code, note.message))
    killed = [(rank, -code) for rank, code in ended.items() if code < 0]
    if killed and all(code < 2 for _, _, code, _ in found):
        rank, number = killed[0]
        memory = "; the operating system does that if memory runs out" if number == signal.SIGKILL else ""
        return 1, f"rank {rank} was killed by {signal.Signals(number).name}{memory}"
    if found:
        _, _, code, message = min(found)
        return int(code), message
    for rank, code in ended.items():
        if not code and not (notes / f"rank{rank}.done").exists():
            return 1, f"rank {rank} exited before its work was done: some code in it called exit"
    code = next((code for code in ended.values() if code), 1)
    return code, "\n".join(noise.splitlines()[-_TAIL_LINES:])


def _note(path: Path) -> _Note:
    """The note of a rank; if it ended while it wrote, a note that says so."""
    try:
        return _Note.model_validate(parse_json(read_text(path, _LARGEST)))
    except (ForeignTextError, ValidationError) as error:
        return _Note(
            code=1, message=f"rank {path.stem.removeprefix('rank')} ended while it wrote its error ({error!s:.200})"
        )


def standstill(ranks: Mapping[int, tuple[str, int]], said: Mapping[int, WaitDiagnosis]) -> str:
    """The ranks that do something else than wait for others, from each rank's trace and process, and what the others
    wait for, as far as they have `said`."""
    found = {}
    for rank, (trace, process) in ranks.items():
        place, own = _place(trace, process), said.get(rank)
        known = own is not None and (own.waits or not place)
        found[rank] = own if known and own is not None else WaitDiagnosis(waits=not place, text=place)
    return report(found)


def report(ranks: Mapping[int, WaitDiagnosis]) -> str:
    """Where all ranks are; first those that wait for nobody, and ranks at the same place together."""
    groups: dict[WaitDiagnosis, list[int]] = {}
    for rank, where in sorted(ranks.items()):
        groups.setdefault(where, []).append(rank)
    busy = [_at(them, where.text) for where, them in groups.items() if not where.waits]
    waiting = [_at(them, where.text or "waits for others") for where, them in groups.items() if where.waits]
    return "; ".join([*(busy or ["all ranks wait for each other"]), *waiting])


def _at(ranks: Sequence[int], text: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {text}"
    verb, _, rest = text.partition(" ")
    return (
        f"ranks {', '.join(map(str, ranks))} { {'is': 'are', 'does': 'do'}.get(verb, verb.removesuffix('s')) } {rest}"
    )


def _place(trace: str, process: int) -> str:
    """What a rank does instead of making progress; empty where it waits for other ranks."""
    if not trace:
        return "does not answer" + (", as it was stopped by a signal" if _is_stopped(process) else "")
    frames = _FRAME.findall(trace.rpartition("most recent call first")[2])  # the main thread comes last
    own = [frame for frame in frames if not is_library(frame[0])]
    above = frames[: frames.index(own[0])] if own else frames
    if any(f"{_TORCH}distributed{os.sep}" in name for name, _, _ in above):
        return ""
    name, line, function = (own or frames or [("?", "?", "?")])[0]
    reading = any(f"{_TORCH}utils{os.sep}data{os.sep}" in name for name, _, _ in above)
    return f"{'waits for the workers of its data loader' if reading else 'is'} in {function} (at {name}:{line})"


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return state.rpartition(")")[2].split()[:1] in (["T"], ["t"])
