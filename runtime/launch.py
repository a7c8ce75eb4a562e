"""`plan run FILE`: starts one process per device of the plan, and says whether they compute what the unsharded
model computes.

    launch ── torch.distributed.run ──┬─ rank 0: prints loss, loss of the unsharded model, difference
                                      ├─ rank 1
                                      └─ ...            a rank that fails leaves a note; torchrun ends the others

Started under torchrun already (several nodes), it is one of the ranks:

    torchrun --nnodes 4 --nproc-per-node 8 ... -m runtime PLAN --steps 10

Exit codes: 0 the losses agree, 1 they do not or a rank broke down, 2 and 3 those of `PlannerError`.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from planner.errors import PlannerError
from planner.plan.plan import Plan

_TAIL_LINES = 5
_PATIENCE = 20.0  # seconds that torchrun has to end its ranks
_ENDED = re.compile(r"rank\s*:\s*(\d+)\s*\(local_rank[^)]*\)\s*exitcode\s*:\s*-(\d+)")


def launch(plan_path: str | Path, *, steps: int = 5, seed: int = 0, check: bool = True) -> int:
    """Run `steps` training steps of a plan on this machine and return the exit code; rank 0 prints to stdout.

    `check` runs the unsharded model beside it, in the memory of rank 0's device. Raises PlannerError for a plan that
    cannot be read or executed; a failure inside a rank is printed in one line.
    """
    if "RANK" in os.environ:
        return _be_a_rank(plan_path, steps=steps, seed=seed, check=check, notes=None)
    plan = _load(plan_path)
    _check_devices(plan)
    arguments = [str(plan_path), "--steps", str(steps), "--seed", str(seed), *(() if check else ("--no-check",))]
    return run_ranks("runtime", arguments, plan.cluster.devices)


def run_ranks(
    module: str, arguments: Sequence[str], processes: int, on_line: Callable[[str], None] | None = None
) -> int:
    """Run `python -m module` in so many processes of this machine, on loopback, and return the exit code.

    The module takes `--notes FOLDER`, for `be_a_rank`. What the ranks print goes to stdout, or line by line to
    `on_line`; a failure inside a rank is printed in one line.
    """
    with tempfile.TemporaryDirectory(prefix="plan-run-") as notes, tempfile.TemporaryFile("w+") as noise:
        command = [
            sys.executable, "-m", "torch.distributed.run",
            "--nnodes", "1", "--nproc-per-node", str(processes),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
            "-m", module, *arguments, "--notes", notes,
        ]  # fmt: skip
        sys.stdout.flush()
        returned = _run(command, noise, _environment(processes), on_line)
        if returned == 0:
            return 0
        noise.seek(0)
        return _report_failure(Path(notes), returned, noise.read())


def threads_per_rank(processes: int) -> int:
    """Threads of each of so many processes on this machine: its cores shared out, one at least."""
    return max(1, (os.cpu_count() or 1) // processes)


def _run(
    command: Sequence[str], noise: IO[str], environment: Mapping[str, str], on_line: Callable[[str], None] | None
) -> int:
    """Run torchrun to its end. Where this process is told to stop, torchrun is told first, which ends its ranks."""
    child = subprocess.Popen(
        command, env=environment, stderr=noise, stdout=None if on_line is None else subprocess.PIPE, text=True
    )
    ours = threading.current_thread() is threading.main_thread()  # only there can a signal be handled
    before = {number: signal.signal(number, _stop) for number in (signal.SIGTERM, signal.SIGHUP) if ours}
    try:
        if on_line is not None and child.stdout is not None:
            for line in child.stdout:
                on_line(line.rstrip("\n"))
        return child.wait()
    except BaseException:
        child.terminate()
        try:
            child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        raise
    finally:
        if child.stdout is not None:
            child.stdout.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m runtime PLAN`: the same as `launch`, with errors in one line."""
    parser = argparse.ArgumentParser(prog="python -m runtime", description="Train for some steps as a plan says.")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    parser.add_argument("--no-check", action="store_true", help="do not run the unsharded model beside it")
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    check = not given.no_check
    try:
        if "RANK" in os.environ:
            return _be_a_rank(given.plan, steps=given.steps, seed=given.seed, check=check, notes=given.notes)
        return launch(given.plan, steps=given.steps, seed=given.seed, check=check)
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _load(plan_path: str | Path) -> Plan:
    from planner.plan.file import load_plan

    return load_plan(Path(plan_path))


