"""Configurations that other projects publish are read as they are meant, or refused in one line."""

import csv
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from planner.export.adapters_in import AskedAdapters, adapters_in
from planner.export.architecture import architecture_of
from planner.export.description import ExportError
from planner.export.editing import edited
from planner.export.guessing import guessed_engine
from planner.export.model_names import zoo_name
from planner.export.models_of import model_of
from planner.export.target import Facts, Job, Reading
from planner.export.targets import TARGETS
from planner.graph.fp8 import Fp8
from planner.models.zoo import zoo_entry
from planner.plan.layout.kept import Kept
from tests.refusals import refused

HERE = Path(__file__).parents[2] / "data" / "published"
ROWS = list(csv.DictReader((HERE / "configurations.csv").read_text().splitlines()))
SAID = {  # what is in no price, of some
    "accelerate/axolotl_qlora-fsdp-70b.yaml": "adapter",
    "mindspeed/pretrain_deepseek3_671b_4k_ptd.sh": "moe-fb-overlap",
    "mindspeed/pretrain_deepseek32_671b_4k_A3_ptd.sh": "keys that an indexer picks",
    "accelerate/axolotl_dpo.yaml": "rl: training on preferences or rewards",
    "megatron/swift_new_special_tokens.sh": "an adapter is trained",
    "accelerate/factory_qwen3moe_lora_sft_kt.yaml": "experts are computed on the processors of the host",
    "accelerate/open-instruct_llama3.1_8b_preview_mix.yaml": "nothing is said of bf16 or fp16",
    "nemo/launcher_mistral_squad.yaml": "an adapter is trained",
    "torchtitan/primus_llama3.1_70B-FP8-pretrain.yaml": "known by the name of this file",
    "megatron/slime_run-qwen3-4B-amd.sh": "preferences or rewards",
    "megatron/slime_run-qwen3-4B-base-sft.sh": "known by the name of this file, which was not read",
    "megatron/primus_llama3.1_8B-MXFP4-pretrain.yaml": "products in 8 bits or less",
    "megatron/neox_pythia_2-8B.yml": "priced with learned positions",
    "megatron/rocm_gpt3_rope_interleaved.yaml": "--position-embedding-type rope: priced with learned positions",
    "nemo/gcp_bridge_deepseek_v3_256gpus.sh": "what this recipe of Megatron Bridge decides",
    "deepspeed/factory_qwen2_full_asft.yaml": "read as ZeRO 0 by its name",
    "accelerate/handbook_zephyr-141b-orpo.yaml": "nothing is said of FSDP or DeepSpeed",
    "accelerate/axolotl_fft-8b.yaml": "move to host memory",
}

AWARE = "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --micro-batch-size 1"
PURE = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
BRIDGE = """import torch
from megatron.bridge.recipes.gpt.vanilla_gpt import vanilla_gpt_pretrain_config
cfg = vanilla_gpt_pretrain_config()
cfg.train.micro_batch_size = 1
cfg.train.global_batch_size = 8
cfg.optimizer.use_distributed_optimizer = True
cfg.optimizer.use_precision_aware_optimizer = True
"""


def reading_of(row: dict[str, str]) -> Reading:
    """As `plan import` reads it; the engine of a file that is no configuration is asked for."""
    text = (HERE / row["file"]).read_text()
    engine = row["engine"] or guessed_engine(text, TARGETS)
    model = row["model"] or model_of(engine, text, row["recipe"])
    if not model:
        raise ExportError("name the model with --model")
    facts = Facts(
        layers=dict(zoo_entry(model).dimensions).get("num_layers", 12),
        devices=int(row["devices"]) if row["devices"] else None,
        architecture=architecture_of(model, None),
        recipe=row["recipe"],
        model=model,
    )
    return TARGETS[engine].read(text, facts)


def words_of(reading: Reading) -> str:
    d = reading.description
    return (
        f"d{d.data} t{d.tensor} p{d.pipeline}x{d.virtual_stages} c{d.ring}x{d.heads} e{d.expert or 0} z{d.zero}"
        f" r{d.replicas} m{d.micro_batch}x{d.micro_batches} f{sum(d.full)} s{sum(d.selective)} {d.precision}"
    )


def name_of(row: dict[str, str]) -> str:
    return f"{row['file']}-{row['model']}"


@pytest.mark.parametrize("row", [row for row in ROWS if row["read"]], ids=name_of)
def test_a_published_configuration_says_what_it_says(row: dict[str, str]) -> None:
    reading = reading_of(row)
    assert words_of(reading) == row["read"]
    assert reading.description.devices == int(row["devices"])


