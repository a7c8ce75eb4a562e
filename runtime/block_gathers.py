"""Weights of a block that are gathered together before it runs, and whose gradients are reduced together.

    forward    [gather] block 0 | [gather] block 1 | ...                   one message for all weights that go together;
                                                                           their memory goes when the block is done
    backward   ... [gather] block 1 [reduce] | [gather] block 0 [reduce]   one more, into the same tensors, and one for
                                                                           all gradients

What autograd keeps of a gathered weight, a view or itself, stays where it is: only the memory behind it is given back
and filled again (`UntypedStorage.resize_`), as FSDP does it (Zhao et al. 2023, "PyTorch FSDP"). The first gradient that
reaches what a block has made says that its backward pass begins. A block that is recomputed gathers once more when it
is computed again, and keeps nothing in between.

A gathered weight is a value of its block like any other: operators find it where they want it.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from planner.plan.bind import BoundPlan
from planner.plan.block_gathers import block_gathers
from planner.sharding.redistribute import Step
from runtime.device_mesh import RankMesh
from runtime.flight import Flight
from runtime.instruction import Copy
from runtime.observer import Observer, teller


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Weights that are gathered together: their `names`, the steps of each `there`, those of its gradient `back`, in
    the dtype in which gradients are `reduced_in`. `sent` says whether weights are, or their gradients alone, `again`
    whether the backward pass needs them."""

    names: tuple[str, ...]
    there: tuple[tuple[Step, ...], ...]
    back: tuple[tuple[Step, ...], ...]
    reduced_in: torch.dtype
    sent: bool
    again: bool


def bundles_of(bound: BoundPlan, operators: Sequence[int]) -> tuple[Bundle, ...]:
    """What a run of operators gathers together."""
    return tuple(
        Bundle(
            names=one.names,
            there=tuple(member.steps for member in one.there.members),
            back=tuple(member.steps for member in one.back.members),
            reduced_in=getattr(torch, one.back.members[0].dtype),
            sent=bool(one.there.moves),
            again=one.again,
        )
        for one in block_gathers(bound, operators)
    )


class Gathered:
    """The weights of a bundle for one pass through their block."""

    def __init__(self, bundle: Bundle, copy: Copy, place: RankMesh) -> None:
        self._bundle, self._place, self._observer = bundle, place, copy.observer
        self._pieces = [copy.tensors[name] for name in bundle.names]
        self._memory: list[torch.Tensor] = []

    def bring(self) -> list[torch.Tensor]:
        """The weights as the block wants them. What is sent comes in memory of its own: a cut at the end of a way makes
        a view, and collectives may deal out views of their message."""
        landed = Flight(self._bundle.there, self._pieces, self._place, self._place.groups).land()
        if not self._bundle.sent:
            return landed
        landed.reverse()
        return [_own(landed.pop()) for _ in self._bundle.names]  # one after the other is let go

    def bring_back(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients as they are stored."""
        given = [gradient.to(self._bundle.reduced_in) for gradient in gradients]
        return Flight(self._bundle.back, given, self._place, self._place.groups).land()

    def keep(self, weights: Sequence[torch.Tensor]) -> None:
        """The memory of these weights is to be given back, and filled again for their backward pass."""
        self._memory = [weight.data for weight in weights]  # autograd must not see that they change

    def leave(self) -> bool:
        """The block is done: give the memory back; whether there is any to come again."""
        for weight in self._memory:
            weight.untyped_storage().resize_(0)
            teller(self._observer)(weight.untyped_storage())
        return bool(self._memory)

    def come_again(self) -> None:
        """Fill the memory once more. It goes when autograd lets go of it."""
        if not self._memory:
            return
        with gathering(self._observer, backward=True), torch.no_grad():
            memory, self._memory = self._memory, []
            landed = self.bring()
            while memory:
                weight, new = memory.pop(), landed.pop()
                weight.untyped_storage().resize_(new.nbytes)
                teller(self._observer)(weight.untyped_storage())
                weight.copy_(new)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


class _Gather(torch.autograd.Function):
    """A bundle is gathered forward, and its gradients, when the last of them is there, are reduced backward."""

    @staticmethod
    def forward(ctx: Any, way: Gathered, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.way = way
        return tuple(way.bring())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.way.bring_back(gradients)


def gather(bundles: Sequence[Bundle], copy: Copy, place: RankMesh, *, leaving: bool) -> list[Gathered]:
    """Gather what a block begins with, as values of a copy. Those that are `leaving` after it do so with `leave`."""
    found = []
    for bundle in bundles:
        way = Gathered(bundle, copy, place)
        with gathering(copy.observer):
            leaves = [copy.stubs.get(name, copy.tensors[name]) for name in bundle.names]
            made = _Gather.apply(way, *leaves)  # type: ignore[no-untyped-call]
        if copy.observer is not None:
            copy.observer.gathered(made)
        copy.values.update(zip(bundle.names, made, strict=True))
        if leaving and bundle.again and any(weight.requires_grad for weight in made):
            way.keep(made)
        found.append(way)
    return found


def leave(gathered: Sequence[Gathered], made: Iterable[torch.Tensor]) -> None:
    """A block is done, and has `made` what others read: its backward pass begins with the first of their gradients."""
    leaving = [way for way in gathered if way.leave()]

    def again(gradient: torch.Tensor) -> None:
        for way in leaving:
            way.come_again()

    for tensor in made if leaving else ():
        if tensor.requires_grad:
            tensor.register_hook(again)  # type: ignore[no-untyped-call]


def gathering(observer: Observer | None, *, backward: bool = False) -> AbstractContextManager[None]:
    """What happens meanwhile is no operator's."""
    return nullcontext() if observer is None else observer.gathering(backward=backward)
