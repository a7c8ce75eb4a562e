"""Sizes in settings of engines: what would take all memory, is no size, or contradicts the rest is refused."""

import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.api.importing import read_settings
from planner.export.architecture import architecture_of
from planner.export.description import Description, ExportError
from planner.export.guessing import guessed_engine
from planner.export.megatron.megatron_reading import options_of
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from planner.sharding.update import Update

LAYERS = 4
FACTS = Facts(layers=LAYERS, devices=None, architecture=architecture_of("llama-tiny+num_layers=4", 128))
ROOM = 2**30
"""Bytes that a test may take beyond what it has."""


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Memory ends before the machine's does."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


MANY = 2_000_000_000
MESH = "[parallelism]\ndata_parallel_shard_degree=1\n"


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("torchtitan", f"{MESH}pipeline_parallel_degree={MANY}"),
        ("torchtitan", f"{MESH}pipeline_parallel_degree={MANY}\npipeline_parallel_first_stage_less_layers=0"),
        ("torchtitan", f"{MESH}pipeline_parallel_degree=4\npipeline_parallel_schedule='Interleaved1F1B'"),
        ("megatron", f"--nproc-per-node {MANY} --pipeline-model-parallel-size {MANY}"),
        (
            "megatron",
            f"--nproc-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank {MANY}",
        ),
        ("mindspeed", f"--nproc-per-node {MANY} --pipeline-model-parallel-size {MANY}"),
        ("nemo", f"recipe.trainer.devices = {MANY}\nrecipe.trainer.strategy.pipeline_model_parallel_size = {MANY}"),
        ("deepspeed", f'{{"pipeline": {{"stages": {MANY}}}, "data_parallel_size": 1}}'),
        ("mindformers", f"parallel_config: {{pipeline_stage: {MANY}}}"),
        ("mindformers", f"parallel_config: {{pipeline_stage: {MANY}}}\nmodel: {{model_config: {{offset: [[1]]}}}}"),
        (
            "mindformers",
            "parallel_config: {pipeline_stage: 2}\nparallel: {pipeline_config: {pipeline_interleave: true}}\n"
            f"model: {{model_config: {{offset: [1, 0], pp_interleave_num: {MANY}}}}}",
        ),
    ],
)  # fmt: skip
def test_more_stages_than_layers_are_refused_before_there_are_any(engine: str, text: str, little_memory: None) -> None:
    for layers in (LAYERS, 0):
        with pytest.raises(ExportError, match=rf"stages, and there are {layers} layers for them"):
            TARGETS[engine].read(text, Facts(layers=layers, devices=None, architecture=None))


TWO = f"{MESH}pipeline_parallel_degree=2\n"
CONTEXT = "--nproc-per-node 4 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes"
RANKS = "--nproc-per-node 2 --pipeline-model-parallel-size 2"
FSDP = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:"


