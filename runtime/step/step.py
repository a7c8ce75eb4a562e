"""One rank's share of the training step that a plan describes.

With pipeline stages a rank computes its stages of every micro-batch in the order of the plan's schedule (see
`runtime.step.pipeline`). One step: for each micro-batch take this rank's part of the inputs, run forward and backward,
and accumulate gradients; then reduce the gradients once, update, and bring the weights back to their stored layout. The
loss is the mean of the losses of the micro-batches.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NoReturn

import torch
from torch import nn

from costmodels import Turn
from planner.errors import LossSpikeError, NonFiniteError
from planner.plan.binding.bind import BoundPlan
from planner.plan.layout.deferred_weight_gradients import arrivals
from planner.plan.layout.stage_cut import check_updates, cut_stage
from planner.plan.schedule import orders_of, pairs_of, relays
from planner.sharding.update import sample_pieces
from runtime.comm.device_mesh import RankMesh, axis_lines
from runtime.comm.exchange import gather_tensors
from runtime.executor.alternation import Alternation
from runtime.executor.deferred_weight_gradients import DeferredGradients
from runtime.executor.executor import Executor, build_executor
from runtime.executor.lowering.compiled import Compiled
from runtime.executor.lowering.programs import Programs
from runtime.executor.relay import Relay
from runtime.executor.slices import Slices
from runtime.guard_settings import GuardSettings
from runtime.observer import Observer, teller, updating
from runtime.offload.activations import OffloadedActivations
from runtime.offload.storage import Outside
from runtime.offload.weights import OffloadedWeights
from runtime.ops.fp8.fp8_scales import fp8_scales_of_rank
from runtime.ops.randomness import Draw
from runtime.optimizers.optimizers import OptimizerSettings
from runtime.parameters.after_step import step_ends
from runtime.parameters.fused import in_module
from runtime.parameters.kept_buffers import kept_buffers
from runtime.parameters.shards import LocalParameter, Version, local_parameters, unused_parameters, whole_buffers
from runtime.servers.addresses import Addresses
from runtime.step.asynchronous import Asynchronous
from runtime.step.checking import LayoutCheck
from runtime.step.evaluation import Evaluation, ForwardPass
from runtime.step.finiteness import FiniteWatch, check_gradients, explain
from runtime.step.guard import LossGuard, Trouble
from runtime.step.inputs import Inputs
from runtime.step.pipeline import Pipeline, Values
from runtime.step.receiving import connect
from runtime.step.stage_links import build_chunks, everyone, share_parameters, whole_value
from runtime.tables.placed import PlacedTables
from runtime.update.optimizer import ShardedOptimizer
from runtime.waiting import phase


class RankStep:
    """What one rank computes in a step. Every method is collective.

    `batched` are the inputs whose leading dim is the samples; `pieces` is the number of parts into which the plan cuts
    them. `seed` is the seed of dropout. `check_layouts` applies to the next step only; `check_gradients` to every step.
    `observer` observes every operator. `outside` is the offload storage. `guard` decides what to do with steps whose
    loss or gradients are not finite, or whose loss spikes. `servers` are the addresses of the plan's parameter servers,
    if any. Without `lowered` the general executor runs every operator; with `compiled`, chains of elementwise operators
    are fused.
    """

    def __init__(
        self,
        module: nn.Module,
        bound: BoundPlan,
        place: RankMesh,
        settings: OptimizerSettings,
        batched: frozenset[str],
        seed: int = 0,
        check_layouts: bool = True,
        outside: Outside | None = None,
        guard: GuardSettings | None = None,
        servers: Addresses | None = None,
        lowered: bool = True,
        compiled: bool = False,
    ) -> None:
        self.bound = bound
        self.place = place
        self.seed = seed
        self.steps = 0  # optimizer steps that have been taken
        self._start = (0, 0)  # steps and samples at the start of this run
        self.check_layouts = check_layouts
        self.check_gradients = False
        self.observer: Observer | None = None
        self.guard = LossGuard(guard or GuardSettings(), place.device)
        self.trouble: Trouble | None = None  # why the last step was not made
        self.cuts = tuple(cut_stage(bound, stage) for stage in range(len(bound.plan.stages)))
        check_updates(bound, self.cuts)
        own = tuple(self.cuts[stage] for stage in bound.plan.stages_of(place.stage))
        outside = outside or Outside()
        self.weights = OffloadedWeights(place.device, outside)
        self.activations = (
            OffloadedActivations(device=place.device, outside=outside) if bound.offloaded_blocks else None
        )
        self.tables = PlacedTables(module, bound, place, settings, servers, imagined=outside.pretended)
        chains = Compiled(bound=bound) if compiled else None
        self.programs = Programs(bound=bound, place=place, compiled=chains) if lowered else None
        self.lanes = axis_lines(place, "gathers") if bound.plan.training.update.ahead else None
        self.alternation = Alternation(place.device)
        self.fp8 = fp8_scales_of_rank(bound, own, place)
        self.scales = self.fp8.delayed
        self.relay = self.new_relay()
        self.executors: tuple[Executor, ...] = tuple(
            build_executor(
                bound,
                place,
                cut,
                self.activations,
                self.tables,
                self.programs,
                self.weights,
                self.lanes,
                alternation=self.alternation,
                scales=self.fp8,
                relay=self.relay,
            )
            for cut in own
        )
        if self.relay is not None:
            self.relay.bundles = [executor.bundles for executor in self.executors]
        update = bound.plan.training.update
        self.pieces = sample_pieces((bound.inputs[name] for name in batched), bound.plan.mesh.sizes)
        # the gradient of a micro-batch's loss, which is the mean over its slices
        self.scale = update.seed(bound.plan.training.micro_batches, self.pieces) / bound.plan.slices
        held = frozenset[str]().union(*(cut.parameters for cut in own))
        held |= unused_parameters(bound) if place.stage == 0 else frozenset()
        self.parameters = local_parameters(module, bound, place, held, self.weights)
        self.buffers = whole_buffers(module, bound.graph, place.device, update.broadcast)
        self.slices = Slices(bound, place, own, self.buffers) if bound.plan.slices > 1 else None
        self.pipeline = self._pipeline()
        changed = self._changed()
        self.ends = tuple(end for end in step_ends(module) if changed.intersection(map(end.full, end.buffers)))
        self.kept_buffers = kept_buffers(module, bound, self.cuts, place.device)
        self.reads = frozenset(
            name
            for cut in own
            for at in cut.operators
            for name in bound.graph.operators[at].operands
            if name in bound.inputs
        )  # inputs that an operator of this rank reads
        share_parameters(self.parameters, bound, place, self.cuts)
        arriving = sum((arrivals(bound, cut) for cut in own), Counter[str]())
        self.optimizer = ShardedOptimizer(bound, self.parameters, settings, place, arriving, outside, self.weights)
        self.asynchronous = None if bound.plan.schedule_kind.flushes else Asynchronous(self)
        self._forward_passes: dict[tuple[str, ...], ForwardPass] = {}  # by their outputs

    def new_relay(self) -> Relay | None:
        """The relay that prefetches weights from one pass to the next, for executors that are built with it; None where
        the plan has no such prefetch."""
        if self.lanes is None or not relays(self.bound.plan):
            return None
        return Relay(
            weights=lambda: {name: parameter.piece for name, parameter in self.parameters.items()},
            place=self.place,
            lanes=self.lanes,
        )

    def _pipeline(self) -> Pipeline:
        bound, place = self.bound, self.place
        chunks = build_chunks(bound, place, self.cuts)
        connect(chunks, place.device)
        return Pipeline(
            chunks=chunks,
            order=orders_of(bound.plan)[place.stage],
            everyone=everyone(place),
            loss=whole_value(bound, bound.graph.loss),
            device=place.device,
            interleave=bound.plan.training.interleave,
            passed=self._passed,
            alternation=self.alternation,
            paired=pairs_of(bound.plan, place.stage),
            relay=self.relay,
            observer=lambda: self.observer,
        )

    def _passed(self) -> None:
        """A backward pass has ended."""
        if self.weights:
            self.weights.hold((), (), teller(self.observer))

    @property
    def samples(self) -> int:
        """Consumed samples, under any plans, including those of batches that made no step."""
        steps, samples = self._start
        return samples + (self.steps - steps) * self.bound.plan.training.global_batch

    def start_from(self, steps: int, samples: int) -> None:
        """Continue the count from these steps and samples."""
        self.steps = steps
        self._start = (steps, samples)

    def __call__(self, inputs: Inputs, learning_rate: float) -> float:
        """Train on one global batch; `inputs` gives the pieces of this rank. Returns the mean loss.

        Raises NonFiniteError on every rank, before the update, where the loss is not finite (or a gradient is not, if
        `check_gradients` is set), and StrategyError where a tensor differs from the plan's promise. If `guard` wants no
        update, `trouble` says why, and weights, states and buffers are unchanged.
        """
        if self.asynchronous is not None:
            return self.asynchronous.window([inputs], [learning_rate])[0]
        if not (self.check_layouts or self.check_gradients):  # both checks read accumulated gradients
            self.optimizer.reduction.begin()
        buffers = dict(self.buffers)
        loss = float(self.accumulate(inputs))
        try:
            made = self._updated(loss, inputs, learning_rate, buffers)
        except (NonFiniteError, LossSpikeError):  # all ranks raise it, and another batch may follow
            self._forget(buffers)
            raise
        if not made:
            self._forget(buffers)
            steps, samples = self._start  # the batch is consumed all the same
            self._start = (steps, samples + self.bound.plan.training.global_batch)
            return loss
        self.end_scales()
        self.tables.step(learning_rate)
        for end in self.ends:
            end.apply(self.buffers)
        self.steps += 1
        return loss

    def _updated(self, loss: float, inputs: Inputs, learning_rate: float, buffers: Mapping[str, torch.Tensor]) -> bool:
        """Check the loss, and the gradients on request, and update the weights. Returns whether `guard` accepts the
        step. `buffers` are those from before it."""
        if not math.isfinite(loss) and self.guard.settings.on_nonfinite == "stop":
            self._explain(loss, inputs, buffers)
        if self.check_gradients:
            check_gradients(self.parameters.values(), self.steps + 1, self.place.device)
        self.optimizer.set_learning_rate(learning_rate)
        self.trouble = None
        with phase("update"):
            return self.optimizer.step(lambda gradients: self._accepts(loss, gradients))

    def _forget(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Drop what a batch that makes no step has left: its gradients, and all changes to the `buffers`."""
        self.buffers.update(buffers)
        for parameter in self.parameters.values():
            parameter.gradient = None
        self.tables.forget()
        self.scales.forget()

    def end_scales(self) -> None:
        """Compute the delayed scales of the next step. Collective."""
        groups = [group for group in self.place.groups if group is not None] if self.scales else ()
        twins = ((name, self.parameters[name].twins) for name in sorted(self.scales.names))
        self.scales.end_step(groups, [(name, group) for name, group in twins if group is not None])

    def _accepts(self, loss: float, gradients: Iterable[torch.Tensor]) -> bool:
        self.trouble = self.guard.judge(self.steps + 1, loss, gradients)
        return self.trouble is None

    def window(self, batches: Sequence[Inputs], rates: Sequence[float]) -> list[float]:
        """Train on global batches without a flush between them, each with its learning rate; returns the mean loss of
        each."""
        assert self.asynchronous is not None, "else it is one step after the other"
        return self.asynchronous.window(batches, rates)

    def evaluate(self, inputs: Inputs, outputs: tuple[str, ...] = ()) -> Evaluation:
        """The mean loss of a global batch with the model in evaluation mode, forward only, and some values that it
        computes; changes nothing (see `runtime.step.evaluation`)."""
        return self.forward_pass(outputs)(inputs)

    def forward_pass(self, outputs: tuple[str, ...] = ()) -> ForwardPass:
        """The forward pass for evaluation, built at its first use."""
        if outputs not in self._forward_passes:
            self._forward_passes[outputs] = ForwardPass(self, outputs)
        return self._forward_passes[outputs]

    def begin_scales(self, *, trains: bool) -> None:
        """Compute the scales of weights that are gathered in 8 bits, before any gather. Collective."""
        if self.fp8.cast:
            with updating(self.observer):
                pieces = {name: self.parameters[name].piece for name in self.fp8.cast}
                self.fp8.begin_step(pieces, trains=trains)

    def accumulate(self, inputs: Inputs) -> torch.Tensor:
        """Forward and backward of all micro-batches: adds to the gradients, changes no weight. Returns the mean
        loss."""
        self.begin_scales(trains=True)
        if not self.check_layouts:
            return self.pipeline.run(
                lambda turn, received, deferred: self.compute(turn, received, inputs, deferred=deferred), self.scale
            )
        check = LayoutCheck(bound=self.bound, place=self.place)
        check.weights(self.parameters)
        total = self.pipeline.run(
            lambda turn, received, deferred: self.compute(turn, received, inputs, check.micro_batch, deferred=deferred),
            self.scale,
        )
        check.gradients(self.parameters)
        check.verify()
        self.check_layouts = False
        return total

    def compute(
        self,
        turn: Turn,
        received: Sequence[Values],
        inputs: Inputs,
        looking: Callable[[int], Observer] | None = None,
        held: Mapping[str, LocalParameter | Version] | None = None,
        ahead: int = 0,
        first: int | None = None,
        deferred: Sequence[DeferredGradients | None] = (),
        executors: Sequence[Executor] | None = None,
    ) -> list[dict[str, torch.Tensor]]:
        """Compute a stage of this rank for the micro-batches of a turn, from their inputs and received values.
        `looking` gives the observer of each; `held` are the weights, where they are not the newest; `ahead` is how many
        steps after this one the batch is for; `first` is the first micro-batch, if the turn does not say it;
        `executors` replace those for training."""
        first = turn.micro_batch * self.bound.plan.training.interleave if first is None else first
        slices = self.bound.plan.slices
        given, draws, observers = [], [], []
        for part, values in enumerate(received, first):
            number = part * slices + turn.slice
            constants = self.slices.constants(turn.slice) if self.slices is not None else {}
            given.append({**inputs(number), **constants, **values})
            draws.append(self._draw(part, turn, inputs, ahead))
            observers.append(self.observer if looking is None else looking(number))
        tables = self.slices.tables(turn.slice) if self.slices is not None else {}
        buffers = {**self.buffers, **tables} if tables else self.buffers
        executor = (executors or self.executors)[turn.chunk]
        return executor.together(held or self.parameters, buffers, given, draws, observers, deferred)

    def _draw(self, part: int, turn: Turn, inputs: Inputs, ahead: int = 0) -> Draw:
        draw = Draw(seed=self.seed, step=self.steps + ahead, micro_batch=part)
        if self.slices is None:
            return draw
        count = self.slices.count
        known = self.slices.part(part, turn.slice, lambda at: inputs(part * count + at), turn.chunk)
        return replace(draw, slice=known)

    def _explain(self, loss: float, inputs: Inputs, buffers: Mapping[str, torch.Tensor]) -> NoReturn:
        """Find out why the loss is not finite: run the forward pass again on the `buffers` from before the step.
        Collective."""
        self._forget(buffers)

        def again(part: int, watch: FiniteWatch) -> None:
            slices = self.bound.plan.slices
            with nullcontext() if self.slices is None else self.slices.keeping():
                for number in range(slices):
                    watch.given(self.parameters, self.buffers, inputs(part * slices + number), self.steps + 1)
                    self.pipeline.forward(
                        lambda turn, received, _: self.compute(turn, received, inputs, lambda _: watch, first=part),
                        part,
                        number,
                    )

        explain(loss, self.steps + 1, self.bound.graph, self.bound.plan.training.micro_batches, again)

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the gradients of the last step, before clipping; None where the plan clips nothing."""
        return self.optimizer.norm

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole weights of the module by name, gathered from all ranks; tied weights under their first name."""
        held = {name: parameter.whole(self.place) for name, parameter in self.parameters.items()}
        return in_module(self.everywhere({**held, **self.tables.whole()}), self.bound.graph.cuts)

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """The whole gradients of the module's trainable parameters accumulated since the last update, summed over all
        ranks."""
        trainable = {name: parameter for name, parameter in self.parameters.items() if parameter.trainable}
        found = {name: parameter.whole_gradient(self.place) for name, parameter in trainable.items()}
        return in_module(self.everywhere(found), self.bound.graph.cuts)

    def changed_buffers(self) -> dict[str, torch.Tensor]:
        """The current buffers, by name, that the forward passes change (running statistics), and those that change with
        them after a step."""
        changed = self._changed() | {end.full(name) for end in self.ends for name in end.buffers}
        return self.everywhere({buffer: self.buffers[buffer] for buffer in sorted(changed)})

    def _changed(self) -> set[str]:
        """Buffers that the forward passes of this rank change."""
        return {buffer for executor in self.executors for buffer, _ in executor.updates}

    def everywhere(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors that each pipeline rank holds, on every rank."""
        if self.pipeline.everyone is None:
            return held
        every = gather_tensors(held, self.pipeline.everyone)
        return {name: tensor for stage in every for name, tensor in stage.items()}
