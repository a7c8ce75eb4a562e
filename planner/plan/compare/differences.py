"""What sets two plans of a model apart, and what each difference costs: a way from one to the other, priced in steps.

    a ──machine──▶ · ──batch──▶ · ──degrees──▶ · ──strategies of self_attn──▶ · ── ... ──▶ b

Every plan on the way is bound and priced like any other, so a step costs what the plan behind it takes more than the
plan before it, and all steps together cost exactly what b takes more than a. What a difference costs depends on those
that were made before it; the order is fixed: what is asked for, then how devices are used, then operators and
parameters, then the schedule, then recomputation.

A difference that makes no legal plan at its turn waits until others have been made. What is not legal by itself in the
end is made together with others, the fewest at a time, and is one step: degrees that change the number of axes change
every strategy with them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError
from planner.errors import PlannerError
from planner.graph.operator_graph import ROWS_FROM, OperatorGraph
from planner.plan.binding.bind import BoundPlan
from planner.plan.binding.machine import own_machine
from planner.plan.compare.contrasts import Difference, blocks_words, degree_words, item_rows, model_words, update_text
from planner.plan.compare.repricing import repriced
from planner.plan.plan import Plan, Prediction
from planner.plan.prediction.loosening import (
    in_parts,
    loosened,
    stored_of,
    strategies_of,
    with_places,
    with_recomputation,
    with_stored,
    with_strategies,
)
from planner.plan.words import activations_words, expert_overlap_words, table_words, tensor_overlap_words
from planner.sharding.stored import StoredParameter

_FITS = 1 + 1e-9

Choice = TypeVar("Choice", tuple[str | None, ...], StoredParameter)
"""What is chosen for an operator, or for a parameter."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A traced graph, and the samples in the example inputs it was traced with."""

    graph: OperatorGraph
    batch: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """Differences that are made at once, and what plans cost before and after them."""

    differences: tuple[Difference, ...]
    before: Prediction
    after: Prediction

    @property
    def seconds(self) -> float:
        """What the step time grows by."""
        return self.after.step_seconds - self.before.step_seconds

    @property
    def nbytes(self) -> float:
        """What the peak of the fullest device grows by."""
        return self.after.peak_bytes - self.before.peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the plan after them fits into its devices, which one on the way need not."""
        return self.after.peak_bytes <= self.after.capacity_bytes * _FITS


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two plans, bound and priced now, and the steps from one to the other: each begins with the prediction that the
    one before it ended with, the first with that of `first`; the last ends with that of `second`."""

    first: BoundPlan
    second: BoundPlan
    steps: tuple[Step, ...]

    def __repr__(self) -> str:
        return f"Comparison({self.first.plan!r}, {self.second.plan!r}, {len(self.steps)} differences)"

    def _repr_html_(self) -> str:
        from planner.report.notebook import comparison_html

        return comparison_html(self.to_rows(), self.first.plan.prediction, self.second.plan.prediction)

    def to_rows(self) -> list[dict[str, object]]:
        """The differences for pandas, in the order in which they are made."""
        return [
            {
                "what": ", ".join(one.name for one in step.differences),
                "first": ", ".join(one.here for one in step.differences),
                "second": ", ".join(one.there for one in step.differences),
                "difference_seconds": step.seconds,
                "difference_bytes": step.nbytes,
            }
            for step in self.steps
        ]

    @property
    def seconds(self) -> float:
        """What a step of the second plan takes more."""
        return self.second.plan.prediction.step_seconds - self.first.plan.prediction.step_seconds

    @property
    def nbytes(self) -> float:
        """What the second plan needs more on its fullest device."""
        return self.second.plan.prediction.peak_bytes - self.first.plan.prediction.peak_bytes


Listener = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class _Change:
    difference: Difference
    apply: Callable[[Plan], Plan]


def compare(
    first: Plan,
    second: Plan,
    traced: Mapping[str, Traced],
    on_progress: Listener = lambda made, of: None,
    cancelled: Callable[[], bool] = lambda: False,
    profile: str | None = None,
) -> Comparison:
    """Price two plans and every difference between them, by the profiles of machines as they are now.

    `traced` has the graphs of both by their fingerprints, `profile` is the file of the profile of one or both, where
    that is none that is shipped. `on_progress` is told how many differences are made, and of
    how many. Where `cancelled` says so, those that are left are made at once, as the last step. Raises PlanFileError
    and the like where one of the plans is not legal.
    """
    here, there = (_priced(plan, traced, profile) for plan in (first, second))
    start, end = loosened(here), loosened(there)
    changes = tuple(_changes(here, there, start, end))
    if _operators(start) != _operators(end):  # nothing on the way
        step = Step(
            differences=tuple(change.difference for change in changes),
            before=here.plan.prediction,
            after=there.plan.prediction,
        )
        return Comparison(first=here, second=there, steps=(step,))
    way = _Way(plan=start, traced=traced, profile=profile, on_progress=on_progress, cancelled=cancelled)
    steps = tuple(way.steps(changes))
    last = way.plan.prediction
    assert (last.step_seconds, last.peak_bytes) == (
        there.plan.prediction.step_seconds,
        there.plan.prediction.peak_bytes,
    ), "a difference was left out"
    return Comparison(first=here, second=there, steps=steps)


