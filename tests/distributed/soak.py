"""A run that is hurt all the time must train what an undisturbed one trains.

    python -m tests.distributed.soak --steps 200 --kills 20 --changes 2 --full-disks 3

Trains a tiny Llama on four processes twice. The second time workers are killed (SIGKILL) at random moments, every
other one while a checkpoint is being written, the number of devices goes down and up again, and the disk with the
checkpoints fills up: the run ends, and is started again with `--continue` when there is room. Then every step must
have been reported, its loss be that of the undisturbed run, the weights be the same, and no process be left.

The disk that fills up is a file system in memory of its own, which takes root to mount.

Without changes of the number of devices "the same" is bit for bit; with them sums are made in another order, and the
script prints by how much that shows.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runtime.checkpoint.folder import checkpoints
from runtime.checkpoint.source import open_checkpoint
from runtime.checkpoint.state_names import OPTIMIZER

LOOK = 0.02  # seconds between two looks at what goes on
DISK = 256 * 2**20  # bytes of the disk that fills up: some ten checkpoints of the tiny model and its plans
FILLER = "filler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """What is done to a run: how many workers are killed, how often the number of devices changes, to the `fewer` and
    back to `all`, and how often the disk of its folder is filled up; all at steps that the seed says."""

    steps: int
    kills: int
    changes: int
    full_disks: int = 0
    seed: int = 0
    fewer: int = 2
    all: int = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run has left: its last loss of every step, the steps that it made again, its restarts, its state by name,
    those of its processes that live on, and what it said each time that it ended for want of room."""

    code: int
    losses: dict[int, float]
    repeated: list[int]
    restarts: list[str]
    state: dict[str, torch.Tensor]
    left: list[int]
    said: str
    killed_while_saving: int = 0
    full: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Run:
    """A `plan run` of the script, started again where it ended, with what it has printed."""

    folder: Path
    command: list[str]
    process: "subprocess.Popen[str]" = field(init=False)
    events: list[dict[str, Any]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)  # processes of ranks
    full: list[str] = field(default_factory=list)  # what it said when the disk was full
    while_saving: int = 0  # ranks that were killed while a checkpoint was written

    def __enter__(self) -> "_Run":
        self._noise = tempfile.TemporaryFile("w+")  # closed by __exit__
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        self._reader.join()
        self._noise.close()

    def start(self, *options: str) -> None:
        """Start it, with options beside its own."""
        self._noise.seek(0)
        self._noise.truncate()
        self.process = subprocess.Popen(
            [*self.command, *options], stdout=subprocess.PIPE, stderr=self._noise, text=True
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,))
        self._reader.start()

    def end(self, deadline: float) -> int:
        """Wait for its end and return its exit code."""
        code = self.process.wait(deadline)
        self._reader.join()
        return code

    def said(self) -> str:
        """What it has written to stderr since it was started last."""
        self._noise.seek(0)
        return self._noise.read()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    @property
    def step(self) -> int:
        return max((event["step"] for event in list(self.events) if event.get("event") == "step"), default=0)

    def ranks(self) -> list[int]:
        """The processes of its ranks, that live now."""
        found = [pid for pid, command in _processes() if str(self.folder) in command and "--notes" in command]
        ranks = [pid for pid in found if _environment(pid).get("RANK")]
        self.seen.update(ranks)
        return ranks

    def saving(self) -> bool:
        return any(self.folder.glob(".step-*.part"))


def run(plan: Path, folder: Path, hurt: Hurt, *options: str, deadline: float = 3600.0) -> Found:
    """Run a plan into `folder`, hurt it, and say what came of it."""
    command = [
        sys.executable, "-m", "planner.cli.main", "run", str(plan), "--steps", str(hurt.steps), "--no-check", "--json",
        "--save", str(folder), *options,
    ]  # fmt: skip
    with _Run(folder=folder, command=command) as one:
        _hurt(one, hurt, deadline)
        code = one.end(deadline)
        said = one.said()
    steps = [event["step"] for event in one.events if event.get("event") == "step"]
    losses = {event["step"]: event["loss"] for event in one.events if event.get("event") == "step"}
    restarts = [event["reason"] for event in one.events if event.get("event") == "restart"]
    return Found(
        code=code,
        losses=losses,
        repeated=[step for at, step in enumerate(steps) if step in steps[:at]],
        restarts=restarts,
        state=dict(state_of(folder)) if code == 0 else {},
        left=[pid for pid in one.seen if Path(f"/proc/{pid}").exists()],
        said=said,
        killed_while_saving=one.while_saving,
        full=tuple(one.full),
    )


