"""Pipeline stages: who computes which operators, what crosses between them, and the 1F1B order on real processes.

    rank = stage * (devices of a stage) + rank inside the stage

    stage 0   F0 F1 .. B0 F2 B1 ..     activations ──> the same place of the next stage, on one process group
    stage 1      F0 B0 F1 B1 ..        gradients   <── back, on another, so that neither waits behind the other

Stages have equal meshes, so a tensor crosses piece by piece: the layout in which its producer made it is the layout in
which it arrives, and the reading operator redistributes it there like any other value. Sends do not wait; receives do.
Narayanan et al. 2019 (PipeDream), 2021 (the flush).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from costmodels import Turn, order_1f1b
from planner.errors import PlannerError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.bind import BoundPlan, stage_of_operators
from planner.sharding.layout import local_shape
from runtime.collectives import all_reduce
from runtime.device_mesh import RankMesh, stage_line
from runtime.parameters import LocalParameter

Values = Mapping[str, torch.Tensor]
Edges = Mapping[str, GradientEdge | None]
"""By name the places in the graph of autograd that made a value; None where no gradient is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """What one stage holds: its operators (with the constant ones that it computes for itself), the values that it gets
    from the stage before and those that it gives to the stage after, the parameters it uses."""

    stage: int
    stages: int
    operators: tuple[int, ...]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    parameters: frozenset[str]

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def cut_stage(bound: BoundPlan, stage: int) -> StageCut:
    """The part of a plan that one stage executes. Raises PlannerError where a value skips a stage."""
    graph, stages = bound.graph, stage_of_operators(bound)
    count = len(bound.plan.stages)
    own = [at for at in range(len(bound.operators)) if stages[at] == stage and _varies(graph, at)]
    own += _constants(graph, own)
    receives = _crossing(graph, stages, stage)
    sends = _crossing(graph, stages, stage + 1) if stage + 1 < count else ()
    used = {name for at in own for name in graph.operators[at].operands}
    return StageCut(
        stage=stage,
        stages=count,
        operators=tuple(sorted(own)),
        receives=receives,
        sends=sends,
        parameters=frozenset(used & graph.parameter_names),
    )


def check_updates(bound: BoundPlan, cuts: Sequence[StageCut]) -> None:
    """Raise PlannerError where a stage reads a buffer that another one changes: it would not hear of it."""
    graph = bound.graph
    for buffer, content in graph.updates:
        writers = {cut.stage for cut in cuts if graph.producer[content] in cut.operators}
        readers = {cut.stage for cut in cuts for at in cut.operators if buffer in graph.operators[at].operands}
        if len(writers | readers) > 1:
            raise PlannerError(
                f"buffer '{buffer}' is changed in stage {min(writers)} and read in the stages {sorted(readers)}; plan"
                " this model with --pipeline 1"
            )


def _varies(graph: OperatorGraph, at: int) -> bool:
    return any(name in graph.data_dependent for name in graph.operators[at].results if name is not None)


def _constants(graph: OperatorGraph, own: Sequence[int]) -> list[int]:
    """Operators whose results never change (masks, positions) and that the stage needs: it computes them itself."""
    found: set[int] = set()
    wanted = [name for at in own for name in graph.operators[at].operands]
    while wanted:
        at = graph.producer.get(wanted.pop())
        if at is not None and not _varies(graph, at) and at not in found:
            found.add(at)
            wanted += graph.operators[at].operands
    return sorted(found)


