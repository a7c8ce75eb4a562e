"""What DeepSpeed does with a configuration beyond parsing it: rules of deepspeed/runtime/engine.py, which exports
follow (0.19.8, and edaa7221 of 22 August 2026)."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from planner.export.description import Description, ExportError
from planner.export.launching import priced_only
from planner.export.target import Facts, Job, Reading
from planner.export.targets import TARGETS
from planner.sharding.update import PLAIN
from tests.refusals import refused
from tests.unit.export.descriptions import facts_of, job_of

DEEPSPEED = TARGETS["deepspeed"]
ALONE = Description(layers=(32,), full=(0,), selective=(0,), sequence_length=8192)
PARAMETER = replace(PLAIN, gradient_dtype="parameter")


def nearest(description: Description) -> Description:
    losses = DEEPSPEED.nearest(description)
    return losses[-1].description if losses else description


def job(description: Description) -> Job:
    return replace(job_of(description, "llama8b"), overlapped=("gathers", "reductions"))


def content(description: Description) -> dict[str, Any]:
    """The configuration of what is nearest, which is read back equal."""
    d = nearest(description)
    text = DEEPSPEED.write(job(d))["ds_config.json"]
    assert DEEPSPEED.read(text, facts_of(d, "llama8b")).description == d
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("update", [PLAIN, PARAMETER])
@pytest.mark.parametrize("degrees", [{"data": 8}, {"tensor": 8, "vocabulary_parallel": False}, {}])
def test_sums_of_gradients_have_the_dtype_of_the_model_without_zero(
    precision: str, update: Any, degrees: dict[str, Any]
) -> None:
    """_do_optimizer_sanity_check: "unsupported mix of model_dtype and grad_accum_dtype", where ZeRO is off."""
    update = PLAIN if precision == "fp32" else update
    found = content(replace(ALONE, precision=precision, update=update, **degrees))
    sums = found.get("data_types", {}).get("grad_accum_dtype", "fp32")
    assert found["zero_optimization"]["stage"] == (0 if sums == precision else 1)
    assert sums == (precision if update is PARAMETER else "fp32")


def test_zero_1_stands_for_none_over_several_devices() -> None:
    (loss,) = DEEPSPEED.nearest(replace(ALONE, data=8))
    assert (loss.what, loss.here, loss.description.zero) == ("ZeRO", "0", 1)
    assert DEEPSPEED.nearest(replace(ALONE, data=8, update=PARAMETER)) == ()


@pytest.mark.parametrize(("change", "overlaps"), [
    ({"zero": 1}, False), ({"zero": 1, "update": PARAMETER}, True), ({"zero": 1, "states_at": "host"}, True),
    ({"zero": 1, "precision": "fp16"}, True), ({"zero": 2}, True), ({"zero": 3}, True),
    ({"zero": 1, "layers": (16, 16), "full": (0, 0), "selective": (0, 0)}, False),
])  # fmt: skip
def test_reductions_overlap_where_the_optimizer_does_that(change: dict[str, Any], overlaps: bool) -> None:
    """The BF16_Optimizer of ZeRO 1 in bf16 with sums in fp32 reduces at the end of a step (allreduce_gradients), and
    pipelines switch the overlap off (_configure_zero_optimizer)."""
    wanted = replace(ALONE, data=8, micro_batches=4, **change)
    assert content(wanted)["zero_optimization"].get("overlap_comm", False) == overlaps
    plain = replace(job(nearest(wanted)), overlapped=())
    assert "overlap_comm" not in DEEPSPEED.write(plain)["ds_config.json"]
    told = priced_only(DEEPSPEED, job(nearest(wanted)))
    assert told == (() if overlaps else ("reductions of gradients overlapped with the backward pass",))


TENSOR = replace(ALONE, data=4, tensor=2, vocabulary_parallel=False, zero=2, micro_batch=2, micro_batches=3)


def test_the_samples_of_a_step_are_left_to_deepspeed_beside_tensor_parallelism() -> None:
    """runtime/config.py: without an `mpu` the assertion on batches counts all devices, those of AutoTP too; with both
    other numbers it computes the third. The devices of a group are compared in their samples (engine.py,
    _configure_tensor_parallel_states)."""
    found = content(TENSOR)
    assert "train_batch_size" not in found
    assert (found["train_micro_batch_size_per_gpu"], found["gradient_accumulation_steps"]) == (2, 3)
    assert any("the same samples" in asked for _, asked in DEEPSPEED.fill_in(job(TENSOR)))
    assert not any("the same samples" in asked for _, asked in DEEPSPEED.fill_in(job(replace(TENSOR, tensor=1))))
    files = DEEPSPEED.write(job(TENSOR))
    alone = replace(facts_of(TENSOR, "llama8b", files["launch.sh"]), devices=None)
    assert DEEPSPEED.read(files["ds_config.json"], alone).description == TENSOR


@pytest.mark.parametrize(("batches", "devices", "steps"), [
    ((48, 2, "auto"), 8, 3), ((48, 2, 3), 8, 3), ((48, 2, 3), None, 3), ((24, 2, 3), 8, 3), ((16, "auto", 1), 8, 1),
])  # fmt: skip
def test_a_batch_counts_the_devices_of_autotp(batches: tuple[object, ...], devices: int | None, steps: int) -> None:
    """Both ways of counting are read: where the program has an `mpu` of its own, data-parallel devices count alone."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    text = json.dumps({**dict(zip(names, batches, strict=True)), "tensor_parallel": {"autotp_size": 2}})
    d = DEEPSPEED.read(text, replace(facts_of(TENSOR, "llama8b"), devices=devices)).description
    assert (d.data, d.tensor, d.micro_batch, d.micro_batches) == (4, 2, 2, steps)


