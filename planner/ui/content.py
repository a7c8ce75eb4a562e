"""What the page shows of a plan, as plain values for JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hardware_profiles import HardwareProfileError, load_profile, profile_names
from planner.engines.spaces import SPACES
from planner.errors import RequestError
from planner.models.zoo import ZOO
from planner.nearest import divisors
from planner.plan.binding.bind import BoundPlan
from planner.plan.compare.alternatives import Priced, alternatives, subjects
from planner.plan.layout.decisions import decisions
from planner.plan.layout.patterns import Patterns
from planner.plan.layout.roles import Roles, roles
from planner.report.rows import degree_rows, figure_rows, job_text, tiles_of
from planner.report.search import proof_text, simpler_text, stopped_text
from planner.report.units import bytes_text, seconds_text
from planner.report.words import SHOWN, short_name
from planner.sharding.rule import splittable
from planner.strategy_search.result import SearchResult

Content = dict[str, Any]

PINNED = ("tensor", "pipeline", "data", "context", "zero", "micro_batches")
"""Degrees that a page may pin, as `planner.Pinned` calls them."""

_ZERO = (0, 1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A plan on the page: what was found, the machine it is for, and whether more is to come."""

    result: SearchResult
    final: bool

    @property
    def bound(self) -> BoundPlan:
        return self.result.bound


def choices(own_model: str | None) -> Content:
    """What can be chosen: models, profiles with their devices, engines."""
    return {
        "models": [*([own_model] if own_model else []), *sorted(ZOO)],
        "hardware": [{"name": name, "devices": devices} for name, devices in _machines()],
        "engines": [{"name": name, "title": space.title} for name, space in sorted(SPACES.items())],
        "pinned": list(PINNED),
    }


def _machines() -> Iterator[tuple[str, int]]:
    for name in profile_names():
        try:
            yield name, load_profile(name).devices
        except HardwareProfileError:  # a file of somebody's that is none
            continue


def plan_content(shown: Shown) -> Content:
    """A plan: its rows, what its operators do, and what was proved of it."""
    bound, result = shown.bound, shown.result
    plan, found = bound.plan, roles(bound)
    prediction, (job, details) = plan.prediction, job_text(plan)
    simpler, figures = result.simpler, figure_rows(plan, prediction)
    return {
        "job": job,
        "details": details,
        "final": shown.final,
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "step": seconds_text(prediction.step_seconds),
        "peak": bytes_text(prediction.peak_bytes),
        "figures": [list(row) for row in figures],
        "tiles": [list(row) for row in tiles_of(figures)],
        "degrees": [list(row) for row in degree_rows(plan, found)],
        "decisions": list(decisions(bound, found)),
        "axes": list(plan.mesh.names),
        "operators": _operators(bound, found),
        "proof": _early(shown)
        + proof_text(
            result.status,
            result.gap,
            "in the search space",
            result.assumed,
            covered=result.covered,
            apart=result.apart,
        ),
        "simpler": None
        if simpler is None
        else simpler_text(result.slower, len(simpler.decisions), len(simpler.fastest_decisions)).partition(";")[0],
        "pins": _pins(bound, found),
    }


def _early(shown: Shown) -> str:
    """What to say before the proof of a last plan whose search did not end by itself."""
    by = shown.result.statistics.stopped_by
    return "" if by is None or not shown.final else f"{stopped_text(by)}; this is the best so far. "


def _operators(bound: BoundPlan, found: Roles) -> list[Content]:
    """Operators that do the work, of the first block of each kind and outside, with the names of their patterns."""
    named = Patterns(bound=bound, roles=tuple(axis.role for axis in found.axes))
    rows = []
    for at, one in enumerate(bound.operators):
        if one.rule.op_class not in SHOWN or bound.blocks.template(at) != at:
            continue
        stored = bound.graph.parameters_of(one.operator)
        rows.append(
            {
                "name": one.operator.name,
                "short": short_name(one.operator),
                "patterns": list(named.of_operator(at)),
                "factors": ",".join("-" if c is None else one.rule.factors[c].name for c in one.strategy),
                "kept_as": named.of_parameter(stored[0]) if stored else "",
                "free": bool(bound.plan.mesh.axes) and bool(splittable(one.rule)),
            }
        )
    return rows


def _pins(bound: BoundPlan, found: Roles) -> list[Content]:
    """Degrees with what they are, and what they could be."""
    devices = divisors(bound.plan.cluster.devices)
    own = {
        "tensor": found.tensor,
        "pipeline": found.pipeline,
        "data": found.data,
        "context": found.context,
        "zero": int(word) if (word := found.zero.partition(" ")[0]).isdigit() else 0,
        "micro_batches": bound.plan.training.micro_batches,
    }
    batches = divisors(bound.plan.training.global_batch)
    legal = {**dict.fromkeys(PINNED, devices), "zero": _ZERO, "micro_batches": batches}
    return [{"name": name, "value": own[name], "legal": list(legal[name])} for name in PINNED]


def operator_content(bound: BoundPlan, machine: Any, name: str) -> Content:
    """What every strategy of an operator would cost, all else as it is, the fastest first."""
    subject = next((one for one in subjects(bound, name) if not one.parameter), None)
    if subject is None:
        raise RequestError(f"'{name:.80}' is no operator of the plan; choose one of the list")
    found = alternatives(bound, machine, subject)
    chosen = next(one for one in found if one.chosen)
    rows = [_choice(one, chosen) for one in found if one.seconds is not None]
    return {"name": subject.name, "twins": len(subject.twins), "choices": rows}


def _choice(one: Priced, chosen: Priced) -> Content:
    assert one.seconds is not None
    assert one.peak is not None
    more = 0.0 if chosen.seconds is None else one.seconds - chosen.seconds
    return {
        "strategy": ",".join("-" if name is None else name for name in one.names),
        "chosen": one.chosen,
        "fits": one.fits,
        "seconds": one.seconds,
        "change": f"{'+' if more > 0 else '-' if more < 0 else ''}{seconds_text(abs(more))}",
        "peak": bytes_text(one.peak),
    }
