"""The parameters and buffers of a model, as one rank keeps them.

A parameter is a leaf tensor: this rank's piece of the weight, in the plan's stored layout. Every use redistributes it
to the layout that the operator wants, and the gradient of that use back to the stored gradient layout. Autograd adds up
the uses, and `accumulate` adds up the micro-batches, in the plan's dtype (`Update.summed_in`). A gradient that is
partial on an axis is a sum over this rank's samples only, until it is reduced once per step.

Autograd requires a gradient of the shape of its leaf. Where the gradient is cut finer than the weight (ZeRO-2) the leaf
is a stub, which has the shape of the cut gradient and no memory, and the weight is a separate tensor:

    stub (a piece) ─┐                                      forward: uses the weight, not the stub
    weight (whole) ─┴─> transfer ─> operator               backward: the gradient, reduced and cut, goes to the stub

A weight that the plan offloads has device memory only while its block runs (`runtime.offload.weights`).
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from planner.errors import ModelError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.tracing.constants import held_tensor
from planner.plan.binding.bind import BoundPlan
from planner.sharding.layout import Layout, local_shape, replicated
from planner.sharding.stored import StoredParameter
from runtime.comm.collectives import all_reduce
from runtime.comm.device_mesh import RankMesh
from runtime.comm.redistribute import convert, whole_tensor
from runtime.offload.weights import OffloadedWeight, OffloadedWeights
from runtime.parameters.fused import in_graph
from runtime.parameters.initial_values import from_first
from runtime.parameters.padding import in_model, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A weight between two updates: this rank's piece, the leaf that gets autograd's gradient, and the function that
    accumulates gradients (`LocalParameter.collect`)."""

    piece: torch.Tensor
    leaf: torch.Tensor
    collect: Callable[[torch.Tensor], None]

    @property
    def stub(self) -> torch.Tensor | None:
        """The leaf, where it is not the piece."""
        return None if self.leaf is self.piece else self.leaf


@dataclass(kw_only=True)
class LocalParameter:
    """A parameter on one rank: its piece of the weight, and of this step's gradient so far.

    `leaf` is the tensor that gets autograd's gradient: the piece itself, or a stub where the gradient is cut finer.
    `shape` is that of the whole parameter, `own_shape` that in the model, if it is padded. `gradient` has the dtype
    `sums` and is None before the first; `arrival` is called after every micro-batch that was added. `local` parameters
    are each rank's own. `twins` are the processes of other pipeline stages that hold the same piece of a shared
    parameter. `offloaded` is the weight's offload storage, if the plan offloads it.
    """

    name: str
    shape: tuple[int, ...]
    own_shape: tuple[int, ...]
    stored: StoredParameter
    piece: torch.Tensor
    leaf: torch.Tensor
    sums: torch.dtype
    local: bool = False
    arrival: Callable[[str], None] | None = None
    gradient: torch.Tensor | None = None
    twins: dist.ProcessGroup | None = None
    offloaded: OffloadedWeight | None = None

    def _widens(self, gradient: torch.Tensor) -> bool:
        return torch.promote_types(gradient.dtype, self.sums) is self.sums

    @property
    def content(self) -> torch.Tensor:
        """The piece for the host to read and write; for an offloaded weight, its offload storage."""
        return self.piece.detach() if self.offloaded is None else self.offloaded.content

    @property
    def present(self) -> torch.Tensor:
        """The piece on the device, for reading; a copy for an offloaded weight."""
        return (
            self.piece.detach() if self.offloaded is None else self.offloaded.content.to(self.piece.device, copy=True)
        )

    def in_model(self, piece: torch.Tensor, layout: Layout, place: RankMesh) -> torch.Tensor:
        """The part of a piece in some layout that is in the model, a view."""
        return in_model(piece, self.shape, self.own_shape, layout, place)

    @property
    def padded(self) -> bool:
        """Whether the whole parameter is padded."""
        return tuple(self.shape) != self.own_shape

    @property
    def trainable(self) -> bool:
        return self.leaf.requires_grad

    @property
    def stub(self) -> torch.Tensor | None:
        """The leaf, where it is not the piece."""
        return None if self.leaf is self.piece else self.leaf

    @property
    def version(self) -> Version:
        """The current weight; another object after `renew`."""
        return Version(piece=self.piece, leaf=self.leaf, collect=self.collect)

    def renew(self) -> None:
        """Allocate new memory for the next weight, which is written next. Earlier computations keep the old memory:
        autograd, and blocks that will be recomputed."""
        before = self.leaf
        alone = self.stub is None
        self.piece = torch.empty_like(self.piece, requires_grad=False)
        self.leaf = self.piece if alone else before.detach().clone().expand(before.shape)
        self.leaf.requires_grad_(True)
        self.leaf.grad_dtype = before.grad_dtype
        self.listen()

    def listen(self) -> None:
        """Make autograd call `accumulate`. Python's garbage collector does not see autograd's hooks: one that referred
        to this parameter would keep it, and its leaf, alive forever."""
        known = weakref.ref(self)

        def arrived(leaf: torch.Tensor) -> None:
            if (kept := known()) is not None:
                kept.accumulate(leaf)

        self.leaf.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]

    def accumulate(self, leaf: torch.Tensor) -> None:
        """Move the gradient from `leaf.grad` into `gradient`. Autograd calls it."""
        if leaf.grad is not None:  # else it arrives later (`runtime.executor.prefetch`)
            self.collect(_taken(leaf))

    def collect(self, gradient: torch.Tensor) -> None:
        """Add the gradient of a use of the weight, in the stored layout, to `gradient`."""
        if gradient.dtype is not self.sums and (self.gradient is None or not self._widens(gradient)):
            gradient = gradient.to(self.sums)
        if self.gradient is None:
            self.gradient = (
                gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()
            )  # own memory: later gradients are added to it
        else:
            self.gradient += gradient  # a narrow gradient is widened in the sum
        del gradient  # a bucket that starts now frees its members
        if self.arrival is not None:
            self.arrival(self.name)

    def whole(self, place: RankMesh) -> torch.Tensor:
        """The full weight, as in the model. Collective."""
        found = whole_tensor(self.present, self.shape, self.stored.weight, place)
        return found[tuple(map(slice, self.own_shape))] if self.padded else found

    def whole_gradient(self, place: RankMesh) -> torch.Tensor:
        """The full gradient, summed; zeros where nothing has been accumulated. Collective; for a local parameter, this
        rank's own."""
        if self.local:
            return self.local_gradient()
        whole = whole_tensor(self.local_gradient(), self.shape, self.stored.gradient, place)
        whole = whole[tuple(map(slice, self.own_shape))].contiguous() if self.padded else whole
        return whole if self.twins is None else all_reduce(whole, self.twins)

    def local_gradient(self) -> torch.Tensor:
        """The gradient in its stored layout, which has the shape of the leaf."""
        if self.gradient is not None:
            return self.gradient
        return torch.zeros(self.leaf.shape, dtype=self.sums, device=self.leaf.device)


