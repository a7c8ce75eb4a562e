"""Settings of the newest versions of engines, and defaults that changed, are read as those versions mean them."""

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.export.architecture import architecture_of
from planner.export.description import Description, ExportError
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from planner.plan.layout.kept import Kept
from tests.refusals import refused

FACTS = Facts(layers=32, devices=8, architecture=None)


def megatron(arguments: str) -> Reading:
    return TARGETS["megatron"].read(f"pretrain_gpt.py --bf16 --micro-batch-size 1 {arguments}\n", FACTS)


def described(arguments: str) -> Description:
    return megatron(arguments).description


def test_megatron_fsdp_shards_all_unless_it_is_told_what() -> None:
    """The default of --data-parallel-sharding-strategy is optim_grads_params from core_v0.18.0 (ba7b5ebc) on, and
    no_shard up to core_v0.17.0 (9539a12e): megatron/training/arguments.py."""
    reading = megatron("--use-megatron-fsdp")
    assert reading.description.zero == 3
    assert [note for note in reading.notes if "up to 0.17 nothing is sharded" in note]
    reading = megatron("--use-megatron-fsdp --data-parallel-sharding-strategy optim")
    assert reading.description.zero == 1
    assert not [note for note in reading.notes if "0.17 nothing" in note]
    recipe = """from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
cfg = vanilla_gpt_pretrain_config()
cfg.train.micro_batch_size = 1
cfg.ddp.use_megatron_fsdp = True
"""
    reading = TARGETS["megatron-bridge"].read(recipe, FACTS)
    assert reading.description.zero == 0, "core/distributed/distributed_data_parallel_config.py: no_shard"


def test_fsdp2_of_megatron_may_keep_weights_after_the_forward_pass() -> None:
    assert described("--use-torch-fsdp2").zero == 3
    assert described("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward").zero == 2


def test_an_older_switch_recomputes_experts() -> None:
    """core/transformer/transformer_config.py: --moe-layer-recompute adds "moe" to the modules."""
    d = described("--moe-layer-recompute")
    assert (d.selective, d.kept) == (d.layers, Kept(but=("attention", "moe")))
    d = described("--moe-layer-recompute --recompute-granularity selective --recompute-modules moe")
    assert d.kept == Kept(but=("moe",))
    assert described("--moe-layer-recompute --recompute-granularity full --recompute-method uniform").kept == Kept()


def test_weights_in_more_pieces_than_tensor_parallel_devices_are_refused() -> None:
    tensor = "--tensor-model-parallel-size 2"
    with refused(ExportError, "--tensor-parallel-num-weight-shards 4", "write 2"):
        described(f"{tensor} --tensor-parallel-num-weight-shards 4")
    with refused(ExportError, "--expert-tensor-parallel-num-weight-shards 2", "write 1"):
        described("--expert-tensor-parallel-size 1 --expert-tensor-parallel-num-weight-shards 2")
    assert described(f"{tensor} --tensor-parallel-num-weight-shards 2") == described(tensor)


@pytest.mark.parametrize(("added", "words"), [
    ("--enable-mhc-connections", "several residual streams"), ("--moe-latent-size 128", "latent space"),
    ("--experimental-attention-variant gdn", "linear attention"),
])  # fmt: skip
def test_layers_of_newer_models_are_refused(added: str, words: str) -> None:
    with refused(ExportError, words):
        megatron(added)


@pytest.mark.parametrize(("added", "words"), [
    ("--cpu-offloading-num-layers 4", "activations in host memory"), ("--cpu-offloading-num-layers 0", ""),
    ("--outer-dp-sharding-strategy optim", "replicas shard states"), ("--outer-dp-sharding-strategy no_shard", ""),
    ("--use-tp-pp-dp-mapping", "the other way round"), ("--distribute-saved-activations", "inputs of recomputed"),
    ("--first-last-layers-bf16", "not in fp8"), ("--attention-backend unfused", "its scores in memory"),
    ("--attention-backend flash", ""), ("--transformer-impl local", "its scores in memory"),
    ("--moe-expert-rank-capacity-factor 1.5", "are dropped"),
])  # fmt: skip
def test_what_no_plan_has_is_said(added: str, words: str) -> None:
    unmodelled = megatron(added).unmodelled
    assert len(unmodelled) == bool(words)
    assert words in "".join(unmodelled)


def test_virtual_stages_beside_other_first_and_last_ones_are_read() -> None:
    """core/transformer/transformer_block.py: get_num_layers_to_build divides the layers of a rank by its stages."""
    said = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 --decoder-last-pipeline-num-layers 6"
    said += " --global-batch-size 16"
    assert described(f"{said} --num-virtual-stages-per-pipeline-rank 2").layers == (3, 5, 5, 3) * 2
    with refused(ExportError, "--num-virtual-stages-per-pipeline-rank 4", "6 layers of a rank"):
        described(f"{said} --num-virtual-stages-per-pipeline-rank 4")


