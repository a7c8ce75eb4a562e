"""The settings of a run. Each option of `plan run` and of `python -m runtime` is one field here, with its help text,
minimum and default. Both command lines are generated from the fields, and ranks receive them as JSON."""

import argparse
import dataclasses
import logging
import re
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from planner.old_words import with_new_options

if TYPE_CHECKING:
    from runtime.guard_settings import GuardSettings

TIMEOUT = 600.0
"""Seconds without progress after which a run is ended."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The command-line option of a setting: its help text, its minimum, and its metavar. `name` is the option's name
    where it differs from the field's; `off` is the option that turns off a setting that is on by default."""

    text: str
    least: int | None = None
    metavar: str | None = None
    name: str = ""
    off: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The settings of a run of a plan. Fields without a `Flag` are not options: `lock` is the token of the lock of
    `save`, where the process that starts the ranks holds it.

    Model and dataset are the user's own arguments: names in a plan are never imported or opened.
    """

    steps: Annotated[
        int,
        Flag(
            "Optimizer steps from the start of training. Steps before a resumed checkpoint count; 0 only evaluates;"
            " with a forward-only plan these are batches.",
            least=0,
        ),
    ] = 5
    seed: Annotated[int, Flag("Seed of weights, synthetic data and order.")] = 0
    check: Annotated[bool, Flag("Also run the unsharded model and compare losses.", off="--no-check")] = True
    model: Annotated[
        str | None,
        Flag(
            "Your own model: package.module:factory, or a config.json.",
            metavar="NAME",
        ),
    ] = None
    dataset: Annotated[
        str | None,
        Flag(
            "package.module:factory of a dataset, or a file of tokens. Default: synthetic data. Each item is one"
            " sample, as the model takes it.",
            metavar="NAME",
        ),
    ] = None
    shuffle: Annotated[bool, Flag("Shuffle the samples of --dataset.")] = False
    full_batch: Annotated[
        bool,
        Flag("Each rank reads the whole batch of --dataset, or only its own samples.", off="--own-samples"),
    ] = True
    workers: Annotated[int, Flag("Processes per rank that read --dataset.", least=0)] = 0
    evaluate: Annotated[
        str | None,
        Flag(
            "Validation dataset: package.module:factory, or a file of tokens. The model is evaluated on it after the"
            " last step, forward only, without dropout and without updates.",
            metavar="NAME",
        ),
    ] = None
    evaluate_every: Annotated[int | None, Flag("Also evaluate every N steps.", least=1, metavar="N")] = None
    evaluate_batches: Annotated[
        int | None, Flag("Evaluate only N global batches of --evaluate.", least=1, metavar="N")
    ] = None
    save: Annotated[str | None, Flag("Checkpoint folder. Any plan can resume from it.", metavar="DIR")] = None
    save_every: Annotated[int, Flag("Steps between checkpoints (or rollback points).", least=1)] = 100
    keep: Annotated[int, Flag("Checkpoints to keep.", least=1)] = 3
    resume: Annotated[
        str | None,
        Flag(
            "Resume from a checkpoint, or the newest of a folder. --steps counts from the start of training.",
            metavar="PATH",
        ),
    ] = None
    go_on: Annotated[bool, Flag("Resume from the newest checkpoint in --save, if there is one.", name="--continue")] = (
        False
    )
    weights: Annotated[str | None, Flag("Initial weights: a checkpoint, or Hugging Face files.", metavar="PATH")] = None
    restarts: Annotated[
        int | None,
        Flag(
            "Restarts in a row from the last checkpoint (3 with --elastic, else 0). A run restarts after a failure; a"
            " completed step resets the count.",
            least=0,
        ),
    ] = None
    elastic: Annotated[
        str | None,
        Flag(
            "Elastic training: continue with fewer or more devices on a new plan. DIR/devices holds their number.",
            metavar="MIN:MAX",
        ),
    ] = None
    state_replicas: Annotated[
        bool, Flag("Keep state replicas in host memory. A failure then loses at most one step.")
    ] = False
    cast: Annotated[bool, Flag("Cast --weights to the precision of the plan.")] = False
    timeout: Annotated[float, Flag("End the run after this many seconds without progress.")] = TIMEOUT
    listen: Annotated[
        str | None,
        Flag(
            "Network interface to listen on: name, address or network. A network is such as 10.0.0.0/24. On one host"
            " the default is loopback.",
            metavar="INTERFACE",
        ),
    ] = None
    on_nonfinite: Annotated[str, Flag("On a NaN or infinity: stop, skip or rollback.")] = "stop"
    on_spike: Annotated[str, Flag("On a loss spike: ignore, stop, skip or rollback.")] = "ignore"
    spike_factor: Annotated[float, Flag("A loss above this many times the median loss is a spike.")] = 2.0
    spike_window: Annotated[int, Flag("Number of previous steps in the median loss.")] = 32
    rollbacks: Annotated[int, Flag("Stop the run after this many rollbacks without progress.", least=1)] = 3
    servers: Annotated[int, Flag("Parameter servers to start, for tables on servers.", least=1)] = 2
    server_folder: Annotated[
        str | None,
        Flag("Folder of the parameter servers. Under torchrun: of servers that already run.", metavar="DIR"),
    ] = None
    measure: Annotated[
        str | None,
        Flag(
            "Record the time of each part of a step, for plan compare and plan fit. The last step runs under the"
            " profiler.",
            metavar="FILE",
        ),
    ] = None
    general: Annotated[bool, Flag("Use the general executor, which runs operators one by one.")] = False
    compile: Annotated[bool, Flag("Fuse chains of elementwise operators with torch.compile.")] = False
    lock: str | None = None

    def guard(self) -> "GuardSettings":
        """What to do with bad steps. Raises RequestError for invalid settings."""
        from runtime.guard_settings import GuardSettings

        return GuardSettings(
            on_nonfinite=self.on_nonfinite,
            on_spike=self.on_spike,
            spike_factor=self.spike_factor,
            spike_window=self.spike_window,
        )

    def arguments(self) -> list[str]:
        """All settings, as arguments for `parse_arguments`."""
        from pydantic import TypeAdapter

        return ["--settings", TypeAdapter(RunSettings).dump_json(self).decode()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field of `RunSettings` that is an option, with values of one `kind`."""

    field: str
    kind: type
    default: Any
    flag: Flag

    @property
    def name(self) -> str:
        return self.flag.name or "--" + self.field.replace("_", "-")


