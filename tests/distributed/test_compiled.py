"""Chains that are compiled make what single operators make, on four real ranks: under recomputation, pipelines, copies,
tensor parallelism and ZeRO, with activations outside of the device. Some run as they are written, some are taken apart
by AOTAutograd as for a compiler and run as what that makes (its backend "aot_eager"), a few are compiled."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from planner.graph.fp8 import Fp8
from tests.long_lists import first, rarely

COMPILES = shutil.which("g++") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()
KEPT = ("linear", "scaled_dot_product_attention", "gelu")
FULL = {"recomputation": "full"}
SELECTIVE = {"recomputation": "selective", "kept": KEPT}
PIPELINE = {"stages": (2, 2), "micro_batches": 4, "global_batch": 8}
COPIES = {**PIPELINE, "interleave": 2, "micro_batches": 2, "global_batch": 16}
BLOCK = {"gathers": "block"}
OFFLOADED = {"offloaded": True}

INTERLEAVED = {**PIPELINE, "schedule": "interleaved_1f1b", "stages": (1,) * 4, "virtual_stages": 2}

CASES = [
    ("llama4", "megatron", (1, 2), {**COPIES, **FULL}, {}),
    ("llama", "zero3", (4,), {**FULL, "micro_batches": 2}, BLOCK),
    ("llama4", "zero2", (2,), {**PIPELINE, **SELECTIVE, "schedule": "zb_h1"}, {}),
    ("llama", "megatron", (2, 2), {}, OFFLOADED),
    ("llama", "zero3", (4,), {"micro_batches": 2}, BLOCK),
    ("llama", "zero3", (4,), {"micro_batches": 2}, {}),
    ("mixture4", "zero2", (2,), {**PIPELINE, **FULL}, {}),
    ("mixture", "zero3", (2, 2), {**SELECTIVE, "micro_batches": 2}, BLOCK),
    ("resnet64", "zero1", (4,), {**FULL, "micro_batches": 2}, {}),
    ("llama", "zero1", (4,), FULL, OFFLOADED),
    ("llama4", "zero3", (2,), INTERLEAVED, {}),
    ("llama4", "zero1", (2,), {**PIPELINE, "schedule": "seqpipe", "slices": 2}, {}),
    ("deepseek", 2, (2, 2), FULL, {}),
    *(("llama", seed, (2, 2), {"micro_batches": 2}, {}) for seed in range(20, 23)),
]

IN_FP8 = [
    ("llama64", "zero3", (4,), {"micro_batches": 2, "fp8": Fp8(recipe="tensorwise")}, BLOCK),
    ("llama64", "megatron", (2, 2), {**FULL, "fp8": Fp8(recipe="mxfp8")}, {}),
    ("gpt64", "zero2", (2,), {"stages": (1, 1), "micro_batches": 4, "fp8": Fp8(recipe="delayed", history=2)}, {}),
    ("wide64", "zero3", (2, 2), {**SELECTIVE, "fp8": Fp8(recipe="delayed", history=2, experts=True)}, BLOCK),
    ("wide64", 7, (2, 2), {"fp8": Fp8(recipe="blockwise", experts=True, dispatch=True)}, {}),
]

COMPILED = [
    ("llama", "megatron", (2, 2), FULL, {}),
    ("gpt4", "zero2", (2,), PIPELINE, {}),
    ("mixture", "zero3", (4,), {"micro_batches": 2}, BLOCK),
]

NAMES = ("model", "kind", "sizes", "settings", "how")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(NAMES, first(3, CASES), ids=str)
def test_programs_with_chains_make_the_same(
    pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict, how: dict
) -> None:
    made = pool.run("tasks_compiled", "compared", model, kind, sizes, settings, how | {"backend": None})
    assert max(worst for worst, _ in made) < 1e-5
    assert min(chains for _, chains in made) > 0


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(NAMES, IN_FP8, ids=str)
def test_chains_between_layers_in_fp8(
    pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict, how: dict
) -> None:
    for backend in (None, "aot_eager"):
        made = pool.run("tasks_compiled", "compared", model, kind, sizes, settings, how | {"backend": backend})
        assert max(worst for worst, _ in made) < 1e-5
        assert min(chains for _, chains in made) > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(NAMES, [*CASES[:4], *rarely(CASES[4:])], ids=str)
def test_autograd_sees_one_function(
    pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict, how: dict
) -> None:
    made = pool.run("tasks_compiled", "compared", model, kind, sizes, settings, how | {"backend": "aot_eager"})
    assert max(worst for worst, _ in made) < 1e-5


@pytest.mark.exhaustive
@pytest.mark.skipif(not COMPILES, reason="no C++ compiler, or no headers of Python")
@pytest.mark.parametrize(NAMES, [*COMPILED[:1], *rarely(COMPILED[1:])], ids=str)
def test_kernels_make_the_same(
    pool, model: str, kind: int | str, sizes: tuple[int, ...], settings: dict, how: dict
) -> None:
    made = pool.run("tasks_compiled", "compared", model, kind, sizes, settings, how | {"backend": "inductor"})
    assert max(worst for worst, _ in made) < 1e-5
