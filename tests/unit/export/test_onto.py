"""A plan written into an existing configuration keeps what no plan says."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from hardware_profiles.foreign import SETTINGS, parse_toml
from planner.api.advising import _GROUPS
from planner.export.architecture import architecture_of
from planner.export.description import Description, ExportError
from planner.export.editing import edited
from planner.export.files.toml import changed_toml
from planner.export.files.yaml_files import parse_yaml
from planner.export.onto import written_onto
from planner.export.target import Facts, Job
from planner.export.targets import TARGETS
from planner.graph.fp8 import NO_FP8, Fp8
from planner.plan.layout.kept import Kept
from planner.sharding.update import PLAIN
from tests.unit.export.descriptions import architecture

PUBLISHED = Path(__file__).parents[2] / "data" / "published"
LLAMA = Facts(layers=80, devices=64, architecture=architecture("llama70b"), model="llama70b")


def job_of(engine: str, text: str) -> Job:
    description = TARGETS[engine].read(text, LLAMA).description
    return Job(model="llama70b", description=description, architecture=LLAMA.architecture, per_node=8)


def test_what_was_imported_comes_back_as_it_was() -> None:
    text = (PUBLISHED / "mindformers" / "finetune_llama3_1_70b.yaml").read_text()
    target = TARGETS["mindformers"]
    job = job_of("mindformers", text)
    again = written_onto(target, text, LLAMA, job)
    assert again == text
    assert "fine_grain_interleave: 2" in again
    assert "enable_parallel_optimizer: true" in again
    assert "fine_grain_interleave: 1" in target.write(job)["train.yaml"]


def test_a_new_file_is_a_whole_configuration() -> None:
    published = parse_yaml((PUBLISHED / "mindformers" / "finetune_llama3_1_70b.yaml").read_text())
    job = job_of("mindformers", (PUBLISHED / "mindformers" / "finetune_llama3_1_70b.yaml").read_text())
    ours = parse_yaml(TARGETS["mindformers"].write(job)["train.yaml"])
    assert published.keys() <= ours.keys()
    assert {"lr_schedule", "train_dataset_task", "callbacks", "context", "trainer", "run_mode"} <= ours.keys()
    assert ours["train_dataset_task"]["dataset_config"] == ours["train_dataset"]
    assert ours["runner_config"].keys() >= {"epochs", "batch_size", "sink_mode", "sink_size"}


def test_what_a_plan_changes_is_changed_and_the_rest_stays() -> None:
    text = (PUBLISHED / "mindformers" / "finetune_llama3_1_70b.yaml").read_text()
    target, job = TARGETS["mindformers"], job_of("mindformers", text)
    changed = replace(job.description, tensor=4, data=2, sequence_parallel=False)
    again = written_onto(target, text, LLAMA, replace(job, description=changed))
    lines = set(again.splitlines()) ^ set(text.splitlines())
    assert {"  model_parallel: 4", "  data_parallel: 2", "  use_seq_parallel: false"} <= lines
    assert target.read(again, LLAMA).description == changed
    assert "strategy_ckpt_save_file: ./ckpt_strategy.ckpt" in again


def test_a_line_that_says_so_already_stays_as_it_is_written() -> None:
    """Sharded states of one replica are none, so that the plan is told of them: the file was all along."""
    text = (PUBLISHED / "mindformers" / "finetune_llama3_1_70b.yaml").read_text()
    text = text.replace("enable_parallel_optimizer: true", "enable_parallel_optimizer: True")
    target, job = TARGETS["mindformers"], job_of("mindformers", text)
    job = replace(job, description=replace(job.description, zero=0))
    changed = replace(job.description, tensor=4, data=2, zero=1)
    again = edited(target, text, job, changed)
    assert "enable_parallel_optimizer: True" in again
    assert "  model_parallel: 4" in again.splitlines()


QWEN = """parallel_config:  # of 8
  data_parallel: 4
  pipeline_stage: 2
  micro_batch_num: 16
# what is computed again
recompute_config:
  recompute: [7, 7]
  select_recompute:
    'feed_forward\\.mul': [14, 14]
    'feed_forward\\.w1\\.activation\\.silu': [14, 14]

    'feed_forward\\.w2\\.reshape': [14, 14]  # ours
  parallel_optimizer_comm_recompute: False  # stays
