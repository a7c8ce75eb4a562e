"""What ranks tell each other is read as what it should be, or refused."""

import math
import pickle

import pytest
import torch

from planner.errors import RunError
from runtime.comm import exchange
from runtime.comm.agreement import Finding
from runtime.step.checking import Checksum, Moment
from tests.refusals import refused

SUMS = list[tuple[Moment, Checksum]]


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        (None, Finding | None),
        (Finding(moment=(0, "x", 3), message="ein Fehler in 'größe'"), Finding | None),
        ([((1, 2), (0.1 + 0.2, -math.inf, 5e-324))], SUMS),
        ("", str),
        (1 / 3, float),
    ],
    ids=str,
)
def test_what_is_told_arrives_exactly(told: object, kind: object) -> None:
    assert exchange._read(exchange._bytes(exchange._written(told, kind)), kind) == told


def test_a_number_that_is_none_arrives() -> None:
    ((_, found),) = exchange._read(exchange._bytes(exchange._written([((1,), (math.nan,) * 3)], SUMS)), SUMS)
    assert all(map(math.isnan, found))


@pytest.mark.parametrize(
    "sent",
    [pickle.dumps("x"), b'{"moment": [1], "message": 3}', b'{"moment": [1.5], "message": ""}', b'["a"]', b"[" * 99999],
    ids=["pickle", "number as text", "float as whole number", "list", "nested"],
)
def test_what_is_something_else_is_refused(sent: bytes) -> None:
    with refused(RunError, "runtime.comm.agreement.Finding | None"):
        exchange._read(exchange._bytes(sent), Finding | None)


@pytest.mark.parametrize("length", [-1, 0, exchange.MOST + 1, 2**62])
def test_lengths_are_checked_before_memory_is_taken(length: int) -> None:
    with refused(RunError, length, exchange.MOST):
        exchange._length(length)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("Tensor", (1,)), ("float32", (-1,)), ("load", ()), ("int64", (2**40, 2**40))]
)
def test_what_is_no_tensor_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with refused(RunError, dtype, shape):
        exchange._empty(dtype, shape)
    assert exchange._empty("bfloat16", (2, 3)).dtype == torch.bfloat16