@pytest.mark.parametrize("row", [row for row in ROWS if row["refused"]], ids=name_of)
def test_what_is_not_read_is_refused_in_one_line(row: dict[str, str]) -> None:
    with pytest.raises(ExportError) as refused:
        reading_of(row)
    assert row["refused"] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_most_are_read() -> None:
    assert sum(bool(row["read"]) for row in ROWS) >= 55
    assert {row["engine"] for row in ROWS} >= set(TARGETS) - {"torch", "megatron-bridge"}


@pytest.mark.parametrize("row", [row for row in ROWS if row["file"] in SAID], ids=name_of)
def test_what_matters_and_has_no_price_is_said(row: dict[str, str]) -> None:
    reading = reading_of(row)
    words = " ".join((*reading.unmodelled, *reading.notes))
    assert SAID[row["file"]] in words


@pytest.mark.parametrize(
    ("file", "states", "weights"),
    [
        ("zero_stage2_offload_config.json", "host", "device"),
        ("axolotl_zero3_bf16_cpuoffload_all.json", "host", "host"),
        ("zero_stage3_config.json", "device", "device"),
    ],
)
def test_what_deepspeed_offloads_is_part_of_the_description(file: str, states: str, weights: str) -> None:
    for row in (row for row in ROWS if row["file"] == f"deepspeed/{file}" and row["read"]):
        reading = reading_of(row)
        assert (reading.description.states_at, reading.description.weights_at) == (states, weights)
        assert any("updates offloaded states on the host's processors" in note for note in reading.notes) == (
            states == "host"
        )
        assert not any("offload" in words for words in reading.unmodelled)


def test_the_engine_of_a_file_is_guessed() -> None:
    wrong = []
    for row in ROWS:
        try:
            found = guessed_engine((HERE / row["file"]).read_text(), TARGETS)
        except ExportError:
            found = ""
        if found != row["engine"]:
            wrong.append(row["file"])
    assert wrong == ["nemo/performance_llama3_8b.py"]


def test_the_model_of_a_file_is_found() -> None:
    engines = ("megatron", "mindspeed", "mindformers")
    named = [row for row in ROWS if row["read"] and (row["engine"] in engines or row["file"].startswith("nemo/gcp"))]
    found = {row["file"]: model_of(row["engine"], (HERE / row["file"]).read_text(), row["recipe"]) for row in named}
    assert found == {row["file"]: row["model"] for row in named}


def test_devices_are_those_that_slurm_is_asked_for() -> None:
    for file, model, devices in (
        ("swissai_submit-llama3-70b.sh", "llama70b", 128),
        ("bigscience_tr11-176B-ml.slurm", "gpt2+hidden_size=14336+num_heads=112+num_layers=70", 192),
    ):
        facts = Facts(layers=80 if "70b" in file else 70, devices=None, architecture=architecture_of(model, None))
        text = (HERE / "megatron" / file).read_text().replace("--nproc-per-node $SLURM_GPUS_PER_NODE", "")
        assert TARGETS["megatron"].read(text, facts).description.devices == devices


def test_embedding_and_head_count_as_layers_where_megatron_deepspeed_is_told_so() -> None:
    (row,) = (row for row in ROWS if "tr11-176B" in row["file"])
    assert reading_of(row).description.layers == (5, *(6,) * 10, 5)


@pytest.mark.parametrize(
    ("engine", "setting", "said"),
    [
        ("torchtitan", "[training]\nenable_cpu_offload = true", "in host memory"),
        (
            "torchtitan",
            "[optimizer]\nearly_step_in_backward = true\n[training]\nseq_len = 2048",
            "updated in the backward pass",
        ),
        ("deepspeed", '{"train_batch_size": 8, "bf16": {"bf16_master_weights_and_grads": true}}', "in fewer bits"),
        ("megatron", f"{AWARE} --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "in fewer bits"),
        ("megatron", f"{AWARE} --exp-avg-dtype bf16", "in fewer bits"),
        ("megatron-bridge", f"{BRIDGE}cfg.optimizer.exp_avg_dtype = torch.float16\n", "in fewer bits"),
        ("accelerate", "distributed_type: FSDP\nmixed_precision: fp8", "in 8 bits"),
    ],
)
def test_what_matters_is_said_of_single_settings(engine: str, setting: str, said: str) -> None:
    facts = Facts(layers=32, devices=8, architecture=None)
    (words,) = TARGETS[engine].read(f"{setting}\n", facts).unmodelled
    assert said in words


@pytest.mark.parametrize(
    ("engine", "setting", "masters"),
    [
        ("torchtitan", '[training]\ndtype = "bfloat16"', False),
        ("deepspeed", json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 1}, "bf16": PURE}), False),
        ("megatron", f"{AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", True),
        (
            "megatron-bridge",
            f"{BRIDGE}cfg.optimizer.exp_avg_dtype = torch.bfloat16\ncfg.optimizer.exp_avg_sq_dtype = torch.bfloat16\n",
            True,
        ),
    ],
)
def test_moments_in_16_bits_are_read(engine: str, setting: str, masters: bool) -> None:
    reading = TARGETS[engine].read(f"{setting}\n", Facts(layers=32, devices=8, architecture=None))
    update = reading.description.update
    assert (update.moment_dtype, update.master_weights) == ("bf16", masters)
    assert reading.unmodelled == ()
    assert not any("exp_avg" in path for path in reading.unread)


