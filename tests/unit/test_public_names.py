"""The public face: names and signatures are pinned, arguments of other types are refused by name, results are short."""

import ast
import inspect
import pickle
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import planner
import runtime
from planner.api.search_options import USUAL, SearchOptions
from planner.cli.options import Options
from planner.errors import LimitError, RequestError
from planner.strategy_search.result import Progress
from tests.refusals import refused

TRACED = "llama-tiny"

NAMES = [
    "Pinned", "Plan", "PlannerError", "Progress", "SearchResult", "StackedSamples", "TracedModel", "Update", "advise",
    "audit", "calibrate", "capacity", "compare", "compare_measured", "diff", "discover", "estimate", "explain",
    "export", "fit", "import_plan", "load", "load_plan", "pareto", "prove", "replan", "report", "save", "save_plan",
    "search", "shard", "trace", "validate", "verify",
]  # fmt: skip

SIGNATURES = {
    "advise": "path hardware='h100-80gb' *engine=None *model=None *devices=None *seq_len=None *cluster=None"
    " *software=None *recipe='' *time_limit=None *on_progress=None *cancelled=None",
    "audit": "plan *model=None",
    "calibrate": "path *times=None *nproc=None *measurements=None *quick=False *on_progress=None",
    "capacity": "model hardware='h100-80gb' *days *tokens *price=None *failures=0.0 *checkpoint_seconds=0.0"
    " *restart_seconds=0.0 *most=65536 *on_case=None *on_progress=None *cancelled=None **SearchOptions",
    "compare": "model hardware='h100-80gb' *devices *software='pytorch' *tokens=None *price=None *failures=0.0"
    " *checkpoint_seconds=0.0 *restart_seconds=0.0 *on_case=None *on_progress=None *cancelled=None **SearchOptions",
    "compare_measured": "plan record=None *log=None *engine=None *trace=None *clock='wall' *model=None *hardware=None",
    "diff": "first second *model=None *on_progress=None *cancelled=None",
    "estimate": "model hardware=None *devices=None *software=None *on_progress=None *cancelled=None **SearchOptions",
    "explain": "plan *model=None *search=True *time_limit=120.0 *on_progress=None *cancelled=None",
    "export": "plan engine folder=None *nearest=False *tolerance=0.01 *model=None",
    "fit": "runs path *hardware=None *clock='wall'",
    "import_plan": "path hardware='h100-80gb' *engine=None *model=None *devices=None *seq_len=None *cluster=None"
    " *software=None *recipe='' *global_batch=None *micro_batches=None",
    "load": "path",
    "pareto": "model hardware='h100-80gb' *against='memory' *devices=None *software=None *on_progress=None"
    " *cancelled=None **JobOptions",
    "prove": "plan *model=None *hardware=None *small=None *processes=16 *on_phase=None",
    "replan": "plan hardware *cluster=None *model=None *time_limit=None *on_progress=None *cancelled=None",
    "report": "plan path *model=None",
    "save": "plan path",
    "search": "model hardware='h100-80gb' *devices=None *software=None *on_progress=None *cancelled=None"
    " **SearchOptions",
    "trace": "model *seq_len=None *precision='bf16' *args=() *kwargs=None *batch=None *rule_cache=None"
    " *graph_cache=None",
    "validate": "path *where=None *processes=1",
    "verify": "plan *model=None *hardware=None",
}


OPTIONS = (
    "*cluster=None *engine=None *seq_len=None *global_batch=None *imbalance=1.0 *tokens_once=None *precision=None"
    " *fp8=None *fp8_layers=() *fp8_left_out=() *fp8_gathered=False *fp8_experts=False *fp8_dispatch=False"
    " *fp8_history=None *fp8_margin=None *optimizer='adamw' *pinned=None *shard=() *default='search' *place=None"
    " *pad=None *per_replica=() *update=None *search='dynamic_programming' *forward_only=False *alltoall=True"
    " *time_limit=None *memory_limit=None *memory_margin=None *planner_memory=None *certify=False *rule_cache=None"
    " *graph_cache=None *args=() *kwargs=None *batch=None"
)
SHORT = {f"{OPTIONS} *objective='time' *top=1 *simplicity=0.01": "**SearchOptions", OPTIONS: "**JobOptions"}