def asked_settings() -> Iterator[Setting]:
    """The settings that are command-line options, in order."""
    hints = get_type_hints(RunSettings, include_extras=True)
    for field in dataclasses.fields(RunSettings):
        hint, *metadata = get_args(hints[field.name])
        for flag in metadata:
            if isinstance(flag, Flag):
                kind = get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
                yield Setting(field=field.name, kind=kind, default=field.default, flag=flag)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of `python -m runtime`: a plan file, settings, whether reports are JSON, and the folder for notes
    to the process that started the ranks."""

    plan: str
    settings: RunSettings
    as_json: bool
    notes: str | None


def parse_arguments(arguments: Sequence[str] | None = None) -> Arguments:
    """Parse the command line of `python -m runtime`; on errors the process ends with a usage message."""
    parser = argparse.ArgumentParser(prog="python -m runtime", description="Train for some steps as a plan says.")
    parser.add_argument("plan", help="plan file")
    for one in asked_settings():
        text = re.sub(r"\[/?bold\]", "", one.flag.text).replace("%", "%%")
        if one.kind is bool:
            off = one.default is True
            parser.add_argument(
                one.flag.off if off else one.name,
                dest=one.field,
                action="store_false" if off else "store_true",
                help=text,
            )
        else:
            default = "" if one.default is None else f" (default {one.default})"
            parser.add_argument(
                one.name, type=one.kind, default=one.default, metavar=one.flag.metavar, help=text + default
            )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    parser.add_argument("--notes", help=argparse.SUPPRESS)
    words, said = with_new_options("run", sys.argv[1:] if arguments is None else arguments)
    for line in said:
        logging.getLogger(__name__).warning("python -m runtime: %s", line)
    given = parser.parse_args(words)
    return Arguments(plan=given.plan, settings=_settings(given), as_json=given.json, notes=given.notes)


def _settings(given: argparse.Namespace) -> RunSettings:
    if given.settings is None:
        return RunSettings(**{one.field: getattr(given, one.field) for one in asked_settings()})
    from pydantic import TypeAdapter

    from hardware_profiles.foreign import parse_json

    return TypeAdapter(RunSettings).validate_python(parse_json(given.settings))
