"""Every error a user of the planner can meet.

    PlannerError
    ├── ModelError              the model cannot be found, built or traced
    ├── RuleError               an operator has no sharding rule, or its call does not match its rule
    ├── LayoutError             a layout or redistribution that cannot exist (a dim that does not divide, ...)
    ├── StrategyError           an illegal choice for an operator or a parameter
    ├── PlanFileError           a plan file that is truncated, of another version, for another graph, ...
    ├── CheckpointError         a checkpoint that is not whole, damaged, foreign, or not for this model
    ├── RequestError            an option or a combination of options that cannot be planned
    ├── AuditError              the runtime does something that an audit cannot judge
    ├── RunError                a run that broke down: a rank failed, was killed, or does nothing
    ├── InfeasibleError         nothing fits into the memory of the devices
    │   └── LimitError          a limit of the planner itself was reached before there was a plan
    ├── NonFiniteError          a loss or a gradient of a training step is NaN or infinite
    └── LossSpikeError          a loss that is far above those before it, where that shall stop the run

A message says what was asked, the numbers that clash, where, and what to do. The command line turns each into one line
and the exit code `exit_code`: 1 for a run that broke down, 2 for bad input, 3 where nothing fits, 4 where a loss is not
finite or leaps.
"""

import difflib
from collections.abc import Iterable, Mapping


class PlannerError(Exception):
    """Base of all errors raised on purpose by the planner."""

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
    """A plan file that cannot be used: unreadable, of another version, for another graph, or changed illegally."""


class CheckpointError(PlannerError):
    """A checkpoint that cannot be used: not whole, damaged, foreign or for another model; or one that cannot be
    written."""


class RequestError(PlannerError):
    """An option, or a combination of options, that cannot be planned."""


class AuditError(PlannerError):
    """The runtime does something that an audit cannot judge."""


class StoppedError(SystemExit):
    """A signal stopped a run; its code is 128 plus the number of the signal, as in a shell."""


class RunError(PlannerError):
    """A run that broke down; `exit_code` is that of the rank which failed first."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class InfeasibleError(PlannerError):
    """Nothing that was tried fits into the memory of the devices. `needed` are the bytes per device of the leanest plan
    looked at, `missing` those of them that there are not; None where that is not known. `advice` says what would help,
    in the form in which programs read it."""

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
    """A limit of the planner itself was reached, of its time or (`memory`) its memory, before there was a plan."""

    def __init__(self, message: str, *, memory: bool = False) -> None:
        super().__init__(message)
        self.memory = memory


class NonFiniteError(PlannerError):
    """A loss, or a gradient, that is NaN or infinite: training cannot go on."""

    exit_code = 4


class LossSpikeError(PlannerError):
    """A loss that is far above those before it, in a run that shall stop then."""

    exit_code = 4


def nearest_names(name: str, known: Iterable[str]) -> list[str]:
    """The known names that are most like one that is not known, three at most; of paths, and for patterns, those with a
    part that is like it."""
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return near
    parts: dict[str, str] = {}
    for one in names:
        for part in one.replace("/", ".").split("."):
            parts.setdefault(part, one)
    wanted = name.replace("/", ".").strip("*?.").rpartition(".")[2]
    return [parts[part] for part in difflib.get_close_matches(wanted, parts, n=3, cutoff=0.7)]


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """The question whether the known names were meant that are most like one that is not known; `otherwise` where none
    is like it."""
    near = nearest_names(name, known)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that `name` is not a known `kind`, name the nearest ones, and list all where the list is short."""
    names = sorted(known)
    meant = did_you_mean(name, names)
    hint = f"; {meant}" if meant else "."
    listing = f" Known: {', '.join(names)}." if len(names) <= 40 else ""
    return f"unknown {kind} '{name}'{hint}{listing}"