@pytest.mark.parametrize(
    ("engine", "text", "words"),
    [
        ("torchtitan", f"{MESH}[training]\nlocal_batch_size=0", "training.local_batch_size: 0; write a number of 1"),
        ("torchtitan", f"{MESH}[training]\nlocal_batch_size=-8", "training.local_batch_size: -8"),
        ("torchtitan", f"{MESH}[training]\nglobal_batch_size=-8", "training.global_batch_size: -8"),
        ("torchtitan", f"{MESH}[training]\nglobal_batch_size=0", "training.global_batch_size: 0"),
        ("torchtitan", f"{MESH}[training]\nseq_len=-8", "training.seq_len: -8"),
        ("torchtitan", "[parallelism]\ndata_parallel_shard_degree=0", "data_parallel_shard_degree: 0"),
        ("torchtitan", "[parallelism]\ndata_parallel_shard_degree=-2", "data_parallel_shard_degree: -2"),
        ("torchtitan", f"{TWO}pipeline_parallel_microbatch_size=0", "pipeline_parallel_microbatch_size: 0"),
        ("torchtitan", f"{TWO}pipeline_parallel_layers_per_stage=-1", "pipeline_parallel_layers_per_stage: -1"),
        ("torchtitan", f"{TWO}pipeline_parallel_layers_per_stage=1000", "1000 makes 1 stages, which do not divide"),
        ("torchtitan", f"{TWO}pipeline_parallel_layers_per_stage=2", "2 makes 3 stages, which do not divide over 2"),
        ("torchtitan", f"{TWO}pipeline_parallel_first_stage_less_layers=-2", "first_stage_less_layers: -2"),
        ("torchtitan", f"{TWO}module_fqns_per_model_part=5", "module_fqns_per_model_part: write a list of names"),
        ("torchtitan", f"{TWO}module_fqns_per_model_part=[1,2]", "module_fqns_per_model_part: write a list of names"),
        ("torchtitan", f"{TWO}module_fqns_per_model_part=[[1],[2]]", "write names of modules, such as layers.0"),
        ("torchtitan", f'{MESH}[activation_checkpoint]\nselective_ac_option="²"', "²; it is op or a number from 1"),
        ("torchtitan", f'{MESH}[activation_checkpoint]\nselective_ac_option="{"9" * 5000}"', "it is op or a number"),
        ("megatron", f"{CONTEXT} ² 2", "whose product is --context-parallel-size 4; found ² 2"),
        ("megatron", f"{CONTEXT} 3 2", "found 3 2"),
        ("megatron", f"{CONTEXT} 0 2", "found 0 2"),
        ("megatron", f"{CONTEXT} 2 2 1", "found 2 2 1"),
        ("megatron", f"{CONTEXT} 1 {'9' * 5000}", "found 1 9999"),
        ("megatron", f"{RANKS} --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 5", "leave -6"),
        ("megatron", f"{RANKS} --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1", "leave 2"),
        ("megatron", f"{RANKS} --decoder-first-pipeline-num-layers 4", "leave 0 of the model's 4 layers for 1 other"),
        ("megatron", f"{RANKS} --decoder-first-pipeline-num-layers -5", "num-layers -5: write a number of 1 or more"),
        ("megatron", f"{RANKS} --num-layers-per-virtual-pipeline-stage -1", "stage -1: write a number of 1 or more"),
        ("megatron", f"{RANKS} --global-batch-size -8", "--global-batch-size -8: write a number of 1 or more"),
        ("megatron", "--nproc-per-node -1", "--nproc-per-node -1: write a number of 1 or more"),
        ("megatron", "--nproc-per-node 1 --nnodes 0", "--nnodes 0: write a number of 1 or more"),
        ("megatron", "--nproc-per-node 1 --seq-length -8", "--seq-length -8: write a number of 1 or more"),
        ("megatron", "--nproc-per-node 1 --ddp-bucket-size -1 --overlap-grad-reduce", "--ddp-bucket-size -1: write"),
        ("mindspeed", "--nproc-per-node 1 --ulysses-degree-in-cp 0", "--ulysses-degree-in-cp 0: write a number of 1"),
        ("accelerate", f'{FSDP} {{fsdp_sharding_strategy: "²"}}', "sharding_strategy: '²'; there are FULL_SHARD"),
        ("accelerate", f"{FSDP} {{fsdp_sharding_strategy: 9}}", "sharding_strategy: 9; there are FULL_SHARD"),
        (
            "deepspeed",
            '{"train_batch_size":1,"train_micro_batch_size_per_gpu":2}',
            "train_batch_size: 1 is less than the 2 samples of one device",
        ),
        (
            "mindformers",
            "recompute_config: {recompute: [-3]}",
            "recompute_config.recompute: -3 layers; write 0 or more",
        ),
        ("mindformers", "recompute_config: {recompute: [-3]}", "recompute_config.recompute: -3 layers"),
        ("mindformers", "recompute_config: {select_recompute: [-3]}", "recompute_config.select_recompute: -3 layers"),
        ("mindformers", "model: {model_config: {seq_length: -5}}", "model.model_config.seq_length: -5"),
        ("mindformers", "runner_wrapper: {use_clip_grad: true, max_grad_norm: 0}", "clipped to a norm of 0: write a"),
        ("nemo", "recipe.trainer.devices = -1", "--nproc-per-node -1: write a number of 1 or more"),
    ],
)
def test_what_is_no_size_or_contradicts_the_rest_is_refused(engine: str, text: str, words: str) -> None:
    if engine in ("megatron", "mindspeed"):
        text = f"--micro-batch-size 1 {text}"  # without any argument of the engine it is another fault
    with pytest.raises(ExportError) as caught:
        TARGETS[engine].read(text, FACTS)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_a_norm_below_zero_clips_nothing_as_engines_have_it(engine: str) -> None:
    text = {
        "megatron": "--nproc-per-node 1 --clip-grad -8",
        "deepspeed": '{"gradient_clipping": -1, "data_parallel_size": 1}',
    }[engine]
    assert TARGETS[engine].read(text, FACTS).description.update.clip_norm is None


