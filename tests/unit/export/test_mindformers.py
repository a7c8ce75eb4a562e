"""What MindFormers does with a configuration beyond parsing it: rules of 2.1.0 that exports follow, and settings of its
published files (configs/), which are read."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from planner.export.description import Description, ExportError
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from tests.refusals import refused
from tests.unit.export.descriptions import architecture, facts_of, job_of

MINDFORMERS = TARGETS["mindformers"]
PIPED = Description(
    layers=(20,) * 4, data=2, full=(0,) * 4, selective=(0,) * 4, micro_batches=8, sequence_length=8192,
    schedule="seqpipe", slices=2,
)  # fmt: skip


def nearest(description: Description) -> Description:
    losses = MINDFORMERS.nearest(description)
    return losses[-1].description if losses else description


def content(description: Description) -> dict[str, Any]:
    """The configuration of what is nearest, which is read back equal and without a note."""
    d = nearest(description)
    text = MINDFORMERS.write(job_of(d, "llama70b"))["train.yaml"]
    reading = MINDFORMERS.read(text, facts_of(d, "llama70b"))
    assert (reading.description, reading.notes) == (d, ())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def read(settings: dict[str, Any], facts: Facts) -> Reading:
    return MINDFORMERS.read(json.dumps({"use_parallel": True, **settings}), facts)


@pytest.mark.parametrize(("change", "slices"), [
    ({}, 2), ({"heads": 2}, 2), ({"full": (0, 0, 0, 3)}, 1), ({"full": (20,) * 4}, 1), ({"ring": 2}, 1),
    ({"ring": 2, "heads": 2}, 1),
])  # fmt: skip
def test_a_sequence_is_sliced_without_recomputed_blocks_and_rings(change: dict[str, Any], slices: int) -> None:
    """trainer/base_trainer.py: "When using seq pipe, cannot apply full recompute"; models/llama/llama.py: "When the
    seq_pipe = True, the use_ring_attention cannot be True"."""
    wanted = replace(PIPED, **change)
    found = nearest(wanted)
    assert (found.slices, found.schedule) == (slices, "seqpipe" if slices > 1 else "1f1b")
    assert found.full == wanted.full
    config = content(wanted)
    assert config["parallel_config"].get("seq_split_num", 1) == slices


def test_slices_say_the_samples_of_a_micro_batch() -> None:
    """Keys and values of a sequence are parameters of `batch_size` x data parallel samples (models/llama/llama.py)."""
    assert content(replace(PIPED, micro_batch=4))["model"]["model_config"]["batch_size"] == 4
    plain = replace(PIPED, micro_batch=4, schedule="1f1b", slices=1)
    assert "batch_size" not in content(plain)["model"]["model_config"]


@pytest.mark.parametrize(("ring", "heads", "rings"), [(4, 1, True), (2, 2, True), (1, 4, False)])
def test_keys_go_round_a_ring_where_that_is_said(ring: int, heads: int, rings: bool) -> None:
    """modules/flash_attention.py: without use_ring_attention keys are whole, also beside Ulysses (hybrid_cp)."""
    d = replace(PIPED, schedule="1f1b", slices=1, ring=ring, heads=heads)
    config = content(d)
    assert config["model"]["model_config"].pop("use_ring_attention", False) == rings
    notes = MINDFORMERS.read(yaml.safe_dump(config), facts_of(d, "llama70b")).notes
    assert bool([note for note in notes if "gathers keys" in note]) == rings


def test_accumulated_batches_have_no_effect_beside_a_pipeline() -> None:
    """trainer/base_trainer.py, _check_grad_accumulation_steps: "will not take effect when using pipeline parallel"."""
    facts = Facts(layers=8, devices=None, architecture=None)
    runner = {"batch_size": 1, "gradient_accumulation_steps": 4}
    for stages, steps in ((1, 4), (2, 8)):
        degrees = {"pipeline_stage": stages, "micro_batch_num": 8}
        reading = read({"parallel_config": degrees, "runner_config": runner}, facts)
        assert reading.description.micro_batches == steps
        assert any("has no effect beside a pipeline" in note for note in reading.notes) == (stages > 1)


