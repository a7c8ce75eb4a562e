"""What no plan can beat: the work of a step, done once, with nothing lost, by all devices together.

    step  >=  (sum over operators of f(whole operator, whole batch)  +  u(all parameters)) / devices

f is what an operator's kernels take forward and backward on one device, u what the optimizer takes, with whole matrices
made orthogonal once. Splitting an operator in n pieces never makes them n times as fast: n f(piece) >= f(whole), for
every kernel of every profile (`tests/property/test_kernel_laws.py`, and for every legal strategy
`tests/unit/plan/test_least_work.py`). So the line above holds for every mesh of any number of axes, every pipeline and
schedule, every number of micro-batches, and however blocks are recomputed, as all of these do at least this work on
some devices, and the busiest of them has the average or more.

This is a second opinion on the proof of a search, by code that shares nothing with it but the prices of kernels that
also judge a plan: no tables, no candidates, no Lagrange multipliers, no list of configurations. It is read off the
model, the machine and the global batch, and anybody can add it up again from its terms. It is weaker than the bound of
a search: it knows of no communication, no memory, no bubble and no launches.
"""

from collections import Counter
from dataclasses import dataclass
from math import fsum, prod

from costmodels import optimizer_time
from hardware_profiles import Cluster, Machine, Seconds, parts_of
from planner.errors import RequestError
from planner.graph.fused_dropout import with_fused_dropout
from planner.graph.operator_graph import Operator, OperatorGraph, TensorType
from planner.plan.binding.bind import prepare
from planner.plan.plan import Plan
from planner.pricing.matrix_update import orthogonalised_seconds
from planner.pricing.operator_price import price_operator
from planner.pricing.parameter_price import precision_of
from planner.sharding.discover import with_rules
from planner.sharding.matrices import MUON, optimizer_of
from planner.sharding.mesh import build_mesh
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of

OPTIMIZER = "optimizer"
"""The term of the update, beside those of the classes of operators."""

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastWork:
    """The least step time by work alone.

    Attributes:
        seconds: that no plan's step is shorter than; the sum of `terms`.
        terms: for each class of operators, and for the optimizer, its seconds shared by all devices.
        devices: among which the work is shared.
    """

    seconds: Seconds
    terms: tuple[tuple[str, Seconds], ...]
    devices: int

    def gap(self, seconds: Seconds) -> float:
        """How much faster, as a share of a step that takes so long, another plan could be at most."""
        return max(0.0, 1 - self.seconds / seconds)

    def contradicts(self, seconds: Seconds) -> bool:
        """Whether no step can be as short as that: then the figure, or this proof, is wrong."""
        return seconds < self.seconds * (1 - _ROUNDING)


def least_work(plan: Plan, traced: OperatorGraph, batch: int, cluster: Machine) -> LeastWork | str:
    """The least step time of the job of a plan, whose model was traced with `batch` samples; or why it cannot be had.

    Nothing of the plan is read but the job: model, global batch, precision, fp8, optimizer, whether it trains, and the
    rules and tables that it brings. On several kinds of devices each operator counts as on those that are quickest at
    it.
    """
    training = plan.training
    run = with_fused_dropout(traced, fused=cluster.software.drops_fused)
    ruled, trains = with_rules(run, plan.rules), plan.schedule_kind.trains
    graph, _ = prepare(
        ruled, training.imbalance, training.update.placed, training.fp8, trains=trains, once=training.tokens_once
    )
    try:
        whole = rescale_batch(graph, batch, training.global_batch)
    except RequestError as error:
        return f"the work of all {training.global_batch} samples at once is not known: {error}"
    terms: dict[str, list[Seconds]] = {}
    known: dict[object, Seconds] = {}
    parts = parts_of(cluster)
    for op in whole.operators:
        rule = rule_of(whole, op)
        key = (id(rule), whole.graded(op))
        if key not in known:
            known[key] = min(_seconds(whole, op, part, training.optimizer) for part in parts)
        terms.setdefault(rule.op_class, []).append(known[key])
    sizes, shapes = Counter[tuple[str, str]](), Counter[TensorType]()
    for name in (one.name for one in whole.parameters if one.name in whole.differentiable):
        tensor, updated = whole.types[name], optimizer_of(whole, training.optimizer, name)
        sizes[precision_of(tensor, training.precision), updated] += tensor.numel
        if updated == MUON:
            shapes[tensor] += 1
    variant = training.update.variant
    terms[OPTIMIZER] = [
        min(float(optimizer_time(float(count), precision, name, one.device, variant)) for one in parts)
        for (precision, name), count in sizes.items()
    ]
    terms[OPTIMIZER] += [
        times * min(orthogonalised_seconds(tensor, prod(tensor.shape[:-2]), one) for one in parts)
        for tensor, times in shapes.items()
    ]
    devices = cluster.devices
    shared = tuple((name, fsum(own) / devices) for name, own in sorted(terms.items()) if fsum(own))
    return LeastWork(seconds=fsum(seconds for _, seconds in shared), terms=shared, devices=devices)


def _seconds(graph: OperatorGraph, op: Operator, cluster: Cluster, optimizer: str) -> Seconds:
    """What the kernels of an operator take forward and backward on one device that has all of it, without launches; a
    CPU makes these itself, and takes them, too."""
    types = (
        [graph.types[name] for name in op.operands],
        [graph.types[name] for name in op.results if name is not None],
    )
    graded = graph.graded(op)
    prices = price_operator(rule_of(graph, op), [()], *types, graded, build_mesh(cluster, ()), cluster, optimizer)
    forward, backward = (
        float(own[0] - late[0]) for own, late in zip((prices.forward, prices.backward), prices.late, strict=True)
    )
    return forward + backward if any(graded) else forward
