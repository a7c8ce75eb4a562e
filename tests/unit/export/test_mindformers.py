"""What MindFormers does with a configuration beyond parsing it: rules of 2.1.0 that exports follow, and settings of its
published files (configs/), which are read."""

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from planner.export.description import Description
from planner.export.target import Facts, Reading
from planner.export.targets import TARGETS
from tests.unit.export.descriptions import facts_of, job_of

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