def _crossing(graph: OperatorGraph, stages: Mapping[int, int], stage: int) -> tuple[str, ...]:
    """Values that `stage` reads and the stage before it makes."""
    found: dict[str, None] = {}
    for at, op in enumerate(graph.operators):
        for name in op.operands if stages[at] == stage else ():
            producer = graph.producer.get(name)
            if producer is None or stages[producer] == stage or name not in graph.data_dependent:
                continue
            if stages[producer] != stage - 1:
                raise PlannerError(
                    f"value '{name}' goes from stage {stages[producer]} to stage {stage}; a pipeline hands values on"
                    " from one stage to the next only, so plan this model with --pipeline 1"
                )
            found.setdefault(name)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Ranks of the stages before and after at the same place inside the stage, and the groups of this line of ranks."""

    before: int
    after: int
    forward: dist.ProcessGroup
    backward: dist.ProcessGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that leaves a stage: local shape, dtype, whether a gradient comes back."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(kw_only=True)
class Pipeline:
    """One rank's share of the pipelined part of a step. Make it with `build_pipeline`."""

    cut: StageCut
    neighbours: Neighbours
    arrivals: tuple[Crossing, ...]
    departures: tuple[Crossing, ...]
    loss: Crossing
    device: torch.device
    turns: list[Turn] = field(default_factory=list)
    _sent: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def run(self, forward: Callable[[int, Values], Values], micro_batches: int) -> torch.Tensor:
        """All micro-batches of a step, forward and backward; returns the mean loss, the same on every rank.

        `forward` computes the stage on one micro-batch: from its number and the values received, the values to send, or
        the loss on the last stage. `turns` has the order in which it was done.
        """
        live: dict[int, tuple[Values, Edges]] = {}
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        self.turns.clear()
        for turn in order_1f1b(self.cut.stage, self.cut.stages, micro_batches):
            if turn.kind == "forward":
                received: Values = {arrival.name: self._receive_value(arrival) for arrival in self.arrivals}
                made = forward(turn.micro_batch, received)
                if self.cut.last:
                    total += made[self.loss.name].detach().float().reshape(()) / micro_batches
                for departure in self.departures:
                    self._send(made[departure.name].detach(), self.neighbours.after, self.neighbours.forward)
                live[turn.micro_batch] = (received, self._edges(made))
            else:
                received, edges = live.pop(turn.micro_batch)
                self._backward(received, edges, micro_batches)
            self.turns.append(turn)
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()
        return all_reduce(total, self.neighbours.forward)  # the other stages hold zero

    def _edges(self, made: Values) -> Edges:
        """Where the backward pass starts: what has been sent is not kept for its own sake."""
        names = (self.loss.name,) if self.cut.last else tuple(d.name for d in self.departures if d.differentiable)
        return {name: get_gradient_edge(made[name]) if made[name].requires_grad else None for name in names}

    def _backward(self, received: Values, edges: Edges, micro_batches: int) -> None:
        if self.cut.last:
            gradients = [torch.full(self.loss.shape, 1.0 / micro_batches, dtype=self.loss.dtype, device=self.device)]
        else:
            returning = [departure for departure in self.departures if departure.differentiable]
            gradients = [self._receive(d, self.neighbours.after, self.neighbours.backward) for d in returning]
        pairs = [(edge, gradient) for edge, gradient in zip(edges.values(), gradients, strict=True) if edge is not None]
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])
        for arrival in self.arrivals:
            if arrival.differentiable:
                value = received[arrival.name]
                gradient = torch.zeros_like(value) if value.grad is None else value.grad
                self._send(gradient, self.neighbours.before, self.neighbours.backward)

    def _receive_value(self, arrival: Crossing) -> torch.Tensor:
        value = self._receive(arrival, self.neighbours.before, self.neighbours.forward)
        return value.requires_grad_(arrival.differentiable)

    def _receive(self, crossing: Crossing, source: int, group: dist.ProcessGroup) -> torch.Tensor:
        value = torch.empty(crossing.shape, dtype=crossing.dtype, device=self.device)
        dist.recv(value, source, group=group)
        return value

    def _send(self, value: torch.Tensor, target: int, group: dist.ProcessGroup) -> None:
        """Start to send; the tensor is kept until it has gone."""
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        whole = value.contiguous()
        work = dist.isend(whole, target, group=group)
        assert work is not None, "this rank is a member of the group"
        self._sent.append((work, whole))


def build_pipeline(bound: BoundPlan, place: RankMesh, cut: StageCut) -> Pipeline:
    """The pipeline as this rank sees it. Collective: every rank calls it."""
    every = tuple(range(cut.stages))
    ranks = [stage * place.mesh.size + place.rank for stage in every]
    neighbours = Neighbours(
        before=ranks[cut.stage - 1],
        after=ranks[(cut.stage + 1) % cut.stages],
        forward=stage_line(place, every, "forward"),
        backward=stage_line(place, every, "backward"),
    )
    return Pipeline(
        cut=cut,
        neighbours=neighbours,
        arrivals=tuple(_crossing_value(bound, name) for name in cut.receives),
        departures=tuple(_crossing_value(bound, name) for name in cut.sends),
        loss=_whole_value(bound, bound.graph.loss),
        device=place.device,
    )


def _crossing_value(bound: BoundPlan, name: str) -> Crossing:
    graph = bound.graph
    maker = bound.operators[graph.producer[name]]
    results = [result for result in maker.operator.results if result is not None]
    layout = maker.layouts.results[results.index(name)].forward
    return Crossing(
        name=name,
        shape=local_shape(graph.types[name].shape, layout, bound.plan.mesh.sizes),
        dtype=getattr(torch, graph.types[name].dtype),
        differentiable=name in graph.differentiable,
    )


def _whole_value(bound: BoundPlan, name: str) -> Crossing:
    tensor = bound.graph.types[name]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return Crossing(name=name, shape=tensor.shape, dtype=dtype, differentiable=name in bound.graph.differentiable)


def share_parameters(parameters: Mapping[str, LocalParameter], place: RankMesh, cuts: Sequence[StageCut]) -> None:
    """Tell parameters that several stages use (tied embeddings) who else holds them. Collective."""
    names = sorted({name for cut in cuts for name in cut.parameters})
    for name in names:
        stages = tuple(cut.stage for cut in cuts if name in cut.parameters)
        if len(stages) > 1:
            group = stage_line(place, stages, "shared parameters")
            if place.stage in stages:
                parameters[name].twins = group
