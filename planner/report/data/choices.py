"""Other plans than the reported one, and what they say about it, if they were searched."""

from collections.abc import Sequence
from dataclasses import dataclass

from hardware_profiles import Bytes, Seconds

DECISIONS = ("degrees", "ZeRO", "recomputation", "micro-batches")
"""Words of a plan (`planner.plan.words`) that are separate decisions; the other words follow from them."""

SHOWN = 3
"""Maximum number of decisions that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan in a few words: step, peak, and the words that tell it apart (`planner.plan.words`). `this` marks the
    reported plan; a conventional plan used as a baseline has a `name`."""

    step_seconds: Seconds
    peak_bytes: Bytes
    words: tuple[tuple[str, str], ...]
    this: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A decision of a plan as it is `here`, and the best value found `instead`, with its step; None if nothing with
    another value fits."""

    decision: str
    here: str
    instead: str
    step_seconds: Seconds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Plans, fastest first, a sentence on their source, and the decisions that matter, the costliest to change
    first."""

    plans: tuple[Choice, ...]
    note: str
    reasons: tuple[Reason, ...] = ()


def reasons_of(own: Choice, others: Sequence[Choice], lacking: Sequence[tuple[str, str]] = ()) -> tuple[Reason, ...]:
    """The cost of another decision: for each decision the fastest of the `others` that decides it otherwise, each plan
    once. `lacking` are decisions and other values that were tried with the same degrees and do not fit.
    """
    here = dict(own.words)
    found: list[Reason] = []
    used: list[Choice] = []
    for decision in (name for name in DECISIONS if name in here):
        unlike = [one for one in others if dict(one.words).get(decision, here[decision]) != here[decision]]
        best = min(unlike, key=lambda one: one.step_seconds, default=None)
        tried = [words for name, words in lacking if name == decision]
        refused = _refused(tried)
        if best is None and not tried:
            continue
        if best is None or best in used:
            if tried:
                found.append(Reason(decision=decision, here=here[decision], instead=refused, step_seconds=None))
            continue
        used.append(best)
        words = "; ".join(filter(None, (refused, _instead(decision, here, dict(best.words)))))
        found.append(Reason(decision=decision, here=here[decision], instead=words, step_seconds=best.step_seconds))
    dearest = sorted(found, key=lambda one: (one.step_seconds is not None, -(one.step_seconds or 0.0)))
    return tuple(dearest[:SHOWN])


def _refused(tried: Sequence[str]) -> str:
    """`0, 1 or 2 do not fit with these degrees`."""
    if not tried:
        return ""
    *first, last = sorted(tried)
    words = f"{', '.join(first)} or {last}" if first else last
    return f"{words} {'do' if first else 'does'} not fit with these degrees"


def _instead(decision: str, here: dict[str, str], there: dict[str, str]) -> str:
    """The other value, with the decisions that change with it."""
    along = [f"{name} {there[name]}" for name in DECISIONS if name != decision and there.get(name) != here.get(name)]
    more = f" (then {', '.join(along)})" if along else ""
    return there[decision] + more
