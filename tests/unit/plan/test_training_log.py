"""Logs of other engines, in lines as they write them."""

import time
from dataclasses import replace
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


def megatron(first: int, count: int, milliseconds: float, batch: int = 16, before: str = "") -> str:
    """Lines of steps as Megatron-LM writes them."""
    return "".join(
        f"{before} [2025-05-27 15:23:07] iteration {at:8d}/     100 | elapsed time per iteration (ms):"
        f" {milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): {20 * milliseconds:.1f} | global batch size:"
        f" {batch:5d} | lm loss: 1.19E+01 |\n"
        for at in range(first, first + count)
    )


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


def test_a_validation_is_no_step(tmp_path: Path) -> None:
    """torchtitan logs it by the number of the step before, with tokens/s of its own, which has no backward pass."""
    lines = [
        line
        for step in range(1, 6)
        for line in (
            f"step: {step}  loss: 8.1  tps: 2,560  tflops: 4.0",
            f"validate step: {step}  loss: 7.0  tps: 9,000",
        )
    ]
    found = read_log(log(tmp_path, "\n".join(lines)), "torchtitan", plan())
    assert found.step_seconds == pytest.approx((0.2, 0.2, 0.2))


def test_a_progress_bar_has_steps(tmp_path: Path) -> None:
    """NeMo 1 draws one line, again and again."""
    drawn = "\r".join(
        f"Epoch 0: | {at}/9 [global_step={at}.000, train_step_timing in s={9 / at}00]" for at in (1, 3, 3, 9)
    )
    found = read_log(log(tmp_path, drawn), "nemo", plan())
    assert found.step_seconds == pytest.approx((1.0,))


def test_many_steps_take_time_in_proportion(tmp_path: Path) -> None:
    """Not in proportion to their square, as where the last number is looked for among all."""

    def seconds(count: int) -> float:
        path, begin = log(tmp_path, megatron(1, count, 200.0)), time.process_time()
        assert len(read_log(path, "megatron", plan()).step_seconds) == count - 2
        return time.process_time() - begin

    assert seconds(16_000) < 3 * 8 * seconds(2_000)


def test_steps_of_other_runs_in_the_file_are_left_out(tmp_path: Path) -> None:
    """Several runs in one file, and a batch that ramps up: whatever comes last, steps of other batches do not count."""
    mine, other = megatron(1, 6, 200.0), megatron(1, 9, 900.0, batch=512)
    for text in (other + mine, mine + other, megatron(1, 9, 50.0, batch=4) + megatron(10, 6, 200.0)):
        found = read_log(log(tmp_path, text), "megatron", plan())
        assert (found.seconds, found.others, len(found.step_seconds)) == (pytest.approx(0.2), 9, 4)
        assert found.tflops == pytest.approx(4000)


def test_peaks_of_other_runs_in_the_file_are_left_out(tmp_path: Path) -> None:
    """Their steps were left out, but the peak was the largest of all."""
    memory = "[Rank 0] (after 2 iterations) memory (MB) | max allocated: 1500.0 | max reserved: {}\n"
    mine, other = (megatron(1, 6, 200.0, batch) + memory.format(size) for batch, size in ((16, 2048.0), (512, 9000.0)))
    larger = NEMO.replace("global_batch_size: 16", "global_batch_size: 512").replace("2147483648", "9147483648")
    for engine, text in (("megatron", mine + other), ("megatron", other + mine), ("nemo", NEMO + larger)):
        found = read_log(log(tmp_path, text), engine, plan())
        assert found.peak_bytes == 2 * 2**30
        assert found.others > 0


TRAINER = "Trainer is initialized with local batch size 4, global batch size {}, gradient accumulation steps 1, sequence length {}, total steps 20 (warmup 2)\n"  # noqa: E501


def test_torchtitan_says_batch_and_sequence_length_at_the_start(tmp_path: Path) -> None:
    assert read_log(log(tmp_path, TRAINER.format(16, 128) + TITAN), "torchtitan", plan()).seconds == pytest.approx(0.2)
    for said, wanted in (((32, 128), "global batch is 32"), ((16, 4096), "sequence length is 4096")):
        with refused(RequestError, wanted, "give the plan that was run"):
            read_log(log(tmp_path, TRAINER.format(*said) + TITAN), "torchtitan", plan())
    known = plan()
    with refused(RequestError, "--from torchtitan", "no sequence length"):
        other = replace(known, model=replace(known.model, sequence_length=None))
        read_log(log(tmp_path, TITAN), "torchtitan", other)