def test_a_published_file_of_a_model_by_its_type_is_read() -> None:
    """configs/deepseek3/pretrain_deepseek3_671b.yaml of 2.1.0: experts whole over tensor and data parallel devices,
    states cut over all of a weight's devices, because 4 are less than 256, and the length of the data set."""
    settings = {
        "use_legacy": False,
        "parallel_config": {
            "data_parallel": 4, "model_parallel": 8, "pipeline_stage": 8, "expert_parallel": 32, "micro_batch_num": 32,
            "use_seq_parallel": True,
        },
        "parallel": {
            "enable_parallel_optimizer": True,
            "parallel_optimizer_config": {"gradient_accumulation_shard": False, "optimizer_weight_shard_size": 256},
        },
        "train_dataset": {"data_loader": {"config": {"seq_length": 4096}}},
        "model": {"model_config": {"offset": [0, 0, 0, 0, 0, 0, 0, 0]}},
    }  # fmt: skip
    facts = Facts(layers=64, devices=None, architecture=None, experts=True)
    reading = read(settings, facts)
    d = reading.description
    assert (d.expert, d.whole_experts, d.zero, d.replicas, d.sequence_length) == (32, True, 1, 1, 4096)
    assert any("256 does not divide 4 devices" in note for note in reading.notes)
    assert not read({**settings, "use_legacy": True}, facts).description.whole_experts


@pytest.mark.parametrize(("level", "zero"), [("level1", 1), ("level2", 2), ("level3", 3)])
def test_levels_of_the_optimizer_are_stages_of_zero(level: str, zero: int) -> None:
    """`optimizer_level` of MindSpore, which is to stand for gradient_accumulation_shard."""
    settings = {
        "parallel_config": {"data_parallel": 8},
        "parallel": {"enable_parallel_optimizer": True, "parallel_optimizer_config": {"optimizer_level": level}},
    }
    assert read(settings, Facts(layers=8, devices=None, architecture=None)).description.zero == zero


DEGREES = {"data_parallel": 2, "model_parallel": 2, "pipeline_stage": 2, "micro_batch_num": 4, "use_seq_parallel": True}
FACTS = Facts(layers=32, devices=None, architecture=None)


def recomputed(config: dict[str, Any], virtual: int = 1) -> Reading:
    settings: dict[str, Any] = {"parallel_config": DEGREES, "recompute_config": config}
    if virtual > 1:
        settings["model"] = {"model_config": {"pp_interleave_num": virtual, "compute_dtype": "bfloat16"}}
        settings["parallel"] = {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "1f1b"}}
    return read(settings, FACTS)


@pytest.mark.parametrize(("value", "virtual", "full"), [
    ([3, 9], 1, (3, 9)), ([3, 9], 2, (2, 5, 1, 4)), ([99, 0], 2, (8, 0, 8, 0)), ([True, False], 1, (16, 0)),
    ([[3, 4], [1, 0]], 2, (3, 4, 1, 0)), ([True, [2, False]], 2, (8, 8, 2, 0)), ([], 2, (0,) * 4),
])  # fmt: skip
def test_recomputed_layers_of_a_rank_are_shared_out_to_its_stages(
    value: list[Any], virtual: int, full: tuple[int, ...]
) -> None:
    """parallel_core/training_graph/transformer/utils.py, LayerSetting: _format_recompute_list, _alloc_recompute_layer
    (1.7.0)."""
    assert recomputed({"recompute": value}, virtual).description.full == full


@pytest.mark.parametrize(("value", "virtual"), [(3, 1), ([3], 1), ([[3, 4]], 2), ([[3], [4]], 2), (["a", 1], 1)])
def test_recomputed_layers_of_other_numbers_of_stages_are_refused(value: Any, virtual: int) -> None:
    with refused(ExportError, "recompute_config.recompute"):
        recomputed({"recompute": value}, virtual)


