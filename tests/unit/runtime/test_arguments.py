"""Batches in any form, as the call with which a model was traced."""

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner.errors import RequestError
from planner.graph.trace import trace
from runtime.step.arguments import Arguments, arguments_of, forward_of, matcher
from tests.refusals import refused

A, B, C = (torch.full((2, 4), value) for value in (1.0, 2.0, 3.0))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: Any = None, *, scale: float = 1.0, y: Any = None) -> torch.Tensor:
        found = self.inner(x) * scale
        for part in (extra["b"], extra["a"][0]) if extra is not None else ():
            found = found + part
        return (found if y is None else found - y).mean()


class Whole(nn.Module):
    """Takes a batch as one argument."""

    def forward(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError


class KeywordOnly(nn.Module):
    def forward(self, x: torch.Tensor, *, y: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def names_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    return trace(Nested(), args, kwargs).inputs


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((A, B), {}), (((A, B),), {}), (([A, B],), {}), (({"y": B, "x": A},), {}), ((UserDict(y=B, x=A),), {}),
     ((A,), {"y": B}), ((), {"y": B, "x": A})],
    ids=["arguments", "tuple", "list", "mapping", "batch of a tokenizer", "mixed", "keywords"],
)  # fmt: skip
def test_all_forms_are_one_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

    positional = arguments_of(forward_of(Two()), args, kwargs, ("args_0", "args_1"))
    assert ([t is w for t, w in zip(positional.args, (A, B), strict=True)], positional.kwargs) == ([True, True], {})
    keywords = arguments_of(forward_of(Two()), args, kwargs, ("y", "x"))
    assert (keywords.args, list(keywords.kwargs)) == ((), ["y", "x"])
    assert [t is w for t, w in zip(keywords.tensors(), (B, A), strict=True)] == [True, True]


def test_names_of_torch_bring_nested_mappings_into_order() -> None:
    planned = ((A, {"b": B, "a": [C]}), {"y": A})
    names = names_of(*planned)
    assert names == ("args_0", "args_1_b", "args_1_a_0", "y")
    given = arguments_of(forward_of(Nested()), (), {"y": A, "extra": {"a": [C], "b": B}, "x": A}, names)
    assert [t is w for t, w in zip(given.tensors(), (A, B, C, A), strict=True)] == [True] * 4
    assert names_of(given.args, dict(given.kwargs)) == names


def test_a_module_that_takes_the_batch_as_one_argument_gets_it() -> None:
    assert arguments_of(forward_of(Whole()), ({"x": A},), {}, ("args_0_x",)).args == ({"x": A},)
    assert arguments_of(forward_of(Whole()), ((A, B),), {}, ("args_0_0", "args_0_1")).args == ((A, B),)


@pytest.mark.parametrize(
    ("batch", "facts"),
    [({"x": A, "y": B, "z": C}, ("KeywordOnly.forward", "z")), ((A, B, C), ("KeywordOnly.forward", "positional"))],
)
def test_what_is_wrong_with_the_parts_of_one_argument_is_said(batch: Any, facts: tuple[object, ...]) -> None:
    with refused(RequestError, *facts):
        arguments_of(forward_of(KeywordOnly()), (batch,), {}, ("x", "y"))


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"x": A}, "the batch lacks the argument ['extra']['b']"),
        ({"x": A, "extra": {"a": [B], "b": C, "c": A}}, "the batch has the argument ['extra']['c']"),
        ({"x": A, "extra": {"a": [B], "b": 1.0}}, "['extra']['b'] is 1.0, and was a tensor"),
        ({"x": A, "extra": {"a": [B], "b": C}, "scale": 2.0}, "['scale'] is 2.0, and was 0.5"),
        ({"x": A, "extra": {"b": B, "a": [C]}, "scale": 2.0}, "['scale'] is 2.0, and was 0.5"),
        ({"z": A}, "does not fit Nested.forward"),
        ({"x": np.zeros((8, 40))}, "['x'] is a value of type ndarray, and was a tensor"),
    ],
    ids=["missing", "more", "number", "constant", "constant in order", "unknown", "array"],
)
def test_another_structure_is_refused(kwargs: dict[str, Any], words: str) -> None:
    forward, planned = forward_of(Nested()), {"x": A, "extra": {"b": B, "a": [C]}, "scale": 0.5}
    names = names_of((), planned)
    found = matcher(forward, names, arguments_of(forward, (), planned, names))
    other = {"scale": 0.5, "extra": {"a": [C], "b": B}, "x": A}
    for inputs in (found.inputs((), planned), found.inputs((planned,), {}), found.inputs((), other)):
        assert {name: float(tensor[0, 0]) for name, tensor in inputs.items()} == {"x": 1, "extra_b": 2, "extra_a_0": 3}
    with pytest.raises(RequestError) as caught:
        found.inputs((), kwargs)
    assert words in str(caught.value)


def test_an_example_is_cut_to_the_samples_of_planning() -> None:
    batch = Arguments(args=(torch.zeros(6, 3), torch.zeros(5)), kwargs={"flag": True})
    cut = batch.samples(2)
    assert [tuple(tensor.shape) for tensor in cut.tensors()] == [(2, 3), (5,)]
    assert cut.kwargs == {"flag": True}
    assert [tuple(tensor.shape) for tensor in batch.samples(8).tensors()] == [(8, 3), (5,)], "only shapes are looked at"
    with refused(RequestError, "samples"):
        Arguments(args=(torch.zeros(()),), kwargs={}).samples(2)