def test_megatron_says_sequence_length_and_devices_before_the_steps(tmp_path: Path) -> None:
    said = "using world size: {}, data-parallel size: 1\n  seq_length ...................................... {}\n"
    assert read_log(log(tmp_path, said.format(4, 128) + MEGATRON), "megatron", plan()).seconds == pytest.approx(0.2)
    with refused(RequestError, "number of devices is 64", 4):
        read_log(log(tmp_path, said.format(64, 128) + MEGATRON), "megatron", plan())
    with refused(RequestError, "sequence length is 4096", 128):
        read_log(log(tmp_path, said.format(4, 4096) + MEGATRON), "megatron", plan())


def test_a_step_that_several_ranks_log_is_one(tmp_path: Path) -> None:
    """Four steps of eight ranks: the first two steps are the warm-up, not the first two lines."""
    times = (9000.0, 5000.0, 201.0, 199.0)
    lines = [megatron(at, 1, took, before=f"[default{rank}]:") for at, took in enumerate(times) for rank in range(8)]
    found = read_log(log(tmp_path, "".join(lines)), "megatron", plan())
    assert found.step_seconds == pytest.approx((0.201, 0.199))
    assert (found.starts, found.warm) == (1, True)


def test_a_run_that_is_started_again_warms_up_again(tmp_path: Path) -> None:
    text = (
        megatron(1, 2, 9000.0) + megatron(3, 6, 200.0) + "Traceback\n" + megatron(5, 2, 8000.0) + megatron(7, 2, 202.0)
    )
    found = read_log(log(tmp_path, text), "megatron", plan())
    assert (found.starts, len(found.step_seconds), max(found.step_seconds)) == (2, 8, pytest.approx(0.202))


def test_steps_of_the_start_alone_are_said_to_be_such(tmp_path: Path) -> None:
    found = read_log(log(tmp_path, megatron(1, 2, 5000.0)), "megatron", plan())
    assert (found.seconds, found.warm) == (pytest.approx(5.0), False)


@pytest.mark.parametrize("stray", [b"\xe2\x96", b"\0\0\0", b"\x1b[2K\x1b[1A"])
def test_bytes_that_are_no_text_lose_nothing_but_themselves(tmp_path: Path, stray: bytes) -> None:
    """Bars of several ranks are torn apart in one file, and a crash leaves zeros."""
    path = tmp_path / "train.log"
    path.write_bytes(stray.join([b"", *MEGATRON.encode().splitlines(keepends=True)]))
    assert read_log(path, "megatron", plan()).seconds == pytest.approx(0.2)


def test_a_log_of_windows_and_numbers_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(MEGATRON + megatron(5, 9, 1.0).replace(": 1.0 |", ": 1e999 |"), encoding="utf-16")
    assert read_log(path, "megatron", plan()).seconds == pytest.approx(0.2)


@pytest.mark.parametrize("words", ["memory (MB) ", "max allocated: ", "elapsed time per iteration (ms): ", "\x1b[3"])
def test_a_long_line_takes_no_time(tmp_path: Path, words: str) -> None:
    """A line of words without the number behind them was looked through from each of them to its end."""
    before = time.process_time()
    assert read_log(log(tmp_path, 30_000 * words + "\n" + MEGATRON), "megatron", plan()).seconds == pytest.approx(0.2)
    assert time.process_time() - before < 5


def test_what_is_no_log_of_the_plan_is_refused(tmp_path: Path) -> None:
    with refused(RequestError, "--from nemo", "train.log"):  # that of the engine which wrote it
        read_log(log(tmp_path, NEMO), "megatron", plan())
    with refused(RequestError, "train.log", "megatron"):
        read_log(log(tmp_path, ""), "megatron", plan())
    with refused(RequestError, "megatorn", "megatron"):
        read_log(log(tmp_path, MEGATRON), "megatorn", plan())
    with refused(RequestError, 32, 16):
        read_log(log(tmp_path, MEGATRON.replace("size:    16", "size:    32")), "megatron", plan())
    found = read_log(log(tmp_path, NEMO.replace("max_memory_reserved: 2147483648 | ", "")), "nemo", plan())
    assert (found.peak_bytes, found.peak_kind) == (2**30, "allocated")
