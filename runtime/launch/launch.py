"""`plan run FILE`: starts one process per device of the plan, and checks that they compute the same as the unsharded
model.

    launch ──┬─ rank 0: reports every step
             ├─ rank 1
             └─ ...            see `runtime.processes.ranks` for how they start, and how all of them end

If a launcher has already started this process, on one host or several, it is one of the ranks (`runtime.launchers`):

    torchrun --nnodes 4 --nproc-per-node 8 ... -m runtime PLAN --steps 10
    srun --nodes 4 --ntasks-per-node 8 plan run PLAN --steps 10
    mpirun -n 8 plan run PLAN --steps 10

Exit codes: 0 the losses agree, 1 they do not or a rank failed, 2 and 3 those of `PlannerError`.
"""

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import PlannerError, RequestError
from planner.plan.binding.model_of import buildable
from planner.plan.file import load_plan
from planner.plan.plan import Plan
from planner.plan.writing import check_place
from runtime.comm.interfaces import interface_of
from runtime.launchers import Launched, launched_by
from runtime.processes.rank import At, Joined, be_a_rank
from runtime.processes.ranks import run_ranks, threads_per_rank
from runtime.processes.run_servers import servers_of
from runtime.processes.watch import LEAVE
from runtime.run_settings import RunSettings, asked_settings, parse_arguments

if TYPE_CHECKING:
    from runtime.processes.progress import Report


def launch(
    plan_path: str | Path,
    settings: RunSettings,
    on_report: Callable[["Report"], None],
    on_line: Callable[[str], None] = print,
) -> int:
    """Run the training steps of a plan on this machine, or as one rank of them under a launcher; returns the exit code.

    `on_report` gets the report of each step and the summary, `on_line` all other lines that the ranks print. Raises
    PlannerError for a plan that cannot be read or executed, RunError where a rank fails.
    """
    from runtime.checkpoint.folder import finished

    plan = load_plan(Path(plan_path))
    _check(settings)
    _check_evaluated(plan, settings)
    _check_servers(plan, settings)
    _check_measure(Path(plan_path), settings)
    buildable(plan.model, settings.model)
    launched = launched_by(os.environ)
    _check_tables(plan, settings, started_here=launched is None)
    if (done := finished(settings)) is not None:
        if launched is None or launched.rank == 0:
            on_line(f"nothing is left to do: {done} is of step {settings.steps}, the last step of --steps")
        return 0
    if launched is not None:
        if settings.restarts:
            raise RequestError(
                "--restarts: the launcher starts the ranks; use its own option, such as torchrun --max-restarts"
            )
        if settings.elastic is None:
            launched.check(plan.cluster.devices)
        _join(launched, settings.listen)
        return be_a_rank(lambda at, joined: _train(plan, settings, on_report, at, joined), None, settings.timeout)

    from runtime.launch.holding import holding_folder

    with holding_folder(settings, on_report) as held:
        return _launch_here(Path(plan_path), plan, held, on_report, on_line)