def test_sequences_that_megatron_deepspeed_splits_by_heads_are_read() -> None:
    """--ds-sequence-parallel-size; and one expert is an MLP there."""
    (row,) = (row for row in ROWS if "fpdt_32k" in row["file"])
    reading = reading_of(row)
    assert (reading.description.heads, reading.description.expert) == (4, None)
    assert "in chunks" in " ".join(reading.unmodelled)
    dense = "--deepspeed --zero-stage 1 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --num-experts 1"
    assert model_of("megatron", dense) == "gpt3-1.3b"


def test_biases_and_tied_embeddings_tell_models_apart() -> None:
    said = "--num-layers 36 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 11008 --swiglu"
    said += " --group-query-attention --num-query-groups 2"
    assert model_of("megatron", f"{said} --add-qkv-bias") == "qwen2.5-3b"
    assert "qkv_bias=False" in str(model_of("megatron", said))
    llama = "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --num-key-value-heads 8"
    llama += " --ffn-hidden-size 28672 --swiglu --untie-embeddings-and-output-weights"
    assert model_of("megatron", f"{llama} --rotary-base 500000") == "llama70b"
    with refused(ExportError, "--num-key-value-heads", 4, 8):
        text = f"{llama.replace('heads 8', 'heads 4')} --micro-batch-size 1"
        a = architecture_of("llama70b", None)
        TARGETS["megatron"].read(text, Facts(layers=80, devices=8, architecture=a))


def test_a_script_sets_what_it_only_asks_for() -> None:
    """: "${NAME:=default}"; a layout that a shell reads twice; what it is itself given."""
    text = ': "${LAYERS:=24}"\n--num-layers $LAYERS --hidden-size 2048 --num-attention-heads 16'
    assert model_of("megatron", text) == "gpt3-1.3b"
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3\\|tL'"
    facts = Facts(layers=4, devices=2, architecture=None)
    assert TARGETS["megatron"].read(layout, facts).description.layers == (3, 1)
    with refused(ExportError, "the script itself is given", "${10}"):
        TARGETS["megatron"].read("TP=${10}\n--tensor-model-parallel-size $TP", facts)


def test_the_stage_of_zero_of_megatron_deepspeed_is_demanded() -> None:
    text = (HERE / "megatron" / "bigscience_tr9-1B3-swiglu.slurm").read_text().replace("--zero-stage", "--stage")
    with pytest.raises(
        ExportError, match="--deepspeed: the stage of ZeRO is not said; write --zero-stage 0, 1, 2 or 3"
    ):
        TARGETS["megatron"].read(text, Facts(layers=24, devices=64, architecture=None))


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Llama-3.2-1B", "llama3.2-1b"),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", None),
        ("google/gemma-1.1-2b-it", "gemma-2b"),
        ("google/gemma-2-2b", None),
        ("google/gemma-3-27b-it", None),
        ("google/gemma-3n-E2B-it", None),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("Qwen/Qwen3-VL-30B-A3B-Instruct", None),
        ("Qwen/Qwen3-14B", "qwen3-14b"),
        ("models/llama3-8b-pro", None),
        ("Llama31Config70B", "llama70b"),
    ],
)
def test_a_name_means_one_model_or_none(name: str, model: str | None) -> None:
    assert zoo_name(name) == model


def test_an_mlp_of_gpt_is_as_wide_as_it_is_said() -> None:
    said = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size {}"
    assert model_of("megatron", said.format(8192)) == "gpt3-1.3b"
    with pytest.raises(ExportError, match="its MLP of 5456 has no gates"):
        model_of("megatron", said.format(5456))


def test_delayed_scales_of_a_published_script_are_read() -> None:
    row = next(row for row in ROWS if row["file"] == "megatron/train_llama3_8b_h100_fp8.sh")
    assert reading_of(row).description.fp8 == Fp8(recipe="delayed", history=1024)


def test_devices_of_megatron_bridge_are_in_the_name_of_the_recipe() -> None:
    (row,) = (row for row in ROWS if "bridge_llama3_70b_pretrain_64gpu" in row["file"])
    text = (HERE / row["file"]).read_text()
    reading = TARGETS["nemo"].read(text, Facts(layers=80, devices=None, architecture=None, recipe=row["recipe"]))
    assert reading.description.devices == 64
    assert "llama3_70b_pretrain_64gpu_h100_bf16_config: on 64 devices, by its name" in reading.notes