def test_zero_3_goes_beside_tensor_parallelism_but_not_beside_experts_of_autoep() -> None:
    """From 0.19.4 on (engine.py: _configure_tensor_parallel_states; auto_ep_folding.py: validate_folding_global)."""
    wanted = replace(TENSOR, zero=3)
    assert nearest(wanted) == wanted
    assert content(wanted)["zero_optimization"]["stage"] == 3
    spread = replace(wanted, expert=4, whole_experts=True)
    assert (nearest(spread).zero, nearest(spread).expert) == (2, 4)


EXPERTS = replace(TENSOR, expert=8, whole_experts=True, sequence_length=32768)


def test_tensor_parallelism_beside_experts_says_what_it_splits() -> None:
    """AutoTP refuses the `tp_plan` of a model with experts ("contains unsupported partition style(s)"), unless it is
    told what to split. Mixtral and Qwen3 MoE were trained so with 0.19.8 and transformers 5.22.2, on two processes."""
    text = DEEPSPEED.write(job_of(EXPERTS, "mixtral-8x7b"))["ds_config.json"]
    section = json.loads(text)["tensor_parallel"]
    assert section["partition_config"]["use_default_specs"] is False
    names = {
        "model.layers.0.self_attn.q_proj.weight": "column",
        "model.layers.0.self_attn.o_proj.weight": "row",
        "model.layers.0.self_attn.q_norm.weight": "skip",
        "model.layers.0.mlp.shared_experts.gate_proj.weight": "column",
        "model.layers.0.mlp.down_proj.weight": "row",
        "lm_head.weight": "column",
        "model.layers.0.mlp.gate.weight": None,
        "model.embed_tokens.weight": None,
        "model.norm.weight": None,
    }
    for name, kind in names.items():
        specs = section["partition_config"]["layer_specs"]
        found = [spec["partition_type"] for spec in specs if any(re.match(p, name) for p in spec["patterns"])]
        assert found == ([] if kind is None else [kind]), name
    reading = DEEPSPEED.read(text, facts_of(EXPERTS, "mixtral-8x7b"))
    assert (reading.description, reading.unread) == (EXPERTS, ())
    assert "partition_config" not in content(TENSOR)["tensor_parallel"]