runner_config:
  batch_size: 1
"""


def test_keys_in_quotes_and_whole_sections_of_yaml_are_changed() -> None:
    target, facts = TARGETS["mindformers"], Facts(layers=28, devices=8, architecture=None, sequence_length=8192)
    before = target.read(QWEN, facts).description
    assert (before.full, before.selective) == ((7, 7), (7, 7))
    job = Job(model="qwen2.5-7b", description=before, architecture=None, per_node=8)
    plain = replace(before, selective=(0, 0), kept=Kept(), full=(3, 0))
    text = written_onto(target, QWEN, facts, replace(job, description=plain))
    assert "feed_forward" not in text
    assert "  parallel_optimizer_comm_recompute: False  # stays" in text
    assert target.read(text, facts).description == plain
    off = text.replace("recompute_config:\n", "recompute_config:\n  select_recompute: False  # off\n")
    back = written_onto(target, off, facts, job)
    assert target.read(back, facts).description == before
    assert {"  data_parallel: 4", "# what is computed again"} <= set(back.splitlines())


def test_advice_names_every_field_in_which_a_better_plan_may_differ() -> None:
    named = {name for _, names in _GROUPS for name in names}
    of_the_training = {"precision", "optimizer", "sequence_length", "imbalance", "fp8"}
    assert {field.name for field in fields(Description)} == named | of_the_training


def test_a_script_is_changed_in_its_options_alone() -> None:
    text = (PUBLISHED / "megatron" / "train_llama3_8b_h100_fp8.sh").read_text()
    facts = Facts(layers=32, devices=8, architecture=None)
    target = TARGETS["megatron"]
    job = Job(model="llama8b", description=target.read(text, facts).description, architecture=None, per_node=8)
    assert written_onto(target, text, facts, job) == text
    wanted = replace(job.description, micro_batch=2, micro_batches=8)
    changed = written_onto(target, text, facts, replace(job, description=wanted))
    assert target.read(changed, facts).description == wanted
    assert len(set(text.splitlines()) - set(changed.splitlines())) == 1


TITAN = """[model]
name = "llama3"
flavor = "70B"
converters = ["quantize.linear.float8"]  # torchao

[parallelism]
tensor_parallel_degree = 8

[activation_checkpoint]
mode = "full"
"""
IN_SECTIONS = """
[quantize.linear.float8]  # eight bits
recipe_name = "rowwise"  # stays
filter_fqns = ["output"]
"""
BEHIND_DOTS = """
[quantize]  # eight bits
linear.float8.recipe_name = "rowwise"  # stays
linear.float8.filter_fqns = ["output"]
"""
IN_BRACES = """
[quantize.linear]  # eight bits
float8 = {recipe_name = "rowwise", filter_fqns = ["output"]}  # stays
"""
IN_TWO_PLACES = f"""{IN_SECTIONS}
[comm]
init_timeout_seconds = 300

