"""Traced graphs on disk: what comes back is what was traced, and nothing else is ever taken."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hardware_profiles import load_profile
from planner.cli.graph_folder import VARIABLE, graph_folder, is_kept, rule_folder
from planner.cli.options import Options
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import BuiltModel, build_model
from planner.plan import graph_cache
from planner.plan.carried import Carried
from planner.plan.graph_cache import GraphKey, graph_key, graph_path, keep_graph, read_graph
from planner.plan.plan import PRECISIONS
from planner.strategy_search.job import Job, named_job
from tests.distributed.language import CONFIGS
from tests.refusals import refused

MODEL = "llama-tiny"


@pytest.fixture(scope="module")
def traced() -> Carried:
    built = build_model(MODEL, dtype=PRECISIONS["fp32"])
    graph = trace(built.module, built.args, built.kwargs)
    return Carried(graph=graph, batch=built.batch, sequence_length=built.sequence_length)


@pytest.fixture
def key() -> GraphKey:
    found = graph_key(MODEL, dtype=PRECISIONS["fp32"], sequence_length=None)
    assert found is not None
    return found


@pytest.fixture
def kept(tmp_path: Path, key: GraphKey, traced: Carried) -> Path:
    """The file of the traced graph, in a folder of its own."""
    folder = tmp_path / "graphs"
    assert keep_graph(folder, key, traced) == ""
    assert read_graph(folder, key) is not None
    return graph_path(folder, key)


def test_a_graph_with_functions_of_the_models_own_code_is_not_kept(
    tmp_path: Path, key: GraphKey, traced: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has not traced the model does not know them."""
    first, *others = traced.graph.operators
    graph = replace(traced.graph, operators=(replace(first, op="own.models_GeLU.v3e69d1e7"), *others))
    own = replace(traced, graph=graph)
    assert "own.models_GeLU.v3e69d1e7" in keep_graph(tmp_path, key, own)
    assert not graph_path(tmp_path, key).exists()
    with monkeypatch.context() as before:
        before.setattr(graph_cache, "_of_the_model", lambda _: "")  # a file from when they were kept
        assert keep_graph(tmp_path, key, own) == ""
        assert read_graph(tmp_path, key) is not None
    assert read_graph(tmp_path, key) is None


def test_what_is_kept_comes_back_equal(kept: Path, key: GraphKey, traced: Carried) -> None:
    found = read_graph(kept.parent, key)
    assert found == traced
    assert found.graph.fingerprint() == traced.graph.fingerprint()
    assert {name: t.contiguous for name, t in found.graph.types.items()} == {
        name: t.contiguous for name, t in traced.graph.types.items()
    }


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\x00\xff", b"[]", b'{"schema_version": 1, "key": {}, "graph": "AAAA"}'],
    ids=["empty", "cut off", "binary", "another form", "without a graph"],
)
def test_a_broken_file_is_as_none_and_is_written_over(
    kept: Path, key: GraphKey, traced: Carried, content: bytes
) -> None:
    kept.write_bytes(content)
    assert read_graph(kept.parent, key) is None
    assert keep_graph(kept.parent, key, traced) == ""
    assert read_graph(kept.parent, key) == traced


@pytest.mark.parametrize("change", ["cut", "flipped"])
def test_a_graph_that_was_damaged_is_not_taken(kept: Path, key: GraphKey, change: str) -> None:
    content = json.loads(kept.read_text())
    text = content["graph"]
    middle = len(text) // 2
    content["graph"] = text[:middle] + ("" if change == "cut" else text[middle + 4 :])
    kept.write_text(json.dumps(content))
    assert read_graph(kept.parent, key) is None


@pytest.mark.parametrize("part", ["reference", "dtype", "sequence_length", "sources", "torch", "python"])
def test_every_part_of_the_key_counts(kept: Path, key: GraphKey, part: str) -> None:
    other = {**key, part: "another"}
    assert read_graph(kept.parent, other) is None
    kept.rename(graph_path(kept.parent, other))  # put under its name by somebody
    assert read_graph(kept.parent, other) is None


def test_a_changed_source_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("graph", "models"):
        (tmp_path / place).mkdir()
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "carried.py").write_text("")
    source = tmp_path / "models" / "llama.py"
    source.write_text("width = 1")
    monkeypatch.setattr(graph_cache, "__file__", str(tmp_path / "plan" / "graph_cache.py"))
    before = graph_key(MODEL, dtype="float32", sequence_length=None)
    source.write_text("width = 2")
    assert graph_key(MODEL, dtype="float32", sequence_length=None) != before


def test_a_folder_of_others_is_not_used(kept: Path, key: GraphKey, traced: Carried) -> None:
    kept.parent.chmod(0o777)
    assert read_graph(kept.parent, key) is None
    assert "chmod 700" in keep_graph(kept.parent, key, traced)


def test_a_link_is_not_followed(kept: Path, key: GraphKey) -> None:
    aside = kept.rename(kept.parent / "aside.json")
    kept.symlink_to(aside)
    assert read_graph(kept.parent, key) is None


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, key: GraphKey, traced: Carried) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/graphs")):  # root may write into a read-only folder
        assert str(folder) in keep_graph(folder, key, traced)
        assert read_graph(folder, key) is None


