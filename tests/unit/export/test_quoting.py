"""Text out of a plan is text in every file that is made of it, whatever it is."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import Tensor, nn, randn

from hardware_profiles import load_profile
from planner.api.carrying import Subject, plan_of
from planner.errors import ModelError, PlanFileError
from planner.export.architecture import architecture_of
from planner.export.description import Description
from planner.export.files.arguments import lines_of, option
from planner.export.files.quoting import in_docstring, in_markdown, one_line
from planner.export.launching import folder_files
from planner.export.target import Job
from planner.export.targets import OPERATOR_TARGETS, TARGETS
from planner.graph.trace import trace
from planner.models.overrides import canonical_reference, changed_reference, split_reference
from planner.plan.file import load_plan, save_plan
from planner.plan.outline import model_reference
from tests.refusals import refused
from tests.unit.export.descriptions import job_of

MARK = "HOSTILE"
HOSTILE = (
    f'{MARK}""";__import__("os").system("touch PWNED");"""',
    f"{MARK}';__import__('os').system('touch PWNED');'",
    f"{MARK}\n__import__('os').system('touch PWNED')\n",
    f"{MARK}\rtouch PWNED\r",
    f"{MARK}\u2028touch PWNED\x85\x0b\x0c",
    f"{MARK}\\",
    f'{MARK}\\"""+f()+"""',
    f"{MARK}$(touch PWNED) `touch PWNED` ${{PWNED}}; touch PWNED & exit",
    f"{MARK}\nMODEL=x bash -c 'touch PWNED'\n#",
    f'{MARK}"\n[training]\nseq_len = 1\n',
    f"{MARK}: [1, 2]\n- *a\n? !!python/object:os.system {{}}\n---\n",
    f"@SETTINGS@ @DIMENSIONS@ @LAUNCH@ {{0}} %s {MARK}",
    f"{MARK}\x1b]0;title\x07\x7f\u202e\ud800é漢🙂",
    f"{MARK}](javascript:x) <script>x</script> ![x](y) | `",
)
PLAIN = Description(layers=(80,), data=16, zero=2, full=(80,), selective=(0,), sequence_length=8192)


def files_of(engine: str, model: str, architecture: bool = True) -> Mapping[str, str]:
    target = TARGETS[engine]
    losses = target.nearest(PLAIN)
    job = replace(job_of(losses[-1].description if losses else PLAIN, "llama70b"), model=model)
    return folder_files(target, job if architecture else replace(job, architecture=None))


def _without_docstring(text: str) -> str:
    tree = ast.parse(text)
    compile(text, "file", "exec")
    first = tree.body[0]
    assert isinstance(first, ast.Expr)
    assert isinstance(first.value, ast.Constant)
    assert MARK in first.value.value or "benign" in first.value.value
    return ast.dump(ast.Module(body=tree.body[1:], type_ignores=[]))


def _without_comments(text: str) -> tuple[list[str], list[str]]:
    """What a shell executes: words, and lines that are no comment."""
    lines = [line for line in text.split("\n") if not line.startswith("#")]
    return shlex.split(text, comments=True), lines


def _sections(text: str) -> dict[str, Any]:
    found = tomllib.loads(text)
    found["job"]["description"] = None
    return found


def _script_without_name(text: str) -> str:
    """All but the comment, and the name, which is one that Slurm takes."""
    return re.sub(r"plan-[a-z0-9-]+\n", "plan\n", "\n".join(text.split("\n")[2:]))


def _manifest(text: str) -> object:
    """All but the name, which is one that Kubernetes takes."""
    return yaml.safe_load(re.sub(r"plan-[a-z0-9]+(-[a-z0-9]+)*", "plan", text))


def _below_its_title(text: str) -> list[str]:
    return re.sub(r"configmap plan-[a-z0-9-]+", "configmap plan", text).split("\n")[1:]


DATA: Mapping[str, Any] = {
    ".py": _without_docstring, ".sh": _without_comments, ".toml": _sections, ".yaml": _manifest,
    ".json": json.loads, ".md": _below_its_title, ".sbatch": _script_without_name,
}  # fmt: skip
"""What of a file is more than free text."""


@pytest.mark.cases(24)
@pytest.mark.parametrize("hostile", HOSTILE, ids=ascii)
@pytest.mark.parametrize("engine", TARGETS)
def test_the_name_of_a_model_is_text_in_every_file(engine: str, hostile: str) -> None:
    kinds = (True, False) if engine in ("megatron", "mindspeed", "mindformers", "torchtitan", "deepspeed") else (True,)
    for architecture in kinds:
        benign, files = files_of(engine, "benign", architecture), files_of(engine, hostile, architecture)
        assert files.keys() == benign.keys()
        for name, text in files.items():
            read = DATA[Path(name).suffix]
            assert read(text) == read(benign[name]), name
            assert text.count("\n") == benign[name].count("\n"), name
            assert all(c.isprintable() or c == "\n" for c in text), name


def test_values_of_options_are_words_to_a_shell() -> None:
    assert [shlex.split(line) for line in lines_of([option("name", *HOSTILE)])] == [["--name", *HOSTILE]]


def test_a_name_reads_back_in_one_line() -> None:
    for hostile in HOSTILE:
        description = tomllib.loads(files_of("torchtitan", hostile)["train.toml"])["job"]["description"]
        assert description == one_line(hostile) + " on 16 devices"
        text = f'"""{in_docstring(hostile)}"""'
        assert ast.literal_eval(text) == one_line(hostile)


class Net(nn.Module):
    """A product whose weight has a name of somebody's."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        (layer,) = self.children()
        found: Tensor = layer(x).square().mean()
        return found


