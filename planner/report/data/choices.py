"""Plans beside the one that is reported: the front of time against memory, for whoever has searched it."""

from dataclasses import dataclass

from hardware_profiles import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A plan in a few words: its step, its peak, and the words that tell it from others (`planner.plan.words`). `this`
    is the plan of the report; one that is `kept` was searched with the degrees of that."""

    step_seconds: Seconds
    peak_bytes: Bytes
    words: tuple[tuple[str, str], ...]
    this: bool = False
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Plans, fastest first, and a sentence on where they are from."""

    plans: tuple[Choice, ...]
    note: str