def said(function: Any) -> str:
    """A signature in a line; * before those that are given by name, and the options of searches in a word."""
    words = []
    for name, one in inspect.signature(function).parameters.items():
        stars = {one.KEYWORD_ONLY: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        words.append(f"{stars}{name}" + ("" if one.default is one.empty else f"={one.default!r}"))
    whole = " ".join(words)
    for options, word in SHORT.items():
        whole = whole.replace(options, word)
    return whole


def test_public_names_and_signatures_stay() -> None:
    assert list(planner.__all__) == NAMES
    assert {name: said(getattr(planner, name)) for name in SIGNATURES} == SIGNATURES
    for name in SIGNATURES:
        function = inspect.unwrap(getattr(planner, name))
        assert inspect.signature(function).return_annotation is not inspect.Signature.empty, name


def test_search_has_the_names_of_the_command() -> None:
    own = {"model", "args", "kwargs", "batch", "pinned", "update", "on_progress", "cancelled"}
    wanted = set(inspect.signature(planner.search).parameters) - own
    assert wanted <= set(Options.__dataclass_fields__)


def test_options_have_a_usual_value_and_a_sentence() -> None:
    assert list(USUAL) == list(SearchOptions.__annotations__)
    for name in USUAL:
        assert re.search(rf"^    (\w+, )*{name}(, \w+)*:", inspect.getdoc(planner.search) or "", re.MULTILINE), name


def test_folders_of_modules_that_share_a_name_can_be_called() -> None:
    import planner.export.targets
    import planner.report.units

    assert planner.report.units.seconds_text(2) == "2 s"  # type: ignore[attr-defined]
    assert said(planner.report) == SIGNATURES["report"]
    with refused(RequestError, "plan", "int"):
        planner.report(3, "page.html")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def traced() -> planner.TracedModel:
    return planner.trace(TRACED, precision="fp32")


@pytest.fixture(scope="module")
def result(traced: planner.TracedModel) -> planner.SearchResult:
    return planner.search(traced, "cpu", devices=2, pinned={"tensor": 2, "micro_batches": 1}, update={"clip_norm": 1})


def test_decisions_may_be_dicts(result: planner.SearchResult) -> None:
    assert result.plan.training.update.clip_norm == 1
    assert result.plans[0].configuration is not None
    assert result.to_rows()[0]["degrees"] == "tensor 2"


def test_what_is_of_another_type_is_named(traced: planner.TracedModel) -> None:
    for words, facts in (
        ({"pinned": {"tensr": 4}}, ("tensr", "tensor")),
        ({"pinned": {"tensor": "4"}}, ("tensor", "4")),
        ({"pinned": 4}, ("pinned", "int")),
        ({"update": {"clip_norm": "1"}}, ("clip_norm", "1")),
        ({"devices": "2"}, ("devices", "2")),
        ({"devices": True}, ("devices", "True")),
        ({"seq_len": 0}, ("seq_len", 0)),
        ({"objective": "speed"}, ("objective", "speed")),
        ({"shard": "b,o"}, ("shard",)),
        ({"place": "hosts"}, ("place", "hosts")),
        ({"tensor": 2}, ("tensor", "pinned={'tensor': 2}")),
        ({"clip_norm": 1.0}, ("clip_norm", "update={'clip_norm': 1.0}")),
        ({"sequence_length": 8}, ("sequence_length", "seq_len")),
        ({"device": 2}, ("device", "devices")),
        ({"hardware": "h1oo"}, ("h1oo",)),
        ({"software": "pytorh"}, ("pytorh",)),
        ({"cluster": 3}, ("cluster", "int")),
        ({"on_progress": 3}, ("on_progress", "int")),
        ({"cancelled": True}, ("cancelled", "bool")),
        ({"hardware": 3}, ("hardware", "int")),
        ({"memory_limit": "64GiB"}, ("memory_limit", "64GiB")),
    ):
        with refused(RequestError, *facts):
            planner.search(traced, **{"hardware": "cpu", **words})  # type: ignore[arg-type]
    with refused(RequestError, "model", "int"):
        planner.search(3, "cpu")
    with refused(RequestError, "tensor", "pinned={'tensor': 2}"):
        planner.compare(traced, "cpu", devices=2, tensor=2)
    with refused(RequestError, "seq_ln", "seq_len"):
        planner.capacity("llama-tiny", days=1, tokens=1e9, seq_ln=64)  # type: ignore[call-arg]
    with refused(RequestError, "pareto", "top"):
        planner.pareto(traced, "cpu", top=2)  # type: ignore[call-arg]
    with refused(RequestError, "against", "speed", "memory"):
        planner.pareto(traced, "cpu", against="speed")  # type: ignore[arg-type]
    with refused(RequestError, "devices=..."):
        planner.compare(traced, "cpu")  # type: ignore[call-arg]
    with refused(RequestError, "path", "int"):
        planner.advise(3)  # type: ignore[arg-type]


def test_results_are_short_and_travel(result: planner.SearchResult, tmp_path: Path) -> None:
    for one in (result, result.plan, result.bound, result.plans[0], result.bound.graph):
        assert len(repr(one)) < 200, repr(one)
    assert pickle.loads(pickle.dumps(result)).plan == result.plan
    assert "<table>" in result._repr_html_()
    assert "llama-tiny" in result.plan._repr_html_()
    path = planner.save(result.plan, tmp_path / "plan.json")
    assert planner.load(path) == result.plan
    with refused(RequestError, "Plan", "SearchResult"):
        planner.save(result, tmp_path / "other.json")  # type: ignore[arg-type]


@pytest.mark.slow
def test_plans_are_priced_compared_and_exported(result: planner.SearchResult, traced: planner.TracedModel) -> None:
    there = planner.estimate(result.plan, "h100", devices=2)
    assert there.cluster.profile == "h100-80gb"
    assert there.prediction.step_seconds < result.plan.prediction.step_seconds
    by_hand = planner.estimate(traced, "cpu", devices=2)
    assert by_hand.pipeline == 1
    found = planner.diff(result.plan, by_hand)
    assert sum(float(str(row["difference_seconds"])) for row in found.to_rows()) == pytest.approx(found.seconds)
    assert "<table>" in found._repr_html_()
    with refused(RequestError, "pinned"):
        planner.estimate(result.plan, pinned={"tensor": 2})


@pytest.mark.slow
def test_an_estimate_fills_in_what_the_command_does(traced: planner.TracedModel) -> None:
    update = {"zero_by": "parameters", "buckets": {"*mlp*": 1}}
    owned = planner.estimate(traced, "cpu", devices=2, update=update).training.update
    assert (owned.zero_by, owned.buckets) == ("parameters", (("*mlp*", 1),))
    assert planner.estimate(traced, "h100-80gb:1,a100-80gb:1").pipeline == 2
    compared, searched = ("objective", "cost", "estimate prices one"), ("engine", "megatron", "needs a search")
    for asked, facts in (({"objective": "cost"}, compared), ({"engine": "megatron"}, searched)):
        with refused(RequestError, *facts, "use search"):
            planner.estimate(traced, "cpu", devices=2, **asked)
    with refused(RequestError, "local_parameters", 3, "a tuple of text"):
        planner.search(traced, "cpu", devices=2, update={"local_parameters": [3]})


def test_a_record_of_degrees_is_checked_like_a_dict_of_them(traced: planner.TracedModel) -> None:
    found = planner.search(traced, "cpu", devices=2, pinned=planner.Pinned(tensor=2, offload="none"))  # type: ignore[arg-type]
    assert found.plan.training.micro_batches
    with refused(RequestError, "pinned.tensor", "'2'", "a whole number"):
        planner.search(traced, "cpu", devices=2, pinned=planner.Pinned(tensor="2"))  # type: ignore[arg-type]


def test_progress_is_told_and_a_search_can_be_cancelled(traced: planner.TracedModel) -> None:
    heard: list[Progress] = []
    found = planner.search(
        traced, "cpu", devices=4, on_progress=heard.append, cancelled=lambda: any(one.done for one in heard)
    )
    assert found.statistics.stopped
    assert heard[-1].best_seconds >= heard[-1].bound_seconds
    with refused(LimitError, "stopped", "first plan"):  # which proves nothing of what fits
        planner.search(traced, "cpu", devices=4, cancelled=lambda: True)


@pytest.mark.parametrize("package", [planner, runtime])
def test_type_checkers_know_which_names_there_are(package: ModuleType) -> None:
    """A `__getattr__` that they see makes every name an Any: `planner.serach` would pass."""
    body = ast.parse(inspect.getsource(package)).body
    assert not [one.name for one in body if isinstance(one, ast.FunctionDef) and one.name == "__getattr__"]
    with pytest.raises(AttributeError, match="serach"):
        _ = package.serach
