"""What a file names is never imported, called or opened: every command that reads a plan, against hostile plans."""

import base64
import http.server
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ModelError, PlanFileError
from planner.models.zoo import ZOO
from planner.plan.binding.model_of import build_planned, buildable
from planner.plan.carried import LONGEST, carried_graph, graph_text
from planner.plan.file import load_plan, save_plan
from tests import refusals
from tests.unit.cli.conftest import CommandLine

pytestmark = pytest.mark.usefixtures("searched_once")

plan = CommandLine()

OWN = """
from pathlib import Path
import torch
from torch import nn

Path("imported").touch()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.down(torch.relu(self.up(x))).pow(2).mean()

def net():
    Path("called").touch()
    return Net(), (torch.zeros(4, 16),)

def other():
    return Net(), (torch.zeros(2, 16),)
"""

MARKS = ("imported", "called", "aborted", "served")

FILE_IS_ENOUGH = (
    ("show",),
    ("show", "--rank", "1"),
    ("verify",),
    ("report", "--no-search", "-o", "page.html"),
    ("report", "--no-search", "--trace", "trace.json"),
    ("report", "--time-limit", "0", "--json"),
    ("explain", "--no-search"),
    ("explain", "up/linear", "--no-search"),
    ("estimate",),
    ("estimate", "--hardware", "cpu", "-o", "again.json"),
    ("export", "--to", "mindspore", "-o", "strategies"),
    ("export", "--to", "deepspeed", "-o", "engine", "--approximate"),
)
"""Commands that reason about a graph: the one that the plan carries will do."""

EXECUTES = (
    ("audit",),
    ("prove",),
    ("run", "--steps", "1", "--no-check"),
    ("run", "--steps", "1", "--save", "runs", "--elastic", "1:4", "--no-check"),
    ("run", "--steps", "1", "--save", "runs", "--restarts", "1", "--no-check"),
)
"""Commands that execute the model or operators of it: a person names it."""

REFERENCES = (
    "os:abort",
    "http.server:test",
    "trap:net",
    "trap:",
    "trap",
    " trap:net",
    "trap:net ",
    "trap.net",
    "trap:Net.forward",
    "trap:net+num_layers=2",
    "./trap:net",
    "/etc/passwd",
    "link/config.json",
    "config.json",
    ".",
    "..",
    "llama-tiny:net",
    "",
)
"""Of models that are none of the zoo."""

