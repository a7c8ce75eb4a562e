"""Arguments of transformers' Trainer, and of the launchers that start it."""

from typing import Any

import pytest

from planner.export.description import Description, ExportError
from planner.export.guessing import guessed_engine
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from tests.refusals import refused

PROGRAM = "train.py --per_device_train_batch_size 1 --bf16"


def read(text: str, devices: int | None = None) -> Reading:
    facts = Facts(layers=32, devices=devices, architecture=None, sequence_length=2048)
    return TARGETS[guessed_engine(text, TARGETS)].read(text, facts)


def launched(options: str) -> Reading:
    return read(f"accelerate launch --num_processes 8 {options} {PROGRAM}")


def in_yaml(lines: str) -> Reading:
    return read(f"model_name_or_path: m\nper_device_train_batch_size: 1\nbf16: true\n{lines}", 8)


@pytest.mark.parametrize(("options", "zero", "recomputes"), [
    ("--use_fsdp", 3, False),
    ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", 2, False),
    ("--use_fsdp --fsdp_sharding_strategy 2", 2, False),
    ("--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false", 2, False),
    ("--use-fsdp --fsdp-version 2 --fsdp-activation-checkpointing true", 3, True),
    ("--multi_gpu", 0, False),
])  # fmt: skip
def test_options_of_the_launcher_are_those_of_its_file(options: str, zero: int, recomputes: bool) -> None:
    """They were read as no FSDP at all, and a note said that nothing is said of it."""
    found = launched(options)
    assert (found.description.zero, bool(found.description.recomputes)) == (zero, recomputes)
    assert any("nothing is said" in note for note in found.notes) == (zero == 0)


def test_the_launcher_knows_these_options() -> None:
    launch = pytest.importorskip("accelerate.commands.launch")
    options = (
        "--use_fsdp --fsdp_version 2 --fsdp_reshard_after_forward false --fsdp_activation_checkpointing true"
        " --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_offload_params true --use_deepspeed --zero_stage 3"
        " --offload_optimizer_device cpu --offload_param_device none --num_machines 2 train.py"
    )
    given = launch.launch_command_parser().parse_args(options.split())
    assert (given.use_fsdp, given.fsdp_version, given.zero_stage, given.num_machines) == (True, "2", 3, 2)


def test_deepspeed_of_the_launcher_has_its_stage_and_offload() -> None:
    assert launched("--use_deepspeed").description.zero == 2
    options = "--use_deepspeed --zero_stage 3 --offload_optimizer_device cpu --offload_param_device"
    found = [launched(f"{options} {place}") for place in ("none", "nvme")]
    assert [(one.description.states_at, one.description.weights_at) for one in found] == [
        ("host", "device"), ("host", "disk"),
    ]  # fmt: skip
    assert not any("states in host memory" in line for one in found for line in one.unmodelled)


def test_a_file_of_the_launcher_is_known_by_its_name_or_refused() -> None:
    with refused(ExportError, "config_file", "my_config.yaml", "FSDP or DeepSpeed"):
        launched("--config_file my_config.yaml")
    with refused(ExportError, "my_config.yaml", "stage of ZeRO"):
        launched("--use_deepspeed --config_file my_config.yaml")
    assert launched("--config_file configs/multi_gpu.yaml").description.zero == 0
    assert launched("--use_fsdp --config_file my_config.yaml").notes[0].startswith("my_config.yaml: what this file")


@pytest.mark.parametrize(("lines", "expected"), [
    ("fsdp: full_shard auto_wrap\nfsdp_config:\n  activation_checkpointing: true\n", (3, True)),
    ("fsdp: true\nfsdp_config:\n  fsdp_version: 2\n  reshard_after_forward: false\n", (2, False)),
    ('fsdp: ["shard_grad_op", "auto_wrap"]\n', (2, False)),
    ("fsdp: true\nfsdp_config:\n  version: 1\n  reshard_after_forward: shard_grad_op\n", (2, False)),
    ('fsdp: ""\n', (0, False)),
    ("fsdp: []\n", (0, False)),
])  # fmt: skip
def test_fsdp_of_the_trainer_is_read_with_its_section(lines: str, expected: tuple[int, bool]) -> None:
    """transformers 5.24.0, training_args.py: _process_fsdp_args."""
    found = in_yaml(lines).description
    assert (found.zero, bool(found.recomputes)) == expected