def _check_devices(plan: Plan) -> None:
    """This machine must have a device per process; CPU processes are free. Raises RequestError."""
    import torch

    from planner.errors import RequestError

    if torch.accelerator.is_available() and torch.accelerator.device_count() < plan.cluster.devices:
        raise RequestError(
            f"the plan is for {plan.cluster.devices} devices, this machine has {torch.accelerator.device_count()};"
            " start it on every node with torchrun --nnodes ... --nproc-per-node ... -m runtime PLAN"
        )


def _environment(processes: int) -> dict[str, str]:
    """The ranks must find this package, wherever the caller stands, and share the cores unless the caller says more."""
    root = str(Path(__file__).resolve().parents[1])
    known = os.environ.get("PYTHONPATH")
    path = f"{root}{os.pathsep}{known}" if known else root
    return {"OMP_NUM_THREADS": str(threads_per_rank(processes)), **os.environ, "PYTHONPATH": path}


def _be_a_rank(plan_path: str | Path, *, steps: int, seed: int, check: bool, notes: str | None) -> int:
    return be_a_rank(lambda: _train(_load(plan_path), steps=steps, seed=seed, check=check), notes)


def be_a_rank(work: Callable[[], int], notes: str | None) -> int:
    """One rank's share. Whatever goes wrong becomes one line: in the notes for the parent, or on stderr."""
    try:
        code = work()
        if code and notes is not None:
            _leave_note(notes, code, "")  # rank 0 has printed what is wrong
        return code
    except PlannerError as error:
        code, message = error.exit_code, str(error)
    except Exception as error:  # the boundary of the process: the other ranks wait for this one, so it must end
        code, message = 1, f"rank {os.environ['RANK']}: {_in_one_line(error)}"
    if notes is None:
        print(f"error: {message}", file=sys.stderr, flush=True)
    else:
        _leave_note(notes, code, message)
    sys.stdout.flush()
    os._exit(code)  # not by way of the process groups, which would wait for the others


def _leave_note(notes: str, code: int, message: str) -> None:
    path = Path(notes) / f"rank{os.environ['RANK']}.json"
    path.write_text(json.dumps({"code": code, "message": message}), encoding="utf-8")


def _train(plan: Plan, *, steps: int, seed: int, check: bool) -> int:
    import torch.distributed as dist

    from runtime.device_mesh import current_device, start_processes
    from runtime.step import local_rank
    from runtime.training import TOLERANCE, train

    start_processes(current_device(local_rank()))
    first = dist.get_rank() == 0
    tolerance = TOLERANCE[plan.training.precision]
    worst = 0.0
    for report in train(plan, steps=steps, seed=seed, check=check):
        worst = max(worst, report.difference)
        if first:
            beside = "" if report.unsharded is None else (
                f"   unsharded {report.unsharded:.6f}   difference {report.difference:.1e}"
            )  # fmt: skip
            print(f"step {report.step:>4}   loss {report.loss:.6f}{beside}", flush=True)
    if first and check:
        verdict = "agrees with" if worst <= tolerance else "DIFFERS from"
        print(
            f"the plan {verdict} the unsharded model: largest relative difference {worst:.1e}, allowed {tolerance:.0e}"
            f" for {plan.training.precision}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()
    return 0 if worst <= tolerance else 1


def _in_one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {lines[0] if lines else '(no message)'} (at {frame.filename}:{frame.lineno})"


def _report_failure(notes: Path, returned: int, noise: str) -> int:
    """One line for the failure of some ranks: an error on purpose before any other, the first before the later."""
    found = []
    for path in notes.iterdir():
        with contextlib.suppress(json.JSONDecodeError):  # a rank that was ended while it wrote
            note = json.loads(path.read_text(encoding="utf-8"))
            found.append((note["code"] < 2, path.stat().st_mtime_ns, note["code"], note["message"]))
    # torchrun lists the failure that it saw first last; ranks that it had to end itself may stand before it
    others, _, first = noise.rpartition("Root Cause")
    killed = [
        (rank, number)
        for part in (first, others)
        for rank, number in _ENDED.findall(part)
        if int(number) != signal.SIGTERM
    ]
    if killed and all(code < 2 for _, _, code, _ in found):
        rank, number = killed[0]
        memory = "; the operating system does that where memory runs out" if int(number) == signal.SIGKILL else ""
        print(
            f"error: rank {rank} was ended by {signal.Signals(int(number)).name}{memory}", file=sys.stderr, flush=True
        )
        return 1
    if found:
        _, _, code, message = min(found)
        if message:
            print(f"error: {message}", file=sys.stderr, flush=True)
        return int(code)
    print("\n".join(noise.splitlines()[-_TAIL_LINES:]), file=sys.stderr, flush=True)
    return returned
