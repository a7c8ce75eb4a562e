"""The pieces of the inputs of one rank, from whole batches or from its own samples alone.

    global batch    m0: s0 s1 s2 s3 | m1: s4 s5 s6 s7          two micro-batches of four samples
    this rank       m0:       s2 s3 | m1:       s6 s7          its inputs are cut in two along the samples

A rank whose pipeline stage reads no input has no samples. A padded batch is filled up with copies of its last sample,
and the weights of all samples are one more input (`planner.sharding.padded_batch`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from planner.errors import RequestError
from planner.plan.binding.bind import BoundPlan
from planner.sharding.layout import REPLICATE, Layout, replicated
from planner.sharding.padded_batch import SAMPLE_WEIGHTS, sample_weights
from planner.sharding.redistribute import Step, redistribution
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import apply_steps, local_piece

Inputs = Callable[[int], dict[str, torch.Tensor]]
"""The pieces of a micro-batch, by its number, on the device of the rank. Where the plan cuts the sequence into q
slices, the pieces of a slice: number m q + s for slice s of micro-batch m."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """One rank's part of a global batch: its pieces of every micro-batch, or slice of one, by name, not yet on its
    device."""

    parts: tuple[Mapping[str, torch.Tensor], ...]


@dataclass(frozen=True, kw_only=True)
class InputPieces:
    """How a plan cuts the inputs for one rank. `batched` are the inputs whose leading dim is the samples; `reads` are
    those that an operator of its stage reads."""

    bound: BoundPlan
    place: RankMesh
    batched: frozenset[str]
    reads: frozenset[str]

    def of_whole(self, given: Mapping[str, torch.Tensor]) -> Inputs:
        """The pieces of a whole global batch. Raises RequestError for tensors of other shapes or dtypes."""
        for name, tensor in given.items():
            self._check(name, tensor)
        given, samples = self._padded(given), self.bound.plan.training.part

        def inputs(unit: int) -> dict[str, torch.Tensor]:
            part, number = divmod(unit, self.bound.plan.slices)
            found = {}
            with torch.no_grad():
                for name, steps in self._steps.items():
                    tensor = given[name].detach()
                    whole = tensor.narrow(0, part * samples, samples) if name in self._batched else tensor
                    piece = apply_steps(self._slice(name, whole, number), steps, self.place)
                    found[name] = piece.to(self.place.device)
            return found

        return inputs

    def of_local(self, batch: LocalBatch) -> Inputs:
        """The pieces of a batch that was read for this rank alone."""
        device = self.place.device
        return lambda part: {name: tensor.to(device, non_blocking=True) for name, tensor in batch.parts[part].items()}

    @cached_property
    def _batched(self) -> frozenset[str]:
        """The batched inputs, including the sample weights, which no model is given."""
        return self.batched | ({SAMPLE_WEIGHTS} & set(self.bound.graph.inputs))

    @cached_property
    def _weights(self) -> torch.Tensor:
        """The sample weights of a padded batch."""
        training = self.bound.plan.training
        weights = sample_weights(training.global_batch, training.update.padding_samples)
        return torch.tensor(weights, dtype=getattr(torch, self.bound.graph.types[SAMPLE_WEIGHTS].dtype))

    def _padded(self, given: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """A whole batch with its padding samples, and the weights of all samples."""
        padding = self.bound.plan.training.update.padding_samples
        if not padding:
            return given
        found = {name: tensor.detach() for name, tensor in given.items()}
        for name in self.batched & found.keys():
            last = found[name][-1:]
            found[name] = torch.cat([found[name], last.expand(padding, *last.shape[1:])])
        return {**found, SAMPLE_WEIGHTS: self._weights}

    @cached_property
    def _steps(self) -> Mapping[str, Sequence[Step]]:
        """The cuts of every input that is read, applied to a micro-batch or to a slice of one."""
        mesh, types, layouts = self.place.mesh, self.bound.graph.types, self.bound.inputs
        everywhere = replicated(len(mesh.axes))
        return {
            name: redistribution(types[name].shape, mesh, everywhere, layouts[name], self._sequences(name))
            for name in self.reads
        }

    @cached_property
    def own(self) -> tuple[int, ...]:
        """The numbers of the samples of a micro-batch that this rank reads, in ascending order."""
        return tuple(sorted({sample for name in self.reads & self._batched for sample in self._samples(name)}))

    def of_samples(self, given: Mapping[str, torch.Tensor], part: int) -> list[dict[str, torch.Tensor]]:
        """The pieces of the slices of micro-batch `part`, from tensors that have only its samples `own`. Raises
        RequestError for tensors of other shapes or dtypes."""
        if SAMPLE_WEIGHTS in self.reads:
            first = part * self.bound.plan.training.part
            given = {**given, SAMPLE_WEIGHTS: self._weights[[first + sample for sample in self.own]]}
        return [self._of_slice(given, number) for number in range(self.bound.plan.slices)]

    def _of_slice(self, given: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
        found = {}
        for name in self.reads:
            tensor, layout = given[name], self.bound.inputs[name]
            if name in self._batched:
                self._check_own(name, tensor)
                held = [self.own.index(sample) for sample in self._samples(name)]
                tensor = tensor if len(held) == len(self.own) else tensor[held]
                layout = _without_samples(layout)
            own = self._slice(name, tensor, number)
            found[name] = local_piece(own, layout, self.place, self._sequences(name)).contiguous()
        return found

    def _sequences(self, name: str) -> frozenset[int]:
        return self.bound.sequences.get(name, frozenset())

    def _slice(self, name: str, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """The positions of a sequence slice; the whole input where it has no sequence dim."""
        whole, part = self.bound.whole.types[name].shape, self.bound.graph.types[name].shape
        for dim, (extent, length) in enumerate(zip(whole, part, strict=True)):
            if extent != length:
                tensor = tensor.narrow(dim, number * length, length)
        return tensor

    def _samples(self, name: str) -> list[int]:
        """The samples of a micro-batch in this rank's piece of an input."""
        layout = tuple(
            placement if placement.is_shard and placement.dim == 0 else REPLICATE
            for placement in self.bound.inputs[name]
        )
        numbers: list[int] = local_piece(torch.arange(self.bound.plan.training.part), layout, self.place).tolist()
        return numbers

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        self._check_dtype(name, tensor)
        training, shape = self.bound.plan.training, self.bound.whole.types[name].shape
        wanted = (training.global_batch, *shape[1:]) if name in self.batched else shape
        if tuple(tensor.shape) != wanted:
            raise RequestError(
                f"input '{name}' has shape {tuple(tensor.shape)}; the plan takes {wanted}: a global batch of"
                f" {training.global_batch} in {training.micro_batches} micro-batches of {training.part}"
            )

    def _check_dtype(self, name: str, tensor: torch.Tensor) -> None:
        wanted = self.bound.graph.types[name].dtype
        if str(tensor.dtype) != f"torch.{wanted}":
            raise RequestError(
                f"input '{name}' is {str(tensor.dtype).removeprefix('torch.')}, the plan takes {wanted}; convert it"
            )

    def _check_own(self, name: str, tensor: torch.Tensor) -> None:
        self._check_dtype(name, tensor)
        wanted = (len(self.own), *self.bound.whole.types[name].shape[1:])
        if tuple(tensor.shape) != wanted:
            raise RequestError(
                f"input '{name}' has shape {tuple(tensor.shape)}; this rank reads {len(self.own)} samples of each"
                f" micro-batch and takes {wanted}"
            )


def _without_samples(layout: Layout) -> Layout:
    return tuple(REPLICATE if placement.is_shard and placement.dim == 0 else placement for placement in layout)