@pytest.mark.parametrize("hostile", [one for one in HOSTILE if "." not in one and one.isprintable()], ids=ascii)
def test_names_of_operators_and_parameters_are_text_for_mindspore(hostile: str) -> None:
    args = (randn(8, 16, device="meta"),)
    graph = trace(Net(hostile).to("meta"), args)
    reference = model_reference(graph, name="a:b", sequence_length=None, batch=8)
    machine = Subject(model=reference, graph=graph, batch=8, cluster=load_profile("cpu").with_devices(2))
    bound = plan_of(machine, Description(layers=(0,), data=2, full=(0,), selective=(0,), precision="fp32"))
    update = replace(bound.plan.training.update, placed=((hostile, "servers"),))
    hostiles = {"model": replace(reference, reference=hostile), "training": replace(bound.plan.training, update=update)}
    files = OPERATOR_TARGETS["mindspore"].write(replace(bound, plan=replace(bound.plan, **hostiles)))
    content = json.loads(files["strategy.json"])
    assert f"{hostile}.weight" in content["parallel_layout_item"]
    assert f"MatMul_{hostile}.weight" in content["parallel_strategy_item"]
    lines = files["README.md"].splitlines()
    assert [line for line in lines if MARK in line] == [lines[0], f"- tables: {in_markdown(hostile)} on servers"]


TWICE = 'llama-tiny+num_layers=""";__import__("os").system("touch PWNED");"""+num_layers=4'


def with_reference(reference: str, folder: Path) -> Path:
    """A plan file that names another model."""
    bound = plan_of(_tiny(), Description(layers=(4,), full=(0,), selective=(0,), precision="fp32"))
    file = folder / "plan.json"
    save_plan(bound.plan, file)
    content = json.loads(file.read_text())
    content["model"]["reference"] = reference
    file.write_text(json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("reference", "facts"),
    [
        ("llama-tiny+num_layers=2+num_layers=4", ("num_layers", 2)),
        (TWICE, ("num_layers",)),
        ('llama-tiny+num_layers="""', ("num_layers",)),
    ],
)
def test_a_name_that_is_none_is_refused(reference: str, facts: tuple[object, ...], tmp_path: Path) -> None:
    file = with_reference(reference, tmp_path)
    with refused(PlanFileError, "model.reference", *facts):
        load_plan(file)


@pytest.mark.parametrize(
    ("reference", "written"),
    [
        ("llama-tiny+num_layers=4+hidden_size=512", "llama-tiny+hidden_size=512+num_layers=4"),
        ("resnet50+blocks=3,4,6,3", "resnet50+blocks=3x4x6x3"),
        ("llama-tiny+num_layers= 4", "llama-tiny+num_layers=4"),
    ],
)
def test_a_plan_has_names_as_we_write_them(reference: str, written: str, tmp_path: Path) -> None:
    assert load_plan(with_reference(reference, tmp_path)).model.reference == written


def _tiny() -> Subject:
    from tests.unit.export.descriptions import subject

    return subject("llama-tiny", "cpu", 1)


def test_a_reference_says_a_dimension_once() -> None:
    with pytest.raises(ModelError, match="num_layers stands 2 times"):
        split_reference("llama-tiny+num_layers=2+num_layers=4")
    with pytest.raises(ModelError):
        architecture_of(TWICE, None)
    assert changed_reference("llama-tiny", ("num_layers=2", "num_layers=4")) == "llama-tiny+num_layers=4"
    assert canonical_reference("llama-tiny+b=2, 3+a=x") == "llama-tiny+a=x+b=2x3"


def test_quoting_leaves_usual_names_as_they_are() -> None:
    name = "llama8b+hidden_size=512+num_layers=40"
    assert one_line(name) == in_docstring(name) == in_markdown(name) == name


def test_a_job_says_its_model_in_every_folder() -> None:
    job = Job(model="llama70b", description=PLAIN, architecture=architecture_of("llama70b", None), per_node=8)
    assert '"""llama70b on 16 devices' in TARGETS["torch"].write(job)["train.py"]