def test_a_recipe_that_only_renames_another_file_s_is_refused() -> None:
    text = "def llama3_8b_pretrain_8gpu_config():\n    cfg = llama3_8b_pretrain_other_config()\n    return cfg\n"
    with refused(ExportError, "degrees and batches are those of llama3_8b_pretrain_other_config", "another file's"):
        TARGETS["nemo"].read(text, Facts(layers=32, devices=8, architecture=None))
    row = next(row for row in ROWS if "bridge_deepseek_v3_pretrain_1024gpu" in row["file"])
    text = (HERE / row["file"]).read_text().replace("set_deepseek_v3_pipeline_model_parallel_layout(", "other(")
    with refused(ExportError, 61, 8, 4, "deepseek_v3_pretrain_config of another file"):
        TARGETS["nemo"].read(text, Facts(layers=61, devices=1024, architecture=None, recipe=row["recipe"]))


def test_layouts_of_deepseek_are_those_of_megatron_bridge() -> None:
    """A layout that is given, or one for the ranks and stages that its table knows."""
    recipe = (
        "def pretrain_recipe():\n    cfg = base()\n    cfg.model.pipeline_model_parallel_size = {}\n"
        "    cfg.model.virtual_pipeline_model_parallel_size = {}\n    cfg.train.global_batch_size = 8\n"
        "    set_deepseek_v3_pipeline_model_parallel_layout(cfg.model{})\n    return cfg\n"
    )
    for ranks, virtual, given, stages in (
        (4, 1, "", (16, 16, 16, 13)),
        (8, 2, "", (*(4,) * 15, 1)),
        (2, 2, ", 'Ett|t*20|t*20|t*19mL'", (2, 20, 20, 19)),
    ):
        text = recipe.format(ranks, virtual, given)
        facts = Facts(layers=61, devices=ranks, architecture=None)
        assert TARGETS["nemo"].read(text, facts).description.layers == stages
    with refused(ExportError, 61, 16, 2):
        TARGETS["nemo"].read(recipe.format(16, 2, ""), Facts(layers=61, devices=16, architecture=None))


def test_experts_are_as_wide_as_an_mlp_where_nothing_else_is_said() -> None:
    said = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --swiglu --num-experts 16"
    said += " --group-query-attention --num-query-groups 8 --moe-router-topk 2 --ffn-hidden-size 6400"
    said += " --untie-embeddings-and-output-weights"
    assert model_of("megatron", said) == "mixtral-8x7b+expert_size=6400+num_experts=16"
    assert model_of("megatron", f"{said} --moe-ffn-hidden-size 14336") == "mixtral-8x7b+num_experts=16"


@pytest.mark.parametrize(
    ("added", "words"),
    [("--linear-attention-freq 4", "linear attention"), ("--num-zero-experts 2", "compute nothing"),
     ("--enable-mhc", "several residual streams"), ("--kv-compress", "compressed keys")],
)  # fmt: skip
def test_layers_that_no_model_has_are_refused(added: str, words: str) -> None:
    with refused(ExportError, words):
        TARGETS["megatron"].read(f"--num-layers 4 {added}", Facts(layers=4, devices=8, architecture=None))


def test_experts_of_axolotl_are_on_different_devices() -> None:
    text = "base_model: {}\nmicro_batch_size: 1\nfsdp_version: 2\nexpert_parallel_size: {}\n"
    for model, degree, words in (("Qwen/Qwen3-30B-A3B", 3, "does not divide 8"), ("Qwen/Qwen3-8B", 2, "no experts")):
        name = model_of("accelerate", text.format(model, degree))
        assert name is not None
        facts = Facts(layers=36, devices=8, architecture=architecture_of(name, None), model=name)
        with refused(ExportError, "expert_parallel_size", degree, words):
            TARGETS["accelerate"].read(text.format(model, degree), facts)


def test_fp8_of_nemo_1_is_a_switch() -> None:
    (row,) = (row for row in ROWS if row["file"] == "nemo/gcp_llama3-70b-fp8.yaml")
    reading = reading_of(row)
    fp8 = reading.description.fp8
    assert (fp8.recipe, fp8.history) == ("delayed", 1024)
    assert not any("fp8" in words for words in reading.unmodelled)


def test_samples_of_a_step_are_counted_as_each_launcher_does() -> None:
    """ms-swift aims at 16; slime divides what it generates; without a number the Trainer takes 8 on each device."""
    facts = Facts(layers=28, devices=4, architecture=None)
    for text, micro_batch, micro_batches in (
        ("swift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size 2", 2, 2),
        ("python sft.py --per_device_train_batch_size 3 --gradient_accumulation_steps 5", 3, 5),
        ("per_device_train_batch_size: auto", 8, 1),
    ):
        description = TARGETS["accelerate"].read(text, facts).description
        assert (description.micro_batch, description.micro_batches) == (micro_batch, micro_batches)
    slime = "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 4 --num-layers 28 --rollout-batch-size 6"
    slime += " --n-samples-per-prompt 8 --num-steps-per-rollout 3"
    found = TARGETS["megatron"].read(slime, Facts(layers=28, devices=None, architecture=None)).description
    assert (found.devices, found.global_batch) == (4, 16)