@pytest.mark.parametrize(("added", "zero", "words"), [
    ("", 1, "the most that they may have"), ("--packing true", 1, "samples are packed"),
    ("--use_megatron_fsdp true", 3, ""),
    ("--use_megatron_fsdp true --data_parallel_sharding_strategy optim_grads", 2, ""),
])  # fmt: skip
def test_defaults_of_ms_swift_are_its_own(added: str, zero: int, words: str) -> None:
    """ms-swift 4.5 (3602360a), swift/megatron/arguments/megatron_args.py: data_parallel_sharding_strategy,
    padding_free."""
    text = f"NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --max_length 8192 {added}\n"
    facts = replace(FACTS, layers=36, architecture=architecture_of("qwen3-8b", 8192))
    reading = TARGETS["megatron"].read(text, facts)
    assert reading.description.zero == zero
    assert words in " ".join(reading.notes)
    assert not [note for note in reading.notes if "0.17 nothing" in note]


def deepspeed(zero: dict[str, Any], **sections: Any) -> Reading:
    text = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, **zero}, **sections})
    return TARGETS["deepspeed"].read(text, FACTS)


def test_weights_shared_in_groups_are_replicas() -> None:
    """DeepSpeed at edaa7221, runtime/zero/config.py: mics_shard_size."""
    d = deepspeed({"mics_shard_size": 4}).description
    assert (d.data, d.zero, d.replicas, d.shards) == (8, 3, 2, 4)
    assert deepspeed({"mics_shard_size": -1}).description.replicas == 1
    with refused(ExportError, "zero_optimization.mics_shard_size: 3", 8):
        deepspeed({"mics_shard_size": 3})


@pytest.mark.parametrize(("zero", "words"), [
    ({"zero_hpz_partition_size": 8}, "second copy"), ({"zero_hpz_partition_size": 1}, ""),
    ({"zero_quantized_weights": True}, "fewer bits"), ({"zero_quantized_gradients": False}, ""),
    ({"zeropp_loco_param": {"err_beta": 0.8}}, "fewer bits"), ({"zenflow": {"topk_ratio": 0.1}}, "updated later"),
])  # fmt: skip
def test_what_no_plan_has_of_zero_is_said(zero: dict[str, Any], words: str) -> None:
    unmodelled = deepspeed(zero).unmodelled
    assert len(unmodelled) == bool(words)
    assert words in "".join(unmodelled)


@pytest.mark.parametrize(("section", "precision", "gradients"), [
    ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "bf16", "mixed"),
    ({"torch_autocast": {"enabled": True}}, "fp16", "mixed"),
    ({"torch_autocast": {"enabled": False, "dtype": "bfloat16"}}, "fp32", "mixed"),
    ({"bf16": {"enabled": True}}, "bf16", "parameter"),
])  # fmt: skip
def test_autocast_of_deepspeed_computes_in_16_bits(section: dict[str, Any], precision: str, gradients: str) -> None:
    """runtime/config.py and torch_autocast.py of edaa7221: weights stay in fp32."""
    reading = deepspeed({}, **section)
    assert (reading.description.precision, reading.description.update.gradient_dtype) == (precision, gradients)
    assert any("torch_autocast" in note for note in reading.notes) == (precision != "fp32" and gradients == "mixed")


def registered(training: str = "", parallelism: str = "", rest: str = "") -> Description:
    text = f"""
def ours() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig({training}),
        parallelism=ParallelismConfig({parallelism}),
        {rest}
    )
"""
    facts = replace(FACTS, architecture=architecture_of("llama8b", 8192))
    return TARGETS["torchtitan"].read(text, facts).description


@pytest.mark.parametrize(("training", "length", "micro_batch"), [
    ("max_context_length=8192", 8192, 2), ("num_tokens_per_microbatch_per_dp_rank=4096", 2048, 2),
    ("max_context_length=4096, num_tokens_per_microbatch_per_dp_rank=4096", 4096, 1), ("seq_len=4096", 4096, 8),
    ("max_context_length=131072", 16384, 1), ("", 2048, 8),
])  # fmt: skip
def test_defaults_of_torchtitan_s_tokens_are_its_own(training: str, length: int, micro_batch: int) -> None:
    """b5bcd76c, torchtitan/config/configs.py: TrainingConfig."""
    d = registered(training)
    assert (d.sequence_length, d.micro_batch) == (length, micro_batch)


