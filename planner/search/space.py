"""The outer space: everything that is chosen around the strategies inside a stage.

A configuration fixes the number of pipeline stages, the shape of the mesh inside a stage, the number of micro-batches
and whether blocks are recomputed. Configurations are tried in the order of a lower bound on their step time, so that
the search can stop early without missing the best one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from costmodels import in_flight, parameter_bytes
from hardware_profiles import Cluster
from planner.graph.operator_graph import OperatorGraph
from planner.pricing.operator_price import PROFILE_DTYPES
from planner.search.template import Template
from planner.sharding.rule import Rule
from planner.sharding.rules import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One point of the outer space. `mesh` has the sizes of the axes inside a stage, slowest links first."""

    stages: int
    mesh: tuple[int, ...]
    micro_batches: int
    recompute: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """What the user has decided: None leaves it to the search."""

    stages: int | None = None
    mesh: tuple[int, ...] | None = None
    micro_batches: int | None = None
    recompute: bool | None = None


FREE = Pinned()
"""Everything is left to the search."""


def configurations(template: Template, devices: int, global_batch: int, pinned: Pinned) -> Iterator[Configuration]:
    """All configurations that divide evenly: stages hold equally many blocks, micro-batches equally many samples."""
    for stages in _divisors(devices):
        if stages > 1 and (not template.pipelines or template.blocks.count % stages):
            continue
        for mesh in mesh_shapes(devices // stages):
            for micro_batches in _divisors(global_batch):
                for recompute in (False, True) if template.blocks.count else (False,):
                    found = Configuration(stages=stages, mesh=mesh, micro_batches=micro_batches, recompute=recompute)
                    if _agrees(found, pinned):
                        yield found


def _agrees(configuration: Configuration, pinned: Pinned) -> bool:
    return all(
        wanted is None or wanted == getattr(configuration, name)
        for name, wanted in (
            ("stages", pinned.stages),
            ("mesh", pinned.mesh),
            ("micro_batches", pinned.micro_batches),
            ("recompute", pinned.recompute),
        )
    )


def mesh_shapes(devices: int) -> tuple[tuple[int, ...], ...]:
    """Meshes of one or two axes over that many devices; one device has no axes."""
    if devices == 1:
        return ((),)
    pairs = tuple((outer, devices // outer) for outer in _divisors(devices) if 1 < outer < devices)
    return ((devices,), *pairs)


def _divisors(number: int) -> tuple[int, ...]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(low + [number // d for d in reversed(low) if d * d != number])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What no plan can beat, from the floating point work, the parameters and the kept activations alone.

    The work of a class takes at least flops / (peak * efficiency) wherever it is done, so n devices need at least 1/n
    of it each and a pipeline of p stages runs (m + p - 1) / m times that. Weights, gradients, optimizer state and kept
    activations of the first stage are at least once in the stage: on d devices some device has 1/d of them or more.
    """

    forward: float  # seconds of one device for the forward work of one sample
    recomputed: float  # the part of it that recomputation of the blocks does again
    backward: float
    outer_parameters: float  # bytes of weight, gradient and state of what the first stage has beside its blocks
    block_parameters: float  # the same for one block
    outer_kept: float  # bytes per sample kept for the backward pass beside the blocks of the first stage
    block_kept: float  # the same for one block
    block_input: float  # bytes per sample that flow from block to block

    def step_seconds(self, configuration: Configuration, devices: int, global_batch: int) -> float:
        """Least step time of a configuration."""
        m, p = configuration.micro_batches, configuration.stages
        once_more = self.recomputed if configuration.recompute else 0.0
        return (self.forward + self.backward + once_more) * global_batch / devices * (m + p - 1) / m

    def device_bytes(self, configuration: Configuration, devices: int, global_batch: int, blocks: int) -> float:
        """Least bytes on the fullest device of the first stage."""
        m, p = configuration.micro_batches, configuration.stages
        share = blocks // p
        kept = self.block_input if configuration.recompute else self.block_kept
        live = in_flight(0, p, m) * (global_batch // m)
        parameters = self.outer_parameters + share * self.block_parameters
        return (parameters + live * (self.outer_kept + share * kept)) / (devices // p)


def bounds(template: Template, batch: int, cluster: Cluster, precision: str, optimizer: str) -> Bounds:
    """Bounds of a model whose template graph has `batch` samples."""
    graph = template.graph
    forward = recomputed = backward = 0.0
    for index, op in enumerate(graph.operators):
        rule = rule_of(graph, op)
        seconds = _work_seconds(graph, index, rule, cluster)
        graded = sum(name in graph.differentiable for i, name in enumerate(op.operands) if i not in rule.addends)
        count = template.blocks.count if template.in_block(index) else 1
        forward += seconds * count
        works = template.in_block(index) and index - template.blocks.start < template.replay.works
        recomputed += seconds * count if works else 0.0
        backward += seconds * count * rule.backward_work(graded)
    kept = _kept_bytes(template)
    per = parameter_bytes(precision, optimizer)
    sizes = {
        p.name: graph.types[p.name].numel * (per.total if p.name in graph.differentiable else per.weight)
        for p in graph.parameters
        if any(template.blocks.count == 0 or at < template.blocks.start + template.blocks.period
               for at in graph.consumers.get(p.name, ()))
    }  # fmt: skip
    return Bounds(
        forward=forward / batch,
        recomputed=recomputed / batch,
        backward=backward / batch,
        outer_parameters=math.fsum(size for name, size in sizes.items() if name not in template.own_parameters),
        block_parameters=math.fsum(size for name, size in sizes.items() if name in template.own_parameters),
        outer_kept=math.fsum(size for at, size in kept.items() if _beside_first(template, at)) / batch,
        block_kept=math.fsum(size for at, size in kept.items() if template.in_block(at)) / batch,
        block_input=math.fsum(graph.types[n].nbytes for n in template.carried if n in graph.differentiable) / batch,
    )


def _beside_first(template: Template, index: int) -> bool:
    return not template.blocks.count or index < template.blocks.start


def _kept_bytes(template: Template) -> dict[int, float]:
    """Bytes of the whole tensors that each operator keeps at least for the backward pass."""
    graph, alive = template.graph, template.alive
    kept: dict[int, float] = {}
    for index, op in enumerate(graph.operators):
        rule = rule_of(graph, op)
        names = {name for name in op.results if name in alive.kept}
        names |= {op.operands[i] for i in alive.saved[index] if op.operands[i] not in alive.kept}
        extra = sum(
            term.coefficient * math.prod(rule.factors[f].extent for f in term.factors) for term in rule.saved_extra
        )
        graded = any(name in graph.differentiable for name in op.operands)
        kept[index] = math.fsum(graph.types[name].nbytes for name in names) + (extra if graded else 0.0)
    return kept


def _work_seconds(graph: OperatorGraph, index: int, rule: Rule, cluster: Cluster) -> float:
    if rule.op_class == "view":
        return 0.0
    op = graph.operators[index]
    work = sum(term.coefficient * math.prod(rule.factors[f].extent for f in term.factors) for term in rule.work)
    names = [*op.operands, *(name for name in op.results if name is not None)]
    dtype = next((graph.types[name].dtype for name in names if graph.types[name].floating), "float32")
    device = cluster.device
    return work / (device.peak(PROFILE_DTYPES[dtype]) * device.efficiency(rule.op_class).compute)