@pytest.mark.parametrize("indent", [None, 2])
def test_arguments_of_the_trainer_in_json_are_read(indent: int | None) -> None:
    """On one line or many. Read as a file without batches and lengths, Llama 8B was priced with its 131,072 tokens."""
    given = {
        "output_dir": "out", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": True,
        "max_seq_length": 4096, "fsdp": "full_shard auto_wrap", "fsdp_config": {"min_num_params": 0},
    }  # fmt: skip
    text = json.dumps(given, indent=indent)
    reading = TARGETS["accelerate"].read(text, Facts(layers=28, devices=4, architecture=None))
    found = reading.description
    assert (found.micro_batch, found.micro_batches, found.sequence_length, found.zero) == (2, 8, 4096, 3)
    assert not any("min_num_params" in note for note in reading.notes)


def test_one_process_on_several_devices_is_no_plan() -> None:
    text = "CUDA_VISIBLE_DEVICES=0,1 \\\nswift sft --model Qwen/Qwen2.5-7B --per_device_train_batch_size 1"
    with refused(ExportError, "CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE"):
        TARGETS["accelerate"].read(text, Facts(layers=28, devices=None, architecture=None))


@pytest.mark.parametrize("stage", ["", "4", "$ZERO"])
def test_a_stage_that_is_none_is_refused(stage: str) -> None:
    with refused(ExportError, "zero_stage", stage) if stage else refused(ExportError, "ds_config.json", "ZeRO"):
        said = f"--zero_stage {stage}" if stage else "--deepspeed ds_config.json"
        text = f"deepspeed main.py --per_device_train_batch_size 1 {said}"
        TARGETS["deepspeed"].read(text, Facts(layers=28, devices=4, architecture=None))


def test_batches_of_a_program_are_changed_and_its_zero_is_listed() -> None:
    text = "per_device_train_batch_size: 1  # small\ndeepspeed: zero2.json\nbf16: true\n"
    target, facts = TARGETS["deepspeed"], Facts(layers=28, devices=4, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="qwen2.5-7b", description=before, architecture=None, per_node=8)
    with refused(ExportError, "deepspeed", "zero_optimization.stage", 3):
        edited(target, text, job, replace(before, zero=3))
    changed = edited(target, text, job, replace(before, micro_batch=2, full=(28,)))
    assert changed.startswith("per_device_train_batch_size: 2  # small\ngradient_checkpointing: true\ndeepspeed:")


def test_an_older_file_of_torchtitan_is_changed_in_the_words_of_its_version() -> None:
    text = (HERE / "torchtitan" / "old_llama3_70b.toml").read_text()
    target, facts = TARGETS["torchtitan"], Facts(layers=80, devices=64, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="llama70b", description=before, architecture=None, per_node=8)
    after = replace(before, tensor=4, data=16, micro_batch=4)
    changed = edited(target, text, job, after)
    assert target.read(changed, facts).description == after
    assert "[parallelism]" not in changed
    assert "tensor_parallel_degree = 4" in changed.partition("[training]")[2].partition("[experimental]")[0]
    with refused(ExportError, "parallelism.fsdp_reshard_after_forward", "this version"):
        edited(target, text, job, replace(before, zero=2))


def test_stages_of_older_pipelines_are_between_split_points() -> None:
    text = "[training]\nbatch_size = 8\n[experimental]\npipeline_parallel_degree = 2\n"
    text += 'pipeline_parallel_split_points = ["layers.10"]\n'
    facts = Facts(layers=32, devices=2, architecture=None)
    description = TARGETS["torchtitan"].read(text, facts).description
    assert (description.layers, description.micro_batch, description.micro_batches) == ((10, 22), 4, 2)
    with refused(ExportError, "parallelism.pipeline_parallel_split_points", 32):
        TARGETS["torchtitan"].read(text.replace("layers.10", "layers.40"), facts)


def test_layers_of_stages_of_mindspeed_are_listed() -> None:
    text = "--num-layers 61 --pipeline-model-parallel-size 8 --num-layer-list 7,7,7,8,8,8,8,8"
    facts = Facts(layers=61, devices=8, architecture=None)
    assert TARGETS["mindspeed"].read(text, facts).description.layers == (7, 7, 7, 8, 8, 8, 8, 8)
    with refused(ExportError, "--num-layer-list", 60, 61):
        TARGETS["mindspeed"].read(text.replace("7,7,7", "7,7,6"), facts)