@pytest.mark.parametrize(("expert", "over"), [(1, 2), (8, 8), (3, 2)])
def test_experts_that_tensor_parallel_devices_cut_become_whole(expert: int, over: int) -> None:
    """AutoTP leaves them whole on all devices; AutoEP puts them over tensor parallel devices first."""
    d = nearest(replace(EXPERTS, expert=expert, whole_experts=False, zero=3, states_at="host"))
    assert (d.expert, d.whole_experts, d.zero, d.states_at) == (over, True, 2, "device")


def test_latent_attention_has_no_tensor_parallelism() -> None:
    d = replace(EXPERTS, layers=(27,))
    known = DEEPSPEED.architecture_of("deepseek-v3", None)
    assert known is not None
    with refused(ExportError, "latent attention", "--tensor 1"):
        DEEPSPEED.write(replace(job_of(d, "mixtral-8x7b"), architecture=known))


def test_a_tied_embedding_stays_whole() -> None:
    """From 0.19.8 on AutoTP shards it along the vocabulary by default, where the model's plan has that."""
    text = DEEPSPEED.write(job_of(replace(TENSOR, layers=(16,)), "llama3.2-1b"))["ds_config.json"]
    assert json.loads(text)["tensor_parallel"] == {"autotp_size": 2, "vocab_parallel_lm_head": False}
    facts = facts_of(TENSOR, "llama8b")
    assert not DEEPSPEED.read(text, facts).description.vocabulary_parallel
    cut = text.replace('"vocab_parallel_lm_head": false', '"vocab_parallel_lm_head": true')
    assert DEEPSPEED.read(cut, facts).description.vocabulary_parallel


@pytest.mark.parametrize(("zero", "there"), [(0, False), (1, True), (2, True), (3, True)])
def test_sgd_under_zero_is_allowed(zero: int, there: bool) -> None:
    """_do_optimizer_sanity_check: "You are using an untested ZeRO Optimizer"."""
    update = PARAMETER if zero == 0 else PLAIN
    found = content(replace(ALONE, data=8, zero=zero, optimizer="sgd", update=update))
    assert found.get("zero_allow_untested_optimizer", False) == there
    assert found["optimizer"] == {"type": "SGD", "params": {"lr": 1e-4, "momentum": 0.9}}, "torch's default is none"
    assert "zero_allow_untested_optimizer" not in content(replace(ALONE, data=8, zero=zero or 1))


@pytest.mark.parametrize(("change", "taken"), [
    ({"zero": 1}, False), ({"zero": 3}, False), ({"zero": 0}, False), ({"zero": 0, "update": PARAMETER}, True),
    ({"zero": 0, "precision": "fp32"}, True),
    ({"zero": 0, "update": PARAMETER, "layers": (16, 16), "full": (0, 0), "selective": (0, 0)}, False),
])  # fmt: skip
def test_lamb_takes_norms_of_whole_weights(change: dict[str, Any], taken: bool) -> None:
    """Under ZeRO its FusedLamb is given flat shards, whose norms are those of no weight."""
    d = replace(ALONE, data=8, optimizer="lamb", micro_batches=4, **change)
    if taken:
        assert content(d)["zero_optimization"]["stage"] == 0
        return
    with refused(ExportError, "LAMB", "--zero 0", "--gradient-dtype parameter"):
        DEEPSPEED.nearest(d)


