"""What is asked of a run, as it travels from the command line to the ranks."""

import argparse
from dataclasses import dataclass

from runtime.guard_settings import GuardSettings

TIMEOUT = 600.0
"""Seconds without progress after which a run is ended."""
SAVE_EVERY = 100
"""Steps from one checkpoint to the next."""
KEEP = 3
"""Checkpoints that stay."""
ROLLBACKS = 3
"""Rollbacks in a row that are borne."""

SERVERS = 2
"""Parameter servers, where a plan has tables on servers and nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """A run of `steps` optimizer steps. `seed` is that of weights, synthetic data and order.

    `check` runs the unsharded model beside it, in the memory of rank 0's device. `model` and `data` are the
    words of the person: the model where it is none of the zoo, `package.module:factory` or a config.json, and the
    factory of a dataset, where there is one. What a plan names itself is never imported or opened.
    `shuffle`, `full_batch` and `workers` are those of `runtime.loader`. A run in which no rank makes progress for
    `timeout` seconds is ended. `on_nonfinite`, `on_spike`, `spike_factor` and `spike_window` are those of
    `runtime.guard`; a run that rolls back does so `rollbacks` times in a row without getting any further.

    `save` is the folder of checkpoints: one every `save_every` steps and one behind the last, of which `keep` stay.
    Training goes on from the checkpoint at `resume`, or with `go_on` from the newest in `save` where there is one;
    `steps` counts those before it too. `weights` has the model to start from: a checkpoint, or files of Hugging Face;
    with `cast` in whatever floating point dtype.

    Ranks that break down are started again, `restarts` times in a row without a step between (None: 3 times where the
    run is elastic, else never). `elastic` is a range of devices, such as "2:4", within which training goes on with
    fewer or more. `copies` keeps copies of the state in the memory of the hosts, after every step. `lock` is the token
    of the lock of `save`, where the process that starts the ranks holds it.

    `listen` is the network interface on which processes listen (`runtime.interfaces.interface_of`); where nothing is
    said loopback for a run on one machine.

    `servers` are the parameter servers of a plan with tables on servers, which keep their files in `server_folder`:
    those that run there, or, of a run on this machine, new ones; a temporary folder where not given. What is not
    `lowered` runs in the general executor, `compiled` fuses chains of elementwise operators.
    """

    steps: int = 5
    seed: int = 0
    check: bool = True
    model: str | None = None
    data: str | None = None
    shuffle: bool = False
    full_batch: bool = True
    workers: int = 0
    timeout: float = TIMEOUT
    listen: str | None = None
    servers: int = SERVERS
    server_folder: str | None = None
    save: str | None = None
    save_every: int = SAVE_EVERY
    keep: int = KEEP
    resume: str | None = None
    go_on: bool = False
    weights: str | None = None
    restarts: int | None = None
    elastic: str | None = None
    copies: bool = False
    lock: str | None = None
    cast: bool = False
    on_nonfinite: str = "stop"
    on_spike: str = "ignore"
    spike_factor: float = 2.0
    spike_window: int = 32
    rollbacks: int = ROLLBACKS
    lowered: bool = True
    compiled: bool = False

    def guard(self) -> GuardSettings:
        """What becomes of steps that break. Raises RequestError for what cannot be asked for."""
        return GuardSettings(
            on_nonfinite=self.on_nonfinite,
            on_spike=self.on_spike,
            spike_factor=self.spike_factor,
            spike_window=self.spike_window,
        )

    def flags(self) -> list[str]:
        """The settings as `arguments_parser` reads them."""
        words = ["--steps", str(self.steps), "--seed", str(self.seed), "--workers", str(self.workers)]
        words += ["--timeout", str(self.timeout), "--on-nonfinite", self.on_nonfinite, "--on-spike", self.on_spike]
        words += ["--spike-factor", str(self.spike_factor), "--spike-window", str(self.spike_window)]
        words += ["--rollbacks", str(self.rollbacks), "--servers", str(self.servers)]
        words += ["--server-folder", self.server_folder] if self.server_folder is not None else []
        words += ["--model", self.model] if self.model is not None else []
        words += ["--data", self.data] if self.data is not None else []
        words += ["--save-every", str(self.save_every), "--keep", str(self.keep)]
        words += ["--lock", self.lock] if self.lock is not None else []
        words += ["--restarts", str(self.restarts)] if self.restarts is not None else []
        paths = (("--save", self.save), ("--resume", self.resume), ("--weights", self.weights))
        for flag, text in (*paths, ("--elastic", self.elastic), ("--listen", self.listen)):
            words += [flag, text] if text is not None else []
        given = [("--no-check", not self.check), ("--shuffle", self.shuffle), ("--own-samples", not self.full_batch)]
        given += [("--continue", self.go_on), ("--cast", self.cast), ("--copies", self.copies)]
        given += [("--general", not self.lowered), ("--compile", self.compiled)]
        return words + [flag for flag, wanted in given if wanted]


def arguments_parser() -> argparse.ArgumentParser:
    """The options of `python -m runtime`."""
    parser = argparse.ArgumentParser(prog="python -m runtime", description="Train for some steps as a plan says.")
    parser.add_argument("plan", help="plan file")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, synthetic data and order (default 0)")
    parser.add_argument("--no-check", action="store_true", help="do not run the unsharded model beside it")
    parser.add_argument("--model", help="package.module:factory or a config.json, where it is none of the zoo")
    parser.add_argument("--data", help="package.module:factory of a dataset (default: synthetic data)")
    parser.add_argument("--shuffle", action="store_true", help="shuffle the samples of --data")
    parser.add_argument("--own-samples", action="store_true", help="each rank reads only the samples of its pieces")
    parser.add_argument("--workers", type=int, default=0, help="processes that read --data, per rank (default 0)")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds without progress (default 600)")
    parser.add_argument("--listen", metavar="INTERFACE", help="network interface, address or network to listen on")
    parser.add_argument("--on-nonfinite", default="stop", help="a step that is not finite: stop, skip or rollback")
    parser.add_argument("--on-spike", default="ignore", help="one that leaps: ignore, stop, skip or rollback")
    parser.add_argument("--spike-factor", type=float, default=2.0, help="times the median of a loss that leaps (2)")
    parser.add_argument("--spike-window", type=int, default=32, help="steps of which the median is taken (32)")
    parser.add_argument("--rollbacks", type=int, default=ROLLBACKS, help="in a row that are borne (default 3)")
    parser.add_argument("--servers", type=int, default=SERVERS, help="parameter servers (default 2)")
    parser.add_argument("--server-folder", help="where they keep their files, and are found")
    parser.add_argument("--save", metavar="DIR", help="folder of checkpoints")
    parser.add_argument("--save-every", type=int, default=SAVE_EVERY, help="steps between two (default 100)")
    parser.add_argument("--keep", type=int, default=KEEP, help="how many of them stay (default 3)")
    parser.add_argument("--resume", metavar="PATH", help="go on from a checkpoint, or the newest of a folder")
    parser.add_argument("--continue", dest="go_on", action="store_true", help="go on from the newest in --save, if any")
    parser.add_argument("--weights", metavar="PATH", help="start from the model of a checkpoint or of Hugging Face")
    parser.add_argument("--restarts", type=int, help="failures in a row without a step that are borne (default 0)")
    parser.add_argument("--elastic", metavar="MIN:MAX", help="go on with fewer devices, or more, on another plan")
    parser.add_argument("--copies", action="store_true", help="keep copies of the state in the memory of the hosts")
    parser.add_argument("--cast", action="store_true", help="convert --weights to the precision of the plan")
    parser.add_argument("--general", action="store_true", help="run operators one by one, by the general executor")
    parser.add_argument("--compile", action="store_true", help="fuse chains of elementwise operators by torch.compile")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    return parser


def settings_of(given: argparse.Namespace) -> RunSettings:
    """What was given on the command line."""
    return RunSettings(
        steps=given.steps,
        seed=given.seed,
        check=not given.no_check,
        model=given.model,
        data=given.data,
        shuffle=given.shuffle,
        full_batch=not given.own_samples,
        workers=given.workers,
        timeout=given.timeout,
        listen=given.listen,
        on_nonfinite=given.on_nonfinite,
        on_spike=given.on_spike,
        spike_factor=given.spike_factor,
        spike_window=given.spike_window,
        rollbacks=given.rollbacks,
        lowered=not given.general,
        compiled=given.compile,
        servers=given.servers,
        server_folder=given.server_folder,
        save=given.save,
        save_every=given.save_every,
        keep=given.keep,
        resume=given.resume,
        go_on=given.go_on,
        weights=given.weights,
        restarts=given.restarts,
        elastic=given.elastic,
        copies=given.copies,
        lock=given.lock,
        cast=given.cast,
    )