def _priced(plan: Plan, traced: Mapping[str, Traced], profile: str | None) -> BoundPlan:
    model = traced[plan.model.fingerprint]
    return repriced(plan, model.graph, model.batch, own_machine(plan.cluster, profile))


@dataclass(kw_only=True)
class _Way:
    """Where the comparison has come to."""

    plan: Plan
    traced: Mapping[str, Traced]
    profile: str | None
    on_progress: Listener
    cancelled: Callable[[], bool]

    def steps(self, changes: Sequence[_Change]) -> Iterator[Step]:
        """Changes one by one, what is not legal yet after the others, what never is together."""
        waiting, made = list(changes), 0
        while waiting:
            left = []
            for change in waiting:
                step = None if self.cancelled() else self._made((change,))
                if step is None:
                    left.append(change)
                else:
                    made += 1
                    self.on_progress(made, len(changes))
                    yield step
            if self.cancelled() and left:
                step = self._made(left)
                assert step is not None
                yield step
                return
            if len(left) == len(waiting):
                together = next(size for size in range(2, len(left) + 1) if self._legal(left[:size]) is not None)
                step = self._made(left[:together])
                assert step is not None
                yield step
                left = left[together:]
            waiting = left

    def _made(self, changes: Sequence[_Change]) -> Step | None:
        after = self._legal(changes)
        if after is None:
            return None
        before, self.plan = self.plan.prediction, after
        return Step(differences=tuple(change.difference for change in changes), before=before, after=after.prediction)

    def _legal(self, changes: Sequence[_Change]) -> Plan | None:
        """The plan with some changes, priced; None where it cannot be."""
        plan = self.plan
        for change in changes:
            plan = change.apply(plan)
        try:
            return _priced(plan, self.traced, self.profile).plan
        except (PlannerError, HardwareProfileError, CostModelError):
            return None


def _changes(here: BoundPlan, there: BoundPlan, start: Plan, end: Plan) -> Iterator[_Change]:
    """All that differs between two loose plans, in the order in which it is made."""
    yield from _asked(start, end)
    moved = _moved(here, there)
    if start.training.update.placed != end.training.update.placed:
        where = [table_words(plan.training.update) or "on the devices" for plan in (start, end)]
        difference = Difference(name="tables", here=where[0], there=where[1])
        yield _Change(difference=difference, apply=lambda plan: with_places(plan, end, moved))
    yield from _used(here, there, start, end)
    if len(start.mesh.axes) == len(end.mesh.axes):
        ours = {name: strategy for name, strategy in strategies_of(start).items() if name not in moved}
        yield from _part_by_part("strategies", ours, strategies_of(end), with_strategies)
        yield from _part_by_part("stored layouts", stored_of(start), stored_of(end), with_stored)
        if start.inputs != end.inputs:
            difference = Difference(name="layouts of inputs", here="", there="")
            yield _Change(difference=difference, apply=lambda plan: replace(plan, inputs=end.inputs))
    yield from _scheduled(start, end)
    if [(group.recomputation, group.kept, group.activations_home) for group in start.groups] != [
        (group.recomputation, group.kept, group.activations_home) for group in end.groups
    ]:
        words = activations_words(start), activations_words(end)
        difference = Difference(name="recomputation", here=words[0], there=words[1])
        yield _Change(difference=difference, apply=lambda plan: with_recomputation(plan, end))


def _operators(plan: Plan) -> list[tuple[str, set[str]]]:
    """The operators of a loose plan, block by block."""
    return [(group.name, {name for name, _ in group.operators}) for group in plan.groups]


def _moved(here: BoundPlan, there: BoundPlan) -> frozenset[str]:
    """Operators that get rows of a table from another place in the second plan."""
    before = {op.operator.name: op.operator.op for op in here.operators}
    after = {op.operator.name: op.operator.op for op in there.operators}
    return frozenset(
        name for name, op in after.items() if op != before.get(name, op) and {op, before[name]} & {*ROWS_FROM.values()}
    )


