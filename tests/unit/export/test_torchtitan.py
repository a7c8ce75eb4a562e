"""torchtitan after 0.2.2 is told the same as 0.2.2, in Python; what its older files say of fp8 is read from where they
say it."""

import ast
import importlib
from dataclasses import replace

import pytest

from planner.api import engine_best
from planner.engines.spaces import SPACES
from planner.export.architecture import architecture_of
from planner.export.description import Description, ExportError
from planner.export.pytorch.torchtitan_registry import FILE, LAUNCH
from planner.export.pytorch.torchtitan_writing import OPERATORS
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from planner.graph.fp8 import Fp8
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN
from tests.refusals import refused

TORCHTITAN = TARGETS["torchtitan"]
WIDE = replace(PLAIN, gradient_dtype="fp32")
ONE = Description(
    layers=(32,), data=8, zero=3, micro_batch=2, micro_batches=4, full=(0,), selective=(0,), sequence_length=8192,
    update=WIDE,
)  # fmt: skip
PIPED = replace(
    ONE, layers=(9, 8, 8, 7), data=2, tensor=2, zero=1, sequence_parallel=True, micro_batch=1, micro_batches=8,
    full=(9, 8, 8, 7), selective=(0,) * 4, update=PLAIN,
)  # fmt: skip
CASES = {
    "a pipeline": ("llama8b", PIPED),
    "copies, by operators": ("llama8b", replace(ONE, replicas=2, selective=(32,), kept=Kept(but=OPERATORS))),
    "experts": ("mixtral-8x7b", replace(ONE, expert=8, update=replace(WIDE, clip_norm=1.0))),
}


def written(model: str, d: Description) -> dict[str, str]:
    job = Job(model=model, description=d, architecture=architecture_of(model, 8192), per_node=8, overlapped=())
    return dict(TORCHTITAN.write(job))


def read_back(text: str, model: str, d: Description) -> Description:
    facts = Facts(layers=sum(d.layers), devices=d.devices, architecture=architecture_of(model, 8192))
    return TORCHTITAN.read(text, facts).description


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_in_python_says_what_the_toml_says(case: str) -> None:
    model, d = CASES[case]
    files = written(model, d)
    ast.parse(files[FILE])
    assert read_back(files["train.toml"], model, d) == d
    assert read_back(files[FILE], model, d) == d
    assert "--module plan_config --config plan_config" in files[LAUNCH]


@pytest.mark.parametrize(
    "changes",
    [{"fp8": Fp8(recipe="rowwise")}, {"full": (16,)}, {"expert": 2, "tensor": 2, "sequence_parallel": True}],
    ids=["fp8", "every second layer", "experts that are cut"],
)
def test_what_later_versions_have_no_setting_for_stays_with_the_toml(changes: dict[str, object]) -> None:
    d = replace(ONE, **changes)  # type: ignore[arg-type]  # of the types of the fields
    model = "mixtral-8x7b" if d.expert else "llama8b"
    assert written(model, d).keys() == {"train.toml", "launch.sh"}
    job = Job(model=model, description=d, architecture=architecture_of(model, 8192), per_node=8, overlapped=())
    assert "torchtitan 0.2.2, as later ones have no setting for" in TORCHTITAN.fill_in(job)[-1][1]


def test_a_configuration_of_the_registry_that_trains_in_fp8_is_taken_back_to_bf16() -> None:
    d = replace(ONE, layers=(126,), data=64, tensor=8, sequence_parallel=True, full=(126,))
    text = written("llama405b", d)[FILE]
    assert 'config.model_spec = model_registry("405B")' in text
    assert text.index("CompileConfig()") > text.index("model_registry(")
    assert read_back(text, "llama405b", d) == d
    assert "model_spec" not in written("llama8b", ONE)[FILE]


