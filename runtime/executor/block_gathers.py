"""Weights of a block that one all-gather brings before the block runs, and whose gradients are reduced together.

    "block"    forward    [gather 0] block 0 | [gather 1] block 1 | ...    one collective for all weights of a block;
                                                                           their memory is freed after the block
               backward   [gather 1] block 1 [reduce 1] | [gather 0] ...   one more into the same tensors, and one for
                                                                           all gradients
    "ahead"    forward    [gather 0] block 0 | block 1 | block 2           prefetch: the next block's weights come
                             [gather 1] [gather 2] [gather 2 again]        under a block, and its gradients are reduced
               backward   block 2 | block 1 | block 0                      under the next block; also from pass to pass
                             [gather 1] [reduce 2, gather 0] [reduce 1] [reduce 0]   (`runtime.executor.relay`)

Autograd may keep a gathered weight or a view of it. That tensor stays; only the memory behind it is freed and filled
again (`UntypedStorage.resize_`), as FSDP does it (Zhao et al. 2023, "PyTorch FSDP"). The backward pass of a block
begins when the first gradient reaches its results. A recomputed block gathers again when it is recomputed, and keeps
nothing in between.

Collectives that overlap with a block use separate process groups, in one order on every rank. An overlapped gradient
does not go through autograd: it is added to its parameter when it arrives. The last gradients of a pass arrive under
the next pass, or at the end of the last pass. At any time there are at most the weights of one block, and the
collective with those of one other block.

A gathered weight is a value of its block like any other: operators find it in the layout that they want.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from planner.plan.layout.block_gathers import BlockGather
from planner.sharding.redistribute import Step
from runtime.comm.async_collectives import Flight, Groups
from runtime.comm.collectives import Pieces
from runtime.comm.device_mesh import RankMesh
from runtime.observer import Observer, teller
from runtime.ops.fp8.fp8_scales import Fp8Scales
from runtime.ops.fp8.narrow_weights import Casts, Narrow, belongs, cast, received


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Weights that are gathered together: their `names`, the steps of each weight (`there`) and of its gradient
    (`back`), and the dtype of the gradient reduction (`reduced_in`). `sent`: the weights need communication. `returns`:
    their gradients need it, or are made here. `again`: the backward pass needs the weights. `refills`: they are then
    received directly into their old memory. With `scales`, one per weight, they are cast to 8 bits before the gather
    (`runtime.ops.fp8.narrow_weights`)."""

    names: tuple[str, ...]
    there: tuple[tuple[Step, ...], ...]
    back: tuple[tuple[Step, ...], ...]
    reduced_in: torch.dtype
    sent: bool
    returns: bool
    again: bool
    refills: bool
    scales: tuple[Casts, ...] = ()


def bundle_of(one: BlockGather, scales: Fp8Scales | None = None) -> Bundle:
    """The executor's form of a segment's gather; fp8 weights are cast by `scales`."""
    assert scales is not None or not one.narrow
    return Bundle(
        names=one.names,
        there=tuple(member.steps for member in one.there.members),
        back=tuple(member.steps for member in one.back.members),
        reduced_in=getattr(torch, one.back.members[0].dtype),
        sent=one.comes,
        returns=bool(one.back.moves),
        again=one.again,
        refills=one.refills,
        scales=tuple(scales.of_weight(name) for name in one.names) if one.narrow and scales is not None else (),
    )


class Gathered:
    """The weights of a bundle for one pass through the block with number `section`."""

    def __init__(
        self,
        bundle: Bundle,
        section: int,
        tensors: Mapping[str, torch.Tensor],
        observer: Observer | None,
        place: RankMesh,
        groups: Groups,
    ) -> None:
        self.bundle, self.section, self.observer, self._tensors = bundle, section, observer, tensors
        self._place, self._groups = place, groups
        self.gradients = tuple(Narrow() for _ in bundle.scales)  # gradients of 8-bit weights, which autograd would cast
        self._memory: list[torch.Tensor] = []
        self._coming: Flight | None = None

    @property
    def kept(self) -> bool:
        """Whether their memory is to be freed, and filled again."""
        return bool(self._memory)

    def start(self) -> None:
        """Start the gather, unless it has been started."""
        if self._coming is None:
            pieces = [self._tensors[name] for name in self.bundle.names]
            if self.bundle.scales:
                pieces = [cast(piece, own) for piece, own in zip(pieces, self.bundle.scales, strict=True)]
            self._coming = Flight(self.bundle.there, pieces, self._place, self._groups, holds=True)

    def landed(self, room: Callable[[], Pieces] | None = None) -> Pieces:
        """The received tensors, once they have arrived; in the memory that `room` gives, if given (`Flight.land`)."""
        self.start()
        assert self._coming is not None
        found, self._coming = self._coming.land(room), None
        return found

    def bring(self) -> list[torch.Tensor]:
        """The weights as the block wants them. Gathered weights get their own memory: a cut as the last step makes a
        view, and collectives may return views of their buffer."""
        landed = self.landed()
        if self.bundle.scales:
            landed = [received(weight) for weight in landed]
        if not self.bundle.sent:
            return landed
        landed.reverse()
        return [_own(landed.pop()) for _ in self.bundle.names]  # frees the received tensors one by one

    def with_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Tell the operators that read 8-bit weights where to put the gradients."""
        for weight, own in zip(weights, self.gradients, strict=bool(self.gradients)):
            belongs(weight, own)

    def wide(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The gradients of the weights; autograd has only stand-ins for the gradients of 8-bit weights."""
        return [own.take() for own in self.gradients] if self.gradients else gradients

    def send_back(self, gradients: Sequence[torch.Tensor]) -> Flight:
        """Start to send gradients to where they are stored."""
        given = [gradient.to(self.bundle.reduced_in) for gradient in gradients]
        return Flight(self.bundle.back, given, self._place, self._groups, holds=True)

    def keep(self, weights: Sequence[torch.Tensor]) -> None:
        """Mark the memory of these weights as to be freed, and filled again for their backward pass."""
        self._memory = [weight.data for weight in weights]  # autograd must not see the change

    def leave(self) -> None:
        """The block is done: free the memory."""
        for weight in self._memory:
            weight.untyped_storage().resize_(0)
            teller(self.observer)(weight.untyped_storage())

    def come_again(self) -> None:
        """Gather again into the memory. It is freed when autograd releases it."""
        memory, self._memory = self._memory, []
        if self.bundle.refills:
            self.landed(lambda: [self._filled_again(weight) for weight in memory])
            return
        landed = self.bring()
        while memory:
            weight, new = memory.pop(), landed.pop()
            self._filled_again(weight).copy_(new)

    def _filled_again(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight whose memory is allocated again."""
        weight.untyped_storage().resize_(weight.nbytes)
        teller(self.observer)(weight.untyped_storage())
        return weight


def _own(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
