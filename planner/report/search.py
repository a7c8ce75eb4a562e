"""The proof of a search and its other results: sentences and tables for a terminal."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rich.console import RenderableType

from planner.errors import StoppedBy
from planner.plan.plan import Prediction
from planner.plan.words import telling
from planner.report.table import table_of
from planner.report.units import bytes_text, percent_text, seconds_text

SPACES = {"time": "in the search space", "memory": "within this memory", "cost": "on this number of devices"}
"""The plans among which the best one of each objective is the fastest, in words."""

_ASSUMED = {
    "1f1b": "under 1F1B with exposed stage transfers",
    "forward": "at the pace of the slowest stage with exposed stage transfers",
    "in order": "with micro-batches one after the other",
    "offload": "with exposed offload",
}
"""What the objective assumes (`planner.strategy_search.engine.scheduling.assumed`), in words."""

_APART = {
    "v": ("with stages one after the other", "with stages in a V", "the busy time of its slowest rank"),
    "slices": ("with whole sequences", "with sequence slices", "its work alone"),
}
"""Plans with the higher lower bound; the other plans; what the bound of these counts."""

_COVERED = "with one or two mesh axes, equal virtual stages and no ring attention"
"""The plans that a proof covers, where the plan that is shown is none of them."""

_SAME = 5e-4
"""Steps with a smaller relative difference are called equally fast."""

_LEAST_SHOWN = 1e-4
"""Smallest gap that is shown."""

_STOPPED: "Mapping[StoppedBy, str]" = MappingProxyType(
    {
        "interrupt": "Stopped by Ctrl-C",
        "memory": "Stopped by the planner's memory limit",
        "time": "Stopped by the time limit",
    }
)

_NONE = 1e-9
"""Gaps up to this are rounding errors."""


def stopped_text(by: StoppedBy) -> str:
    """What ended a search before its end: `Stopped by the time limit`."""
    return _STOPPED[by]


def proof_text(
    status: str,
    gap: float,
    where: str,
    assumed: Sequence[str] = (),
    *,
    covered: bool = True,
    apart: tuple[str, float] | None = None,
) -> str:
    """The proof about the plans `where`: none is faster, or one could be faster by a gap at most. A step may do better
    than what is `assumed`; then the sentence ends with that, and compares what plans take so with the step of the
    plan. A plan with three or four mesh axes, unequal virtual stages or ring attention is not `covered`: the proof is
    then about the plans around which it was found. Plans with their own lower bound are in a second sentence (`apart`,
    `SearchResult.apart`)."""
    where = where if covered else f"{where}, {_COVERED},"
    under = f", if steps are counted {' and '.join(_ASSUMED[one] for one in assumed)}" if assumed else ""
    if status == "optimal":
        return f"Proved optimal: no plan {where} is faster{under}"
    if apart is None or apart[1] >= gap:
        return f"Proved: no plan {where} is {_faster(gap)}{under}"
    others, like, counted = _APART[apart[0]]
    by = f" (bound: {counted})" if counted else ""
    return f"Proved: no plan {where} {others} is {_faster(apart[1])}{under};\nno plan {like} is {_faster(gap)}{by}"


def _faster(gap: float) -> str:
    if gap <= _NONE:  # no plan of that space is better; the plan itself may be outside of it
        return "faster"
    return f"more than {_rounded_up(gap)} faster"


def placements_text(compared: int) -> str:
    """A sentence that the search placed the tables, and how many placements it tried."""
    return f"The search placed the tables: the best of {compared} placements that were tried, each with its best plan"


def offload_text(step: float, alone: float | None) -> str:
    """A sentence that the search offloads without a request: because nothing fits otherwise, or because the step is
    that much shorter than on the devices `alone`."""
    why = "Nothing fits without offload"
    if alone is not None:
        why = f"Without offload the fastest plan found takes {seconds_text(alone)}, {alone / step - 1:.0%} longer"
    return f"{why}: the search offloaded what costs the step least; --offload none forbids that"


def misaligned_text(rows: Mapping[str, int], times: float) -> str:
    """A sentence that matrix products with such numbers of rows are slower than with zero padding."""
    named = ", ".join(f"{name} ({count:,})" for name, count in rows.items())
    return (
        f"The rows of {named} are not multiples of 8 (16 bytes), so their matrix products take longer on these devices:"
        f" {times:.1f} times as long if the number is odd. --pad auto pads them with zeros; the model computes the same"
    )


def without_fp8_text(recipe: str) -> str:
    """A sentence that fp8 was requested but no layer uses it."""
    return (
        f"No linear layer is in fp8 ({recipe}), as that makes no step shorter here: casting operands takes longer than"
        " the products save, or shorter products overlap less communication; --fp8-layers '*' computes all in fp8"
    )


def simulated_text(step: float, bounded: float, *, fastest: bool = True) -> str:
    """How much shorter the simulated step of a plan is than the step that its proof counts, and whether the plan is the
    `fastest` of those that were simulated; empty if it is no shorter."""
    change = 1 - step / bounded
    if change < _LEAST_SHOWN / 100:
        return ""
    least = ", the shortest step that was simulated" if fastest else ""
    return (
        f"Counted so, this plan takes {seconds_text(bounded)}. Simulated with its own schedule and overlaps, it takes"
        f" {seconds_text(step)} ({percent_text(change)} less){least}. No bound says what other plans gain so"
    )


def simpler_text(slower: float, decisions: int, fastest: int) -> str:
    """The cost of the preferred simpler plan, and how to get the fastest."""
    more = "as fast as" if slower < _SAME else f"{percent_text(slower)} slower than"
    return (
        f"Simpler plan preferred: {decisions} decision{'' if decisions == 1 else 's'}, {more} the fastest plan found,"
        f" which has {fastest} decisions; --simplicity 0 takes the fastest"
    )


def neighbour_text(asked: tuple[int, int], other: tuple[int, int], step: float, gain: float) -> str:
    """A better pair of (samples, devices) near the requested one: seconds of a step, and the gain in samples/s per
    device."""
    (batch, devices), (samples, others) = asked, other
    if others == devices:
        badly, options, each = f"{batch:,} samples on {devices:,} devices", f"--global-batch {samples}", ""
    else:
        badly = f"{devices:,} devices"
        options, each = f"--devices {others} --global-batch {samples}", " on each device"
    return (
        f"{badly} divide badly: with {options} a step takes at most {seconds_text(step)}, at least"
        f" {math.floor(gain * 1000) / 10:.1f}% more samples a second{each}"
    )


def _rounded_up(gap: float) -> str:
    """A share in percent, rounded up, with one decimal or at least one digit."""
    percent = max(gap, _LEAST_SHOWN) * 100
    digits = 1 if percent >= 0.1 else 2
    return f"{math.ceil(round(percent * 10**digits, 9)) / 10**digits:.{digits}f}%"


def effort_text(algorithm: str, evaluated: int, configurations: int, seconds: float, total: float) -> str:
    """The effort of the search."""
    return (
        f"{algorithm}: evaluated {evaluated} of {configurations} configurations in {seconds:.1f} s ({total:.1f} s in"
        " all)"
    )


def plans_table(title: str, plans: Sequence[tuple[Prediction, Mapping[str, str]]]) -> RenderableType:
    """Plans side by side: time, difference from the first, memory, and the words that tell them apart."""
    names = telling([words for _, words in plans])
    table = table_of(f"\n{title}", "", "step time", "slower by", "peak memory", *names)
    for column in table.columns[1:4]:
        column.justify = "right"
    first = plans[0][0].step_seconds
    for number, (prediction, words) in enumerate(plans, start=1):
        slower = percent_text(prediction.step_seconds / first - 1) if number > 1 else ""
        figures = (seconds_text(prediction.step_seconds), slower, bytes_text(prediction.peak_bytes))
        table.add_row(str(number), *figures, *(words[name] for name in names))
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to split the sequence: ring and Ulysses degrees (None if every operator splits freely), seconds of the best
    plan found, the lower bound, and bytes of the leanest plan; infinite if unknown.
    """

    ring: int | None
    heads: int | None
    seconds: float
    bound: float
    least: float


