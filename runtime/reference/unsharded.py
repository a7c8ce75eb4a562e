"""The unsharded model on one device, trained as the plan trains: the reference for a distributed run.

It has the same micro-batches, optimizer, masters, dropout, gradient dtype, sums or averages, and clipping, but no
graph, no layouts and no communication: the module itself is called. Where the plan pads the batch, the last micro-batch
has fewer samples and a smaller weight. It needs the memory of the whole model.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from planner.graph.operator_graph import Cut, Operator
from planner.graph.placed import place_of
from planner.graph.tracing.autocast import without_autocast
from planner.graph.tracing.returned import loss_in
from planner.plan.plan import Training
from planner.sharding.matrices import ADAMW, MUON
from runtime.checkpoint.state_names import MASTER, kept_name, saved_name, scales_name
from runtime.ops.randomness import FIRST, Draw
from runtime.optimizers.muon import whole
from runtime.optimizers.narrow import wide_dtype
from runtime.optimizers.optimizers import (
    OptimizerSettings,
    kept_of,
    make_optimizer,
    moments_of,
    start_moments,
)
from runtime.parameters.after_step import step_ends
from runtime.parameters.fused import all_in_graph, in_module, part_of
from runtime.reference.per_replica import Forward
from runtime.reference.plain_tables import sparse_tables, start_sparse
from runtime.reference.same_choices import SameChoices
from runtime.step.narrow_products import narrow_products
from runtime.step.same_dropout import SameDropout
from runtime.step.same_fp8 import Recipes, SameFp8, scales_of_module

_OF_MATRICES = frozenset({"lamb", MUON})
"""Optimizers whose update of an element depends on other elements of its matrix."""


class UnshardedStep:
    """Each call is one training step of the unsharded module. `batched` has the positions of the inputs with a sample
    dim; `pieces` is the number of parts into which the plan cuts them (see `planner.sharding.update`); `dropping` are
    the operators of its graph that drop elements, as decided by `seed`; `recipes` those of fp8 layers and experts, by
    their weights. `forward` computes micro-batches in the place of the module, for plans with per-replica operators.
    `matrices` are the parameters that Muon updates; `cuts` are those that are parts of weights of the module, which
    optimizers that look at whole matrices update one by one."""

    def __init__(
        self,
        module: nn.Module,
        training: Training,
        settings: OptimizerSettings,
        batched: frozenset[int],
        pieces: int = 1,
        *,
        dropping: Sequence[Operator] = (),
        recipes: Recipes | None = None,
        seed: int = 0,
        forward: Forward | None = None,
        matrices: Collection[str] = (),
        cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        self._forward = forward
        self._module, self._update = module, training.update
        self._precision = training.precision
        self._dropping = dropping
        self._recipes = recipes or {}
        self._cuts = cuts or {}
        self._scales = scales_of_module(module, self._recipes, training.fp8, self._cuts)
        self._seed = seed
        self._steps = 0
        self._parts = training.parts
        self._samples = training.global_batch
        mean = training.update.gradients == "mean"
        self._seeds = [part / self._samples if mean else float(pieces) for part in self._parts]
        self._batched = batched
        trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        self._names, self._weights = list(trained), list(trained.values())
        self._gradients: list[torch.Tensor | None] = [None] * len(self._weights)
        self._masters = [self._master(weight) for weight in self._weights]
        masters = dict(zip(self._names, self._masters, strict=True))
        tables = [name for name in self._names if place_of(name, training.update.placed) is not None]
        self._sparse = sparse_tables(module, {name: masters.pop(name) for name in tables}, training.optimizer, settings)
        apart = self._cuts.items() if training.optimizer in _OF_MATRICES else ()
        self._of_matrices = {name: cut for name, cut in apart if cut.of in masters}  # without those that are frozen
        self._dense = all_in_graph(masters, self._of_matrices)  # the masters that the optimizer updates
        for name, cut in self._of_matrices.items():
            self._dense[name].grad_dtype = masters[cut.of].grad_dtype
        held = list(module.named_parameters(remove_duplicate=False))
        names = {
            name: [name, *(other for other, one in held if one is trained[self._of(name)])] for name in self._dense
        }
        by = {n: ADAMW if training.optimizer == MUON and n not in matrices else training.optimizer for n in self._dense}
        self._moments = {name: moments_of(one, settings) for name, one in by.items()}
        self._optimizer = make_optimizer(
            training.optimizer,
            list(self._dense.values()),
            settings.of_parameters(names.values()),
            names=list(self._dense),
            together=[whole(place, self._dense[name]) for place, (name, one) in enumerate(by.items()) if one == MUON],
            moment_dtype=training.update.moment_dtype,
        )

    @torch.no_grad()
    def restore(self, read: Callable[[str], torch.Tensor | None], steps: int, updates: int) -> None:
        """Load a state after these steps and updates: `read` gives a whole tensor by its name in a checkpoint, None
        where it is not there."""
        self._steps = steps
        held = (*self._module.named_parameters(), *self._module.named_buffers())
        for name, tensor in held:
            found = read(saved_name(name))
            if found is not None:
                tensor.copy_(found)
        for name in self._scales.names:
            found = read(scales_name(saved_name(name)))
            if found is not None:
                self._scales.history_of(name).copy_(found)
        self._scales.settle()
        masters = dict(zip(self._names, self._masters, strict=True))
        for name, weight, master in zip(self._names, self._weights, self._masters, strict=True):
            found = read(kept_name(MASTER, saved_name(name)))
            master.copy_(weight if found is None else found)
        dense, moments = list(self._dense.values()), list(self._moments.values())
        start_moments(self._optimizer, dense, moments, updates, self._update.moment_dtype)
        for name, kept in zip(self._dense, kept_of(self._optimizer), strict=True):
            for kind in self._moments[name] if updates else ():
                found = read(kept_name(kind, saved_name(self._of(name))))
                if found is not None and name in self._of_matrices:
                    found = part_of(found, self._of_matrices[name])
                if found is None:  # of a table that was off the devices
                    kept[kind].zero_()
                else:
                    kept[kind].copy_(found)
        if self._sparse is not None:
            tables = {name: master for name, master in masters.items() if name not in self._dense}
            start_sparse(self._sparse, tables, read, updates)

    def kept(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors that `restore` reads, by their names in a checkpoint."""
        held = (*self._module.named_parameters(), *self._module.named_buffers())
        found = {saved_name(name): tensor for name, tensor in held}
        for name, master in zip(self._names, self._masters, strict=True):
            found[kept_name(MASTER, saved_name(name))] = master
        moments: dict[str, dict[str, torch.Tensor]] = {}
        for name, kept in zip(self._dense, kept_of(self._optimizer), strict=True):
            for kind in self._moments[name]:
                if kind in kept:
                    moments.setdefault(kind, {})[name] = kept[kind]
        for kind, each in moments.items():
            whole = in_module(each, self._of_matrices)
            found.update((kept_name(kind, saved_name(name)), tensor) for name, tensor in whole.items())
        found.update((scales_name(saved_name(name)), self._scales.history_of(name)) for name in self._scales.names)
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def _same_fp8(self) -> SameFp8:
        return SameFp8(self._module, self._recipes, self._scales, self._cuts)

    def _of(self, name: str) -> str:
        """The weight of the module that a master is, or is a part of."""
        return self._of_matrices[name].of if name in self._of_matrices else name

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], update: bool = True) -> float:
        """The mean loss of the samples, before the update; without `update` nothing changes."""
        buffers = {} if update else {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        total = self._pass(args, kwargs)
        if update:
            self._step()
            self._steps += 1
        else:
            self._forget(buffers)
        return total

    def gradients(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], choices: Sequence[torch.Tensor | None] = ()
    ) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The mean loss of a global batch, the gradients of all trained parameters, and the buffers afterwards; nothing
        changes. `choices` are the module's choices for the whole batch (`runtime.reference.same_choices`)."""
        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        total = self._pass(args, kwargs, choices)
        found = {
            name: torch.zeros_like(weight) if gradient is None else gradient.clone()
            for name, weight, gradient in zip(self._names, self._weights, self._gradients, strict=True)
        }
        after = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        self._forget(buffers)
        return total, found, after

    @torch.no_grad()
    def _forget(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Drop the gradients, and restore the buffers."""
        self._gradients = [None] * len(self._weights)
        self._scales.forget()
        for name, buffer in self._module.named_buffers():
            buffer.copy_(buffers[name])

    def _pass(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], choices: Sequence[torch.Tensor | None] = ()
    ) -> float:
        """Forward and backward of all micro-batches; returns their mean loss."""
        with narrow_products(self._precision), without_autocast():
            return self._all_parts(args, kwargs, choices)

    def _all_parts(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], choices: Sequence[torch.Tensor | None]
    ) -> float:
        total = 0.0
        for part, samples in enumerate(self._parts):
            part_args, part_kwargs = self._part((args, dict(kwargs)), part)
            draw = Draw(seed=self._seed, step=self._steps, micro_batch=part)
            chosen = SameChoices([None if one is None else self._rows(one, part) for one in choices])
            if self._forward is not None:
                loss = self._forward(part_args, part_kwargs, draw)
            else:
                with (
                    SameDropout(self._dropping, draw),
                    SameFp8(self._module, self._recipes, self._scales, self._cuts),
                    chosen,
                ):
                    loss = loss_in(self._module(*part_args, **part_kwargs))
            torch.autograd.backward(loss, torch.full_like(loss, self._seeds[part]))
            self._accumulate()
            total += float(loss.detach()) * samples / self._samples
        return total

    @torch.no_grad()
    def evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
        """The mean loss of the micro-batches, with the model in evaluation mode; nothing changes."""
        trained = [module for module in self._module.modules() if module.training]
        self._module.eval()
        total = 0.0
        for part, samples in enumerate(self._parts):
            part_args, part_kwargs = self._part((args, dict(kwargs)), part)
            with narrow_products(self._precision), without_autocast():
                if self._forward is not None:
                    loss = self._forward(part_args, part_kwargs, FIRST)
                else:
                    with self._same_fp8():
                        loss = loss_in(self._module(*part_args, **part_kwargs))
            total += float(loss) * samples / self._samples
        for module in trained:
            module.training = True
        return total

    def _master(self, weight: torch.Tensor) -> torch.Tensor:
        dtype = wide_dtype(weight.dtype) if self._update.master_weights else weight.dtype
        master = weight.detach().to(dtype, copy=True)
        master.grad_dtype = wide_dtype(dtype)
        return master

    def _part(self, arguments: Any, part: int) -> Any:
        leaves, spec = pytree.tree_flatten(arguments)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for number, place in enumerate(places):
            if number in self._batched:
                leaves[place] = self._rows(leaves[place], part)
        return pytree.tree_unflatten(leaves, spec)

    def _rows(self, whole: torch.Tensor, part: int) -> torch.Tensor:
        """The rows of a micro-batch, from a tensor with several rows per sample in its leading dim."""
        each = whole.shape[0] // self._samples
        return whole.narrow(0, each * sum(self._parts[:part]), each * self._parts[part])

    def _accumulate(self) -> None:
        for index, weight in enumerate(self._weights):
            if weight.grad is not None:
                name = str(weight.dtype).removeprefix("torch.")
                new = weight.grad.to(getattr(torch, self._update.summed_in(name)))
                known = self._gradients[index]
                self._gradients[index] = new if known is None else known + new
                weight.grad = None

    @torch.no_grad()
    def _step(self) -> None:
        for master, total in zip(self._masters, self._gradients, strict=True):
            master.grad = None if total is None else total.to(wide_dtype(master.dtype))
        if self._update.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._masters, self._update.clip_norm)
        whole = dict(zip(self._names, self._masters, strict=True))
        for name, cut in self._of_matrices.items():
            gradient = whole[cut.of].grad
            self._dense[name].grad = None if gradient is None else part_of(gradient, cut)
        self._optimizer.step()
        if self._sparse is not None:
            self._sparse.step()
        self._scales.end_step()
        held = dict(self._module.named_buffers())
        for end in step_ends(self._module):
            after = dict(held)
            end.apply(after)
            for name in map(end.full, end.buffers):
                held[name].copy_(after[name])
        self._gradients = [None] * len(self._weights)
        for weight, updated in zip(self._weights, self._masters, strict=True):
            weight.copy_(updated)
