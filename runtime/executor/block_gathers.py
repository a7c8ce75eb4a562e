"""Weights of a block that are gathered together before it runs, and whose gradients are reduced together.

    "block"    forward    [gather 0] block 0 | [gather 1] block 1 | ...    one message for all weights that go together;
                                                                           their memory goes when the block is done
               backward   [gather 1] block 1 [reduce 1] | [gather 0] ...   one more, into the same tensors, and one for
                                                                           all gradients
    "ahead"    forward    [gather 0] block 0 | block 1 | block 2           the next block's come while a block computes,
                             [gather 1] [gather 2] [gather 2 again]        and its gradients leave while the one before
               backward   block 2 | block 1 | block 0                      it does; so from pass to pass
                             [gather 1] [reduce 2, gather 0] [reduce 1] [reduce 0]   (`runtime.executor.relay`)

What autograd keeps of a gathered weight, a view or itself, stays where it is: only the memory behind it is given back
and filled again (`UntypedStorage.resize_`), as FSDP does it (Zhao et al. 2023, "PyTorch FSDP"). The first gradient that
reaches what a block has made says that its backward pass begins. A block that is recomputed gathers once more when it
is computed again, and keeps nothing in between.

What travels while a block computes does so on process groups of its own, in one order on every rank. A gradient that is
late does not come through autograd: it is added to its parameter when it lands, the last of them under the next pass,
or when the last one is over. Weights of one block and the message with those of another are there at the same time,
never more.

A gathered weight is a value of its block like any other: operators find it where they want it.
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
from runtime.ops.fp8_scales import Fp8Scales
from runtime.ops.narrow_weights import Casts, Narrow, belongs, cast, received


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Weights that are gathered together: their `names`, the steps of each `there`, those of its gradient `back`, in
    the dtype in which gradients are `reduced_in`. `sent` says whether weights are, `returns` whether their gradients
    are, or are made here, `again` whether the backward pass needs them, and `refills` whether they land then in the
    memory that they had. With `scales`, those of each, they are cast to 8 bits before they set out
    (`runtime.ops.narrow_weights`)."""

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
    """What a segment gathers together, in the terms of the executor; weights in fp8 are cast by `scales`."""
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
    """The weights of a bundle for one pass through their block, the `section` of that number."""

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
        self.gradients = tuple(Narrow() for _ in bundle.scales)  # of weights in 8 bits, which autograd would cast
        self._memory: list[torch.Tensor] = []
        self._coming: Flight | None = None

    @property
    def kept(self) -> bool:
        """Whether their memory is to be given back, and filled again."""
        return bool(self._memory)

    def start(self) -> None:
        """Let them set out, where they have not."""
        if self._coming is None:
            pieces = [self._tensors[name] for name in self.bundle.names]
            if self.bundle.scales:
                pieces = [cast(piece, own) for piece, own in zip(pieces, self.bundle.scales, strict=True)]
            self._coming = Flight(self.bundle.there, pieces, self._place, self._groups, holds=True)

    def landed(self, room: Callable[[], Pieces] | None = None) -> Pieces:
        """What was sent, when it is there: where there is `room`, if that is given (`Flight.land`)."""
        self.start()
        assert self._coming is not None
        found, self._coming = self._coming.land(room), None
        return found

    def bring(self) -> list[torch.Tensor]:
        """The weights as the block wants them. What is sent comes in memory of its own: a cut at the end of a way makes
        a view, and collectives may deal out views of their message."""
        landed = self.landed()
        if self.bundle.scales:
            landed = [received(weight) for weight in landed]
        if not self.bundle.sent:
            return landed
        landed.reverse()
        return [_own(landed.pop()) for _ in self.bundle.names]  # one after the other is let go

    def with_gradients(self, weights: Sequence[torch.Tensor]) -> None:
        """Let the readers of weights in 8 bits know where their gradients are brought."""
        for weight, own in zip(weights, self.gradients, strict=bool(self.gradients)):
            belongs(weight, own)

    def wide(self, gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The gradients of the weights, where autograd has brought them or stand-ins of those in 8 bits."""
        return [own.take() for own in self.gradients] if self.gradients else gradients

    def send_back(self, gradients: Sequence[torch.Tensor]) -> Flight:
        """Gradients on their way to where they are stored."""
        given = [gradient.to(self.bundle.reduced_in) for gradient in gradients]
        return Flight(self.bundle.back, given, self._place, self._groups, holds=True)

    def keep(self, weights: Sequence[torch.Tensor]) -> None:
        """The memory of these weights is to be given back, and filled again for their backward pass."""
        self._memory = [weight.data for weight in weights]  # autograd must not see that they change

    def leave(self) -> None:
        """The block is done: give the memory back."""
        for weight in self._memory:
            weight.untyped_storage().resize_(0)
            teller(self.observer)(weight.untyped_storage())

    def come_again(self) -> None:
        """Fill the memory once more. It goes when autograd lets go of it."""
        memory, self._memory = self._memory, []
        if self.bundle.refills:
            self.landed(lambda: [self._filled_again(weight) for weight in memory])
            return
        landed = self.bring()
        while memory:
            weight, new = memory.pop(), landed.pop()
            self._filled_again(weight).copy_(new)

    def _filled_again(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight with memory once more."""
        weight.untyped_storage().resize_(weight.nbytes)
        teller(self.observer)(weight.untyped_storage())
        return weight


def _own(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)