def test_the_trainer_s_words_for_fsdp_are_these() -> None:
    arguments = pytest.importorskip("transformers").TrainingArguments
    for words, version, expected in (
        ("shard_grad_op auto_wrap", 2, False), ("full_shard offload", 2, True), ("shard_grad_op", 1, "shard_grad_op"),
    ):  # fmt: skip
        settings: dict[str, Any] = {"version": version}
        arguments._apply_legacy_fsdp_to_config(words, settings)
        assert settings["reshard_after_forward"] == expected
        assert settings.get("cpu_offload", False) == ("offload" in words)


def test_offload_of_fsdp_is_said_to_have_no_price() -> None:
    for lines in ("fsdp: full_shard offload\n", "fsdp: true\nfsdp_config: {cpu_offload: true}\n"):
        assert [line for line in in_yaml(lines).unmodelled if "states in host memory" in line]
    assert not in_yaml("fsdp: full_shard\nfsdp_config: {cpu_offload: false}\n").unmodelled


def test_hybrid_shards_have_a_replica_on_each_machine() -> None:
    def of(machines: str, words: str) -> Description:
        return read(f'torchrun --nproc_per_node 8 {machines} {PROGRAM} --fsdp "{words} auto_wrap"').description

    found = [of("--nnodes 2", words) for words in ("hybrid_shard", "hybrid_shard_zero2")]
    assert [(one.zero, one.replicas) for one in found] == [(3, 2), (2, 2)]
    assert of("", "hybrid_shard").replicas == 1
    assert any("how many machines" in note for note in in_yaml("fsdp: hybrid_shard\n").notes)


@pytest.mark.parametrize("machines", ["--nnodes=$NNODES", "--nnodes 1:4", "--hostfile hosts"])
def test_machines_that_a_file_does_not_tell_are_asked_for(machines: str) -> None:
    """They were read as one."""
    with refused(ExportError, "how many devices", "--devices"):
        read(f"torchrun --nproc_per_node=8 {machines} {PROGRAM}")
    slurm = "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\n"
    assert read(f"{slurm}torchrun --nproc_per_node=8 {machines} {PROGRAM}").description.devices == 32


def test_settings_without_a_place_are_refused() -> None:
    with refused(ExportError, "deepspeed", "inside this file"):
        in_yaml("deepspeed:\n  zero_optimization:\n    stage: 2\n")
    with refused(ExportError, "--fsdp", "full_shard"):
        read(f"torchrun --nproc_per_node=8 {PROGRAM} --fsdp")


def test_options_may_be_written_with_dashes() -> None:
    found = read("torchrun --nproc-per-node=8 a.py --bf16 --per-device-train-batch-size=2").description
    assert (found.devices, found.micro_batch) == (8, 2)


def test_a_file_of_accelerate_says_its_offload_and_its_micro_batches() -> None:
    text = (
        "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n"
        "  gradient_accumulation_steps: 4\n  offload_optimizer_device: cpu\n  offload_param_device: none\n"
    )
    found = read(text)
    assert (found.description.zero, found.description.states_at, found.description.micro_batches) == (2, "host", 4)
    assert not found.unmodelled
    assert any("priced as 4 micro-batches of one sample" in note for note in found.notes)
    with refused(ExportError, "MEGATRON_LM", "DEEPSPEED"):
        read("distributed_type: MEGATRON_LM\nnum_processes: 8\n")


@pytest.mark.parametrize(("text", "facts"), [
    ("import torch\nfrom torch.nn.parallel import DistributedDataParallel\n", ("program", "not run", "plan estimate")),
    ("import lightning as L\ntrainer = L.Trainer(strategy='fsdp')\n", ("program", "not run", "plan estimate")),
    ("trainer:\n  devices: 8\nmodel:\n  class_path: my.Model\n", ("LightningCLI", "not read")),
    ("seed_everything: 1\ntrainer:\n  devices: 8\n", ("LightningCLI", "not read")),
])  # fmt: skip
def test_programs_and_files_of_lightning_are_refused_by_name(text: str, facts: tuple[str, ...]) -> None:
    """Files of LightningCLI were taken for NeMo's, and of programs an engine was asked for, which they have not."""
    with refused(ExportError, *facts):
        read(text, 8)
