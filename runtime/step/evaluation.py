"""The forward pass of one rank alone: for validation between training steps, and for forward-only plans.

    trained     forward ─ backward ─ reduce ─ update            dropout, statistics of the batch, gradients, states
    evaluated   forward ────────────────────> loss, outputs     what `model.eval()` computes under `torch.no_grad()`

The operators run in the layouts of the plan, on the current weights: gathers, rings, all-to-alls, slices, stages and
offloaded weights are those of training, and so are the micro-batches and the mean of their losses. Autograd records
nothing, so a value is freed after its last use, and nothing is recomputed, or offloaded for a backward pass. Weights,
gradients, optimizer states, buffers, and past and future random numbers stay unchanged.

The evaluated model may differ from the trained one (`planner.graph.forward_only`): then the rank has separate programs
for it, which are written at the first evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist

from costmodels import Turn
from planner.plan.binding.bind import BoundPlan
from planner.plan.binding.evaluated import evaluated, idle_updates, output_name
from planner.plan.layout.stage_cut import StageCut
from runtime.comm.device_mesh import RankMesh
from runtime.executor.deferred_weight_gradients import DeferredGradients
from runtime.executor.executor import Executor, build_executor
from runtime.executor.lowering.compiled import Compiled
from runtime.executor.lowering.programs import Programs
from runtime.executor.relay import Relay
from runtime.executor.slices import Slices
from runtime.observer import Observer, teller
from runtime.offload.weights import OffloadedWeights
from runtime.ops.fp8.fp8_scales import Fp8Scales
from runtime.step.inputs import Inputs
from runtime.step.pipeline import Pipeline, Values
from runtime.tables.placed import PlacedTables


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The mean loss of a global batch, and the requested values that the model computes, by their requested names:
    whole, in host memory, the same on every rank."""

    loss: float
    outputs: Mapping[str, torch.Tensor]


class _Rank(Protocol):
    """The part of a rank's step that is used here."""

    bound: BoundPlan
    place: RankMesh
    cuts: tuple[StageCut, ...]
    executors: tuple[Executor, ...]
    programs: Programs | None
    pipeline: Pipeline
    slices: Slices | None
    tables: PlacedTables
    weights: OffloadedWeights
    fp8: Fp8Scales
    lanes: tuple[dist.ProcessGroup | None, ...] | None
    observer: Observer | None
    relay: Relay | None

    def new_relay(self) -> Relay | None: ...

    def begin_scales(self, *, trains: bool) -> None: ...

    def compute(
        self,
        turn: Turn,
        received: Sequence[Values],
        inputs: Inputs,
        *,
        executors: Sequence[Executor] | None = None,
    ) -> list[dict[str, torch.Tensor]]: ...

    def everywhere(self, held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]: ...


Parts = dict[str, dict[tuple[int, int], torch.Tensor]]
"""Values by name, and by micro-batch and slice."""


