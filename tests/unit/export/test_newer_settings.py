"""Settings of the newest versions of engines, and defaults that changed, are read as those versions mean them."""

from dataclasses import replace

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
