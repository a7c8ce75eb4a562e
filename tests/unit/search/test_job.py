"""The same words are the same job on the command line and in Python."""

import warnings
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from rich.console import Console

import planner
from hardware_profiles import load_machine, load_software
from planner.api import searching
from planner.cli.options import Options
from planner.cli.requesting import request_of
from planner.strategy_search.job import default_precision, given_job, machine_from
from planner.strategy_search.request.offload import parse_offload
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned

WORDS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama-tiny", "cpu", {}),
    ("llama-tiny", "cpu", {"devices": 2, "global_batch": 8}),
    ("llama-tiny", "h100-80gb", {}),
    ("gpt-tiny", "a100-80gb:8,h100-80gb:8", {}),
    ("llama-tiny", "ascend-910b-64gb", {"devices": 16, "precision": "fp16", "seq_len": 64}),
    ("gpt-tiny", "h100-80gb", {"software": "megatron", "optimizer": "sgd", "devices": 4}),
]


class _AskedError(Exception):
    """Holds what was asked, in place of a search."""


def asked_in_python(monkeypatch: pytest.MonkeyPatch, model: Any, hardware: str, words: dict[str, Any]) -> SearchRequest:
    def ask(request: SearchRequest, *_: object) -> None:
        raise _AskedError(request)

    monkeypatch.setattr(searching, "plan_for", ask)
    with pytest.raises(_AskedError) as asked:
        planner.search(model, hardware, **words)
    request: SearchRequest = asked.value.args[0]
    return request


def asked_on_the_command_line(model: str, hardware: str, words: dict[str, Any]) -> SearchRequest:
    return request_of(Options(model=model, hardware=hardware, **words), Console(quiet=True))


class _Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def test_weights_in_another_dtype_than_the_precision_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"the weights are float32, and precision 'bf16' means bfloat16"):
        asked_in_python(monkeypatch, _Wide(), "h100-80gb", {"devices": 2, "args": (torch.ones(4, 8),)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked_in_python(monkeypatch, _Wide(), "h100-80gb", {"args": (torch.ones(4, 8),), "precision": "fp32"})
        narrow = torch.ones(4, 8, dtype=torch.bfloat16)
        asked_in_python(monkeypatch, _Wide().bfloat16(), "h100-80gb", {"args": (narrow,)})


@pytest.mark.slow
@pytest.mark.cases(3, 3)
@pytest.mark.parametrize(("model", "hardware", "words"), WORDS)
def test_the_same_words_are_the_same_request(
    monkeypatch: pytest.MonkeyPatch, model: str, hardware: str, words: dict[str, Any]
) -> None:
    here = asked_in_python(monkeypatch, model, hardware, words)
    there = asked_on_the_command_line(model, hardware, words)
    different = [one.name for one in fields(here) if getattr(here, one.name) != getattr(there, one.name)]
    assert different == []


def test_what_nobody_says() -> None:
    """fp32 on CPUs and bf16 elsewhere, 4 samples per device, all devices of the profile, PyTorch."""
    on_cpu = asked_on_the_command_line("llama-tiny", "cpu", {})
    assert (on_cpu.precision, on_cpu.global_batch, on_cpu.cluster.devices) == ("fp32", 4, 1)
    on_h100 = asked_on_the_command_line("llama-tiny", "h100-80gb", {})
    assert (on_h100.precision, on_h100.global_batch, on_h100.cluster.devices) == ("bf16", 32, 8)
    assert on_h100.cluster.software.name == "pytorch"
    assert default_precision(load_machine("a100-80gb:8,h100-80gb:8")) == "bf16"
    for without_bf16 in ("v100-32gb", "ascend-910a-32gb", "a100-80gb:8,v100-32gb:8"):
        assert default_precision(load_machine(without_bf16)) == "fp16", without_bf16


class _Classifier(torch.nn.Module):
    """Of images, B 3 H W, or of what has other numbers of channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = torch.nn.Conv2d(channels, 8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.layer(images)).square().mean()


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("model", "samples"),
    [("gpt-tiny", 4), ("vit-tiny", 32), ("resnet-tiny+width=32", 32), ("dlrm-tiny", 2048), ("wide-deep-tiny", 2048)],
)
def test_the_batch_that_nobody_says_is_of_the_model(monkeypatch: pytest.MonkeyPatch, model: str, samples: int) -> None:
    here = asked_in_python(monkeypatch, model, "h100-80gb", {"devices": 8})
    there = asked_on_the_command_line(model, "h100-80gb", {"devices": 8})
    assert here.global_batch == there.global_batch == 8 * samples
    assert asked_on_the_command_line(model, "h100-80gb", {"devices": 8, "global_batch": 16}).global_batch == 16


@pytest.mark.parametrize(("channels", "samples"), [(3, 32), (1, 4)])
def test_own_models_of_images_have_the_batch_of_images(channels: int, samples: int) -> None:
    machine = machine_from("h100-80gb", devices=4)
    job = given_job(_Classifier(channels), machine, args=(torch.zeros(2, channels, 16, 16),))
    assert job.global_batch == 4 * samples
    assert replace(job, cluster=machine.with_devices(2)).global_batch == 2 * samples


def test_a_traced_model_has_the_batch_of_the_machine_that_it_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = planner.trace("vit-tiny")
    here = asked_in_python(monkeypatch, traced, "h100-80gb", {"devices": 16})
    assert here.global_batch == 16 * 32


def test_a_machine_keeps_its_software_unless_another_is_named() -> None:
    machine = load_machine("h100-80gb").with_software(load_software("megatron"))
    assert machine_from(machine, devices=16).software.name == "megatron"
    assert machine_from(machine, software="nemo").software.name == "nemo"
    assert machine_from("h100-80gb").software.name == "pytorch"


def test_a_request_stays_as_it_was_made() -> None:
    """Saved tensors are not offloaded where sequences come in slices; what was asked for stays to be read."""
    pinned = Pinned(slices=2, pipeline=2, offload=parse_offload("auto"))
    request = replace(asked_on_the_command_line("llama-tiny", "h100-80gb", {}), pinned=pinned)
    assert request.pinned == pinned
    assert pinned.offload.saved == ("device", "host")
    assert request.offload.saved == ("device",)
