"""A run that is hurt all the time must train what an undisturbed one trains.

    python -m tests.distributed.soak --steps 200 --kills 20 --changes 2

Trains a tiny Llama on four processes twice. The second time workers are killed (SIGKILL) at random moments, every
other one while a checkpoint is being written, and the number of devices goes down and up again. Then every step must
have been reported, its loss be that of the undisturbed run, the weights be the same, and no process be left.

Without changes of the number of devices "the same" is bit for bit; with them sums are made in another order, and the
script prints by how much that shows.
"""

import argparse
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hurt:
    """What is done to a run: how many workers are killed, and how often the number of devices changes, to the `fewer`
    and back to `all`; both at steps that the seed says."""

    steps: int
    kills: int
    changes: int
    seed: int = 0
    fewer: int = 2
    all: int = 4


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a run has left: its last loss of every step, the steps that it made again, its restarts, its state by name,
    and those of its processes that live on."""

    code: int
    losses: dict[int, float]
    repeated: list[int]
    restarts: list[str]
    state: dict[str, torch.Tensor]
    left: list[int]
    said: str
    killed_while_saving: int = 0


@dataclass(kw_only=True)
class _Run:
    """A `plan run` of the script, with what it has printed."""

    folder: Path
    process: "subprocess.Popen[str]"
    events: list[dict[str, Any]] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)  # processes of ranks

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.events.append(json.loads(line))

    @property
    def step(self) -> int:
        return max((event["step"] for event in list(self.events) if event["event"] == "step"), default=0)

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
    with tempfile.TemporaryFile("w+") as noise:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True)
        one = _Run(folder=folder, process=process)
        reader = threading.Thread(target=one.read)
        reader.start()
        try:
            while_saving = _hurt(one, hurt, deadline)
            code = process.wait(deadline)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
            reader.join()
        noise.seek(0)
        said = noise.read()
    steps = [event["step"] for event in one.events if event["event"] == "step"]
    losses = {event["step"]: event["loss"] for event in one.events if event["event"] == "step"}
    restarts = [event["reason"] for event in one.events if event["event"] == "restart"]
    return Found(
        code=code,
        losses=losses,
        repeated=[step for at, step in enumerate(steps) if step in steps[:at]],
        restarts=restarts,
        state=dict(state_of(folder)) if code == 0 else {},
        left=[pid for pid in one.seen if Path(f"/proc/{pid}").exists()],
        said=said,
        killed_while_saving=while_saving,
    )


def _hurt(one: _Run, hurt: Hurt, deadline: float) -> int:
    """Kill workers and change the number of devices at random steps; returns how many were killed while a checkpoint
    was being written."""
    drawn = random.Random(hurt.seed)
    steps = range(2, hurt.steps - max(min(15, hurt.steps // 2), hurt.steps // 10))  # else it is over before it notices
    kills = sorted(drawn.choices(steps, k=hurt.kills)) if hurt.kills else []
    changes = sorted(drawn.sample(steps, k=hurt.changes))
    counts = [hurt.fewer, hurt.all] * hurt.changes
    while_saving, ends = 0, time.monotonic() + deadline
    while one.process.poll() is None and time.monotonic() < ends and (kills or changes):
        if changes and one.step >= changes[0]:
            changes.pop(0)
            count = counts.pop(0)
            _write(one.folder / "devices", str(count))
            if count != hurt.all:
                _await_plan(one, count)
            _await_restart(one)
        if kills and one.step >= kills[0]:
            wants_saving = len(kills) % 2 == 1
            for _ in range(int(2 / LOOK)):
                if not wants_saving or one.saving() or one.step >= hurt.steps - 4:  # else it may be over
                    break
                time.sleep(LOOK)
            ranks = one.ranks()
            if ranks:
                kills.pop(0)
                while_saving += one.saving()
                time.sleep(drawn.random() * 0.05)
                _send([drawn.choice(ranks)], signal.SIGKILL)
                _await_restart(one)
        one.ranks()
        time.sleep(LOOK)
    return while_saving


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
    before = sum(event["event"] == "restart" for event in list(one.events))
    ends = time.monotonic() + 60
    while one.process.poll() is None and time.monotonic() < ends:
        if sum(event["event"] == "restart" for event in list(one.events)) > before:
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


def main() -> int:
    """Run the soak and print what was found; 0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--changes", type=int, default=2, help="of the number of devices, 4 to 2 and back")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as place:
        folder = Path(place)
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
        hurt = Hurt(steps=asked.steps, kills=asked.kills, changes=asked.changes, seed=asked.seed)
        found = run(plan, folder / "hurt", hurt, *every, *elastic)
    faults = faults_of(alone, found, asked.steps, changed=asked.changes > 0)
    print(
        f"hurt: {len(found.losses)} steps in {time.perf_counter() - started:.0f} s, exit code {found.code},"
        f" {len(found.restarts)} restarts, {found.killed_while_saving} of the kills while a checkpoint was written"
    )
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