GOOD = Description(layers=(2, 2), full=(0, 0), selective=(0, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (-1, 5)}, "stages of -1, 5 layers"),
        ({"layers": (), "full": (), "selective": ()}, "stages of no layers"),
        ({"virtual_stages": 3}, "3 on each pipeline rank"),
        ({"virtual_stages": 0}, "stages on each pipeline rank: 0; write a number"),
        ({"full": (0,)}, "recomputed layers are given for 1 and 2 stages, and there are 2"),
        ({"full": (-3, 0)}, "-3 fully and 0 selectively recomputed layers in a stage of 2"),
        ({"full": (2, 0), "selective": (1, 0)}, "2 fully and 1 selectively recomputed layers in a stage of 2"),
        ({"micro_batch": 0}, "samples of a micro-batch: 0; write a number from 1 to 2147483648"),
        ({"micro_batches": -8}, "micro-batches: -8"),
        ({"data": 2**40}, "data parallel degree: 1099511627776"),
        ({"ring": 0}, "ring-attention degree: 0"),
        ({"heads": -2}, "Ulysses degree: -2"),
        ({"expert": 0}, "expert parallel degree: 0"),
        ({"sequence_length": 0}, "tokens of a sample: 0"),
        ({"replicas": 2}, "2 replicas (HSDP) do not divide 1 data-parallel devices"),
        ({"zero": 4}, "ZeRO 4: there are stages 0 to 3"),
        ({"update": Update(buckets="none", clip_norm=-1.0)}, "gradients clipped to a norm of -1"),
    ],
)
def test_a_description_is_of_a_training_step(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ExportError) as caught:
        replace(GOOD, **change)
    assert words in str(caught.value), str(caught.value)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), ValueError("x"), TypeError("x"), KeyError("x")])
def test_what_a_reader_forgot_is_refused_with_the_file(error: Exception) -> None:
    def read(text: str, facts: Facts) -> Reading:
        raise error

    with pytest.raises(ExportError, match=rf"train\.toml: its values are none of torchtitan's .{type(error).__name__}"):
        read_settings(Path("train.toml"), replace(TARGETS["torchtitan"], read=read), "", FACTS)


def test_layers_of_another_model_are_refused() -> None:
    def read(text: str, facts: Facts) -> Reading:
        return Reading(description=replace(GOOD, layers=(2, 3)))

    with pytest.raises(ExportError, match=r"train\.toml: its stages have 5 layers, the model has 4"):
        read_settings(Path("train.toml"), replace(TARGETS["torchtitan"], read=read), "", FACTS)


@pytest.mark.parametrize(
    "text",
    [
        "A=${" + "${a}" * 60 + "\n",
        "A='" + "(" * 5000 + "1'\nB=$((A))\n",
        "A=" + "1+" * 60000 + "1\nB=$((A+A+A))\n",
        "B=$((" + "*".join(["999999999999"] * 14) + "))\n",
        "A=${" + '${"' * 20000 + "\n",
        "\n" * 100_000,
    ],
    ids=["nested", "brackets", "long", "large", "open", "empty"],
)
def test_scripts_are_read_in_little_time(text: str) -> None:
    guessed_engine(f"{text}--micro-batch-size 1", TARGETS)
    with contextlib.suppress(ExportError):
        options_of(f"{text} --micro-batch-size 1")


@pytest.mark.parametrize(("engine", "text", "section"), [
    ("mindformers", "parallel_config: 5", "parallel_config"), ("torchtitan", "training = 5\n[job]\nx = 1", "training"),
    ("mindformers", "recompute_config: full\nparallel_config:\n  data_parallel: 2", "recompute_config"),
    ("deepspeed", '{"train_batch_size": 8, "tensor_parallel": 2}', "tensor_parallel"),
])  # fmt: skip
def test_a_number_in_the_place_of_a_section_is_refused(engine: str, text: str, section: str) -> None:
    """It was passed over, and all settings of the section were read as not given."""
    with pytest.raises(ExportError, match=f"{section}: .* in the place of a section"):
        TARGETS[engine].read(text, Facts(layers=32, devices=8, architecture=None))