def _hurt(one: _Run, hurt: Hurt, deadline: float) -> None:
    """Kill workers, change the number of devices and fill the disk at random steps."""
    drawn = random.Random(hurt.seed)
    steps = range(2, hurt.steps - max(min(15, hurt.steps // 2), hurt.steps // 10))  # else it is over before it notices
    kills = sorted(drawn.choices(steps, k=hurt.kills)) if hurt.kills else []
    changes = sorted(drawn.sample(steps, k=hurt.changes))
    full_disks = sorted(drawn.sample(steps, k=hurt.full_disks))
    counts = [hurt.fewer, hurt.all] * hurt.changes
    ends = time.monotonic() + deadline
    while one.process.poll() is None and time.monotonic() < ends and (kills or changes or full_disks):
        if full_disks and one.step >= full_disks[0]:
            full_disks.pop(0)
            _fill_the_disk(one)
        if changes and one.step >= changes[0]:
            changes.pop(0)
            count = counts.pop(0)
            _write(one.folder / "devices", str(count))
            if count != hurt.all:
                _await_plan(one, count)
            _await_restart(one)
        if kills and one.step >= kills[0] and _kill(one, drawn, hurt, while_saving=len(kills) % 2 == 1):
            kills.pop(0)
        one.ranks()
        time.sleep(LOOK)


def _kill(one: _Run, drawn: random.Random, hurt: Hurt, *, while_saving: bool) -> bool:
    """Kill one rank and wait until the run has noticed; False where it has none now."""
    for _ in range(int(2 / LOOK)):
        if not while_saving or one.saving() or one.step >= hurt.steps - 4:  # else it may be over
            break
        time.sleep(LOOK)
    ranks = one.ranks()
    if ranks:
        one.while_saving += one.saving()
        time.sleep(drawn.random() * 0.05)
        _send([drawn.choice(ranks)], signal.SIGKILL)
        _await_restart(one)
    return bool(ranks)


def _fill_the_disk(one: _Run) -> None:
    """Leave no byte until the run has ended for it; then make room, and have it go on."""
    filler = one.folder / FILLER
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as opened:
        while True:
            opened.write(bytes(2**16))
    code = one.end(600.0)
    said = one.said()
    assert code != 0, "a run that cannot save says so"
    assert "No space left" in said, said[-2000:]
    one.full.append(said.strip().splitlines()[-1])
    filler.unlink()
    one.start("--continue")


def _await_plan(one: _Run, devices: int) -> None:
    """Until a plan for so many devices has been found, which takes longer than many steps of a tiny model. A rank
    stands still meanwhile, and with it all others."""
    ranks = one.ranks()[:1]
    _send(ranks, signal.SIGSTOP)
    ends = time.monotonic() + 120
    while one.process.poll() is None and time.monotonic() < ends:
        if any((one.folder / "plans").glob(f"{devices}-devices-*")):
            break
        time.sleep(LOOK)
    _send(ranks, signal.SIGCONT)


def _await_restart(one: _Run) -> None:
    """Until the run has noticed: a second blow to a run that is over would hit nobody, and devices that come back at
    once were never gone."""
    before = sum(event.get("event") == "restart" for event in list(one.events))
    ends = time.monotonic() + 60
    while one.process.poll() is None and time.monotonic() < ends:
        if sum(event.get("event") == "restart" for event in list(one.events)) > before:
            return
        time.sleep(LOOK)


def _send(processes: Iterable[int], what: signal.Signals) -> None:
    for pid in processes:
        try:
            os.kill(pid, what)
        except ProcessLookupError:
            continue


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _processes() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            yield int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def state_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """What the last checkpoint has, whole."""
    source = open_checkpoint(checkpoints(folder)[-1])
    source.check()
    for name in source.tensors:
        yield name, source.read(name)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two states' weights, relative to the largest element of each tensor; infinite where
    they do not have the same tensors."""
    if one.keys() != other.keys():
        return float("inf")
    weights = [name for name in one if not name.startswith(f"{OPTIMIZER}/")]
    return max(
        float((one[name].double() - other[name].double()).abs().max() / one[name].double().abs().max().clamp(min=1e-30))
        for name in weights
    )


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same bit for bit, those of the optimizer too."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@contextlib.contextmanager
def disk(folder: Path, size: int = DISK) -> Iterator[Path]:
    """A file system of its own at `folder`, as large as that. Raises CalledProcessError for who may not mount one."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def main() -> int:
    """Run the soak and print what was found; 0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--changes", type=int, default=2, help="of the number of devices, 4 to 2 and back")
    parser.add_argument("--full-disks", type=int, default=0, help="how often the disk fills up; takes root")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as place, contextlib.ExitStack() as mounted:
        folder = Path(place)
        into = folder / "hurt"
        if asked.full_disks:
            mounted.enter_context(disk(into))
        plan = folder / "plan.json"
        subprocess.run(
            [sys.executable, "-m", "planner.cli.main", "--model", "llama-tiny", "--devices", "4", "--hardware", "cpu",
             "--global-batch", "8", "-q", "-o", str(plan)],
            check=True,
        )  # fmt: skip
        every = ("--save-every", str(asked.save_every))
        alone = run(plan, folder / "alone", Hurt(steps=asked.steps, kills=0, changes=0), *every)
        print(f"undisturbed: {len(alone.losses)} steps, exit code {alone.code}", flush=True)
        started = time.perf_counter()
        elastic = ("--elastic", "2:4") if asked.changes else ("--restarts", "3")
        hurt = Hurt(
            steps=asked.steps,
            kills=asked.kills,
            changes=asked.changes,
            full_disks=asked.full_disks,
            seed=asked.seed,
        )
        found = run(plan, into, hurt, *every, *elastic)
    faults = faults_of(alone, found, asked.steps, changed=asked.changes > 0)
    print(
        f"hurt: {len(found.losses)} steps in {time.perf_counter() - started:.0f} s, exit code {found.code},"
        f" {len(found.restarts)} restarts, {found.killed_while_saving} of the kills while a checkpoint was written,"
        f" {len(found.full)} full disks"
    )
    for said in found.full:
        print(f"full disk: {said}")
    if found.state and alone.state:
        print(f"largest relative difference of a weight: {difference(alone.state, found.state):.1e}")
        print(f"the same bit for bit: {'yes' if equal(alone.state, found.state) else 'no'}")
    for fault in faults:
        print(f"FAULT: {fault}")
    return 1 if faults else 0


def faults_of(alone: Found, found: Found, steps: int, *, changed: bool) -> list[str]:
    """What is wrong with a run that was hurt, beside one that was not. Where the number of devices `changed`, weights
    may differ by 1e-4 of the largest of each tensor: float32 sums in another order, over hundreds of steps."""
    faults = []
    if found.code != 0:
        faults.append(f"it ended with code {found.code}: {found.said[-500:]}")
    missing = [number for number in range(1, steps + 1) if number not in found.losses]
    if missing:
        faults.append(f"steps {missing} were not reported")
    if found.left:
        faults.append(f"processes {found.left} are left")
    if changed:
        if not difference(alone.state, found.state) <= 1e-4:
            faults.append(f"the weights differ by {difference(alone.state, found.state):.1e}")
    elif not equal(alone.state, found.state):
        faults.append("the weights or the state of the optimizer are not the same")
    else:
        wrong = [number for number in alone.losses if alone.losses[number] != found.losses.get(number)]
        if wrong:
            faults.append(f"the losses of steps {wrong} are not the same")
    return faults


if __name__ == "__main__":
    sys.exit(main())