def test_settings_of_nemo_1_may_stand_on_the_command_line() -> None:
    text = "python examples/nlp/language_modeling/megatron_gpt_pretraining.py trainer.devices=8 trainer.num_nodes=2"
    text += (
        " model.tensor_model_parallel_size=4 model.micro_batch_size=1 model.global_batch_size=16 model.num_layers=24"
    )
    text += " model.hidden_size=2048 model.num_attention_heads=16 model.optim.name=distributed_fused_adam"
    assert guessed_engine(text, TARGETS) == "nemo"
    assert model_of("nemo", text) == "gpt3-1.3b"
    description = TARGETS["nemo"].read(text, Facts(layers=24, devices=None, architecture=None)).description
    assert (description.devices, description.tensor, description.micro_batches, description.zero) == (16, 4, 4, 1)
    with refused(ExportError, "training=llama/llama2_7b", "another file"):
        text = "python3 launcher_scripts/main.py training=llama/llama2_7b training.trainer.num_nodes=1"
        TARGETS["nemo"].read(text, Facts(layers=32, devices=8, architecture=None))


def test_dimensions_alone_are_no_training() -> None:
    text = "--num-layers 28 --hidden-size 2048 --num-attention-heads 16"
    for engine in ("megatron", "mindspeed"):
        with refused(ExportError, "dimensions"):
            TARGETS[engine].read(text, Facts(layers=28, devices=8, architecture=None))


def test_options_with_underscores_are_those_of_megatron() -> None:
    text = "torchrun --nproc_per_node 8 finetune.py --tensor_model_parallel_size 2 --micro_batch_size 1 --bf16"
    text += " --global_batch_size 8 --num_layers 28 --sequence_parallel"
    assert guessed_engine(text, TARGETS) == "megatron"
    description = TARGETS["megatron"].read(text, Facts(layers=28, devices=None, architecture=None)).description
    assert (description.devices, description.tensor, description.micro_batches, description.precision) == (
        8,
        2,
        2,
        "bf16",
    )


def test_accelerate_s_file_may_be_json() -> None:
    text = '{"distributed_type": "FSDP", "num_processes": 8,\n "mixed_precision": "bf16",\n'
    text += ' "fsdp_config":\n {"fsdp_version": 2}}\n'
    assert guessed_engine(text, TARGETS) == "accelerate"
    target, facts = TARGETS["accelerate"], Facts(layers=32, devices=None, architecture=None)
    before = target.read(text, facts).description
    assert (before.devices, before.zero, before.precision) == (8, 3, "bf16")
    job = Job(model="llama8b", description=before, architecture=None, per_node=8)
    changed = edited(target, text, job, replace(before, zero=2))
    assert target.read(changed, facts).description.zero == 2
    assert changed.startswith("{")


def test_a_sum_of_expr_and_the_end_of_a_text_are_no_values() -> None:
    text = "GPUS=2\nmegatron sft --model Qwen/Qwen3-8B --global_batch_size $(expr 16 / $GPUS)"
    text += " --micro_batch_size `expr 2 - 1`"
    facts = Facts(layers=36, devices=2, architecture=None)
    assert TARGETS["megatron"].read(text, facts).description.global_batch == 8
    text = "c=$(cat <<- EOM\n  run.py --model_recipe_name llama3_8b --tensor_model_parallel_size 2 \\\n\nEOM\n)\n"
    assert TARGETS["nemo"].read(text, Facts(layers=32, devices=2, architecture=None)).description.tensor == 2