@pytest.mark.parametrize(("rest", "full", "selective"), [
    ("", 0, 32), ("activation_checkpoint=None,", 0, 0), ("activation_checkpoint=FullAC.Config(),", 32, 0),
    ("activation_checkpoint=SelectiveAC.Config(),", 0, 32),
    ("activation_checkpoint=ActivationCheckpointConfig(),", 0, 32),
    ('activation_checkpoint=ActivationCheckpointConfig(mode="none"),', 0, 0),
])  # fmt: skip
def test_a_configuration_of_torchtitan_recomputes_by_operators(rest: str, full: int, selective: int) -> None:
    """b5bcd76c, torchtitan/trainer.py: `activation_checkpoint` is a SelectiveAC unless it is said."""
    d = registered(rest=rest)
    assert (d.full, d.selective) == ((full,), (selective,))


def test_torchtitan_keeps_fp32_weights_without_data_parallelism() -> None:
    """Since 00b7f569 of April 2026 `fully_shard` is applied to one device, too (models/llama3/parallelize.py)."""
    alone = "tensor_parallel_degree=8"
    assert registered(parallelism=alone).update.master_weights
    assert not registered('dtype="bfloat16"', alone).update.master_weights
    toml = "[parallelism]\ndata_parallel_shard_degree = 1\ntensor_parallel_degree = 8\n"
    assert not TARGETS["torchtitan"].read(toml, FACTS).description.update.master_weights, "0.2.2"


def test_norms_of_torchtitan_may_be_whole() -> None:
    """b5bcd76c, torchtitan/config/configs.py: enable_sequence_parallel."""
    assert registered(parallelism="tensor_parallel_degree=8").sequence_parallel
    assert not registered(parallelism="tensor_parallel_degree=8, enable_sequence_parallel=False").sequence_parallel


def mindspeed(arguments: str) -> Reading:
    return TARGETS["mindspeed"].read(f"pretrain_gpt.py --bf16 --micro-batch-size 1 {arguments}\n", FACTS)


@pytest.mark.parametrize(("count", "full"), [
    (2, (1, 1, 1, 1)), (3, (2, 2, 1, 1)), (1, (1, 1, 0, 0)), (99, (8, 8, 8, 8)),
])  # fmt: skip
def test_recomputed_layers_of_a_rank_are_those_of_its_stages_in_turn(count: int, full: tuple[int, ...]) -> None:
    """Ascend/MindSpeed at 028de58c, mindspeed/core/transformer/transformer_block.py."""
    said = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8 --recompute-granularity full"
    said += " --global-batch-size 16"
    said += f" --recompute-method block --recompute-num-layers {count}"
    assert mindspeed(f"{said} --enable-recompute-layers-per-pp-rank").description.full == full
    assert mindspeed(said).description.full == (min(count, 8),) * 4


@pytest.mark.parametrize(("added", "but"), [
    ("--recompute-norm", ("normalisation",)), ("--recompute-activation-function", ("elementwise",)),
    ("--recompute-norm --recompute-activation-function", ("elementwise", "normalisation")),
])  # fmt: skip
def test_norms_that_mindspeed_computes_again_are_read(added: str, but: tuple[str, ...]) -> None:
    reading = mindspeed(added)
    assert (reading.description.selective, reading.description.kept) == ((32,), Kept(but=but))
    assert not reading.notes
    assert not TARGETS["mindspeed"].nearest(reading.description)
    assert any("priced in all layers" in note for note in mindspeed(f"{added} --recompute-norm-num-layers 4").notes)


@pytest.mark.parametrize(("added", "words"), [
    ("--swap-attention", "activations in host memory"), ("--moe-zero-memory level1", "results of experts"),
    ("--moe-zero-memory disable", ""), ("--tp-2d", "over two axes"),
])  # fmt: skip
def test_what_no_plan_has_of_mindspeed_is_said(added: str, words: str) -> None:
    unmodelled = mindspeed(added).unmodelled
    assert len(unmodelled) == bool(words)
    assert words in "".join(unmodelled)


@pytest.mark.parametrize(("section", "words"), [
    ("distribute_parallel_config:\n  tensor_model_parallel_size: 4", "llm_template_v2_experimental"),
    ("parallelism:\n  tensor_parallel: 4", "PyNative"),
])  # fmt: skip
def test_other_forms_of_mindformers_are_refused(section: str, words: str) -> None:
    """Their degrees would be read as 1: branch br_feature_llm_trainer of MindFormers, configs; its manual of 2.0."""
    with refused(ExportError, words, "write parallel_config"):
        TARGETS["mindformers"].read(f"use_parallel: true\n{section}\nrecompute_config:\n  recompute: true\n", FACTS)


