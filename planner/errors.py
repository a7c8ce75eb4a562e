"""Every error that a user of the planner can meet.

    PlannerError
    ├── ModelError              the model cannot be found, built or traced
    ├── RuleError               an operator has no sharding rule, or its call does not match its rule
    ├── LayoutError             a layout or redistribution that cannot exist (a dim that does not divide, ...)
    ├── StrategyError           an illegal choice for an operator or a parameter
    ├── PlanFileError           a plan file that is truncated, of another version, for another graph, ...
    ├── CheckpointError         a checkpoint that is not whole, damaged, foreign, or not for this model
    ├── RequestError            an option or a combination of options that cannot be planned
    ├── AuditError              the runtime does something that the audit cannot check
    ├── RunError                a failed run: a rank failed, was killed, or hangs
    ├── InfeasibleError         nothing fits into the memory of the devices
    │   └── LimitError          the search was stopped before there was a plan
    │       └── LateError       the time limit was over before the search began
    ├── NonFiniteError          a loss or a gradient of a training step is NaN or infinite
    └── LossSpikeError          a loss far above those before it, if the run is to stop then

A message says what was asked, which numbers clash, where, and what to do. The command line prints it as one line and
exits with `exit_code`: 1 for a failed run, 2 for bad input, 3 if nothing fits, 4 for a loss that is not finite or
spikes.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from hardware_profiles.spelling import nearest_names

StoppedBy = Literal["interrupt", "memory", "time"]
"""What stops a search before its end: its user, or a limit of the planner's own memory or time."""


class PlannerError(Exception):
    """Base of all errors that the planner raises on purpose."""

    exit_code = 2


class ModelError(PlannerError):
    """The model cannot be found, built or traced."""


class RuleError(PlannerError):
    """An operator has no sharding rule, or a call does not match the rule of its operator."""


class LayoutError(PlannerError):
    """A layout that a tensor cannot have, or a redistribution that does not exist."""


class StrategyError(PlannerError):
    """A strategy that an operator, or a stored layout that a parameter, cannot have."""


class PlanFileError(PlannerError):
    """A plan file that cannot be used: unreadable, of another version, for another graph, or with an illegal edit."""


class CheckpointError(PlannerError):
    """A checkpoint that cannot be used (incomplete, damaged, foreign or for another model) or written."""


class RequestError(PlannerError):
    """An option, or a combination of options, that cannot be planned."""


class AuditError(PlannerError):
    """The runtime does something that the audit cannot check."""


class StoppedError(SystemExit):
    """A signal stopped a run; its code is 128 plus the number of the signal, as in a shell."""


class RunError(PlannerError):
    """A failed run; `exit_code` is that of the rank that failed first."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InfeasibleError(PlannerError):
    """No tried plan fits into the memory of the devices. `needed` is the memory per device of the leanest plan,
    `missing` the part of it that the device lacks; None if unknown. `advice` says what would help, in the form for
    programs."""

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        needed: float | None = None,
        missing: float | None = None,
        advice: tuple[Mapping[str, object], ...] = (),
    ) -> None:
        super().__init__(message)
        self.needed, self.missing, self.advice = needed, missing, advice


class LimitError(InfeasibleError):
    """A search was stopped before there was a plan, `by` a limit of the planner's own time or memory, or its user."""

    def __init__(self, message: str, *, by: StoppedBy = "time") -> None:
        super().__init__(message)
        self.by: StoppedBy = by


class LateError(LimitError):
    """The time limit was over before the search began."""


class NonFiniteError(PlannerError):
    """A loss, or a gradient, that is NaN or infinite: training cannot go on."""

    exit_code = 4


class LossSpikeError(PlannerError):
    """A loss far above those before it, in a run that is to stop then."""

    exit_code = 4


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The question "did you mean ...?" with the most similar known names; `otherwise` if none is similar."""
    near = nearest_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """The message that `name` is not a known `kind`, with the nearest names, and with all names if the list is
    short."""
    names = sorted(known)
    meant = did_you_mean(name, names)
    hint = f"; {meant}" if meant else "."
    listing = f" Known: {', '.join(names)}." if len(names) <= 40 else ""
    return f"unknown {kind} '{name}'{hint}{listing}"
