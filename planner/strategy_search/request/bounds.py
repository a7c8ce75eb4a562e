"""Simple lower bounds, from the floating point work and the parameters alone. They decide the order of the search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodels import best_rate, parameter_bytes
from hardware_profiles import Cluster
from planner.errors import RuleError
from planner.graph.operator_graph import OperatorGraph
from planner.pricing.kernels.call import multiplied_in
from planner.pricing.operator_price import profile_dtype
from planner.pricing.parameter_price import precision_of, weight_bytes
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of
from planner.sharding.update import PLAIN, Update
from planner.strategy_search.request.offload import NOTHING, Offload
from planner.strategy_search.request.space import Configuration
from planner.strategy_search.request.template import Template


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Lower bounds from the floating point work and the parameters alone.

    The work of a class takes at least flops / `best_rate` on any device, so n devices need at least 1/n of that each. A
    pipeline of p ranks with v virtual stages takes 1 + (p - 1) / (v m) times that. Weights, gradients and optimizer
    states exist at least once in all, so some device has at least 1/n of them.
    """

    work: float  # seconds of one device for the forward and backward work of one sample
    recomputed: float  # seconds of one device to recompute all blocks once
    parameters: float  # bytes of weights, gradients and optimizer states
    passed_on: float  # seconds of one device for the `work` that other stages wait for: all but weight gradients

    def step_seconds(self, configuration: Configuration, devices: int, global_batch: int, recompute: bool) -> float:
        """Least step time of a configuration; `recompute` says whether blocks are fully recomputed."""
        m, p, v = configuration.micro_batches, configuration.pipeline, configuration.virtual_stages
        seconds = self.work + (self.recomputed if recompute else 0.0)
        return seconds * global_batch / devices * (1 + (p - 1) / (v * m))

    def seconds_of_one(self, configuration: Configuration, devices: int, global_batch: int) -> float:
        """Least seconds of a micro-batch through all stages forward and back, for any schedule: each of p stages waits
        for the previous one, and has 1/p of the devices. Every step takes at least that."""
        return self.passed_on * global_batch / configuration.micro_batches * configuration.pipeline / devices

    def device_bytes(self, devices: int) -> float:
        """Least bytes on the device that holds most."""
        return self.parameters / devices


def mixed_step_seconds(
    limits: Sequence[Bounds], devices: Sequence[int], configuration: Configuration, global_batch: int, recompute: bool
) -> float:
    """Least step time on groups of different devices, with one stage on each rank. All devices together are busy for as
    long as the slowest stage. One micro-batch takes at least as long on all stages as on the quickest devices."""
    seconds = [own.work + (own.recomputed if recompute else 0.0) for own in limits]
    part = global_batch / configuration.micro_batches
    pace = part / math.fsum(count / own for count, own in zip(devices, seconds, strict=True))
    return (configuration.micro_batches - 1) * pace + part * min(seconds) * configuration.pipeline / sum(devices)


def bounds(
    template: Template,
    batch: int,
    cluster: Cluster,
    precision: str,
    optimizer: str,
    update: Update = PLAIN,
    offload: Offload = NOTHING,
) -> Bounds:
    """Bounds of a model whose template graph has `batch` samples. Anything that may be offloaded takes no memory."""
    graph = template.graph
    forward = recomputed = backward = passed_back = 0.0
    owned = {parameter.name for parameter in graph.parameters}
    for index, op in enumerate(graph.operators):
        rule = rule_of(graph, op)
        seconds = _work_seconds(graph, index, rule, cluster)
        graded = graph.graded_places(op)
        count = template.times(index)
        forward += seconds * count
        recomputed += seconds * count if template.works(index) else 0.0
        backward += seconds * count * rule.backward_work(graded)
        passed_back += seconds * count * rule.backward_work(i for i in graded if op.operands[i] not in owned)
    offloaded = frozenset[str]() if offload.weights == NOTHING.weights else template.every_own_parameter

    def held(name: str) -> float:
        tensor, updated = graph.types[name], template.optimizer_of(optimizer, name)
        per = parameter_bytes(precision_of(tensor, precision), updated, cluster.software, update.variant)
        beside = per.gradient + (per.state if offload.optimizer == NOTHING.optimizer else 0.0)
        weight = 0.0 if name in offloaded else weight_bytes(tensor, per.weight)
        return (beside if name in graph.differentiable else 0.0) + weight

    sizes = (graph.types[p.name].numel * held(p.name) * template.parameter_times(p.name) for p in graph.parameters)
    return Bounds(
        work=(forward + backward) / batch,
        recomputed=recomputed / batch,
        parameters=math.fsum(sizes),
        passed_on=(forward + passed_back) / batch,
    )


def _work_seconds(graph: OperatorGraph, index: int, rule: Rule, cluster: Cluster) -> float:
    if rule.op_class == "view":
        return 0.0
    op = graph.operators[index]
    names = [*op.operands, *(name for name in op.results if name is not None)]
    dtype = next((graph.types[name].dtype for name in names if graph.types[name].floating), "float32")
    computed = profile_dtype(rule.op_class, dtype)
    if computed is None:
        raise RuleError(
            f"operator '{op.name}' ({op.op}), called in {op.place}, computes in {dtype}, for which no profile has a"
            " rate; compute in float32 (x.float()), or in 16 bits"
        )
    if rule.casts and cluster.device.multiplies(rule.computed[0]):
        computed = rule.computed[0]
    elif rule.op_class in ("matmul", "experts", "recurrent", "delta_rule", "state_space", "index_scores"):
        computed = multiplied_in(cluster.software, computed)
    return rule.flops / best_rate(rule.op_class, computed, cluster.device)
