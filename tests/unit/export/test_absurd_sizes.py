"""Sizes in settings of engines: what would take all memory, is no size, or contradicts the rest is refused."""

import resource
from collections.abc import Iterator

import pytest

from planner.export.architecture import architecture_of
from planner.export.description import ExportError
from planner.export.target import Facts
from planner.export.targets import TARGETS

LAYERS = 4
FACTS = Facts(layers=LAYERS, devices=None, architecture=architecture_of("llama-tiny", 128))
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