def test_what_was_used_least_lately_goes(
    kept: Path, key: GraphKey, traced: Carried, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [{**key, "reference": f"other-{number}"} for number in range(3)]
    for number, other in enumerate(others):
        assert keep_graph(kept.parent, other, traced) == ""
        os.utime(graph_path(kept.parent, other), (number, number))
    monkeypatch.setattr(graph_cache, "MOST", int(2.5 * kept.stat().st_size))
    left = kept.parent / f".{kept.name}.left"
    left.write_text("")
    os.utime(left, (0, 0))
    assert keep_graph(kept.parent, key, traced) == ""
    assert sorted(kept.parent.iterdir()) == sorted([kept, graph_path(kept.parent, others[2])])


def test_constants_of_code_are_not_kept(tmp_path: Path, key: GraphKey, traced: Carried) -> None:
    graph = replace(traced.graph, constants={"mask": object()})
    assert keep_graph(tmp_path / "graphs", key, replace(traced, graph=graph))
    assert not (tmp_path / "graphs").exists()


_PLAN = """
import sys
from planner.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_plan_is_the_same_with_a_kept_graph_and_without_pytorch(tmp_path: Path) -> None:
    def planned() -> tuple[str, bool]:
        plan = tmp_path / "plan.json"
        words = ["--model", MODEL, "--devices", "2", "--hardware", "cpu", "-q", "-o", str(plan)]
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", _PLAN, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return plan.read_text(), done.stdout.strip() == "True"

    first, loaded = planned()
    assert loaded
    assert len(list((tmp_path / ".cache" / "parallel-planner" / "graphs").iterdir())) == 1
    assert planned() == (first, False)


def test_where_graphs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert graph_folder(Options()) == tmp_path / "parallel-planner" / "graphs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says that it is to be ignored
    assert graph_folder(Options()) == Path("~/.cache/parallel-planner/graphs").expanduser()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert graph_folder(Options()) == tmp_path / "mine"
    assert graph_folder(Options(graph_cache="none")) is None
    assert graph_folder(Options(full_trace=True)) is None
    monkeypatch.setenv(VARIABLE, "none")
    assert graph_folder(Options()) is None
    assert graph_folder(Options(graph_cache=str(tmp_path))) == tmp_path


@pytest.mark.parametrize(("option", "folder"), [("graph_cache", graph_folder), ("rule_cache", rule_folder)])
def test_a_file_is_refused_as_a_folder(tmp_path: Path, option: str, folder: Callable[[Options], Path | None]) -> None:
    """Nothing would be kept, without a word."""
    file = tmp_path / "rules.json"
    file.write_text("{}")
    with refused(RequestError, f"--{option.replace('_', '-')} {file}", "name a folder"):
        folder(Options(**{option: str(file)}))  # type: ignore[arg-type]


def test_of_the_graph_of_a_plan_file_nothing_is_known(tmp_path: Path) -> None:
    """`plan compare FILE --engines` has no --model."""
    assert not is_kept(Options(graph_cache=str(tmp_path)))


@pytest.mark.thorough
def test_the_graph_of_a_config_is_kept_by_what_the_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: with a link, as in a cache of downloads. What the second trace has found is kept with it."""
    config = json.loads((CONFIGS / "llama" / "config.json").read_text())
    content = json.dumps({**config, "num_hidden_layers": 1})
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    (here / "config.json").write_text(content)
    (there / "config.json").symlink_to(here / "config.json")
    traces = []

    def job(reference: str) -> Job:
        def traced(model: BuiltModel) -> OperatorGraph:
            traces.append(reference)
            return trace(model.module, model.args, model.kwargs)

        return named_job(reference, load_profile("cpu").with_devices(2), traced, graph_cache=tmp_path / "graphs")

    first = job(str(here))
    assert len(traces) == 2  # at two batches
    again = job(str(there))
    assert len(traces) == 2
    assert again.graph.fingerprint() == first.graph.fingerprint()
    assert (again.batch, again.only_batch) == (first.batch, first.only_batch) == (first.batch, None)
    changed = job(f"{here}+num_hidden_layers=2")
    assert len(traces) == 4
    assert changed.graph.fingerprint() != first.graph.fingerprint()
    (here / "config.json").write_text(content.replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    assert job(str(there)).graph.fingerprint() != first.graph.fingerprint()
    monkeypatch.setattr(graph_cache, "_state_of", lambda package: "another version")
    job(str(there))
    assert len(traces) == 8


def test_why_a_model_has_one_batch_is_kept(kept: Path, key: GraphKey, traced: Carried) -> None:
    alone = replace(traced, only_batch="it multiplies by the number of samples")
    assert keep_graph(kept.parent, key, alone) == ""
    assert read_graph(kept.parent, key) == alone


def test_what_a_factory_makes_has_no_key() -> None:
    assert graph_key("package.module:factory", dtype="float32", sequence_length=None) is None