ODD_CHANGES = (
    "llama-tiny+num_layers=trap:net",
    "llama-tiny+num_layers=__import__('trap')",
    "llama-tiny+num_layers=-1",
    "llama-tiny+num_layers=1e9",
    "llama-tiny+num_layers=999999999999",
    "llama-tiny+__class__=trap",
    "llama-tiny+hidden_size=7",
    "llama-tiny+num_heads=0",
)
"""Of a model of the zoo."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a plan for a model of one's own, and its module."""
    folder = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        (folder / "trap.py").write_text(OWN)
        found = plan("--model", "trap:net", "--hardware", "cpu", "--devices", "2", "--global-batch", "8", "-o", "plan")
        assert found.code == 0, found
        assert "plan run plan --model trap:net" in found.out
        yield folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with the plan, and the module that leaves marks; other names leave marks too."""
    for name in ("plan", "trap.py"):
        shutil.copy(made / name, tmp_path / name)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "auto_map": {"AutoConfig": "trap.Net"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "abort", lambda: Path("aborted").touch())
    monkeypatch.setattr(http.server, "test", lambda: Path("served").touch())
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    return tmp_path


def marks() -> list[str]:
    return [mark for mark in MARKS if Path(mark).exists()]


def edited(change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(Path("plan").read_text())
    change(content)
    Path("plan").write_text(json.dumps(content))


def named(reference: str, *, carried: bool) -> None:
    """The plan names another model; with or without the graph."""

    def change(content: dict[str, Any]) -> None:
        content["model"]["reference"] = reference
        if not carried:
            content["model"].pop("graph", None)

    edited(change)


def refused(*arguments: str) -> str:
    """The one line of a command that must fail, and has run nothing."""
    outcome = plan(*arguments)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("plan: ")
    assert outcome.err.count("\n") == 1, outcome.err
    assert marks() == []
    return outcome.err


@pytest.mark.cases(2, 3)
@pytest.mark.parametrize("command", FILE_IS_ENOUGH, ids=" ".join)
def test_the_graph_in_the_file_is_enough_for_what_executes_nothing(folder: Path, command: tuple[str, ...]) -> None:
    (folder / "trap.py").unlink()
    outcome = plan(command[0], "plan", *command[1:])
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    named("os:abort", carried=True)
    again = plan(command[0], "plan", *command[1:])
    assert again.code == 0, again
    assert marks() == []


@pytest.mark.parametrize("command", [*FILE_IS_ENOUGH, *EXECUTES], ids=" ".join)
@pytest.mark.parametrize(
    "reference",
    ["os:abort", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("http.server:test", "trap:net"))],
)
def test_no_command_imports_what_a_plan_names(folder: Path, command: tuple[str, ...], reference: str) -> None:
    named(reference, carried=False)
    message = refused(command[0], "plan", *command[1:])
    assert f"the plan is for the model '{reference}'" in message
    assert "--model package.module:factory" in message


@pytest.mark.parametrize("reference", REFERENCES)
def test_whatever_a_plan_names(folder: Path, reference: str) -> None:
    named(reference, carried=False)
    assert "none of the zoo" in refused("show", "plan")
    assert "none of the zoo" in refused("diff", "plan", "plan")


@pytest.mark.parametrize("reference", ["a\nb", "\x1b[2J", "x" * 5000])
def test_a_name_is_short_and_printable(folder: Path, reference: str) -> None:
    named(reference, carried=True)
    assert "reference" in refused("show", "plan")


@pytest.mark.parametrize("reference", ODD_CHANGES)
def test_changed_dimensions_are_data(folder: Path, reference: str) -> None:
    assert reference.partition("+")[0] in ZOO
    named(reference, carried=True)
    refused("show", "plan")


@pytest.mark.parametrize("command", EXECUTES, ids=" ".join)
def test_what_executes_the_model_has_it_from_the_person(folder: Path, command: tuple[str, ...]) -> None:
    assert "say which model it is: --model" in refused(command[0], "plan", *command[1:])


@pytest.mark.thorough
@pytest.mark.slow
def test_the_person_names_the_model(folder: Path) -> None:
    assert "--model NAME checks it against the model\n" in plan("verify", "plan").out
    assert marks() == []
    named("os:abort", carried=False)
    outcome = plan("verify", "plan", "--model", "trap:net")
    assert (outcome.code, outcome.err) == (0, "")
    assert "--model NAME" not in outcome.out
    assert marks() == ["imported", "called"]
    assert plan("audit", "plan", "--model", "trap:net").code == 0
    outcome = plan("show", "plan", "--model", "trap:other")
    assert outcome.code == 2
    assert "is for another graph of os:abort" in outcome.err


def test_a_checkpoint_is_converted_for_the_model_of_the_person(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from runtime.checkpoint.manifest import read_manifest, write_manifest

    weights = folder / "weights"
    weights.mkdir()

    net = {"up.weight": torch.zeros(32, 16), "up.bias": torch.zeros(32), "seen": torch.zeros(())}
    save_file({**net, "down.weight": torch.zeros(16, 32), "down.bias": torch.zeros(16)}, weights / "model.safetensors")
    convert = ("checkpoint", "convert", "weights", "--plan", "plan", "-o", "converted")
    assert "its buffers are taken from it; say which model" in refused(*convert)
    outcome = plan(*convert, "--model", "trap:net")
    assert outcome.code == 0, outcome
    for mark in marks():
        Path(mark).unlink()
    manifest = read_manifest(Path("converted"))
    assert manifest.plan is not None
    for reference in ("os:abort", "trap:net", "./config.json", "link/config.json"):
        under = {**manifest.plan, "model": {**manifest.plan["model"], "reference": reference}}
        write_manifest(Path("converted"), replace(manifest, plan=under))
        assert plan("checkpoint", "inspect", "converted").code == 0
        if ":" in reference:
            assert plan("checkpoint", "merge", "converted", "-o", reference.replace(":", "-")).code == 0
        else:
            assert "--model path/to/config.json" in refused("checkpoint", "merge", "converted", "-o", "merged")
    assert marks() == []


def test_from_python_too(folder: Path) -> None:
    found = load_plan("plan")
    with refusals.refused(ModelError, "trap:net", "--model"):
        buildable(found.model, None)
    with refusals.refused(ModelError, "trap:net", "--model"):
        build_planned(found, None)
    assert marks() == []
    assert build_planned(found, "trap:net").reference == "trap:net"


def test_elastic_plans_are_searched_for_the_model_of_the_person(folder: Path) -> None:
    from runtime.recovery.replanning import Plans, Range

    found = load_plan("plan")
    with refusals.refused(ModelError, "trap:net", "--model"):
        Plans(found, folder / "plans", Range(least=1, most=2)).plan(1)
    assert marks() == []
    assert Plans(found, folder / "plans", Range(least=1, most=2), "trap:net").plan(1).cluster.devices == 1


def test_strategies_are_taken_from_a_plan_without_its_model(folder: Path) -> None:
    named("os:abort", carried=False)
    options = ("--hardware", "cpu", "--devices", "2", "--global-batch", "8", "-o", "new.json")
    outcome = plan("--model", "llama-tiny", "--shard-from", "plan", *options)
    assert outcome.code == 2
    assert marks() == []


@pytest.mark.parametrize(
    "content",
    [
        {"model_type": "mine", "auto_map": {"AutoConfig": "trap.Net", "AutoModelForCausalLM": "trap.Net"}},
        {"model_type": "mine", "trust_remote_code": True, "auto_map": {"AutoConfig": "trap.Net"}},
        {"auto_map": {"AutoConfig": "someone/repository--trap.Net"}},
    ],
)
def test_code_beside_a_config_is_never_asked_for_or_run(folder: Path, content: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **content}))
    assert "transformers cannot read it" in refused("--model", "./config.json", "--hardware", "cpu", "--devices", "2")


@pytest.mark.parametrize("name", ["AutoModelForCausalLM", "__class__ForCausalLM", "PreTrainedModelForCausalLM"])
def test_an_architecture_is_a_class_of_models(folder: Path, name: str) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": [name], "model_type": "llama"}))
    assert f"the architecture {name} is not known: transformers" in refused(
        "--model", "./config.json", "--hardware", "cpu"
    )


def test_a_carried_graph_is_the_one_that_was_traced(folder: Path) -> None:
    from planner.cli.tracing import traced
    from planner.models.zoo import build_model

    built = build_model("trap:net", dtype="float32")
    text = load_plan("plan").model.graph
    assert text is not None
    found = carried_graph(text)
    assert (found.graph, found.batch, found.sequence_length) == (traced(built), 4, None)
    assert graph_text(found.graph, batch=4, sequence_length=None) == text


def _content(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return found


def _packed(content: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(content).encode())).decode()


LINEAR = 2  # place of the first linear layer among the operators


def _put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        at: Any = content
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_put("operators", LINEAR, "op", value="load_library"), "operators.2.op"),
        (_put("operators", LINEAR, "op", value="aten.linear.default\n"), "operators.2.op"),
        (_put("operators", LINEAR, "op", value="aten.relu.default"), "cannot be applied"),
        (_put("operators", LINEAR, "arguments", value=[{"value": "nowhere"}]), "reads 'nowhere'"),
        (_put("operators", LINEAR, "arguments", value=[]), "cannot be applied"),
        (_put("operators", LINEAR, "arguments", value=[{"code": "x"}]), "has the argument"),
        (_put("operators", LINEAR, "arguments", value=[{"dtype": "__class__"}]), "has the argument"),
        (_put("operators", LINEAR, "keywords", value=[["dtype", {"dtype": "load"}]]), "torch has no dtype 'load'"),
        (_put("operators", LINEAR, "arguments", value=[2**70]), "does not fit in 64 bits"),
        (_put("operators", LINEAR, "results", value=["up/linear", "up/linear"]), "is there twice"),
        (_put("operators", LINEAR, "name", value="bad\nname"), "has a control character"),
        (_put("types", "up.weight", value=[[2**60, 2**60], "float32", True]), "types.up.weight"),
        (_put("types", "up.weight", value=[[2**40, 2**40], "float32", True]), "more than 2**48 elements"),
        (_put("types", "up.weight", value=[[32, 17], "float32", True]), "cannot be applied"),
        (_put("types", "up.weight", value=[[32, 16], "object", True]), "there is no dtype 'object'"),
        (_put("types", "more", value=[[32, 16], "float32", True]), "'more' has no type, or a type and no producer"),
        (_put("loss", value="up/linear"), "is no scalar"),
        (_put("batch", value=0), "batch"),
        (_put("code", value="print()"), "code"),
    ],
)  # fmt: skip
def test_a_graph_in_a_file_is_data(folder: Path, change: Callable[[dict[str, Any]], None], words: str) -> None:
    content = _content(str(load_plan("plan").model.graph))
    assert content["operators"][LINEAR]["name"] == "up/linear"
    change(content)
    edited(lambda plan: plan["model"].update(graph=_packed(content)))
    message = refused("show", "plan")
    assert "model.graph: " in message
    assert words in message, message
    assert "give the model with --model" in message


@pytest.mark.parametrize("text", ["", "####", "AAAA", "é"])
def test_a_text_that_is_no_graph(text: str) -> None:
    with refusals.refused(PlanFileError, "model.graph"):
        carried_graph(text)


def test_a_graph_does_not_unpack_to_more_than_is_read() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(2**26 + 1), 1)).decode()
    assert len(bomb) < LONGEST
    with refusals.refused(PlanFileError, "67,108,864"):
        carried_graph(bomb)


def test_no_list_of_2_to_the_40_tensors_is_made(folder: Path) -> None:
    content = _content(str(load_plan("plan").model.graph))
    content["types"] |= {"big": [[2**40], "float32", True], "piece": [[1], "float32", True]}
    content["inputs"].append("big")
    cut = {"name": "cut", "op": "aten.unbind.int", "keywords": [], "results": ["piece"], "module": ""}
    content["operators"].insert(0, {**cut, "arguments": [{"value": "big"}]})
    with refusals.refused(PlanFileError, "aten.unbind.int", 1):
        carried_graph(_packed(content))


FALSIFIED = {
    "batch": lambda model: model.update(batch=model["batch"] + 2),
    "sequence_length": lambda model: model.update(sequence_length=(model["sequence_length"] or 0) + 8),
    "parameters": lambda model: model.update(parameters=model["parameters"] + 1),
    "fingerprint": lambda model: model.update(fingerprint="sha256:" + "0" * 64),
    "outline.inputs": lambda model: model["outline"].update(
        inputs=dict.fromkeys(model["outline"]["inputs"], "int64 8x9")
    ),
    "inputs of the outline renamed": lambda model: model["outline"].update(
        inputs={f"{name}_": text for name, text in model["outline"]["inputs"].items()}
    ),
    "an input of the outline is gone": lambda model: model["outline"].update(inputs={}),
    "outline.parameters": lambda model: model["outline"]["parameters"].popitem(),
    "a parameter of the outline": lambda model: model["outline"]["parameters"].update(
        {next(iter(model["outline"]["parameters"])): "int8 1"}
    ),
    "outline.operators": lambda model: model["outline"].update(operators="ffff" + model["outline"]["operators"][4:]),
    "fewer outline.operators": lambda model: model["outline"].update(operators=""),
    "graph": lambda model: model.update(graph=_other_graph(model)),
}


def _other_graph(model: dict[str, Any]) -> str:
    """A good graph, but of another model."""
    from planner.cli.tracing import traced
    from planner.models.zoo import build_model

    built = build_model("gpt-tiny", dtype="float32")
    return str(graph_text(traced(built), batch=built.batch, sequence_length=model["sequence_length"]))


@pytest.mark.cases(12, 6)
@pytest.mark.parametrize("field", FALSIFIED)
@pytest.mark.parametrize(
    "given", [(), pytest.param(("--model", "trap:net"), marks=pytest.mark.thorough)], ids=["carried", "given"]
)
def test_nothing_false_about_the_model_verifies(folder: Path, field: str, given: tuple[str, ...]) -> None:
    edited(lambda content: FALSIFIED[field](content["model"]))
    outcome = plan("verify", "plan", *given)
    assert outcome.code in (1, 2), outcome
    word = next(word for word in (*MODEL_FIELDS, "fingerprint") if word in field)
    assert word in outcome.out + outcome.err


_QUICK = ("batch", "outline.inputs", "graph")
"""Fields that are falsified here in any case, and the one that a model of the zoo has not."""

MODEL_FIELDS = ("batch", "sequence_length", "parameters", "inputs", "input", "operators", "graph", "parameter")


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize(
    "field",
    [
        "batch",
        "outline.inputs",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in FALSIFIED if one not in _QUICK),
    ],
)
def test_nothing_false_about_a_model_of_the_zoo_verifies(zoo: Path, field: str) -> None:
    edited(lambda content: FALSIFIED[field](content["model"]))
    outcome = plan("verify", "plan")
    assert outcome.code in (1, 2), outcome


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    options = ("--hardware", "cpu", "--devices", "2", "--global-batch", "8", "--seq-len", "16", "-o", "plan")
    assert plan("--model", "gpt-tiny", *options).code == 0
    assert plan("verify", "plan").code == 0
    assert "graph" not in json.loads(Path("plan").read_text())["model"]
    return tmp_path


def test_a_plan_reads_back_with_its_graph(folder: Path) -> None:
    found = load_plan("plan")
    save_plan(found, "again")
    assert load_plan("again") == found
    assert Path("again").read_text() == Path("plan").read_text()