def local_parameters(
    module: nn.Module,
    bound: BoundPlan,
    place: RankMesh,
    held: frozenset[str],
    weight_offload: OffloadedWeights | None = None,
) -> dict[str, LocalParameter]:
    """This rank's pieces of the real weights of `module` in its stage, copied to its device or to their offload
    storage; the weights of rank 0 where the plan broadcasts them. Raises ModelError for weights on the meta device."""
    weights, update = dict(module.named_parameters(remove_duplicate=False)), bound.plan.training.update
    found = {}
    for parameter in bound.graph.parameters:
        weight = in_graph(weights, parameter)
        local = update.is_local(parameter.name)
        if update.broadcast and not local:
            weight = from_first(weight, place.device)
        if parameter.name not in held:
            continue
        if weight.is_meta:
            raise ModelError(
                f"parameter '{parameter.name}' is on the meta device and has no values;"
                " build the module on a real device to run it"
            )
        stored, shape = bound.parameters[parameter.name], bound.whole.types[parameter.name].shape
        whole = padded(weight.detach(), shape)
        piece = convert(whole, shape, replicated(len(stored.weight)), stored.weight, place)
        piece = piece.to(place.device, copy=True).contiguous()
        leaf = _leaf(piece, shape, stored, place) if parameter.trainable else piece  # else no gradient to cut
        leaf.requires_grad_(parameter.trainable)
        dtype = str(weight.dtype).removeprefix("torch.")
        kept = LocalParameter(
            name=parameter.name,
            shape=shape,
            own_shape=bound.whole.own_shape(parameter.name),
            stored=stored,
            piece=piece,
            leaf=leaf,
            sums=getattr(torch, update.summed_in(dtype)),
            local=local,
        )
        if leaf.requires_grad:
            leaf.grad_dtype = getattr(torch, update.reduced_in(dtype))
            kept.listen()
        if stored.weight_offloaded:
            assert weight_offload is not None, parameter.name
            kept.offloaded = weight_offload.offload(parameter.name, piece, stored.weight_home)
        found[parameter.name] = kept
    return found


def _taken(leaf: torch.Tensor) -> torch.Tensor:
    """Take the gradient out of `leaf.grad`, so that no other reference to it is left."""
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None, "autograd has just left it"
    return gradient


def _leaf(piece: torch.Tensor, shape: tuple[int, ...], stored: StoredParameter, place: RankMesh) -> torch.Tensor:
    """The piece, or a stub: one element expanded to the shape of a gradient that is cut finer."""
    wanted = local_shape(shape, stored.gradient, place.mesh.sizes)
    return piece if wanted == tuple(piece.shape) else piece.new_zeros(()).expand(wanted)


def unused_parameters(bound: BoundPlan) -> frozenset[str]:
    """Parameters that no operator reads; they belong to the first stage."""
    return frozenset(name for name in bound.graph.parameter_names if name not in bound.graph.consumers)


def whole_buffers(
    module: nn.Module, graph: OperatorGraph, device: torch.device, broadcast: bool = False
) -> dict[str, torch.Tensor]:
    """Buffers and constant tensors that the graph reads, whole on every rank, copied to its device; rank 0's where they
    are broadcast."""
    if broadcast:
        return {name: from_first(held_tensor(module, name, graph.constants), device) for name in graph.buffers}
    found = {}
    for name in graph.buffers:
        value = held_tensor(module, name, graph.constants)
        if value.is_meta:
            raise ModelError(
                f"buffer '{name}' is on the meta device and has no values; build the module on a real device to run it"
            )
        found[name] = value.to(device, copy=True)
    return found