def test_buffers_hold_the_largest_weight_that_comes_from_a_disk() -> None:
    """partitioned_param_swapper.py, get_buffer: "More elements ... than buffer size"."""
    d = replace(ALONE, data=8, zero=3, states_at="disk", weights_at="disk", layers=(80,))
    for model, data, size in (("llama70b", 8, 128256 * 8192 // 8), ("llama70b", 16, None), ("llama8b", 8, None)):
        text = DEEPSPEED.write(job_of(replace(d, data=data), model))["ds_config.json"]
        assert json.loads(text)["zero_optimization"]["offload_param"].get("buffer_size") == size
    unknown = replace(job_of(d, "llama70b"), architecture=None)
    assert any("buffer_size" in what for _, what in DEEPSPEED.fill_in(unknown))


@pytest.mark.parametrize("key", ["amp", "elasticity", "zero_optimization.mics_shard_size"])
def test_keys_that_newer_versions_refuse_are_named(key: str) -> None:
    """runtime/config.py, _reject_removed_config_keys."""
    outer, _, inner = key.partition(".")
    text = json.dumps({"train_batch_size": 8, outer: {inner or "enabled": -1 if inner else False}})
    notes = DEEPSPEED.read(text, replace(facts_of(ALONE, "llama8b"), devices=8)).notes
    assert [note for note in notes if note.startswith(f"DeepSpeed 0.19.8 refuses {key}")]


def read(settings: dict[str, Any]) -> Reading:
    text = json.dumps({"train_batch_size": 8, **settings})
    return DEEPSPEED.read(text, Facts(layers=32, devices=8, architecture=None))


@pytest.mark.parametrize(("settings", "norm"), [
    ({}, 1.0), ({"gradient_clipping": "auto"}, 1.0), ({"gradient_clipping": 0.5}, 0.5),
    ({"gradient_clipping": 0}, None),
])  # fmt: skip
def test_gradients_are_clipped_to_1_unless_a_file_says_more(settings: dict[str, Any], norm: float | None) -> None:
    """deepspeed/runtime/constants.py, 0.19.3 and later: GRADIENT_CLIPPING_DEFAULT. Accelerate (_prepare_deepspeed) and
    transformers' Trainer (max_grad_norm) have the same in the place of "auto"."""
    assert read(settings).description.update.clip_norm == norm


@pytest.mark.parametrize(("section", "stage"), [(True, 1), (False, 0), ({}, 0), ({"stage": 2}, 2)])
def test_the_older_form_of_zero_is_read(section: object, stage: int) -> None:
    """deepspeed/runtime/zero/config.py: read_zero_config_deprecated."""
    assert read({"zero_optimization": section}).description.zero == stage


@pytest.mark.parametrize("section", [2, "auto", [1]])
def test_zero_that_is_no_section_is_refused(section: object) -> None:
    with refused(ExportError, "zero_optimization", str(section)):
        read({"zero_optimization": section})


@pytest.mark.parametrize(("settings", "precision"), [
    ({"fp16": {"enabled": "auto"}}, "fp16"), ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16"),
    ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, "fp16"), ({"fp16": {"enabled": False}}, "fp32"),
])  # fmt: skip
def test_a_dtype_that_is_left_to_the_program_is_noted(settings: dict[str, Any], precision: str) -> None:
    found = read(settings)
    assert found.description.precision == precision
    left = settings.get(precision, {}).get("enabled") == "auto"
    assert [note for note in found.notes if "enabled is auto" in note] == (
        [f"{precision}.enabled is auto: the program decides, and it is priced in {precision}"] if left else []
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_are_on_the_host_under_zero_3_alone(stage: int) -> None:
    found = read({"zero_optimization": {"stage": stage, "offload_param": {"device": "cpu"}}})
    assert found.description.weights_at == ("host" if stage == 3 else "device")


def test_partial_offload_and_reductions_of_whole_gradients_are_noted() -> None:
    offload = {"device": "cpu", "ratio": 0.3}
    notes = " ".join(read({"zero_optimization": {"stage": 3, "offload_optimizer": offload}}).notes)
    assert "offload_optimizer.ratio: 0.3" in notes
    assert "reduce_scatter is off" in " ".join(read({"zero_optimization": {"stage": 2, "reduce_scatter": False}}).notes)
