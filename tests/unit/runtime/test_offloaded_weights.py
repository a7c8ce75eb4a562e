"""Offloaded weights are on the device while their block runs, and come before it does."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import runtime
from hardware_profiles import Home
from planner.errors import PlanFileError
from planner.plan.plan import Plan
from planner.sharding.stored import StoredParameter
from runtime.offload.copy_streams import Lane
from runtime.offload.storage import Outside
from runtime.offload.weights import OffloadedWeights, Visits
from tests.distributed.offloading import of_blocks
from tests.refusals import refused
from tests.unit.runtime.test_step import batch, build, plan

CPU = torch.device("cpu")


def scaled_down(runs: Sequence[str]) -> tuple[list[str], list[torch.Tensor]]:
    """A product with each weight in turn, whose run offloads it where its name is there ("" offloads nothing), forward
    and backward; what happened in which order, and the gradients."""
    offload, done = OffloadedWeights(CPU, Outside()), list[str]()
    pieces = [torch.full((3,), 2.0 + at, requires_grad=True) for at in range(len(runs))]
    names = {piece.untyped_storage()._cdata: name for piece, name in zip(pieces, runs, strict=True)}
    for piece, name in zip(pieces, runs, strict=True):
        if name:
            offload.offload(name, piece, "host")
            assert piece.untyped_storage().nbytes() == 0

    def told(storage: torch.UntypedStorage) -> None:
        done.append(f"{'+' if storage.nbytes() else '-'}{names[storage._cdata]}")

    visits = Visits(offload, [(name,) if name else () for name in runs], told)
    value = torch.ones(3, requires_grad=True)
    for number, piece in enumerate(pieces):
        visits.enter(number)
        done.append(f"run {number}")
        value = value * piece
        visits.leave(number, [value])
        value.register_hook(lambda _, number=number: done.append(f"back {number}"))  # type: ignore[no-untyped-call]
    done.append("loss")
    value.sum().backward()  # type: ignore[no-untyped-call]
    offload.hold((), (), told)
    return done, [piece.grad for piece in pieces if piece.grad is not None]


def test_weights_come_before_their_block_and_leave_after_it() -> None:
    done, gradients = scaled_down("abc")
    forward = ["+a", "+b", "run 0", "-a", "+c", "run 1", "-b", "run 2", "-c"]
    backward = ["+c", "+b", "back 2", "-c", "+a", "back 1", "-b", "back 0", "-a"]
    assert done == [*forward, "loss", *backward]
    assert [gradient.tolist() for gradient in gradients] == [[12.0] * 3, [8.0] * 3, [6.0] * 3]


def test_beside_a_block_that_offloads_nothing_no_weights_are_there() -> None:
    done, gradients = scaled_down(["a", "", "c", "d"])
    forward = ["+a", "run 0", "-a", "run 1", "+c", "+d", "run 2", "-c", "run 3", "-d"]
    backward = ["+d", "+c", "back 3", "-d", "back 2", "-c", "back 1", "+a", "back 0", "-a"]
    assert done == [*forward, "loss", *backward]
    assert gradients[0].tolist() == [60.0] * 3


def test_a_new_weight_is_there_for_whoever_reads_it_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its way out takes long."""
    offload, piece = OffloadedWeights(CPU, Outside()), torch.ones(3)
    weight = offload.offload("a", piece, "host")
    late = Lane(CPU)
    gate = threading.Event()
    late.run(lambda: assert_set(gate))
    monkeypatch.setattr(offload, "_outward", late)
    offload.write(weight, torch.tensor([1.0, 2.0, 3.0]))
    threading.Timer(0.05, gate.set).start()
    offload.hold(("a",), (), lambda _: None)
    assert piece.tolist() == weight.content.tolist() == [1.0, 2.0, 3.0]
    offload.hold((), (), lambda _: None)
    assert piece.untyped_storage().nbytes() == 0


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(timeout=60)


def away(home: Home, pattern: str) -> Plan:
    homes = of_blocks(home, pattern)
    (outside, blocks), whole = plan().groups, StoredParameter(weight=(), gradient=(), state=())
    kept = tuple((name, replace(whole, weight_home=homes(name))) for name, _ in outside.parameters)
    return replace(plan(), groups=(replace(outside, parameters=kept), blocks))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("home", "pattern"), [("host", r"\.[123]\."), ("disk", r"\.[13]\.")])
def test_one_device_trains_alike(home: Home, pattern: str) -> None:
    """Bit for bit, and what is written to the weights from outside is what it trains on."""
    plain, offloaded = (
        runtime.parallelize(build(), one, example=batch(2), device=CPU) for one in (plan(), away(home, pattern))
    )
    for _ in range(3):
        assert offloaded(*batch()) == plain(*batch())
    assert len(offloaded.rank.weights.rows) == (6 if home == "host" else 4)
    assert offloaded.rank.weights.there == ()
    for name, weight in offloaded.full_parameters().items():
        assert torch.equal(weight, plain.full_parameters()[name])


def test_what_stands_outside_of_the_blocks_stays() -> None:
    """The first product is of another kind than the three after it."""
    with refused(PlanFileError, "blocks.0.weight", "host", "weight_home"):
        runtime.parallelize(build(), away("host", ""), example=batch(2), device=CPU)