class ForwardPass:
    """The forward pass of a rank, with requested outputs. Building and calling it is collective.

    Raises RequestError for an output that the model does not compute.
    """

    def __init__(self, rank: _Rank, outputs: tuple[str, ...] = ()) -> None:
        self._rank, self.bound = rank, evaluated(rank.bound)
        self._names = {asked: output_name(self.bound, asked) for asked in outputs}
        self._executors, self._relay = rank.executors, rank.relay
        if self.bound is not rank.bound or outputs:
            self._executors = self._built()

    def _built(self) -> tuple[Executor, ...]:
        rank, bound, idle = self._rank, self.bound, idle_updates(self.bound)
        programs = None
        if rank.programs is not None:
            chains = None if rank.programs.compiled is None else Compiled(bound=bound)
            programs = Programs(bound=bound, place=rank.place, compiled=chains)
        names = tuple(dict.fromkeys(self._names.values()))
        cuts = (
            replace(cut, operators=tuple(at for at in cut.operators if at not in idle))
            for cut in (rank.cuts[stage] for stage in bound.plan.stages_of(rank.place.stage))
        )
        self._relay = rank.new_relay()
        executors = tuple(
            build_executor(
                bound,
                rank.place,
                cut,
                None,
                rank.tables,
                programs,
                rank.weights,
                rank.lanes,
                names,
                scales=rank.fp8,
                relay=self._relay,
            )
            for cut in cuts
        )
        if self._relay is not None:
            self._relay.bundles = [executor.bundles for executor in executors]
        return executors

    def __call__(self, inputs: Inputs) -> Evaluation:
        """Evaluate a global batch; `inputs` gives the pieces of this rank."""
        rank, parts = self._rank, Parts()
        loss = self.mean_loss(inputs, parts)
        held = {name: self._joined(name, found) for name, found in parts.items()}
        whole = rank.everywhere(held) if self._names else {}
        own = {asked: self._in_model(name, whole[name]) for asked, name in self._names.items()}
        return Evaluation(loss=float(loss), outputs=own)

    def _in_model(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A value without padding."""
        for padded, dim, extent in self.bound.whole.unpadded:
            value = value.narrow(dim, 0, extent) if padded == name else value
        return value

    def mean_loss(self, inputs: Inputs, parts: Parts) -> torch.Tensor:
        """The mean loss; this rank's outputs are collected in `parts`."""
        rank = self._rank
        rank.begin_scales(trains=False)
        slices = nullcontext() if rank.slices is None else rank.slices.keeping()
        with slices, rank.tables.aside():
            loss = rank.pipeline.evaluate(self._forward(inputs, parts), self._relay)
        if rank.weights:
            rank.weights.hold((), (), teller(rank.observer))
        return loss

    def _forward(
        self, inputs: Inputs, parts: Parts
    ) -> Callable[[Turn, Sequence[Values], Sequence[DeferredGradients | None]], Sequence[Values]]:
        names = frozenset(self._names.values())

        def forward(
            turn: Turn, received: Sequence[Values], _: Sequence[DeferredGradients | None]
        ) -> Sequence[dict[str, torch.Tensor]]:
            made = self._rank.compute(turn, received, inputs, executors=self._executors)
            first = turn.micro_batch * len(received)
            producer, own = self.bound.graph.producer, self._rank.cuts
            here = own[self.bound.plan.stages_of(self._rank.place.stage)[turn.chunk]].operators
            for number, values in enumerate(made, first):
                for name in names & values.keys():
                    if producer[name] in here:
                        parts.setdefault(name, {})[number, turn.slice] = values[name].detach().cpu()
            return made

        return forward

    def _joined(self, name: str, found: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
        """A value of all micro-batches, concatenated along its leading dim, and of all slices along the sequence; for a
        scalar, one number per micro-batch."""
        bound = self.bound
        whole, part = bound.whole.types[name].shape, bound.graph.types[name].shape
        cut = next((dim for dim, (one, other) in enumerate(zip(whole, part, strict=True)) if one != other), None)
        joined = []
        for micro_batch in sorted({micro_batch for micro_batch, _ in found}):
            pieces = [found[key] for key in sorted(key for key in found if key[0] == micro_batch)]
            if len(pieces) == 1:
                joined.append(pieces[-1])
            elif cut is None:  # the loss: every slice has the same weight in the mean
                joined.append(torch.stack(pieces).mean(dim=0) if name == bound.graph.loss else pieces[-1])
            elif cut == 0:  # samples and positions in one dim
                samples = bound.plan.training.part
                rows = [piece.reshape(samples, -1, *piece.shape[1:]) for piece in pieces]
                joined.append(torch.cat(rows, dim=1).flatten(0, 1))
            else:
                joined.append(torch.cat(pieces, dim=cut))
        return torch.stack(joined) if not part else self._of_batch(torch.cat(joined))

    def _of_batch(self, value: torch.Tensor) -> torch.Tensor:
        """A value of all micro-batches, without the samples with which a plan pads the batch."""
        training = self.bound.plan.training
        return value[: value.shape[0] // training.padded_batch * training.global_batch]