@pytest.mark.parametrize(("value", "selective", "noted"), [
    ([r"feed_forward\.mul"], (16, 16), False), ({r"feed_forward\.mul": [3, 4]}, (3, 4), False),
    ({r"feed_forward\.mul": True, r"attention\.flash_attention": True}, (16, 16), True),
    ({r"attention\.flash_attention": True}, (0, 0), True),
    (True, (16, 16), False),
])  # fmt: skip
def test_patterns_of_other_operators_are_noted(value: Any, selective: tuple[int, ...], noted: bool) -> None:
    found = recomputed({"select_recompute": value})
    assert found.description.selective == selective
    assert bool([note for note in found.notes if "flash_attention priced as kept" in note]) == noted


@pytest.mark.parametrize(("config", "words"), [
    ({"recompute": True, "mp_comm_recompute": False}, "mp_comm_recompute is off"),
    ({"select_recompute": True, "select_recompute_exclude": True}, "select_recompute_exclude"),
])  # fmt: skip
def test_what_changes_recomputation_is_noted(config: dict[str, Any], words: str) -> None:
    assert [note for note in recomputed(config).notes if words in note]


def test_slices_of_inputs_are_noted_where_norms_are_whole() -> None:
    config = {"recompute": True, "recompute_slice_activation": True}
    for sequence, noted in ((True, False), (False, True)):
        degrees = {**DEGREES, "use_seq_parallel": sequence}
        notes = read({"parallel_config": degrees, "recompute_config": config}, FACTS).notes
        assert bool([note for note in notes if "recompute_slice_activation" in note]) == noted


def test_swapped_activations_have_no_price_and_lists_beside_them_are_refused() -> None:
    """LayerSetting: with swap `recompute` lists layers (_format_recompute_list_select_layer_index)."""
    swap = {"swap": True, "layer_swap": [{"layers": [1], "backward_prefetch": 1}]}
    settings = {"parallel_config": DEGREES, "swap_config": swap}
    assert [line for line in read(settings, FACTS).unmodelled if "activations in host memory" in line]
    with refused(ExportError, "swap_config", "recompute_config"):
        read({**settings, "recompute_config": {"recompute": [3, 4]}}, FACTS)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_cuts_the_embedding_along_the_vocabulary(stages: int) -> None:
    """core/parallel_config.py, build_parallel_config: "vocab_emd_dp will be reset to False"."""
    settings = {"parallel_config": {**DEGREES, "pipeline_stage": stages, "vocab_emb_dp": True}}
    assert read(settings, FACTS).description.vocabulary_parallel == (stages > 1)


def test_data_parallel_mode_has_no_other_degrees() -> None:
    """trainer/base_trainer.py: _check_global_batch_size_for_auto_parallel."""
    settings = {"parallel_config": DEGREES, "parallel": {"parallel_mode": 0}, "runner_config": {"batch_size": 2}}
    found = read(settings, replace(FACTS, devices=8))
    d = found.description
    assert (d.data, d.tensor, d.pipeline, d.micro_batch, d.micro_batches) == (8, 1, 1, 2, 1)
    assert [note for note in found.notes if "parallel_mode 0" in note]
    with refused(ExportError, "parallel.parallel_mode", "--devices"):
        read(settings, FACTS)
    with refused(ExportError, "parallel.parallel_mode", 3):
        read({**settings, "parallel": {"parallel_mode": 3}}, FACTS)
    notes = read({**settings, "parallel": {"parallel_mode": "auto_parallel"}}, FACTS).notes
    assert [note for note in notes if "MindSpore may change strategies" in note]
    assert [note for note in read({**settings, "use_parallel": False, "parallel": {}}, FACTS).notes if "is off" in note]


