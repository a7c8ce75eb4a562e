"""Executes a bound plan: the operators of the graph, one after the other, on the tensors of one rank.

    producer ──(promised layouts)──> transfer ──(wanted layouts)──> operator on local tensors ──> checked shape ──> ...

Tensors are plain local tensors; their layouts are known from the plan. Before an operator, each operand is brought from
the layout that its producer promised to the layout that the operator's strategy wants; autograd brings the gradients
back the dual way. After the operator, the shapes of the results are compared with the promise of its rule. Data moves
nowhere else, so nothing is ever redistributed unplanned. Data, tensor, sequence, vocabulary and optimizer parallelism
are all just layouts here.

A value is dropped after its last use. A recomputed block runs under a checkpoint: its values are dropped after the
forward pass and computed again, communication included, when its gradient is needed. Under "selective" the results of
some of its operators are kept instead (see `runtime.ops.kept_results`). The inputs of a block may be offloaded from the
device (see `runtime.offload.activations`), and so may the tensors that any other block saves (see
`runtime.offload.saved_tensors`), and the weights of any block (see `runtime.offload.weights`). Weights that a plan
gathers block by block are values of their block (see `runtime.executor.block_gathers`, `runtime.executor.prefetch`).

A stage may process several interleaved micro-batches. They go through the same program and alternate operator by
operator, so that one computes while a transfer of another is in flight (see `runtime.executor.interleaving`).

Buffers that the model changes get their new contents after the micro-batch. Their old tensors stay unchanged, so a
later recomputation reads the old contents.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch.utils.checkpoint import checkpoint

from costmodels import Then
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.deferred_weight_gradients import deferred_weight_gradients
from planner.plan.layout.expert_overlap import expert_overlaps_of, replayed
from planner.plan.layout.micro_batch_turns import turns_of_stages
from planner.plan.layout.overlapped_products import overlaps_of
from planner.plan.layout.segments import segments_of
from planner.plan.layout.stage_cut import StageCut
from planner.plan.prediction.charges import Phase
from planner.pricing.liveness import Replay, replays
from planner.sharding.layout import PARTIAL, local_shape, replicated
from planner.sharding.rule import Duplex
from runtime.comm.async_collectives import Groups
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import Transfer, transfer
from runtime.executor.alternation import Alternation
from runtime.executor.block_gathers import Bundle
from runtime.executor.deferred_weight_gradients import DeferredGradients
from runtime.executor.expert_parts import in_parts
from runtime.executor.instruction import Instruction, MicroBatch, Operand, Values, compute
from runtime.executor.interleaving import Departed, Turn, depart, in_turns
from runtime.executor.lowering.programs import Body, Programs, one_after_the_other
from runtime.executor.overlapping import overlap
from runtime.executor.prefetch import Prefetch
from runtime.executor.relay import Relay
from runtime.executor.sections import Section, section_of
from runtime.observer import Observer, Told, teller
from runtime.offload.activations import OffloadedActivations, Trail, alone
from runtime.offload.saved_tensors import SavedMemory
from runtime.offload.weights import OffloadedWeights, Visits
from runtime.ops.fp8.fp8_scales import Fp8Scales
from runtime.ops.kept_results import KeptResults
from runtime.ops.local.local_ops import local_call
from runtime.ops.randomness import FIRST, Draw
from runtime.parameters.shards import LocalParameter, Version
from runtime.tables.placed import PlacedTables


@dataclass(frozen=True, kw_only=True)
class Executor:
    """The program of one rank. Build it with `build_executor`."""

    place: RankMesh
    sections: tuple[Section, ...]
    results: tuple[str, ...]
    loss: str | None
    last: Transfer | None = field(default=None)
    updates: tuple[tuple[str, str], ...] = ()
    activation_offload: OffloadedActivations | None = None
    programs: Programs | None = None
    weights: OffloadedWeights | None = None
    lanes: Groups | None = None
    relay: Relay | None = None
    kept: tuple[tuple[str, Transfer | None], ...] = ()

    def __call__(
        self,
        parameters: Mapping[str, LocalParameter],
        buffers: MutableMapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        draw: Draw = FIRST,
        observer: Observer | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the stage on one micro-batch, from local pieces in the layouts of the plan. Returns the values that the
        next stage reads, in their producers' layouts, or the loss, which is the same on every rank of the last stage.
        `draw` gives the step and micro-batch for random numbers; `observer` observes. `buffers` receives the new
        contents of the buffers that the model changes.
        """
        return self.together(parameters, buffers, [inputs], [draw], [observer])[0]

    def together(
        self,
        parameters: Mapping[str, LocalParameter | Version],
        buffers: MutableMapping[str, torch.Tensor],
        inputs: Sequence[Mapping[str, torch.Tensor]],
        draws: Sequence[Draw],
        observers: Sequence[Observer | None],
        deferred: Sequence[DeferredGradients | None] = (),
    ) -> list[dict[str, torch.Tensor]]:
        """Run the stage on several interleaved micro-batches, which alternate in each operator. Weight gradients that
        the plan defers are collected in `deferred`; without it they are computed in the normal backward pass."""
        pieces = {name: parameter.piece for name, parameter in parameters.items()}
        stubs = {name: stub for name, parameter in parameters.items() if (stub := parameter.stub) is not None}
        tensors = {**pieces, **buffers}
        batches = [
            MicroBatch(
                tensors=tensors, stubs=stubs, draw=draw, observer=observer, values={**given}, deferred=later, turn=turn
            )
            for given, draw, observer, later, turn in zip(
                inputs, draws, observers, deferred or [None] * len(inputs), Turn.of_each(len(inputs)), strict=True
            )
        ]
        trail = Trail(self.activation_offload) if self.activation_offload is not None else None
        visits = self._visits(teller(batches[0].observer))
        gathers = self._gathers(batches[0], parameters)
        for number, section in enumerate(self.sections):
            if trail is not None and not section.segment.offloads_activations:
                trail.let_go()
            if visits is not None:
                visits.enter(number)
            if section.segment.recomputed and torch.is_grad_enabled():
                self._recomputed(number, batches, gathers, trail)
            elif trail is not None and section.segment.offloads_activations and torch.is_grad_enabled():
                self._saving(number, batches, trail)
            else:
                if gathers is not None:
                    gathers.enter(number, batches[0], "forward")
                self._run(section, batches)
                if gathers is not None:
                    gathers.leave(number, [batches[0].values[name] for name in section.segment.writes])
            if visits is not None:
                visits.leave(number, [batch.values[name] for batch in batches for name in section.segment.writes])
        if trail is not None:
            trail.let_go()
        for batch in batches:
            for buffer, content in self.updates:
                buffers[buffer] = batch.values[content].detach()
        return [self._made(batch.values) for batch in batches]

    def _visits(self, told: Told) -> Visits | None:
        """The loads of offloaded weights in a pass; None where none are offloaded."""
        runs = [section.segment.weights for section in self.sections]
        return Visits(self.weights, runs, told) if self.weights is not None and any(runs) else None

    def _gathers(self, batch: MicroBatch, parameters: Mapping[str, LocalParameter | Version]) -> Prefetch | None:
        """The gathers of a pass; None where no weights are gathered together."""
        if not any(self.bundles):
            return None
        trip = Prefetch(
            bundles=self.bundles,
            recomputed=[section.segment.recomputed and torch.is_grad_enabled() for section in self.sections],
            batch=replace(batch, values={}, deferred=None),
            parameters=parameters,
            place=self.place,
            lanes=self.lanes,
        )
        if self.relay is not None:
            self.relay.take_in(trip)
        return trip

    @property
    def bundles(self) -> Sequence[Sequence[Bundle]]:
        """The bundles that each section gathers."""
        return [section.bundles for section in self.sections]

    def _made(self, values: Values) -> dict[str, torch.Tensor]:
        made = {name: values[name] for name in self.results}
        if self.loss is not None and self.last is not None:
            made[self.loss] = self.last(made[self.loss], self.place)
        for name, whole in self.kept:
            made[name] = values[name] if whole is None else whole(values[name], self.place)
        return made

    def _saving(self, number: int, batches: Sequence[MicroBatch], trail: Trail) -> None:
        """A section that offloads its saved tensors; they are loaded back at the first gradient of its results."""
        section, saved = self.sections[number], SavedMemory()
        staying = [batch.piece(name) for batch in batches for name in (*section.segment.reads, *section.segment.held)]
        with saved.watching():
            self._run(section, [replace(batch, saved=saved) for batch in batches])
        made = [batch.values[name] for batch in batches for name in section.segment.writes]
        back = trail.offload(number, saved.take((*staying, *made)), section.segment.home, teller(batches[0].observer))
        for tensor in made:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: back())  # type: ignore[no-untyped-call]

    def _recomputed(
        self, number: int, batches: Sequence[MicroBatch], gathers: Prefetch | None, trail: Trail | None
    ) -> None:
        section = self.sections[number]
        kept = [KeptResults() for _ in batches]
        count = len(section.segment.reads)
        program = section
        watched = self._watches(section, departs=len(batches) > 1)  # decided once: both runs of the block save the same
        # the recomputation keeps no other value alive
        bare = [replace(batch, values={}, watched=watched) for batch in batches]
        back: Callable[[], None] = _nothing
        phase: Phase = "forward"

        def block(*reads: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal program, phase
            back()
            inside = [
                replace(
                    batch,
                    values=dict(zip(section.segment.reads, reads[at * count : (at + 1) * count], strict=True)),
                    kept=kept[at],
                )
                for at, batch in enumerate(bare)
            ]
            if gathers is not None:
                gathers.enter(number, inside[0], phase)
            phase = "recomputation"
            self._run(program, inside)
            if len(bare) > 1:  # else a finished batch runs on until all are, and sends what no operator reads
                program = replace(section, instructions=section.instructions[: section.again])
            return tuple(batch.values[name] for batch in inside for name in section.segment.writes)

        reads = [batch.values[name] for batch in batches for name in section.segment.reads]
        made = checkpoint(block, *reads, use_reentrant=False, preserve_rng_state=False)
        if trail is not None and section.segment.offloads:
            offloaded = [batch.values[name] for batch in batches for name in section.segment.offloads]
            back = trail.offload(number, alone(offloaded, made), section.segment.home, teller(batches[0].observer))
        del reads
        writes = iter(made)
        for batch in batches:
            batch.values.update(zip(section.segment.writes, writes, strict=False))
            for instruction in section.instructions:
                for name in instruction.last:
                    batch.values.pop(name, None)

    def _run(self, section: Section, batches: Sequence[MicroBatch]) -> None:
        departs, turns = len(batches) > 1, [batch.turn for batch in batches]
        if self.programs is None:
            in_turns([self._general(section, batch, departs=departs) for batch in batches], turns)
            return
        bodies = self._bodies(section, departs=departs)
        if departs:
            in_turns([one_after_the_other(bodies, batch) for batch in batches], turns)
            return
        for body in bodies:
            body(batches[0])

    def _bodies(self, section: Section, *, departs: bool) -> tuple[Body, ...]:
        if self.programs is None:
            return ()
        inside, recomputed = section.instructions, section.segment.recomputed
        return self.programs.bodies(inside, recomputed=recomputed, departs=departs, again=section.again)

    def _watches(self, section: Section, *, departs: bool) -> bool:
        """Whether the programs of a section check their results in the next run."""
        return not all(body.seen for body in self._bodies(section, departs=departs))

    def _general(self, section: Section, batch: MicroBatch, *, departs: bool) -> Iterator[Then]:
        """The instructions on one batch. With `departs`, it yields to other micro-batches after each send and at its
        pauses."""
        for instruction in section.instructions:
            if departs and instruction.then == "pause":
                yield "pause"
            with batch.looking(instruction):
                operands = [self._departed(o, batch, instruction, departs=departs) for o in instruction.operands]
            if departs and any(o.yields for o in instruction.operands):
                yield instruction.then
            with batch.looking(instruction):
                arrived = [o.arrive() if isinstance(o, Departed) else o for o in operands]
                compute(instruction, batch, arrived, self.place)
            for name in instruction.last:
                batch.values.pop(name, None)
            if departs and instruction.sends:
                yield "work"

    def _departed(
        self, operand: Operand, batch: MicroBatch, instruction: Instruction, *, departs: bool
    ) -> torch.Tensor | Departed:
        """An operand in the layout that the operator wants, or in flight to it."""
        piece, steps = batch.piece(operand.name), operand.transfer
        stub = batch.stubs.get(operand.name) if operand.weight else None
        assert steps is not None or stub is None, operand.name  # no gradient is lost
        if steps is None:
            return piece
        if departs and steps.departs:
            return depart(piece, steps, self.place, stub, instruction, None if operand.yields else batch.turn)
        return steps(piece, self.place, stub, instruction)


def _nothing() -> None:
    """What a block that offloads nothing waits for, and the switch where no passes alternate."""


def build_executor(
    bound: BoundPlan,
    place: RankMesh,
    cut: StageCut,
    activation_offload: OffloadedActivations | None = None,
    tables: PlacedTables | None = None,
    programs: Programs | None = None,
    weights: OffloadedWeights | None = None,
    lanes: Groups | None = None,
    outputs: Collection[str] = (),
    alternation: Alternation | None = None,
    scales: Fp8Scales | None = None,
    relay: Relay | None = None,
) -> Executor:
    """The program of this rank for its stage of a plan. It gets the storage of what it offloads; the `tables` off the
    devices; the offloaded `weights` of the rank; the process groups for prefetched weights, if any; the `alternation`
    of passes; the `scales` of fp8 layers that are known before they run; and the `relay` through which passes prefetch
    weights for each other. Also returns those of the values `outputs` that the stage makes, whole on every rank of it.
    Raises ModelError for an operator that is not supported yet."""
    graph, mesh = bound.graph, place.mesh
    promised = bound.promised
    results = (*cut.sends, *((graph.loss,) if cut.last else ()))
    asked = tuple(name for name in outputs if graph.producer.get(name) in cut.operators)
    updates = tuple((buffer, content) for buffer, content in graph.updates if graph.producer[content] in cut.operators)
    segments = segments_of(bound, cut, outputs=asked)
    running = [at for segment in segments for at in segment.operators]
    last_use = {name: at for at in running for name in graph.operators[at].operands}
    thens = turns_of_stages(bound, [segments])
    blocks = bound.blocks
    again = replays(graph, blocks)
    overlaps = overlaps_of(bound, cut.operators)
    experts = expert_overlaps_of(bound, overlaps, cut.operators)
    changed = replayed(bound, experts, overlaps)

    def works(at: int, plain: Replay) -> bool:
        own, replay = changed.get(at, (bound.place_of(at), plain))
        return own < replay.works

    instructions: dict[int, Instruction] = {}
    together = frozenset[str]().union(*(segment.gathered for segment in segments))
    outlive = {*results, *asked, *(content for _, content in updates)}
    for index in cut.operators:
        op, block = bound.operators[index], blocks.block_of(index)
        operands = tuple(
            Operand(name=name, transfer=None, weight=False)
            if name in together
            else build_operand(bound, name, promised[name], index, position)
            for position, name in enumerate(op.operator.operands)
        )
        made = [name for name in op.operator.results if name is not None]
        shapes = {name: local_shape(graph.types[name].shape, promised[name].forward, mesh.sizes) for name in made}
        ended = {name for name in op.operator.operands if last_use[name] == index}
        ended |= {name for name in made if name not in last_use}
        instructions[index] = Instruction(
            index=index,
            bound=op,
            operands=operands,
            call=local_call(graph, op, place, bound.sequences, tables, scales),
            results=tuple(None if name is None else (name, shapes[name]) for name in op.operator.results),
            last=tuple(sorted(ended - outlive)),
            kept=bound.is_kept(index),
            repeated=block is None or works(index, again[blocks.kinds[block]]),
            deferred=bool(deferred_weight_gradients(bound, index)),
            then=thens.get(index, "work"),
        )
    chosen = tuple(one for one in overlaps if one.kind == "operand" or one.value not in (*results, *asked))
    instructions = overlap(instructions, chosen, bound, place)
    behind = in_parts(instructions, experts, _nothing if alternation is None else alternation.switch)
    everywhere = Duplex(forward=replicated(len(mesh.axes)), gradient=replicated(len(mesh.axes)))

    def brought(name: str, differentiable: bool) -> Transfer | None:
        shape, sequences = graph.types[name].shape, bound.sequences.get(name, ())
        return transfer(shape, mesh, promised[name], everywhere, differentiable, sequences=sequences)

    return Executor(
        place=place,
        sections=tuple(section_of(segment, instructions, behind, scales) for segment in segments),
        activation_offload=activation_offload if bound.offloaded_blocks else None,
        programs=programs,
        weights=weights,
        lanes=lanes,
        relay=relay,
        results=results,
        updates=updates,
        loss=graph.loss if cut.last else None,
        last=brought(graph.loss, differentiable=True) if cut.last else None,
        kept=tuple((name, brought(name, differentiable=False)) for name in asked if name != graph.loss),
    )


def build_operand(bound: BoundPlan, name: str, promised: Duplex, index: int, position: int) -> Operand:
    """The operand of operator `index` at this position among its operands; its producer has `promised` its layouts."""
    graph, mesh, wanted = bound.graph, bound.plan.mesh, bound.operators[index].layouts.operands[position]
    weight, update = name in graph.parameter_names, bound.plan.training.update
    if weight and update.is_local(name):  # the gradient stays a local one on each rank
        own = tuple(PARTIAL if placement.is_shard else placement for placement in wanted.gradient)
        promised = replace(promised, gradient=own)
    shape, sequences = graph.types[name].shape, bound.sequences.get(name, ())
    between = transfer(shape, mesh, promised, wanted, name in graph.differentiable, weight, sequences)
    if weight and between is not None:
        between = replace(between, reduced_in=getattr(torch, update.reduced_in(graph.types[name].dtype)))
    return Operand(name=name, transfer=between, weight=weight)