[quantize.linear.mx]
recipe_name = "mxfp8_cublas"
"""


@pytest.mark.parametrize("section", [IN_SECTIONS, BEHIND_DOTS, IN_BRACES, IN_TWO_PLACES])
def test_keys_of_nested_tables_are_changed_where_they_stand(section: str) -> None:
    target, text = TARGETS["torchtitan"], TITAN + section
    job = job_of("torchtitan", text)
    other = replace(job, description=replace(job.description, fp8=Fp8(recipe="rowwise_with_gw_hp")))
    assert written_onto(target, text, LLAMA, other) == text.replace('"rowwise"', '"rowwise_with_gw_hp"')
    head = "model.layers.*.self_attn.q_proj.weight"
    for fp8 in (Fp8(recipe="tensorwise"), Fp8(recipe="mxfp8", left_out=(head,)), NO_FP8):
        wanted = replace(job.description, fp8=fp8)
        written = written_onto(target, text, LLAMA, replace(job, description=wanted))
        assert "# eight bits" in written
        quantize = parse_toml(written, SETTINGS).get("quantize", {})
        assert quantize.keys() <= {"linear"}
        assert quantize.get("linear", {}).keys() <= {"float8", "mx"}
        assert target.read(written, LLAMA).description == wanted


def test_fp8_of_torchtitan_0_1_is_changed_in_its_own_section() -> None:
    text = (PUBLISHED / "torchtitan" / "old_llama3_405b_converters.toml").read_text()
    target, facts = TARGETS["torchtitan"], Facts(layers=126, devices=512, architecture=architecture("llama405b"))
    before = target.read(text, facts).description
    job = Job(model="llama405b", description=before, architecture=facts.architecture, per_node=8)
    wanted = replace(before, fp8=Fp8(recipe="rowwise"), update=replace(before.update, gathers=PLAIN.gathers))
    written = written_onto(target, text, facts, replace(job, description=wanted))
    assert "quantize" not in parse_toml(written, SETTINGS)
    assert parse_toml(written, SETTINGS)["float8"]["recipe_name"] == "rowwise"


OTHERS = '["first", "quantize.linear.float8", "quantize.grouped_mm.float8"]'


def test_converters_of_other_things_stay() -> None:
    target, text = TARGETS["torchtitan"], TITAN.replace('["quantize.linear.float8"]', OTHERS) + IN_SECTIONS
    job = job_of("torchtitan", text)
    for fp8, converter in ((NO_FP8, []), (Fp8(recipe="mxfp8"), ["quantize.linear.mx"])):
        wanted = replace(job.description, fp8=fp8)
        written = written_onto(target, text, LLAMA, replace(job, description=wanted))
        found = parse_toml(written, SETTINGS)["model"]["converters"]
        assert found == ["first", *converter, "quantize.grouped_mm.float8"]
        assert target.read(written, LLAMA).description == wanted
        assert written_onto(target, written, LLAMA, job) != written


@pytest.mark.parametrize("name", ["old_llama3_405b", "old_llama3_405b_converters"])
def test_fp8_of_older_versions_is_switched_where_they_switch_it(name: str) -> None:
    """Before 4cdc5926 (14 February 2025) `[float8] enable_float8_linear` did, and names of layers and recipes were
    none; 0.1.0 has `[model] converters`."""
    text = (PUBLISHED / "torchtitan" / f"{name}.toml").read_text()
    target, facts = TARGETS["torchtitan"], Facts(layers=126, devices=512, architecture=architecture("llama405b"))
    before = target.read(text, facts).description
    job = Job(model="llama405b", description=before, architecture=facts.architecture, per_node=8)
    plain = replace(before, fp8=NO_FP8, update=replace(before.update, gathers=PLAIN.gathers))
    off = written_onto(target, text, facts, replace(job, description=plain))
    assert target.read(off, facts).description == plain
    assert "converters" not in off
    assert ("enable_float8_linear = false" in off) == (name == "old_llama3_405b")
    on = written_onto(target, off, facts, job)
    assert target.read(on, facts).description == before
    assert "quantize" not in on
    recipe = replace(job, description=replace(plain, fp8=Fp8(recipe="rowwise")))
    if name == "old_llama3_405b":
        with pytest.raises(ExportError, match=r"float8\.recipe_name: this version of torchtitan has no such setting"):
            written_onto(target, off, facts, recipe)
    with pytest.raises(ExportError, match="this version of torchtitan has no such converter"):
        written_onto(target, off, facts, replace(job, description=replace(plain, fp8=Fp8(recipe="mxfp8"))))


def test_a_plain_value_in_the_place_of_a_section_is_not_replaced() -> None:
    with pytest.raises(ExportError, match=r"quantize\.linear is no table of settings; change it by hand"):
        changed_toml("[quantize]\nlinear = 8\n", {("quantize", "linear", "float8", "recipe_name"): "rowwise"})


def test_recipes_are_not_rewritten() -> None:
    text = (PUBLISHED / "nemo" / "llama3_8b.py").read_text()
    facts = Facts(layers=32, devices=8, architecture=None)
    target = TARGETS["nemo"]
    a = architecture_of("llama8b", None)
    job = Job(model="llama8b", description=target.read(text, facts).description, architecture=a, per_node=8)
    with pytest.raises(ExportError, match="not rewritten"):
        written_onto(target, text, facts, replace(job, description=replace(job.description, zero=0)))
