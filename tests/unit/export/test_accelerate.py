"""What is written for Accelerate, by its own classes where it is installed, and files that people have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.engines.spaces import SPACES
from planner.export.description import Description, ExportError
from planner.export.pytorch.accelerate_reading import SYNC_EACH_BATCH
from planner.export.target import Facts
from planner.export.targets import TARGETS
from planner.models.zoo import ZOO
from tests.refusals import refused
from tests.unit.export.descriptions import architecture, descriptions, job_of, recorded

ACCELERATE = TARGETS["accelerate"]
PLAIN = Description(layers=(80,), data=8, full=(0,), selective=(0,), sequence_length=8192)
FACTS = Facts(layers=80, devices=None, architecture=architecture("llama70b"))


def has_place(d: Description) -> bool:
    return d.pipeline == 1 and (d.tensor == 1 or (d.data > 1 and d.context == 1))


def file_of(description: Description) -> str:
    losses = ACCELERATE.nearest(description)
    nearest = losses[-1].description if losses else description
    return ACCELERATE.write(job_of(nearest, "llama70b"))["accelerate.yaml"]


@settings(max_examples=30, deadline=None)
@given(description=descriptions("llama70b").filter(has_place))
def test_every_key_is_known(description: Description) -> None:
    content = yaml.safe_load(file_of(description))
    known = recorded("accelerate")
    assert set(content) <= set(known["keys"])
    for section in ("fsdp_config", "parallelism_config"):
        assert set(content.get(section, ())) <= set(known["options"])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_its_own_classes_take_the_file(data: st.DataObject, tmp_path: Path) -> None:
    """Runs where accelerate is installed: its configuration class, and its checks of sizes."""
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    sizes = pytest.importorskip("accelerate.parallelism_config", reason="accelerate is not installed")
    description = data.draw(descriptions("llama70b").filter(has_place))
    path = tmp_path / "accelerate.yaml"
    path.write_text(file_of(description))
    config = config_args.ClusterConfig.from_yaml_file(path)
    assert config.num_processes == description.devices
    if config.parallelism_config:
        prefix = "parallelism_config_"
        given_sizes = {
            name.removeprefix(prefix): size
            for name, size in config.parallelism_config.items()
            if name != f"{prefix}cp_comm_strategy"
        }
        assert sizes.ParallelismConfig(**given_sizes).total_size == description.devices


@pytest.mark.parametrize(
    ("strategy", "zero", "replicas"),
    [("FULL_SHARD", 3, 1), ("SHARD_GRAD_OP", 2, 1), ("NO_SHARD", 0, 1), ("HYBRID_SHARD", 3, 2), (2, 2, 1)],
)
def test_a_file_of_the_first_fsdp_is_read(strategy: object, zero: int, replicas: int) -> None:
    text = (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\n"
        f"fsdp_config:\n  fsdp_sharding_strategy: {strategy}\n  fsdp_backward_prefetch: BACKWARD_PRE\n"
    )
    reading = ACCELERATE.read(text, FACTS)
    found = reading.description
    assert (found.data, found.zero, found.replicas) == (16, zero, replicas)
    assert reading.notes[0].startswith("the file leaves batches and lengths to the program: priced as one micro-batch")
    assert f"{FACTS.own_length} tokens" in reading.notes[0]


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json",
            ("DEEPSPEED", "deepspeed_config_file"),
        ),
        ("distributed_type: TPU", ("TPU", "NO", "MULTI_GPU", "FSDP")),
        ("distributed_type: MULTI_GPU", ("num_processes", "--devices")),
        ("num_processes: 8\nparallelism_config: {parallelism_config_tp_size: 3}", ("parallelism_config", 3, 8)),
        (
            "num_processes: 8\nparallelism_config: {parallelism_config_sp_size: 2}",
            ("parallelism_config.parallelism_config_sp_size", "cp_size"),
        ),
    ],
)
def test_what_is_no_plan_is_refused(text: str, facts: tuple[object, ...]) -> None:
    with refused(ExportError, *facts):
        ACCELERATE.read(text, FACTS)


@pytest.mark.parametrize(
    ("description", "facts"),
    [
        (replace(PLAIN, layers=(40, 40), full=(0, 0), selective=(0, 0)), (2, "--pipeline 1")),
        (replace(PLAIN, data=1, tensor=8), ("tensor 8", "--data 2")),
        (replace(PLAIN, tensor=2, ring=2), ("tensor 2 x context 2", "transformers")),
        (replace(PLAIN, precision="fp16"), ("--precision bf16",)),
    ],
)
def test_what_has_no_place_is_refused(description: Description, facts: tuple[object, ...]) -> None:
    with refused(ExportError, *facts):
        ACCELERATE.nearest(description)


def test_batches_stand_in_the_command() -> None:
    description = replace(PLAIN, zero=3, replicas=2, micro_batch=2, micro_batches=4)
    assert ACCELERATE.nearest(description) == ()
    script = ACCELERATE.write(job_of(description, "llama70b"))["launch.sh"]
    assert "--per_device_train_batch_size 2" in script
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4" in script


@pytest.mark.parametrize(("zero", "micro_batches", "there"), [(3, 4, True), (2, 4, True), (3, 1, False), (0, 4, False)])
def test_gradients_are_sharded_after_every_micro_batch(zero: int, micro_batches: int, there: bool) -> None:
    """Without `sync_each_batch` the Trainer takes all micro-batches but the last with `Accelerator.no_sync`, which
    turns the reductions of FSDP2 off: gradients are whole on every device."""
    d = replace(PLAIN, zero=zero, micro_batches=micro_batches)
    files = ACCELERATE.write(job_of(d, "llama70b"))
    given = """--accelerator_config '{"gradient_accumulation_kwargs": {"sync_each_batch": true}}'"""
    assert (given in files["launch.sh"]) == there
    assert ("sync_each_batch=True" in dict(ACCELERATE.fill_in(job_of(d, "llama70b")))["TRAIN"]) == there
    for script, noted in ((files["launch.sh"], False), (files["launch.sh"].replace(given, ""), there)):
        reading = ACCELERATE.read(files["accelerate.yaml"], replace(FACTS, beside=script))
        assert reading.description == d
        assert bool([note for note in reading.notes if "stay whole on every device" in note]) == noted


def test_the_trainer_takes_the_argument() -> None:
    """transformers reads JSON there, and gives the rest to `GradientAccumulationPlugin`."""
    plugin = pytest.importorskip("accelerate.utils").GradientAccumulationPlugin
    content = json.loads(SYNC_EACH_BATCH)
    fields = pytest.importorskip("transformers.trainer_pt_utils").AcceleratorConfig(**content)
    assert plugin(**fields.gradient_accumulation_kwargs).sync_each_batch is True


TENSOR = replace(PLAIN, zero=3, tensor=2, vocabulary_parallel=False, full=(80,), micro_batches=2)


@pytest.mark.parametrize("engine", ["accelerate", "torch"])
def test_sgd_has_the_momentum_that_is_planned(engine: str) -> None:
    """torch.optim.SGD has none by default; transformers, trainer_optimizer.py: _get_sgd reads it from optim_args."""
    said = {"accelerate": "--optim_args momentum=0.9", "torch": "lr=rate, momentum=0.9)"}[engine]
    for optimizer, there in (("sgd", True), ("adamw", False)):
        files = TARGETS[engine].write(job_of(replace(PLAIN, optimizer=optimizer), "llama70b"))
        assert any(said in text for text in files.values()) == there


def test_tensor_parallelism_is_that_of_transformers() -> None:
    """transformers shards a model with a `DistributedConfig` when it loads it, and Accelerate wraps nothing that is
    sharded (fsdp2_prepare_model): weights are gathered again, and the model recomputes by itself. Run with gloo on four
    processes, transformers 5.22.2 and 5.24: without `fsdp_size` "The parallel mesh requires 2 processes"."""
    (loss, again) = ACCELERATE.nearest(replace(TENSOR, zero=2, replicas=2))
    assert (loss.what, again.here, again.description) == ("ZeRO 2", "2", TENSOR)
    files = ACCELERATE.write(job_of(TENSOR, "llama70b"))
    content = yaml.safe_load(files["accelerate.yaml"])
    assert content["fsdp_config"]["fsdp_activation_checkpointing"] is False
    assert "--gradient_checkpointing" in files["launch.sh"]
    for word in ("gradient_checkpointing", "activation_checkpointing"):  # the name from transformers 5.23 on
        script = files["launch.sh"].replace("gradient_checkpointing", word)
        assert ACCELERATE.read(files["accelerate.yaml"], replace(FACTS, beside=script)).description == TENSOR
    told = dict(ACCELERATE.fill_in(job_of(TENSOR, "llama70b")))["TRAIN"]
    assert "DistributedConfig(tp_size=2, fsdp_size=8, fsdp_mixed_precision=True)" in told
    assert "DistributedConfig" not in dict(ACCELERATE.fill_in(job_of(replace(TENSOR, tensor=1), "llama70b")))["TRAIN"]


@pytest.mark.parametrize("model", ["gpt3-175b", "deepseek-v3"])
def test_models_without_a_plan_of_transformers_have_no_tensor_parallelism(model: str) -> None:
    job = replace(job_of(TENSOR, "llama70b"), model=model, architecture=ACCELERATE.architecture_of(model, None))
    with refused(ExportError, model, "--tensor 1"):
        ACCELERATE.write(job)
    assert "accelerate.yaml" in ACCELERATE.write(replace(job, description=replace(TENSOR, tensor=1)))


@pytest.mark.thorough
def test_models_without_a_plan_are_those_of_the_zoo() -> None:
    """What the space leaves out is what transformers has no plan for, where it is installed."""
    auto = pytest.importorskip("transformers").AutoConfig
    kinds = {"gpt2": "gpt", "bert": "bert", "t5": "t5", "vit": "vit", "deepseek_v3": "deepseek-v3"}
    without = {name for name, degrees in SPACES["accelerate"].models if degrees == (("tensor", 1),)}
    for kind, start in kinds.items():
        plan = auto.for_model(kind).base_model_tp_plan or {}
        assert not [name for name in plan if "attn" in name]
        assert {name for name in ZOO if name.startswith(start)} <= without
    for kind in ("llama", "mistral", "gemma", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v2"):
        assert [name for name in auto.for_model(kind).base_model_tp_plan if "attn" in name]


AXOLOTL = "base_model: meta-llama/Llama-2-70b\nmicro_batch_size: 2\nfsdp_version: 2\nfsdp_config:\n  version: 2\n"


@pytest.mark.parametrize(("added", "precision"), [
    ("", "bf16"), ("bf16: auto\n", "bf16"), ("bf16: false\n", "fp32"), ("bf16: false\nfp16: false\n", "fp32"),
    ("bf16: false\nbfloat16: true\n", "bf16"),
])  # fmt: skip
def test_axolotl_computes_in_fp32_where_16_bits_are_off(added: str, precision: str) -> None:
    found = ACCELERATE.read(AXOLOTL + added, replace(FACTS, devices=8)).description
    assert (found.precision, found.sequence_length) == (precision, 512)
    with refused(ExportError, "mixed_precision", "fp16"):
        ACCELERATE.read(f"{AXOLOTL}fp16: true\n", replace(FACTS, devices=8))


TRAINER = "deepspeed --num_gpus 8 train.py --deepspeed ds_z2.json --per_device_train_batch_size 1 --bf16 "


def test_the_trainer_s_optimizer_is_that_of_deepspeed() -> None:
    def read(added: str) -> Description:
        return TARGETS["deepspeed"].read(TRAINER + added, FACTS).description

    assert [read(added).optimizer for added in ("", "--optim sgd", "--optim adamw_8bit")] == ["adamw", "sgd", "adamw"]
    assert [read(f"--max_grad_norm {norm}").update.clip_norm for norm in ("0.3", "0")] == [0.3, None]
    with refused(ExportError, "--optim", "adafactor"):
        read("--optim adafactor")
    with refused(ExportError, "--max_grad_norm", "$CLIP"):
        read("--max_grad_norm $CLIP")


@pytest.mark.parametrize(("said", "precision", "remark"), [("fp8", "bf16", True), ("bf16", "bf16", False)])
def test_fp8_under_deepspeed_is_bf16_but_for_linear_layers(said: str, precision: str, remark: bool) -> None:
    text = f"distributed_type: DEEPSPEED\nmixed_precision: {said}\ndeepspeed_config:\n  zero_stage: 2\n"
    found = ACCELERATE.read(text, replace(FACTS, devices=8))
    assert (found.description.precision, found.description.update.clip_norm) == (precision, 1.0)
    assert bool([line for line in found.unmodelled if "products in 8 bits" in line]) == remark


def test_a_batch_size_of_axolotl_accumulates_nothing() -> None:
    """axolotl 067b021c, utils/schemas/training.py: gradient_accumulation_steps is 1 before normalize_config looks."""
    facts = replace(FACTS, devices=8)
    found = ACCELERATE.read(f"{AXOLOTL}batch_size: 8\n", facts)
    assert (found.description.micro_batch, found.description.micro_batches) == (2, 1)
    assert [note for note in found.notes if "batch_size: 8" in note and "gradient_accumulation_steps: 4" in note]
    assert not [note for note in ACCELERATE.read(f"{AXOLOTL}batch_size: 2\n", facts).notes if "accumulates" in note]
    with refused(ExportError, "batch_size", "gradient_accumulation_steps"):
        ACCELERATE.read(f"{AXOLOTL}batch_size: 8\ngradient_accumulation_steps: 4\n", facts)


@pytest.mark.parametrize(("setting", "words"), [
    ("gradient_checkpointing: offload", "activations in host memory"), ("layer_offloading: true", "weights of blocks"),
    ("gradient_checkpointing: true\nselective_checkpointing: true", "results of attention"),
])  # fmt: skip
def test_what_axolotl_keeps_elsewhere_is_said_to_have_no_price(setting: str, words: str) -> None:
    found = ACCELERATE.read(f"{AXOLOTL}{setting}\n", replace(FACTS, devices=8))
    assert [line for line in found.unmodelled if words in line]


@pytest.mark.parametrize(
    "kind", ["distributed_type: MULTI_GPU", "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2"]
)
def test_a_bare_no_is_no_mixed_precision(kind: str) -> None:
    """YAML reads it as false, and so does Accelerate (commands/config/config_args.py)."""
    found = ACCELERATE.read(f"mixed_precision: no\nnum_processes: 8\n{kind}\n", replace(FACTS, devices=8))
    assert found.description.precision == "fp32"