def _asked(start: Plan, end: Plan) -> Iterator[_Change]:
    """What is asked for: model, machine, batch, optimizer, gradients."""
    ours, theirs = start.training, end.training
    if (start.model, ours.precision, start.rules) != (end.model, theirs.precision, end.rules):
        yield _Change(
            difference=Difference(name="model", here=model_words(start), there=model_words(end)),
            apply=lambda plan: replace(
                plan,
                model=end.model,
                rules=end.rules,
                training=replace(plan.training, precision=theirs.precision),
            ),
        )
    if replace(start.cluster, devices=1) != replace(end.cluster, devices=1):
        yield _Change(
            difference=Difference(name="machine", here=start.cluster.machine, there=end.cluster.machine),
            apply=lambda plan: replace(plan, cluster=replace(end.cluster, devices=plan.cluster.devices)),
        )
    if ours.fp8 != theirs.fp8:
        difference = Difference(name="fp8", here=ours.fp8.text(), there=theirs.fp8.text())
        yield _Change(difference=difference, apply=_training("fp8", theirs.fp8))
    for field in ("global_batch", "optimizer", "imbalance", "tokens_once"):
        one, other = getattr(ours, field), getattr(theirs, field)
        if one != other:
            difference = Difference(name=field.replace("_", " "), here=str(one), there=str(other))
            yield _Change(difference=difference, apply=_training(field, other))
    if replace(ours.update, placed=()) != replace(theirs.update, placed=()):
        words = update_text(ours.update), update_text(theirs.update)

        def apply(plan: Plan) -> Plan:
            return _training("update", replace(theirs.update, placed=plan.training.update.placed))(plan)

        yield _Change(difference=Difference(name="gradients", here=words[0], there=words[1]), apply=apply)


def _training(field: str, value: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, training=replace(plan.training, **{field: value}))  # type: ignore[arg-type]


def _used(here: BoundPlan, there: BoundPlan, start: Plan, end: Plan) -> Iterator[_Change]:
    """How devices are used: degrees, and with them all that is said axis by axis where there are more or fewer."""
    axes, other = ([(axis.size, axis.order) for axis in plan.mesh.axes] for plan in (start, end))
    pipelines = (start.pipeline, start.virtual_stages) != (end.pipeline, end.virtual_stages)
    if axes == other and not pipelines and start.cluster.devices == end.cluster.devices:
        return

    def apply(plan: Plan) -> Plan:
        moved = replace(
            plan,
            cluster=replace(plan.cluster, devices=end.cluster.devices),
            mesh=end.mesh,
            alltoall=end.alltoall,
            stages=end.stages if pipelines else plan.stages,
            virtual_stages=end.virtual_stages,
        )
        if len(start.mesh.axes) == len(end.mesh.axes):
            return moved
        return replace(with_stored(with_strategies(moved, strategies_of(end)), stored_of(end)), inputs=end.inputs)

    yield _Change(
        difference=Difference(name="degrees", here=degree_words(here), there=degree_words(there)), apply=apply
    )


def _part_by_part(
    what: str,
    ours: Mapping[str, Choice],
    theirs: Mapping[str, Choice],
    write: Callable[[Plan, Mapping[str, Choice]], Plan],
) -> Iterator[_Change]:
    """What is chosen otherwise for operators or parameters, a change for each part of the model."""
    different = [name for name in ours if name in theirs and ours[name] != theirs[name]]
    for part, names in in_parts(different).items():
        chosen = {name: theirs[name] for name in names}
        yield _Change(
            difference=item_rows(f"{what} of {part}", ours, chosen),
            apply=partial(_written, write, chosen),
        )


def _written(write: Callable[[Plan, Mapping[str, Choice]], Plan], chosen: Mapping[str, Choice], plan: Plan) -> Plan:
    return write(plan, chosen)


def _scheduled(start: Plan, end: Plan) -> Iterator[_Change]:
    """Micro-batches, the order of turns, and how blocks are divided over stages."""
    for field in ("micro_batches", "interleave"):
        one, other = getattr(start.training, field), getattr(end.training, field)
        if one != other:
            difference = Difference(name=field.replace("_", "-"), here=str(one), there=str(other))
            yield _Change(difference=difference, apply=_training(field, other))
    overlaps: tuple[tuple[str, Callable[[Any], str]], ...] = (
        ("tensor_overlap", tensor_overlap_words),
        ("expert_overlap", expert_overlap_words),
    )
    for field, words in overlaps:
        one, other = getattr(start.training, field), getattr(end.training, field)
        if one != other:
            difference = Difference(name=field.replace("_", "-"), here=words(one), there=words(other))
            yield _Change(difference=difference, apply=_training(field, other))
    for field in ("schedule", "slices"):
        one, other = getattr(start, field), getattr(end, field)
        if one != other:
            yield _Change(
                difference=Difference(name=field, here=str(one), there=str(other)),
                apply=lambda plan, field=field, other=other: replace(plan, **{field: other}),  # type: ignore[misc]
            )
    if start.stages != end.stages and len(start.stages) == len(end.stages):
        yield _Change(
            difference=Difference(name="blocks of stages", here=blocks_words(start), there=blocks_words(end)),
            apply=lambda plan: replace(plan, stages=end.stages),
        )
