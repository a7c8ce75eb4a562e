"""Products in fp8: what they gather, keep and scale."""

from pathlib import Path

import pytest

from tests.unit.validation.runs import BRIDGE, machine


def test_what_models_and_dtypes_say_of_kernels(tmp_path: Path) -> None:
    assert machine(tmp_path, model="Mistral-7B")[0].software.window == 4096
    assert machine(tmp_path, model="Mistral-7B-v0.3")[0].software.window == 0
    known = {"precision": "fp8", "date": "2025-06", "compile": "True"}
    assert machine(tmp_path, 3, **known, precision_detail="float8 rowwise")[0].software.gained < 1
    assert machine(tmp_path, 3, **known, precision_detail="float8 tensorwise")[0].software.gained == 1


def test_scales_of_rows_leave_less_of_the_gain_on_blackwell(tmp_path: Path) -> None:
    known = {"precision": "fp8", "date": "2025-06", "compile": "True", "precision_detail": "float8 rowwise"}
    gained = [
        machine(tmp_path, 3, **known, profile=name)[0].software.gained
        for name in ("b200-180gb", "h100-80gb", "h200-141gb")
    ]
    assert 0 < gained[0] < gained[1] == gained[2] < 1


def test_products_in_fp8_of_transformer_engine_keep_their_operands_so(tmp_path: Path) -> None:
    llama = {"vocab": "128256", "hidden": "4096", "n_params_B": "8.03"}
    engine, _ = machine(tmp_path, 1, notes="TE", precision="fp8", flash_attention="True", **llama)
    assert engine.software.keeps_fp8
    blocks = 1 - 2 * 128256 * 4096 / 8.03e9  # embedding and head stay in 16 bits
    assert engine.software.stored.beside == pytest.approx(2 * blocks)  # as it is and transposed, in fp8
    recipe, _ = machine(tmp_path, 1, source=BRIDGE.format("26.04"), precision="fp8", precision_detail="mxfp8")
    assert recipe.software.stored.beside == 0.0
    assert 0 < recipe.software.gained < 1
    wide, _ = machine(tmp_path, 1, source=BRIDGE.format("26.04"))
    assert not wide.software.keeps_fp8


@pytest.mark.parametrize(
    ("detail", "narrow"),
    [("float8 tensorwise", True), ("float8 rowwise", False), ("mxfp8", False), ("fp8 (TE)", False)],
)
def test_torchtitan_gathers_inputs_in_fp8_with_one_scale_for_each_tensor(
    tmp_path: Path, detail: str, narrow: bool
) -> None:
    """docs/float8.md of torchtitan: "float8 all-gather for TP (by default for `Float8Linear`)", with tensor-wise
    scales."""
    found, _ = machine(tmp_path, 3, precision="fp8", precision_detail=detail, other_flags="torchtitan; vanilla TP")
    assert found.software.gathers_inputs_narrow == narrow


@pytest.mark.parametrize(
    ("changes", "scaled"),
    [
        ({"source": BRIDGE.format("26.04")}, True),
        ({"source": BRIDGE.format("26.04"), "precision_detail": "mxfp8"}, False),
        ({"source": BRIDGE.format("25.11"), "precision_detail": "fp8-cs"}, True),
        ({"source": BRIDGE.format("26.04"), "precision": "bf16"}, False),
        ({"source": "NeMo 25.04", "precision_detail": "per tensor, current scaling"}, True),
        ({"source": "NeMo 24.07"}, False),
        ({"source": "NeMo 25.04", "precision_detail": "fp8 hybrid, delayed scaling"}, False),
        ({"stack": "torchtitan", "compile": "True", "precision_detail": "float8 tensorwise"}, False),
    ],
)
def test_current_scaling_of_transformer_engine(tmp_path: Path, changes: dict[str, str], scaled: bool) -> None:
    asked = {"precision": "fp8", "flash_attention": "True", "date": "2026-01", **changes}
    software = machine(tmp_path, 3 if "stack" in changes else 1, **asked)[0].software
    assert software.current_scaling is scaled


def test_weights_that_a_row_says_to_be_in_fp8(tmp_path: Path) -> None:
    """Without the words Transformer Engine keeps two copies in fp8 beside each weight."""
    asked = {"precision": "fp8", "other_flags": "NeMo", "flash_attention": "True", "date": "2024-10", "n_params_B": "7"}
    stored = machine(tmp_path, 1, **{**asked, "other_flags": "NeMo; FP8_PARAMS=True"})[0].software
    assert stored.gathers_narrow
    assert stored.stored.beside == 0
    beside = machine(tmp_path, 1, **asked)[0].software
    assert not beside.gathers_narrow
    assert beside.stored.beside > 0


@pytest.mark.parametrize("word", ["FP8", "fp8", "float8", "MXFP8"])
def test_products_in_fp8_by_any_word(tmp_path: Path, word: str) -> None:
    cluster, _ = machine(tmp_path, precision=word, profile="b200-180gb")
    assert cluster.software.products == "fp8"
    assert (cluster.software.gained != 1) == (word == "MXFP8")
