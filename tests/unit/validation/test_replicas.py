"""Rows of hybrid sharding: how many copies there are of what groups share out, or why nobody can say."""

from pathlib import Path

import pytest

from planner.validation.pricing.evaluate import evaluate_rows
from planner.validation.request.configuration import run_of
from planner.validation.unsupported import UnsupportedError
from tests.unit.validation.runs import one

_WIDE = {"tp": "1", "pp": "1", "n_devices": "32", "dp": "32", "global_batch": "64", "recompute": "none"}


@pytest.mark.parametrize(
    ("changes", "zero", "replicas"),
    [
        ({"other_flags": "dp_replicate=8; dp_shard=4", "zero_stage": "3"}, 3, 8),
        ({"other_flags": "data_parallel_replicate_degree: 8; data_parallel_shard_degree: -1"}, 1, 8),
        ({"other_flags": "dp_shard=4", "zero_stage": ""}, 3, 8),
        ({"other_flags": "sharding_group_size=16", "zero_stage": "3"}, 3, 2),
        ({"notes": "mics_shard_size=8", "zero_stage": "3"}, 3, 4),
        ({"zero_stage": "HYBRID_SHARD"}, 3, 4),  # nodes of eight
        ({"zero_stage": "_HYBRID_SHARD_ZERO2", "devices_per_node": "4"}, 2, 8),
        ({"other_flags": "num-distributed-optimizer-instances=2", "zero_stage": ""}, 1, 2),
        ({"other_flags": "HSDP 4 x 8, dp_replicate=4", "zero_stage": ""}, 3, 4),
        ({"other_flags": "dp_replicate=1; dp_shard=32", "zero_stage": "3"}, 3, None),
        ({"other_flags": "dp_replicate=32; dp_shard=1", "zero_stage": ""}, 0, None),  # DistributedDataParallel
        ({"other_flags": "FSDP, no HSDP", "zero_stage": "3"}, 3, None),
        ({"zero_stage": "hsdp", "n_devices": "8", "dp": "8"}, 3, None),  # one node
        ({"zero_stage": "0", "other_flags": "DeepSpeed's pipeline engine"}, 1, None),  # its optimizer in bf16
        ({"zero_stage": "0", "other_flags": "DeepSpeed's pipeline engine", "precision": "fp16"}, 0, None),
        ({"zero_stage": "1", "other_flags": "overlapped-distributed-optimizer"}, 2, None),  # of Megatron-LLaMA
        ({"zero_stage": "1", "other_flags": "no overlapped-distributed-optimizer"}, 1, None),
        ({"distributed_optimizer": "OverlappedDistributedOptimizer"}, 2, None),
        ({"zero_stage": "0", "other_flags": "DeepSpeed, no-pipeline-parallel"}, 0, None),
        ({"zero_stage": "1", "source": "MaxText"}, 3, None),  # its axis `fsdp` shards weights, too
        ({"zero_stage": "1", "stack": "MaxText", "other_flags": "shard_optimizer_over_data=True"}, 1, None),
    ],
)
def test_copies_of_groups(tmp_path: Path, changes: dict[str, str], zero: int, replicas: int | None) -> None:
    pinned = run_of(one(tmp_path, **(_WIDE | changes))).pinned
    assert (pinned.zero, pinned.replicas) == (zero, replicas)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"other_flags": "HSDP 4 x 8"}, "which are the copies"),
        ({"other_flags": "dp_replicate=3"}, "3 copies do not divide dp 32"),
        ({"other_flags": "dp_replicate=4; dp_shard=4"}, "4 copies of shards on 4 devices"),
        ({"other_flags": "dp_replicate=4", "notes": "dp_replicate=8"}, "two degrees"),
        ({"other_flags": "dp_replicate=4", "zero_stage": "0"}, "zero_stage is 0"),
        ({"other_flags": "HSDP", "tp": "2", "dp": "16"}, "without degrees"),
        ({"zero_stage": "HYBRID_SHARD", "n_devices": "12", "dp": "12"}, "devices of a node do not divide"),
        ({"notes": "12% faster than HSDP"}, "its notes name HSDP"),
    ],
)
def test_what_does_not_say_how_many(tmp_path: Path, changes: dict[str, str], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        run_of(one(tmp_path, **(_WIDE | changes)))


@pytest.mark.slow
def test_copies_are_priced_between_one_group_and_none(tmp_path: Path) -> None:
    ways = ({"zero_stage": "3"}, {"zero_stage": "3", "other_flags": "dp_replicate=8"}, {"zero_stage": "0"})
    rows = [one(tmp_path, **(_WIDE | changes)) for changes in ways]
    whole, hybrid, copies = (evaluate_rows([row])[0].predicted_peak_bytes or 0.0 for row in rows)
    assert 0 < whole < hybrid < copies