@pytest.mark.parametrize(("config", "precision", "masters", "fused"), [
    ({"type": "LlamaConfig"}, "fp16", False, False),
    ({"type": "LlamaConfig", "compute_dtype": "bfloat16", "use_flash_attention": True}, "bf16", False, True),
    ({"type": "LlamaConfig", "compute_dtype": "bfloat16", "param_init_type": "float32"}, "bf16", True, False),
    ({"model_type": "qwen3", "compute_dtype": "bfloat16"}, "bf16", True, True),
    ({"model_type": "qwen3", "compute_dtype": "bfloat16", "use_flash_attention": False}, "bf16", True, False),
])  # fmt: skip
def test_what_llama_leaves_out_is_as_in_its_configuration(
    config: dict[str, Any], precision: str, masters: bool, fused: bool
) -> None:
    """models/llama/llama_config.py, 1.7.0: float16 for products and weights, no fused attention."""
    found = read({"parallel_config": DEGREES, "model": {"model_config": config}}, FACTS)
    assert (found.description.precision, found.description.update.master_weights) == (precision, masters)
    assert bool([line for line in found.unmodelled if "attention keeps its scores" in line]) == (not fused)


def test_a_dtype_that_is_not_said_is_noted() -> None:
    notes = read({"model": {"model_config": {"hidden_size": 64}}}, FACTS).notes
    assert "compute_dtype is not said: priced in bf16" in notes


def test_states_beside_those_of_adamw_are_noted() -> None:
    """core/optim/pma_adamw.py: pma_weight."""
    assert [note for note in read({"optimizer": {"type": "PmaAdamW"}}, FACTS).notes if "mean of the weights" in note]


@pytest.mark.parametrize(("parallel", "recompute", "zero", "words"), [
    ({"gradient_accumulation_shard": False}, True, 3, "gradients are whole"),
    ({"gradient_accumulation_shard": True}, [3, 4], 2, "gathered again; priced as kept"),
    ({"gradient_accumulation_shard": True}, True, 3, ""),
])  # fmt: skip
def test_parts_of_zero_3_are_noted(parallel: dict[str, Any], recompute: Any, zero: int, words: str) -> None:
    config = {"recompute": recompute, "parallel_optimizer_comm_recompute": True}
    optimizer = {"enable_parallel_optimizer": True, "parallel_optimizer_config": parallel}
    found = read({"parallel_config": DEGREES, "parallel": optimizer, "recompute_config": config}, FACTS)
    assert found.description.zero == zero
    assert words in " ".join(found.notes)
    assert bool(words) == bool(found.notes)


def test_experts_that_drop_tokens_by_default_are_said_to_have_no_price() -> None:
    """tools/register/template.py: MoEConfig.capacity_factor is 1.1; grouped products drop none."""
    facts = replace(FACTS, experts=True)
    for config, dropped in (({"expert_num": 8}, True), ({"expert_num": 8, "use_gmm": True}, False)):
        found = read({"parallel_config": DEGREES, "moe_config": config}, facts)
        assert bool([line for line in found.unmodelled if "beyond an expert's capacity" in line]) == dropped


@pytest.mark.parametrize(("config", "wrong"), [
    ({"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}, ""),
    ({"intermediate_size": 768}, ""), ({"intermediate_size": 6144}, "intermediate_size"),
    ({"moe_intermediate_size": 1024}, "moe_intermediate_size"), ({"num_experts": 64}, "num_experts"),
    ({"num_attention_heads": 16}, "num_attention_heads"), ({"num_key_value_heads": 8}, "num_key_value_heads"),
])  # fmt: skip
def test_the_model_of_a_file_is_the_named_one(config: dict[str, Any], wrong: str) -> None:
    """configs/qwen3_moe/pretrain_qwen3_30b_a3b_4k.yaml of 1.7.0 has the width of an MLP that no block has."""
    facts = Facts(layers=48, devices=None, architecture=architecture("qwen3-30b-a3b"))
    settings = {"model": {"model_config": {"num_hidden_layers": 48, "hidden_size": 2048, **config}}}
    if not wrong:
        assert read(settings, facts).description.layers == (48,)
        return
    with refused(ExportError, f"model.model_config.{wrong}", config[wrong]):
        read(settings, facts)