def test_most_scripts_are_changed_to_what_was_meant() -> None:
    """Twice as many samples at a time; what reads otherwise after the change is never written (`changed_text`)."""
    tried, meant = 0, 0
    for row in ROWS:
        if not row["read"] or row["engine"] not in ("megatron", "mindspeed"):
            continue
        reading = reading_of(row)
        before = reading.description
        if before.micro_batches % 2:
            continue
        after = replace(before, micro_batch=before.micro_batch * 2, micro_batches=before.micro_batches // 2)
        a = architecture_of(row["model"], None)
        job = Job(model=row["model"], description=before, architecture=a, per_node=8)
        tried += 1
        try:
            changed = edited(TARGETS[row["engine"]], (HERE / row["file"]).read_text(), job, after)
        except ExportError:
            continue
        facts = Facts(layers=sum(before.layers), devices=before.devices, architecture=a, model=row["model"])
        meant += TARGETS[row["engine"]].read(changed, facts).description == after
    assert tried > 50
    assert meant / tried > 0.8


def test_an_option_is_changed_where_it_stands() -> None:
    text = (
        "TP=4  # of a node\n# --micro-batch-size 8\nARGS=(\n    --tensor-model-parallel-size $TP\n"
        "    --micro-batch-size 1\n    --global-batch-size 16 \\\n"
        "    --bf16 --sequence-parallel\n    --num-layers 8\n)\n"
    )
    target, facts = TARGETS["megatron"], Facts(layers=8, devices=8, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="gpt2", description=before, architecture=None, per_node=8)
    after = replace(before, tensor=1, data=8, sequence_parallel=False, micro_batches=2, full=(8,), zero=1)
    changed = edited(target, text, job, after)
    assert target.read(changed, facts).description == after
    assert "    --tensor-model-parallel-size 1\n" in changed
    assert "    --use-distributed-optimizer\n" in changed
    assert changed.startswith("TP=4  # of a node\n# --micro-batch-size 8\n")
    assert "--sequence-parallel" not in changed
    twice = text.replace("    --bf16", "    --micro-batch-size 1 --bf16")
    with refused(ExportError, "--micro-batch-size", 2):
        edited(target, twice, job, replace(before, micro_batch=2, micro_batches=4))


@pytest.mark.parametrize(("section", "fits"), [
    ("parallel_config:\n  data_parallel: 8  # all\n  model_parallel: 1\n  gradient_aggregation_group: 4\n", True),
    ("parallel_config: {data_parallel: 8, model_parallel: 1, gradient_aggregation_group: 4}\n", False),
    ("parallel_config: &all\n  data_parallel: 8\n  model_parallel: 1\nalso: *all\n", False),
])  # fmt: skip
def test_other_keys_of_a_section_stay(section: str, fits: bool) -> None:
    """Of a section in braces all other keys were lost."""
    text = (
        f"runner_config:\n  batch_size: 1\n{section}model:\n  model_config:\n    num_layers: 32\n    seq_length: 2048\n"
    )
    target, facts = TARGETS["mindformers"], Facts(layers=32, devices=8, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="llama8b", description=before, architecture=None, per_node=8)
    after = replace(before, data=4, tensor=2)
    if not fits:
        with refused(ExportError, "parallel_config.data_parallel", "by hand"):
            edited(target, text, job, after)
        return
    changed = edited(target, text, job, after)
    assert target.read(changed, facts).description == after
    assert "  data_parallel: 4  # all\n" in changed
    assert "  gradient_aggregation_group: 4\n" in changed


@pytest.mark.parametrize(("head", "tensor", "other"), [
    ('TP=2\nif [ "$1" = big ]; then TP=4; fi', 4, 2), ('if [ "$1" = big ]; then\n TP=4\nelse\n TP=2\nfi', 2, 4),
    ("TP=2\ncase $1 in\n a) TP=4;;\nesac", 4, 2), ("A=a\nTP=2\nif [ $A = b ]; then TP=4; fi", 2, None),
    ('TP=2\nif [ "$1" = big ]; then TP=4; fi\nTP=8', 8, None), ('TP=2\nif [ "$1" = a ]; then OTHER=4; fi', 2, None),
])  # fmt: skip
def test_numbers_by_conditions_that_are_not_known_are_said(head: str, tensor: int, other: int | None) -> None:
    """The last of them was taken without a word."""
    text = f"{head}\npretrain_gpt.py --num-layers 8 --tensor-model-parallel-size $TP --micro-batch-size 1 --bf16\n"
    found = TARGETS["megatron"].read(text, Facts(layers=8, devices=8, architecture=None))
    assert found.description.tensor == tensor
    said = [f"TP: {other} or {tensor}, by a condition that the file does not decide; read as {tensor}"]
    assert [note for note in found.notes if "by a condition" in note] == (said if other else [])


def test_what_stands_behind_an_option_stays() -> None:
    """Variables behind a switch, or behind a number, were taken away with it, and so was where the output goes."""
    text = (
        'DATA="--data-path x"\ntorchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 $DATA'
        " --global-batch-size 16 --num-layers 8 --bf16 --sequence-parallel ${MORE[@]} --micro-batch-size 1 $LAST"
        ' --recompute-activations "$@" --use-distributed-optimizer 2>&1 | tee log.txt'
    )
    target, facts = TARGETS["megatron"], Facts(layers=8, devices=8, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="gpt2", description=before, architecture=None, per_node=8)
    after = replace(
        before, tensor=1, data=8, sequence_parallel=False, micro_batches=2, zero=0, selective=(0,), kept=Kept()
    )
    changed = edited(target, text, job, after)
    assert target.read(changed, facts).description == after
    assert changed == (
        'DATA="--data-path x"\ntorchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 1 $DATA'
        " --global-batch-size 16 --num-layers 8 --bf16 ${MORE[@]} --micro-batch-size 1 $LAST"
        ' "$@" 2>&1 | tee log.txt\n'
    )


@pytest.mark.parametrize(("options", "stages"), [
    ("--recompute-activations", 1), ("--recompute-granularity full --recompute-method uniform", 1),
    ("--num-layers-per-virtual-pipeline-stage 2", 2), ("--decoder-first-pipeline-num-layers 3", 2),
    ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 6", 2),
])  # fmt: skip
def test_options_that_say_one_thing_are_changed_together(options: str, stages: int) -> None:
    """What recomputation or stages are was said twice, and the change refused."""
    text = (
        f"pretrain_gpt.py --pipeline-model-parallel-size {stages} --micro-batch-size 1 --global-batch-size 16 --bf16"
        f" --num-layers 8 {options} --use-distributed-optimizer\n"
    )
    layers = 6 if "layers 6" in options else 8
    target, facts = TARGETS["megatron"], Facts(layers=layers, devices=8, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="gpt2", description=before, architecture=None, per_node=8)
    after = replace(
        before,
        layers=(layers,),
        data=8,
        micro_batches=2,
        full=(0,),
        selective=(0,),
        kept=Kept(),
        virtual_stages=1,
        schedule="1f1b",
    )
    assert before != after
    assert target.read(edited(target, text, job, after), facts).description == after


@pytest.mark.parametrize(("head", "tail"), [
    ("torchrun --nproc_per_node 8 pretrain_gpt.py", ""), ("ARGS=(", ")\ntorchrun pretrain_gpt.py ${ARGS[@]}"),
    ('ARGS="', '"\ntorchrun pretrain_gpt.py $ARGS'),
])  # fmt: skip
def test_a_changed_value_is_quoted_for_the_shell(head: str, tail: str, tmp_path: Path) -> None:
    """A layout has bars, which began another command of the script, so that the change was refused."""
    text = (
        f"{head} --tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 16 --num-layers 8 --bf16{tail}"
    )
    target, facts = TARGETS["megatron"], Facts(layers=8, devices=8, architecture=None)
    before = target.read(text, facts).description
    job = Job(model="gpt2", description=before, architecture=None, per_node=8)
    after = replace(before, data=4, layers=(3, 5), micro_batches=4, full=(0, 0), selective=(0, 0), zero=1)
    changed = edited(target, text, job, after)
    assert target.read(changed, facts).description == after
    (tmp_path / "torchrun").write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", changed], capture_output=True, text=True, check=True, env=environment)
    words = done.stdout.splitlines()
    assert words[words.index("--pipeline-model-parallel-layout") + 1] == "Et*3|t*5L"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("finetuning_type: lora\nlora_rank: 8\nlora_target: all\n", AskedAdapters(rank="8")),
        (
            "adapter: lora\nlora_r: 32\nlora_alpha: 16\n"
            "lora_target_modules:\n  - q_proj\n  - v_proj\nlora_dropout: 0.05",
            AskedAdapters(rank="32", alpha="16", dropout="0.05", layers=("q_proj", "v_proj")),
        ),
        (
            "train.py --use_peft --lora_r 16 --lora_target_modules q_proj v_proj --bf16",
            AskedAdapters(rank="16", layers=("q_proj", "v_proj")),
        ),
        (
            "--lora-r 4 \\\n --lora-target-modules linear_qkv linear_proj \\\n --bf16",
            AskedAdapters(rank="4", layers=("q_proj", "k_proj", "v_proj", "o_proj")),
        ),
        ('{"use_lora": true, "target_modules": ["q_proj"]}', AskedAdapters(rank="8", layers=("q_proj",))),
        (
            "--use_peft --lora_r 16 --lora_target_modules q_proj v_proj --learning_rate 2e-4 --epochs 1",
            AskedAdapters(rank="16", layers=("q_proj", "v_proj")),
        ),
        (
            "# lora_rank: 64 would be more\n# finetuning_type: full\nfinetuning_type: lora\nlora_rank: 256",
            AskedAdapters(rank="256"),
        ),
        (
            "finetuning_type: lora\nlora_target: q_proj|v_proj\nadditional_target: lm_head\nuse_dora: true",
            AskedAdapters(rank="8", layers=("q_proj", "v_proj"), trained=("lm_head",), wider=True),
        ),
        (
            "adapter: lora\nlora_target_modules:\n  # of attention\n  - q_proj",
            AskedAdapters(rank="8", layers=("q_proj",)),
        ),
        ("adapter:\nlora_r: 32\n", None),
        ("use_lora: false\nlora_rank: 16", None),
        ("--q-lora-rank 1536 --kv-lora-rank 512", None),
        ("lora_r: 0\nuse_peft: false", None),
        ("finetuning_type: full\nlora_rank: 8", None),
    ],
)
def test_adapters_of_settings(text: str, asked: AskedAdapters | None) -> None:
    assert adapters_in(text) == asked