@pytest.mark.parametrize(("section", "precision"), [
    ({"bfloat16": {"enabled": True}}, "bf16"), ({"bfloat16": {"enabled": False}}, "fp32"),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "fp32"), ({"bfloat16": {"enabled": "auto"}}, "bf16"),
])  # fmt: skip
def test_deepspeed_reads_the_older_name_of_bf16_where_the_newer_is_absent(
    section: dict[str, Any], precision: str
) -> None:
    text = json.dumps({"train_batch_size": 8, **section})
    assert TARGETS["deepspeed"].read(text, FACTS).description.precision == precision


def test_optimizers_that_torchtitan_has_not_are_refused() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nname = "{}"\n'
    assert TARGETS["torchtitan"].read(text.format("Adam"), FACTS).description.optimizer == "adamw"
    with refused(ExportError, "optimizer.name", "SGD", "AdamW"):
        TARGETS["torchtitan"].read(text.format("SGD"), FACTS)


NEOX = "pipe_parallel_size: 2\nmodel_parallel_size: 2\ntrain_micro_batch_size_per_gpu: 1\nbf16: {enabled: true}\n"


def neox(added: str) -> Reading:
    return TARGETS["megatron"].read(NEOX + added, FACTS)


def test_sequence_parallelism_and_offload_of_neox_are_read() -> None:
    """gpt-neox ea7aefd8, megatron/neox_arguments: sequence_parallel; zero_optimization is DeepSpeed's."""
    assert [neox(added).description.sequence_parallel for added in ("", "sequence_parallel: true\n")] == [False, True]
    offload = "zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}\n"
    assert [neox(added).description.states_at for added in ("", offload)] == ["device", "host"]


@pytest.mark.parametrize(("added", "words"), [
    ("", "attention keeps its scores"), ("checkpoint_activations: true\npartition_activations: true\n", "inputs of"),
    ("checkpoint_activations: true\ncheckpoint_in_cpu: true\n", "activations in host memory"),
    ("use_bnb_optimizer: true\n", "optimizer states in fewer bits"), ("train_impl: dpo\n", "preferences"),
    ("sliding_window_width: 128\n", "attention in a window"),
])  # fmt: skip
def test_what_neox_has_and_no_plan_is_said(added: str, words: str) -> None:
    assert [line for line in neox(added).unmodelled if words in line]
    flash = 'attention_config: [[["flash"], 32]]\n'
    assert neox(flash).unmodelled == ()
    assert [n for n in neox(f"{flash}pipe_partition_method: parameters\n").notes if "equally many layers" in n]


def test_experts_of_ms_swift_are_whole_unless_it_is_said() -> None:
    """ms-swift 3602360a, swift/megatron/arguments/megatron_args.py: expert_tensor_parallel_size is 1."""
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --max_length 4096 --expert_model_parallel_size 4"
    text += " --tensor_model_parallel_size 2 --sequence_parallel true"
    facts = Facts(layers=48, devices=8, architecture=architecture_of("qwen3-30b-a3b", 4096))
    for added, whole in (("", True), (" --expert_tensor_parallel_size 2", False)):
        assert TARGETS["megatron"].read(f"{text}{added}\n", facts).description.whole_experts == whole


@pytest.mark.parametrize(("config", "batch", "length", "noted"), [
    ("config: pre_trainer.yaml", 16, 1024, False), ("config: sft_trainer.yaml", 128, 2048, False),
    ("config: mine.yaml", 128, 4096, True), ("trainable: true", 128, 4096, False),
])  # fmt: skip
def test_batches_of_primus_are_those_of_its_configuration(config: str, batch: int, length: int, noted: bool) -> None:
    """Primus fd1eeabb, primus/configs/modules/megatron/{trainer_base,pre_trainer,sft_trainer}.yaml."""
    text = (
        f"modules:\n  pre_trainer:\n    framework: megatron\n    {config}\n    model: llama3_8B.yaml\n    overrides:\n"
    )
    found = TARGETS["megatron"].read(f"{text}      tensor_model_parallel_size: 2\n", FACTS)
    assert (found.description.global_batch, found.description.sequence_length) == (batch, length)
    assert bool([note for note in found.notes if "mine.yaml" in note]) == noted
    for value, on in (("0", False), ("1", True)):
        text_of = f"{text}      tensor_model_parallel_size: 2\n      sequence_parallel: {value}\n"
        assert TARGETS["megatron"].read(text_of, FACTS).description.sequence_parallel == on


def test_samples_of_llama_factory_have_its_length_unless_it_is_said() -> None:
    text = "per_device_train_batch_size: 1\ntensor_model_parallel_size: 2\nbf16: true\nmodel_name_or_path: a/b\n"
    for added, length in (("", 2048), ("cutoff_len: 4096\n", 4096)):
        assert TARGETS["megatron"].read(text + added, FACTS).description.sequence_length == length
