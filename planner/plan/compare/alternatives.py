"""Other choices for one operator, or for one parameter, and what the plan would cost with each of them.

Everything else stays as it is: neighbours keep their strategies, parameters their stored layouts, blocks their
recomputation. So a choice also pays for the redistributions that its neighbours would spare it if they followed
(`planner.strategy_search.analysis.around` asks what they would do). Twins of the operator in other blocks follow it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from hardware_profiles import Machine
from hardware_profiles.spelling import nearest_names
from planner.errors import PlannerError, RequestError, unknown_name
from planner.graph.blocks import block_parameters
from planner.matching import matches, module_and_call
from planner.plan.binding.bind import BoundPlan, bind_operator, check_stored
from planner.plan.compare.contrasts import choice_text
from planner.plan.prediction.loosening import loosened, with_stored, with_strategies
from planner.plan.prediction.predict import predict
from planner.sharding.legality import legal_strategies
from planner.sharding.rule import strategy_names
from planner.sharding.stored import StoredParameter, legal_stored

MOST = 6
"""Operators and parameters that are explained at once."""

_FITS = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One choice: `seconds` of a step and `peak` bytes of the plan with it, None where there is no such plan, and then
    `fault` says why. `chosen` marks what the plan has."""

    choice: str
    names: tuple[str | None, ...]
    chosen: bool
    seconds: float | None
    peak: float | None
    fits: bool
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is asked about: an operator or a parameter of the first block of its kind, and its twins in others."""

    name: str
    parameter: bool
    twins: tuple[str, ...]


def subjects(bound: BoundPlan, pattern: str) -> tuple[Subject, ...]:
    """Operators and parameters that a name or a pattern means. A module's name means the operators right in it.

    Raises RequestError where none does, with the nearest names, or where more than `MOST` do.
    """
    operators, parameters = _operator_twins(bound), _parameter_twins(bound)
    found = []
    for names, parameter in ((operators, False), (parameters, True)):
        for name, twins in names.items():
            if any(_means(pattern, twin) for twin in twins) and not (_shared(name) and pattern not in twins):
                found.append(Subject(name=name, parameter=parameter, twins=twins))
    if not found:
        known = [name for name in (*operators, *parameters) if not _shared(name)]
        listed = "" if nearest_names(pattern, known) else " `plan show` lists them; or give a pattern: '*up_proj*'."
        raise RequestError(unknown_name("operator or parameter", pattern, known) + listed)
    if len(found) > MOST:
        listed = ", ".join(subject.name for subject in found[:MOST])
        raise RequestError(
            f"'{pattern}' means {len(found)} operators and parameters ({listed}, ...); at most {MOST} are explained at"
            " once: give a narrower pattern"
        )
    return tuple(found)


def _means(pattern: str, name: str) -> bool:
    return matches(name, pattern) or matches(module_and_call(name)[0] or name, pattern)


def _shared(name: str) -> bool:
    return name.endswith("/shared")


def _operator_twins(bound: BoundPlan) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    names = [one.operator.name for one in bound.operators]
    for at, name in enumerate(names):
        found.setdefault(names[bound.blocks.template(at)], []).append(name)
    return {name: tuple(twins) for name, twins in found.items()}


def _parameter_twins(bound: BoundPlan) -> dict[str, tuple[str, ...]]:
    blocks, found = bound.blocks, dict[str, list[str]]()
    rows = [block_parameters(bound.graph, blocks, block) for block in range(blocks.count)]
    inside = {name for row in rows for name in row}
    for name in bound.parameters:
        if name not in inside:
            found[name] = [name]
    for block, row in enumerate(rows):
        first = rows[blocks.firsts[blocks.kinds[block]]]
        for name, twin in zip(row, first, strict=True):
            found.setdefault(twin, []).append(name)
    return {name: tuple(twins) for name, twins in found.items()}


def alternatives(bound: BoundPlan, cluster: Machine, subject: Subject) -> tuple[Priced, ...]:
    """All choices for an operator or a parameter, with what the plan costs with each; the fastest that fits first."""
    loose = replace(bound, plan=loosened(bound))
    choices = _stored(loose, cluster, subject) if subject.parameter else _strategies(loose, cluster, subject)
    return tuple(sorted(choices, key=_order))


def _order(found: Priced) -> tuple[bool, bool, float, bool]:
    return found.seconds is None, not found.fits, found.seconds or 0.0, not found.chosen


def _strategies(bound: BoundPlan, cluster: Machine, subject: Subject) -> Iterator[Priced]:
    places = {one.operator.name: at for at, one in enumerate(bound.operators)}
    first = bound.operators[places[subject.name]]
    mesh = bound.plan.mesh
    legal = legal_strategies(first.rule, mesh, rings=True)
    for strategy in legal:
        names = strategy_names(first.rule, strategy)

        def rechosen(names: tuple[str | None, ...] = names) -> BoundPlan:
            operators = list(bound.operators)
            for twin in subject.twins:
                operators[places[twin]] = bind_operator(bound, places[twin], names)
            plan = with_strategies(bound.plan, dict.fromkeys(subject.twins, names))
            return replace(bound, plan=plan, operators=tuple(operators))

        chosen = strategy == first.strategy
        yield _priced(choice_text(names), names, chosen, rechosen, cluster)


def _stored(bound: BoundPlan, cluster: Machine, subject: Subject) -> Iterator[Priced]:
    tensor = bound.graph.types[subject.name]
    trainable = subject.name in bound.graph.differentiable
    for stored in legal_stored(tensor.shape, bound.plan.mesh.sizes, trainable):

        def rechosen(stored: StoredParameter = stored) -> BoundPlan:
            for twin in subject.twins:
                check_stored(bound, twin, stored)
            wanted: Mapping[str, StoredParameter] = dict.fromkeys(subject.twins, stored)
            return replace(bound, plan=with_stored(bound.plan, wanted), parameters={**bound.parameters, **wanted})

        chosen = stored == bound.parameters[subject.name]
        yield _priced(choice_text(stored), (), chosen, rechosen, cluster)


def _priced(
    choice: str, names: tuple[str | None, ...], chosen: bool, rechosen: Callable[[], BoundPlan], cluster: Machine
) -> Priced:
    try:
        found = predict(rechosen(), cluster)
    except PlannerError as error:
        fault = str(error)
        return Priced(choice=choice, names=names, chosen=chosen, seconds=None, peak=None, fits=False, fault=fault)
    return Priced(
        choice=choice,
        names=names,
        chosen=chosen,
        seconds=found.step_seconds,
        peak=found.peak_bytes,
        fits=found.peak_bytes <= found.capacity_bytes * _FITS,
    )
