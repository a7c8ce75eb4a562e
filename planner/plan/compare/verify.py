"""The independent checker: is a plan legal, does it fit, and does it cost what it says?

Everything is derived again from the traced model, the profile and the plan's choices; nothing is taken over from the
search or from the figures that the plan carries. A plan that was edited by hand is judged by what it says now.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from hardware_profiles import Machine
from planner.errors import PlanFileError
from planner.faults import Fault
from planner.graph.operator_graph import OperatorGraph
from planner.plan.binding.apart import graph_of
from planner.plan.binding.bind import BoundPlan, bind
from planner.plan.carried import carried_graph, graph_text
from planner.plan.layout.offloaded import offloaded_fault
from planner.plan.layout.parameter_owners import check_owners
from planner.plan.outline import outline
from planner.plan.plan import ModelReference, Plan, Prediction
from planner.plan.prediction.predict import predict
from planner.sharding.mesh import build_mesh

_FIGURES = (
    "step_seconds",
    "objective_seconds",
    "peak_bytes",
    "capacity_bytes",
    "model_flops",
    "model_flops_utilisation",
    "samples_per_second",
)
_ENDS = ("low_seconds", "high_seconds")  # of which older files say nothing
_TOLERANCE = 1e-9  # relative: sums of the same terms in the same order


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A bound plan, its price computed anew, and what does not hold (nothing: the plan is good); `outside` says where
    more is offloaded than there is room."""

    bound: BoundPlan
    prediction: Prediction
    remarks: tuple[str, ...]
    outside: Fault | None = None

    @property
    def fits(self) -> bool:
        """Whether a device has room for what is on it, and outside of it for what is offloaded there."""
        inside = self.prediction.peak_bytes <= self.prediction.capacity_bytes * (1 + _TOLERANCE)
        return inside and self.outside is None

    @property
    def as_stated(self) -> bool:
        """Whether the plan costs what it says."""
        return not self.remarks


def verify(plan: Plan, traced: OperatorGraph, batch: int, cluster: Machine) -> Verdict:
    """Check a plan against the traced graph of its model and its cluster.

    Raises PlanFileError or StrategyError where the plan is not legal; a legal plan that does not fit, or costs
    something else than it says, gets remarks.
    """
    _check_cluster(plan, cluster)
    traced = graph_of(plan, traced)
    bound = bind(plan, traced, batch)
    check_owners(bound)
    prediction = predict(bound, cluster)
    found = {**_figures(prediction), "parameters": traced.parameter_count()}
    said = {**_figures(plan.prediction), "parameters": plan.model.parameters}
    found = {name: value for name, value in found.items() if name not in _ENDS or name in said}
    remarks = [
        f"{name} is {found.get(name, math.nan):.6g}, the file says {said.get(name, math.nan):.6g}"
        for name in dict.fromkeys((*found, *said))
        if plan.prediction.stages or not name.startswith(("stage ", "objective"))  # of which version 1 says nothing
        if not math.isclose(found.get(name, math.nan), said.get(name, math.nan), rel_tol=_TOLERANCE)
    ]
    remarks = [*_model_remarks(plan.model, traced, batch), *remarks]
    outside = offloaded_fault(prediction, cluster)
    return Verdict(bound=bound, prediction=prediction, remarks=tuple(remarks), outside=outside)


def _model_remarks(said: ModelReference, traced: OperatorGraph, batch: int) -> Iterator[str]:
    """What the file says of its model that its graph has not; older files say nothing of some of it."""
    if said.batch not in (None, batch):
        yield f"model.batch is {batch}, the file says {said.batch}"
    if said.outline is not None:
        known = outline(traced)
        yield from _differing("model.outline.inputs", known.inputs, said.outline.inputs)
        yield from _differing("model.outline.parameters", known.parameters, said.outline.parameters)
        if known.operators != said.outline.operators:
            yield "model.outline.operators has other digests than the operators of the model"
    if said.graph in (None, graph_text(traced, batch=batch, sequence_length=said.sequence_length)):
        return
    found = carried_graph(said.graph)
    if found.sequence_length != said.sequence_length:
        yield f"model.sequence_length is {found.sequence_length} in model.graph, the file says {said.sequence_length}"
    if (found.graph.fingerprint(), found.batch) != (traced.fingerprint(), batch):
        yield "model.graph is not the graph of the model"


def _differing(what: str, found: Iterable[tuple[str, str]], said: Iterable[tuple[str, str]]) -> Iterator[str]:
    """The first entry that is not as the file says, or stands in another place."""
    for here, there in zip_longest(found, said):
        if here != there:
            words = ["nothing" if one is None else " ".join(one) for one in (here, there)]
            yield f"{what}: {words[0]}, the file says {words[1]}"
            return


def _figures(prediction: Prediction) -> dict[str, float]:
    """Every number of a prediction by name."""
    return {
        **{name: getattr(prediction, name) for name in _FIGURES},
        **{name: value for name in _ENDS if (value := getattr(prediction, name)) is not None},
        **{f"time of {name}": value for name, value in prediction.time},
        **{f"memory of {name}": value for name, value in prediction.memory},
        **{f"bytes kept on the {home}": value for home, value in prediction.offloaded},
        **{
            f"stage {index}: {name}": getattr(stage, name)
            for index, stage in enumerate(prediction.stages)
            for name in ("micro_batch_seconds", "once_seconds", "peak_bytes", "ahead_seconds")
        },
    }


def _check_cluster(plan: Plan, cluster: Machine) -> None:
    if plan.cluster.profile != cluster.name or plan.cluster.digest != cluster.digest():
        raise PlanFileError(
            f"cluster: the plan is for profile {plan.cluster.profile} ({plan.cluster.digest[:12]}), this one is "
            f"{cluster.name}"
            f" ({cluster.digest()[:12]}); plan again for this profile"
        )
    expected = build_mesh(cluster, plan.mesh.sizes)
    for axis, known in zip(plan.mesh.axes, expected.axes, strict=True):
        if axis.stride != known.stride or axis.bandwidth != known.bandwidth:
            raise PlanFileError(
                f"mesh: axis '{axis.name}' has stride {axis.stride} and bandwidth {axis.bandwidth:g}; on "
                f"{cluster.name} it is {known.stride} and"
                f" {known.bandwidth:g}"
            )
