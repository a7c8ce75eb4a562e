"""What of a plan small ones cover: both are listed (`planner.plan.shrinking.facts`), and the lists are compared."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from planner.plan.shrinking.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """One kind of decision: how many different ones the plan makes, and how often; how many of these are in a small
    plan; and those that are not, each with how often the plan makes it, most often first."""

    kind: str
    different: int
    times: int
    covered: int
    covered_times: int
    missing: tuple[tuple[str, int], ...]

    @property
    def complete(self) -> bool:
        return not self.missing


def coverage(large: Facts, small: Sequence[Facts]) -> tuple[Covered, ...]:
    """For each kind of decision of a large plan what some small plans have of it."""
    found = []
    for kind, facts in large.items():
        known = Counter[str]()
        for one in small:
            known.update(one[kind])
        missing = {fact: times for fact, times in facts.items() if fact not in known}
        times = sum(facts.values())
        found.append(
            Covered(
                kind=kind,
                different=len(facts),
                times=times,
                covered=len(facts) - len(missing),
                covered_times=times - sum(missing.values()),
                missing=tuple(sorted(missing.items(), key=lambda item: (-item[1], item[0]))),
            )
        )
    return tuple(found)
