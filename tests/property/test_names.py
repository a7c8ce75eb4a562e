"""Names of modules, parameters and buffers are data: whatever PyTorch takes goes from the trace through the plan file,
a step, a checkpoint and its merged and converted forms, and comes back as it was."""

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import planner
import runtime
from hardware_profiles import load_machine
from planner.errors import ModelError
from planner.export.mindspore.mindspore import MINDSPORE
from planner.graph.trace import trace
from planner.matching import matches, module_and_call
from planner.plan.binding.bind import bind
from planner.plan.file import dump_plan, parse_plan
from runtime.checkpoint.offline import convert, merge
from runtime.checkpoint.source import open_checkpoint
from runtime.checkpoint.state_names import file_key, kept_name, name_of_key, own_name, read_name, saved_name
from tests.refusals import refused

STRANGE = (
    "en/de", "/abs", "optimizer/exp_avg/x", "previous/x", "quoted/x", "w@3", "__metadata__", "#", "a#1", "%s", "%2F",
    "x" * 300, "\N{GRINNING FACE}", "a b", "'", '"', "*", "[a]", "?", "\u00e9", "e\u0301", "A", "a", "~", "{}", "$HOME",
    "-rf", "a:b", "a=b", "\\", "0", "add", "tanh", "x", "linear", "\N{ONE DOT LEADER}\N{ONE DOT LEADER}",
)  # fmt: skip
WIDTH, BATCH = 4, 2


def _is_taken(name: str) -> bool:
    """Whether PyTorch takes it for a module, and a plan for its name."""
    return "." not in name and name.isprintable() and not any(hasattr(kind(), name) for kind in KINDS)


KINDS = (nn.Module, nn.ModuleDict, nn.ParameterDict)
NAMES = st.text(min_size=1, max_size=12).filter(_is_taken)


class Named(nn.Module):
    """A module, a parameter and a buffer of each name, at the root and below."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in names})
        self.scales = nn.ParameterDict({name: nn.Parameter(torch.rand(WIDTH)) for name in names})
        self.own = [name for name in names if not hasattr(self, name)]
        for name in self.own[::2]:
            self.register_parameter(name, nn.Parameter(torch.rand(WIDTH)))
        for name in self.own[1::2]:
            self.register_buffer(name, torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, linear in self.inner.items():
            x = torch.tanh(linear(x)) * self.scales[name]
        for name in self.own:
            x = x + getattr(self, name)
        return x.mean()


def _goes_around(names: tuple[str, ...], folder: Path) -> None:
    torch.manual_seed(0)
    module, x = Named(names), torch.randn(BATCH, WIDTH)
    wanted = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    cluster = load_machine("cpu").with_devices(1)
    plan = planner.search(module, cluster, args=(x,), global_batch=BATCH, precision="fp32").plan
    assert parse_plan(dump_plan(plan)) == plan
    step = runtime.parallelize(module, plan, example=(x,))
    assert set(step.full_parameters()) == set(dict(module.named_parameters()))
    step(x)
    runtime.Checkpoints(folder / "run", asynchronous=False).save(step)

    other = runtime.parallelize(Named(names), plan, example=(x,))
    runtime.Checkpoints(folder / "run").restore(other)
    trained = {name: tensor.clone() for name, tensor in step.full_parameters().items()}
    assert all(torch.equal(tensor, trained[name]) for name, tensor in other.full_parameters().items())
    assert other(x) == step(x)

    source = open_checkpoint(folder / "run")
    bound = bind(plan, trace(module, (x,)), BATCH)
    homes = {name: (0,) for name, _ in module.named_buffers()}
    convert(source, source.manifest, bound, homes, folder / "converted")
    again = open_checkpoint(folder / "converted")
    assert set(again.tensors) == set(source.tensors)
    assert all(torch.equal(again.read(name), source.read(name)) for name in source.tensors)
    merge(source, source.manifest, folder / "merged", shard=200)
    files = [load_file(path) for path in (folder / "merged").glob("*.safetensors")]
    found = {key: tensor for file in files for key, tensor in file.items()}
    assert {read_name(name_of_key(key)).tensor for key in found} == set(wanted)
    whole = open_checkpoint(folder / "merged")
    assert all(torch.equal(whole.read(saved_name(name)), tensor) for name, tensor in trained.items())
    if len(names) == 1 and names[0] != "__metadata__":
        module.load_state_dict(found)
    assert MINDSPORE.write(bound)


@pytest.mark.thorough
@pytest.mark.slow
def test_strange_names_go_around(tmp_path: Path) -> None:
    _goes_around((*STRANGE[:6], "x" * 300, "[a]", "add", "x"), tmp_path)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_name_goes_around(name: str, tmp_path: Path) -> None:
    _goes_around((name,), tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_any_names_go_around(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    _goes_around(tuple(names), tmp_path_factory.mktemp("names"))


@settings(max_examples=300)
@given(name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), place=st.integers(0, 99))
@example(name="optimizer/exp_avg/w", place=1)
@example(name="__metadata__", place=1)
@example(name="w@1", place=2)
@example(name="quoted/w", place=2)
@example(name="quoted/__metadata__", place=2)
def test_a_name_in_a_checkpoint_says_one_thing(name: str, place: int) -> None:
    saved = saved_name(name)
    said = {
        saved: (name, None, None),
        own_name(saved, place): (name, place, None),
        kept_name("exp_avg", saved): (name, None, "exp_avg"),
        kept_name("exp_avg", own_name(saved, place)): (name, place, "exp_avg"),
    }
    assert {one: (k.tensor, k.place, k.kind) for one in said if (k := read_name(one))} == said
    assert name_of_key(file_key(saved)) == saved
    assert file_key(name_of_key(name)) == name or name.endswith("__metadata__")
    assert file_key(saved) != "__metadata__"
    assert matches(name, name)


def test_names_of_old_checkpoints_are_read_as_they_were() -> None:
    for name in ("model.layers.0.weight", "own.weight", "en_de"):
        assert saved_name(name) == name
        assert file_key(name) == name_of_key(name) == name


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31m", "\u202eb"])
def test_a_name_that_cannot_be_shown_is_refused_by_planning(name: str) -> None:
    module = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH)})
    with refused(ModelError, ascii(f"{name}.weight")):
        trace(module, (torch.zeros(BATCH, WIDTH),))


def test_operators_are_told_from_parameters_whatever_modules_are_called() -> None:
    assert module_and_call("layers.en/de/linear_2") == ("layers.en/de", "linear_2")
    assert module_and_call("layers.en/de.weight") == ("layers.en/de.weight", "")
    assert module_and_call("linear") == ("", "linear")
    assert matches("layers.[a]/linear", "layers.[a]/linear")
    assert matches("layers.[a]/linear", "layers.[[]a]/*")