@pytest.mark.parametrize(("ring", "said"), [(1, False), (2, True)])
def test_contexts_are_gathered_in_later_versions(ring: int, said: bool) -> None:
    d = replace(ONE, data=8 // ring, ring=ring, zigzag=ring > 1)
    job = Job(model="llama8b", description=d, architecture=architecture_of("llama8b", 8192), per_node=8, overlapped=())
    assert ("gathers the keys of a context" in TORCHTITAN.fill_in(job)[-1][1]) is said


@pytest.mark.parametrize("section", ["float8", "quantize.linear.float8"])
def test_fp8_is_read_from_the_section_of_its_converter(section: str) -> None:
    other = {"float8": "quantize.linear.float8"}.get(section, "float8")
    text = f"""
[model]
converters = ["{section}"]
[parallelism]
data_parallel_shard_degree = 8
[{section}]
recipe_name = "rowwise"
filter_fqns = ["output", "attention.wk"]
[{other}]
recipe_name = "rowwise_with_gw_hp"
filter_fqns = ["output"]
"""
    found = read_back(text, "llama8b", ONE).fp8
    assert found == Fp8(recipe="rowwise", left_out=("model.layers.*.self_attn.k_proj.weight",))
    lines = text.replace(section, "quantize.linear.mx").replace('recipe_name = "rowwise"\n', "")
    assert read_back(lines, "llama8b", ONE).fp8 == replace(found, recipe="mxfp8")


@pytest.mark.parametrize("converter", ["mx", "quantize.grouped_mm.mx", "quantize.grouped_mm.float8"])
def test_fp8_that_no_plan_has_comes_first(converter: str) -> None:
    text = f'[model]\nconverters = ["{converter}"]\n[parallelism]\ndata_parallel_shard_degree = 8\n'
    reading = TORCHTITAN.read(text, Facts(layers=32, devices=8, architecture=architecture_of("llama8b", 8192)))
    assert "fp8" in reading.unmodelled[0]


def test_advice_on_another_stage_of_zero_has_its_dtype_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO 3 reduces in fp32, ZeRO 1 sums in what it has: a file can say the one or the other, as it says the stage."""
    monkeypatch.setattr(engine_best, "_searched", lambda *_: [replace(PIPED, update=PLAIN)])
    here = replace(ONE, update=replace(WIDE, clip_norm=1.0))
    found = list(engine_best._candidates(None, TORCHTITAN, here, engine_best.Patience(), None))  # type: ignore[arg-type]
    (piped,) = [d for d in found if d.zero == 1]
    assert piped == replace(PIPED, update=replace(PLAIN, clip_norm=1.0))
    assert all(d.update == here.update for d in found if d.zero == 3)


@pytest.mark.parametrize(("reshard", "notes"), [("default", 0), ("never", 0), ("always", 1)])
def test_fsdp_beside_a_pipeline_is_zero_1_whatever_it_is_told(reshard: str, notes: int) -> None:
    text = f"""
[parallelism]
data_parallel_shard_degree = 4
pipeline_parallel_degree = 2
fsdp_reshard_after_forward = "{reshard}"
"""
    reading = TORCHTITAN.read(text, Facts(layers=32, devices=8, architecture=architecture_of("llama8b", 8192)))
    assert reading.description.zero == 1
    assert len([note for note in reading.notes if "reshard_after_forward" in note]) == notes


@pytest.mark.parametrize("engine", ["torchtitan", "torch"])
def test_more_than_zero_1_is_given_up_beside_a_pipeline(engine: str) -> None:
    losses = TARGETS[engine].nearest(replace(PIPED, zero=3))
    assert [(loss.what, loss.here, loss.there[0]) for loss in losses if loss.what == "ZeRO"] == [("ZeRO", "3", "1")]


def test_keys_go_round_a_ring_in_torchtitan_0_2_2() -> None:
    """Its trainer reads no `context_parallel_rotate_method` (train.py, tag v0.2.2), and gathers keys by default; what
    `--experimental.custom_import` names is imported first."""
    attention = importlib.import_module("torch.distributed.tensor.experimental._attention")
    for d, there in ((replace(ONE, ring=2, zigzag=True), True), (ONE, False)):
        files = written("llama8b", d)
        assert ("--experimental.custom_import plan_ring" in files["launch.sh"]) == there
        assert ('PYTHONPATH="$(cd ' in files["launch.sh"]) == ("plan_ring.py" in files) == there
        if there:
            before = attention._cp_options.rotate_method
            try:
                exec(files["plan_ring.py"])
                assert attention._cp_options.rotate_method is attention._RotateMethod.ALL_TO_ALL
            finally:
                attention._cp_options.rotate_method = before


def test_samples_divide_over_twice_context_and_tensor() -> None:
    """torchtitan 0.2.2, models/llama3/infra/parallelize.py: seq_len % parallel_dims.seq_len_divisor."""
    cut = replace(ONE, tensor=4, sequence_parallel=True)
    TORCHTITAN.nearest(replace(cut, sequence_length=4104))
    with refused(ExportError, "2 x context x tensor = 8", 4100):
        TORCHTITAN.nearest(replace(cut, sequence_length=4100))


@pytest.mark.parametrize("size", ["0.6B", "1.7B", "4B", "8B", "14B", "32B"])
def test_qwen3_has_its_flavor_and_no_pipeline(size: str) -> None:
    """torchtitan 0.2.2, models/qwen3/__init__.py: qwen3_args; pipelining_fn is None."""
    model = f"qwen3-{size.lower()}"
    layers = architecture_of(model, 8192)
    assert layers is not None
    whole = replace(ONE, layers=(layers.layers,))
    assert f'name = "qwen3"\nflavor = "{size}"\n' in written(model, whole)["train.toml"]
    half = (layers.layers // 2,) * 2
    with refused(ExportError, "no pipeline", model):
        written(model, replace(PIPED, layers=half, full=(0, 0), selective=(0, 0), micro_batches=4))
    assert dict(SPACES["torchtitan"].models)[model] == (("pipeline", 1),)


@pytest.mark.parametrize(("flavor", "model", "words"), [
    ("70B", "llama8b", "--model llama70b"), ("70B_flex", "llama8b", "--model llama70b"), ("8B_varlen", "llama8b", ""),
    ("8B", "llama8b", ""),
])  # fmt: skip
def test_a_file_of_another_flavor_is_refused(flavor: str, model: str, words: str) -> None:
    text = f'[model]\nname = "llama3"\nflavor = "{flavor}"\n'
    facts = Facts(layers=32, devices=8, architecture=architecture_of(model, 2048))
    if not words:
        assert TORCHTITAN.read(text, facts).notes == ()
        return
    with refused(ExportError, "model.flavor", words):
        TORCHTITAN.read(text, facts)


def test_a_toy_is_noted() -> None:
    facts = Facts(layers=32, devices=8, architecture=architecture_of("llama8b", 2048))
    found = TORCHTITAN.read('[model]\nname = "llama3"\nflavor = "debugmodel_flex_attn"\n', facts)
    assert [note for note in found.notes if "debugmodel_flex_attn is a toy" in note]


@pytest.mark.parametrize(("section", "words"), [
    ("context_parallel_degree = 2", "keys of a context are gathered"),
    ('context_parallel_degree = 2\ncontext_parallel_rotate_method = "alltoall"', ""),
    ("tensor_parallel_degree = 2\ndisable_loss_parallel = true", "disable_loss_parallel"),
])  # fmt: skip
def test_what_is_priced_otherwise_is_noted(section: str, words: str) -> None:
    """torchtitan 0.2.2, torchtitan/config/job_config.py: context_parallel_rotate_method is "allgather"."""
    found = TORCHTITAN.read(f"[parallelism]\n{section}\n", Facts(layers=32, devices=8, architecture=None))
    assert words in " ".join(found.notes)
    assert bool(words) == bool(found.notes)


def test_experts_in_fp8_beside_linear_layers_have_no_price() -> None:
    both = '["quantize.linear.float8", "quantize.grouped_mm.float8"]'
    for converters, said in ((both, True), ('["quantize.linear.float8"]', False)):
        text = f'[model]\nconverters = {converters}\n[quantize.linear.float8]\nfilter_fqns = ["output"]\n'
        found = TORCHTITAN.read(text, Facts(layers=32, devices=8, architecture=None))
        assert found.description.fp8.recipe == "tensorwise"
        assert bool([line for line in found.unmodelled if "products in 8 bits" in line]) == said