def contexts_table(ways: Sequence[Way]) -> RenderableType:
    """Ways to split the sequence, best first: by the sums that the search bounds, not by simulated steps."""
    title = "\nWays to split the sequence, under the assumptions of the bound"
    table = table_of(title, "degree", "ring", "Ulysses", "step", "")
    for column in table.columns[:4]:
        column.justify = "right"
    best = ways[0].seconds
    for way in ways:
        degrees = ("any", "", "")
        if way.ring is not None and way.heads is not None:
            degrees = (str(way.ring * way.heads), str(way.ring), str(way.heads))
        table.add_row(*degrees, *_fate(way, best))
    return table


def _fate(way: Way, best: float) -> tuple[str, str]:
    """The step time of the best plan of a way and how it compares; or why there is none."""
    if way.seconds < math.inf:
        more = percent_text(way.seconds / best - 1)
        return seconds_text(way.seconds), "least" if way.seconds == best else f"{more} more"
    if way.bound < math.inf:
        return (
            f"> {seconds_text(way.bound)}",
            f"at least {percent_text(max(0.0, way.bound / best - 1))} more: not evaluated further",
        )
    needed = f": the leanest plan evaluated needs {bytes_text(way.least)}" if way.least < math.inf else ""
    return "", f"does not fit{needed}"


def certificate_text(solver: str, status: str, gap: float, seconds: float) -> str:
    """The result of an independent solver about the slowest pipeline rank."""
    words = "cannot be less busy" if gap < _LEAST_SHOWN / 100 else f"could be at most {_rounded_up(gap)} less busy"
    return f"Certified by {solver} in {seconds:.1f} s ({status}): the slowest pipeline rank {words}"
