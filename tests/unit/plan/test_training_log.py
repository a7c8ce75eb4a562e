"""Logs of other engines, in lines as they write them."""

from pathlib import Path

import pytest

from planner.errors import RequestError
from planner.plan.compare.training_log import read_log
from tests.refusals import refused
from tests.unit.plan.test_measured import plan

MEGATRON = """
[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.5 | max allocated: 1500.0 | reserved: 1600.0 | max reserved: 2000.0
[Rank 1] (after 2 iterations) memory (MB) | allocated: 1000.5 | max allocated: 1500.0 | reserved: 1600.0 | max reserved: 2048.0
 [2025-05-27 15:23:07] iteration        1/     100 | consumed samples:           16 | elapsed time per iteration (ms): 27160.0 | throughput per GPU (TFLOP/s/GPU): 4.4 | learning rate: 1.500000E-06 | global batch size:    16 | lm loss: 1.192634E+01 |
 [2025-05-27 15:23:09] iteration        2/     100 | consumed samples:           32 | elapsed time per iteration (ms): 300.0 | throughput per GPU (TFLOP/s/GPU): 398.0 | learning rate: 1.500000E-06 | global batch size:    16 | lm loss: 1.192634E+01 |
 [2025-05-27 15:23:10] iteration        3/     100 | consumed samples:           48 | elapsed time per iteration (ms): 201.0 | throughput per GPU (TFLOP/s/GPU): 400.0 | learning rate: 1.500000E-06 | global batch size:    16 | lm loss: 1.192634E+01 |
 [2025-05-27 15:23:11] iteration        4/     100 | consumed samples:           64 | elapsed time per iteration (ms): 199.0 | throughput per GPU (TFLOP/s/GPU): 402.0 | learning rate: 1.500000E-06 | global batch size:    16 | lm loss: 1.192634E+01 |
"""  # noqa: E501
NEMO = """
Training epoch 0, iteration 9/14 | lr: 1.6e-06 | global_batch_size: 16 | global_step: 9 | max_memory_reserved: 2147483648 | max_memory_allocated: 1073741824 | reduced_train_loss: 11.97 | train_step_timing in s: 3.684 | TFLOPS_per_GPU: 1.831e+03 | consumed_samples: 1408
Training epoch 0, iteration 10/14 | lr: 1.6e-06 | global_batch_size: 16 | global_step: 10 | max_memory_reserved: 2147483648 | max_memory_allocated: 1073741824 | reduced_train_loss: 11.97 | train_step_timing in s: 0.2 | TFLOPS_per_GPU: 4.0e+02 | consumed_samples: 1408
Training epoch 0, iteration 11/14 | lr: 1.6e-06 | global_batch_size: 16 | global_step: 11 | max_memory_reserved: 2147483648 | max_memory_allocated: 1073741824 | reduced_train_loss: 11.97 | train_step_timing in s: 0.2 | TFLOPS_per_GPU: 401 | consumed_samples: 1408
"""  # noqa: E501
TITAN = """
[rank0]:[titan] 2025-06-01 10:00:00,000 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss:  8.1740  \x1b[33mmemory:  1.50GiB(50.49%)  \x1b[34mtps: 100  \x1b[36mtflops: 3.00  \x1b[35mmfu: 0.33%\x1b[39m
[rank0]:[titan] 2025-06-01 10:00:01,000 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1740  \x1b[33mmemory:  2.00GiB(50.49%)  \x1b[34mtps: 2,500  \x1b[36mtflops: 390.00  \x1b[35mmfu: 33.32%\x1b[39m
[rank0]:[titan] 2025-06-01 10:00:02,000 - root - INFO - \x1b[31mstep: 20  \x1b[32mloss:  8.1740  \x1b[33mmemory:  2.00GiB(50.49%)  \x1b[34mtps: 2,560  \x1b[36mtflops: 401.00  \x1b[35mmfu: 33.32%\x1b[39m
"""  # noqa: E501


def log(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("engine", "text"), [("megatron", MEGATRON), ("nemo", NEMO), ("torchtitan", TITAN)])
def test_steps_behind_the_warm_up_count(tmp_path: Path, engine: str, text: str) -> None:
    """The plan is of 16 samples of 128 tokens on 4 devices: 2,560 tokens/s of a device are 0.2 s."""
    found = read_log(log(tmp_path, text), engine, plan())
    assert found.seconds == pytest.approx(0.2)
    assert found.tflops == 401
    assert (found.peak_bytes, found.peak_kind) == (2 * 2**30, "reserved")


def test_what_is_no_log_of_the_plan_is_refused(tmp_path: Path) -> None:
    with refused(RequestError, "--from megatron", "train.log"):
        read_log(log(tmp_path, NEMO), "megatron", plan())
    with refused(RequestError, "megatorn", "megatron"):
        read_log(log(tmp_path, MEGATRON), "megatorn", plan())
    with refused(RequestError, 32, 16):
        read_log(log(tmp_path, MEGATRON.replace("size:    16", "size:    32")), "megatron", plan())
    found = read_log(log(tmp_path, NEMO.replace("max_memory_reserved: 2147483648 | ", "")), "nemo", plan())
    assert (found.peak_bytes, found.peak_kind) == (2**30, "allocated")