def _launch_here(
    path: Path,
    plan: Plan,
    settings: RunSettings,
    on_report: Callable[["Report"], None],
    on_line: Callable[[str], None],
) -> int:
    """Start the ranks on this machine, under the lock of the checkpoint folder, if there is one."""
    _check_folder(settings)  # again: another run may have ended meanwhile
    if settings.restarts or settings.elastic is not None:
        from runtime.recovery.running import run_on_and_on

        return run_on_and_on(path, plan, settings, on_report, on_line)
    from runtime.processes.progress import reading

    read = reading(on_report, on_line)
    with servers_of(plan, settings) as found:
        words = replace(settings, server_folder=found).arguments()
        return run_ranks("runtime", [str(path), *words], plan.cluster.devices, read, settings.timeout)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m runtime PLAN`: the same as `launch`, with plain text lines and one-line errors."""
    given = parse_arguments(arguments)
    if given.notes is not None:
        asked = Path(given.notes) / LEAVE
        return be_a_rank(
            lambda at, joined: _train(load_plan(given.plan), given.settings, _write_record, at, joined, asked.exists),
            given.notes,
        )
    try:
        return launch(given.plan, given.settings, write_json if given.as_json else write_text)
    except PlannerError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def write_text(report: "Report") -> None:
    """A report as plain lines on stdout."""
    from runtime.processes.progress import lines_of

    _write("\n".join(lines_of(report)))


def write_json(report: "Report") -> None:
    """A report as one JSON object on one line of stdout."""
    from runtime.processes.progress import content_of

    _write(json.dumps(content_of(report), allow_nan=False))


def _write_record(report: "Report") -> None:
    from runtime.processes.progress import record_of

    _write(record_of(report))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _join(launched: Launched, listen: str | None) -> None:
    """Join as the process that a launcher has started: torch reads its rank from the environment."""
    if launched.rank == 0:
        sys.stderr.write(launched.text() + "\n")
        if listen is not None and launched.agent:
            sys.stderr.write(f"--listen {listen}: the store of torchrun still listens on all addresses\n")
    os.environ.update(launched.environment())
    if launched.local_world is not None:  # without a setting torch uses all cores in each process
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(launched.local_world)))


def _check(settings: RunSettings) -> None:
    """Raise for errors in a request that do not depend on the plan."""
    for one in asked_settings():
        value, least = getattr(settings, one.field), one.flag.least
        if value is not None and least is not None and value < least:
            raise RequestError(f"{one.name} {value}: give {least} or more")
    if not settings.timeout > 0:
        raise RequestError(f"--timeout {settings.timeout:g}: give seconds, more than 0")
    if settings.listen is not None:
        interface_of(settings.listen)
    settings.guard()
    if settings.go_on and settings.save is None:
        raise RequestError(
            "--continue: resumes from the newest checkpoint in --save; give --save DIR, or --resume PATH"
        )
    given = [("--resume", settings.resume), ("--continue", settings.go_on), ("--weights", settings.weights)]
    wants = (
        ("--restarts", settings.restarts),
        ("--elastic", settings.elastic),
        ("--state-replicas", settings.state_replicas),
    )
    if settings.save is None and (asked := [flag for flag, value in wants if value]):
        raise RequestError(f"{asked[0]}: needs a folder of checkpoints to resume from; give --save DIR")
    usual = RunSettings()
    if settings.save is None and settings.keep != usual.keep:
        raise RequestError(f"--keep {settings.keep}: nothing is saved; give --save DIR")
    if settings.save is None and settings.save_every != usual.save_every and not settings.guard().rolls_back:
        raise RequestError(f"--save-every {settings.save_every}: nothing is saved; give --save DIR")
    guard = settings.guard()
    if guard.on_spike == "ignore":
        spikes = (
            ("--spike-factor", settings.spike_factor != usual.spike_factor),
            ("--spike-window", settings.spike_window != usual.spike_window),
        )
        if unused := [flag for flag, other in spikes if other]:
            raise RequestError(
                f"{unused[0]}: spikes are ignored; give --on-spike stop, skip or rollback, or leave it out"
            )
    if settings.rollbacks != usual.rollbacks and not guard.rolls_back:
        raise RequestError(
            f"--rollbacks {settings.rollbacks}: nothing is rolled back; give --on-nonfinite or --on-spike rollback, or"
            " leave it out"
        )
    if settings.state_replicas and settings.check:
        raise RequestError(
            "--state-replicas: the unsharded model of the check cannot resume from them; give --no-check"
        )
    if settings.evaluate is None:
        words = [("--evaluate-every", settings.evaluate_every), ("--evaluate-batches", settings.evaluate_batches)]
        if lone := [flag for flag, value in words if value is not None]:
            raise RequestError(f"{lone[0]}: needs a dataset to evaluate on; give --evaluate NAME")
    if settings.compile and settings.general:
        raise RequestError("--compile: the general executor runs operators one by one; leave out --general")
    _check_folder(settings)
    if len(both := [flag for flag, value in given if value]) > 1:
        raise RequestError(f"{' and '.join(both)}: give only one of them")
    if settings.cast and settings.weights is None:
        raise RequestError("--cast: converts only what --weights PATH loads; a resumed run keeps its precision")
    if settings.dataset is None and (settings.shuffle or settings.workers or not settings.full_batch):
        flag = "--shuffle" if settings.shuffle else "--workers" if settings.workers else "--own-samples"
        raise RequestError(f"{flag}: for a dataset only, not for synthetic data; give --dataset package.module:factory")


def _check_evaluated(plan: Plan, settings: RunSettings) -> None:
    """Raise RequestError where a run without training steps is given options that need training, or has nothing to
    do."""
    trains = plan.schedule_kind.trains
    if settings.steps == 0 and settings.evaluate is None:
        raise RequestError("--steps 0: nothing is trained or evaluated; give --evaluate NAME, or more steps")
    if trains and settings.steps:
        return
    why = "--steps 0 trains nothing" if trains else "the plan is forward only and trains nothing"
    asked = {
        "--save": None if trains or settings.save is None else settings.save,
        "--measure": settings.measure,
        "--restarts": settings.restarts,
        "--elastic": settings.elastic,
        "--state-replicas": settings.state_replicas,
        "--evaluate-every": settings.evaluate_every,
        "--on-nonfinite": settings.on_nonfinite != RunSettings().on_nonfinite,
        "--on-spike": settings.on_spike != RunSettings().on_spike,
    }
    if given := [flag for flag, value in asked.items() if value]:
        raise RequestError(f"{given[0]}: {why}; leave it out")


def _check_servers(plan: Plan, settings: RunSettings) -> None:
    """Raise RequestError where servers are asked for, and the plan has no tables on them."""
    if any(place == "servers" for _, place in plan.training.update.placed):
        return
    if settings.server_folder is not None or settings.servers != RunSettings().servers:
        flag = "--servers" if settings.server_folder is None else "--server-folder"
        raise RequestError(
            f"{flag}: the plan has no tables on servers; leave it out, or plan with --place TABLE=servers"
        )


def _check_measure(plan_path: Path, settings: RunSettings) -> None:
    """Raise where the measurement record could not be written at the end of the run, or would overwrite the plan."""
    if settings.measure is None:
        return
    path = Path(settings.measure)
    if path.resolve() == plan_path.resolve():
        raise RequestError(f"--measure {path}: the record would overwrite the plan file; name another file")
    check_place(path)


def _check_folder(settings: RunSettings) -> None:
    """A new run must not delete the checkpoints of another one, nor continue from them by mistake."""
    from runtime.checkpoint.folder import checkpoints, newest

    if settings.save is None or settings.go_on or settings.resume is not None:
        return
    folder = Path(settings.save)
    if there := checkpoints(folder):
        found = newest(folder) or there[-1]
        raise RequestError(
            f"--save {settings.save}: already has checkpoints, the last is {found.name}; resume from it with"
            " --continue, or name another folder"
        )


def _check_tables(plan: Plan, settings: RunSettings, *, started_here: bool) -> None:
    """Tables off the devices have no state replicas, and servers on several nodes must be started before."""
    placed = plan.training.update.placed
    if placed and settings.state_replicas:
        raise RequestError(
            f"--state-replicas: the plan has tables off the devices ({placed[0][0]}), which have no replicas in memory;"
            " leave it out, checkpoints have them"
        )
    if placed and settings.save is None and settings.guard().rolls_back:
        raise RequestError(
            f"rollback: the plan has tables off the devices ({placed[0][0]}), which have no replicas in memory; give"
            " --save DIR, checkpoints have them"
        )
    served = any(place == "servers" for _, place in placed)
    again = "--elastic" if settings.elastic is not None else "--restarts" if settings.restarts else None
    if served and again is not None and settings.server_folder is not None:
        raise RequestError(
            f"{again}: every attempt starts its own servers, with the tables of the last checkpoint; leave"
            " --server-folder out"
        )
    if served and not started_here and settings.server_folder is None:
        raise RequestError(
            "the plan has tables on servers: start them with python -m runtime.servers DIR --servers N, and say where"
            " they are with --server-folder DIR --servers N"
        )


def _train(
    plan: Plan,
    settings: RunSettings,
    on_report: Callable[["Report"], None],
    at: At,
    joined: Joined,
    leave: Callable[[], bool] = lambda: False,
) -> int:
    import torch.distributed as dist

    from runtime.comm.device_mesh import current_device, local_rank, start_processes
    from runtime.launch.training import train
    from runtime.processes.progress import RunSummary

    joined(start_processes(current_device(local_rank()), settings.timeout, settings.listen))
    if settings.elastic is not None and dist.get_world_size() != plan.cluster.devices:
        from runtime.recovery.replanning import plan_of_all

        at("searching a plan for another number of devices")
        plan = plan_of_all(plan, settings, dist.get_world_size())
    code = 0
    for report in train(plan, settings, at, leave=leave):
        if dist.get_rank() == 0:
            on_report(report)
            code = 1 if isinstance(report, RunSummary) and not report.agrees else 0
    at("ending")
    dist.barrier()
    dist.destroy_process_group()
    return code
