"""The loss of a row, and its logits."""

from pathlib import Path

import pytest

from planner.validation.stack.losses import gathers_logits
from tests.unit.validation.runs import machine, one


@pytest.mark.parametrize(
    ("changes", "composed"),
    [
        ({"date": "2021-04", "flash_attention": "False"}, True),
        ({"date": "2024-07"}, True),
        ({"date": "2024-07", "other_flags": "cross-entropy-loss-fusion"}, False),
        ({"date": "2024-07", "other_flags": "in-house framework in eager PyTorch"}, False),
        ({"date": "2024-07", "other_flags": "nanotron in eager PyTorch"}, True),
        ({"other_flags": "Megatron-DeepSpeed"}, False),
    ],
)
def test_megatron_and_what_has_its_loss_compute_it_kernel_by_kernel(
    tmp_path: Path, changes: dict[str, str], composed: bool
) -> None:
    """What Megatron-DeepSpeed takes for it is in its `passes`, which were fitted."""
    assert machine(tmp_path, 1, **changes)[0].software.composed_loss == ("megatron" if composed else "")


@pytest.mark.parametrize(
    ("flags", "loss", "gates"),
    [
        ("Liger kernels", "pieces", True),
        ("use_liger_kernel=True", "pieces", True),
        ("Liger: RMSNorm, SwiGLU and cross entropy; linear warmup", "in place", True),
        ("Liger (RMSNorm, SwiGLU, no cross entropy)", "whole", True),
        ("Liger fused linear cross entropy", "pieces", False),
        ("Liger FLCE", "pieces", False),
        ("Liger cross entropy", "in place", False),
        ("Liger: cross entropy", "in place", False),
        ("Liger kernel cross entropy", "in place", False),
        ("Liger kernel, cross entropy in fp32", "pieces", True),
        ("Liger: RMSNorm, SwiGLU", "whole", True),
        ("liger_glu_activation: true; liger_fused_linear_cross_entropy: false", "whole", True),
    ],
)
def test_which_kernels_of_liger_ran(tmp_path: Path, flags: str, loss: str, gates: bool) -> None:
    told = {"stack": "fsdp", "zero_stage": "3", "tp": "1", "pp": "1", "dp": "8"}
    software = machine(tmp_path, 3, other_flags=flags, **told)[0].software
    assert (software.loss, software.gates_in_place) == (loss, gates)


@pytest.mark.parametrize(
    ("flags", "pieces"),
    [
        ("FSDP2; eight chunks of the loss", True),
        ("chunked cross entropy", True),
        ("loss in chunks of 1024", True),
        ("no chunked loss", False),
        ("chunked prefill", False),
        ("loss_chunk_size 1024", True),
        ("loss_chunk_size 0", False),
        ("ce_chunk_size=0", False),
        ("disable_chunked_loss=true", False),
        ("disable_chunked_loss=false", True),
        ("chunked_cross_entropy", True),
        ("loss_num_chunks=1", False),
    ],
)
def test_a_loss_in_chunks_never_holds_all_logits(tmp_path: Path, flags: str, pieces: bool) -> None:
    assert (machine(tmp_path, 3, other_flags=flags)[0].software.loss == "pieces") == pieces


def test_torchtitan_cut_whole_logits_until_the_projection_was_in_the_chunks(tmp_path: Path) -> None:
    for date, loss in (("2025-03", "in place"), ("2026-05", "pieces"), ("", "pieces")):
        row = {"stack": "torchtitan", "other_flags": "eight chunks of the loss", "date": date}
        assert machine(tmp_path, 3, **row)[0].software.loss == loss


def test_outputs_with_a_cache_hold_keys_values_and_logits(tmp_path: Path) -> None:
    """Of 4 layers and 2 samples of 512 tokens."""
    told = {"zero_stage": "3", "tp": "1", "pp": "1", "dp": "8", "n_kv_heads": "4"}
    found = [
        machine(tmp_path, 3, other_flags=f"FSDP{flag}", recompute=recompute, **told)[0].software.buffers
        for flag, recompute in (("", "full"), ("; use_cache=True", "full"), ("; use_cache", "none"), ("", "none"))
    ]
    assert found[1] - found[0] == 1024 * (4 * 2 * 2 * 4 * 64 + 4 * 50257)
    assert found[2] == found[3], "what is not recomputed is kept anyway"


def test_a_loss_that_is_not_compiled_has_all_logits(tmp_path: Path) -> None:
    """And 4 bytes more of each where a variable holds them."""
    fsdp = {"zero_stage": "3", "tp": "1", "pp": "1", "dp": "8", "stack": "fsdp-compiled", "date": "2026-01"}
    eager = machine(tmp_path, 3, **fsdp, other_flags="eager loss")[0].software
    assert eager.loss == "whole"
    assert machine(tmp_path, 3, **fsdp)[0].software.loss != "whole"
    assert machine(tmp_path, 3, **fsdp, other_flags="no eager loss")[0].software.loss != "whole"
    held = machine(tmp_path, 3, **fsdp, other_flags="eager loss; logits held")[0].software
    assert held.buffers - eager.buffers == 4.0 * 2 * 512 * 50257


def test_logits_are_gathered_under_tensor_parallelism_of_pytorch(tmp_path: Path) -> None:
    """Unless it says `loss_parallel`, or is torchtitan's."""
    fsdp = {"zero_stage": "fsdp2 (3)", "pp": "1", "dp": "4"}
    for changes, whole in (
        ({"stack": "FSDP2"}, True),
        ({"stack": "FSDP2", "other_flags": "loss_parallel"}, False),
        ({"stack": "torchtitan"}, False),
        ({"stack": "FSDP2", "tp": "1", "dp": "8"}, False),
        ({"stack": "Megatron-LM"}, False),
        ({"source": "a paper"}, False),  # which does not say by what
        ({"other_flags": "DTensor tensor parallelism"}, True),
    ):
        assert gathers_logits(one(tmp_path, **{**fsdp, **changes})) == whole


@pytest.mark.parametrize(
    ("changes", "whose"),
    [
        ({"stack": "PyTorch"}, "pytorch-16"),
        ({"stack": "PyTorch", "compile": "True", "other_flags": "eager loss; loss in bf16"}, "pytorch-16"),
        ({"stack": "PyTorch", "compile": "True", "other_flags": "eager loss"}, "pytorch"),
        ({"stack": "Megatron-LM"}, "megatron"),
    ],
)
def test_logits_stay_in_16_bits_where_nothing_casts_them(tmp_path: Path, changes: dict[str, str], whose: str) -> None:
    told = {"other_flags": "loss in bf16", "tp": "1", "pp": "1", "dp": "8", "date": "2025-03"}
    software = machine(tmp_path, 0, **{**told, **changes})[0].software
    assert software.composed_loss == whose
    assert (software.buffers < 0) == (whose == "pytorch-16"), "less than what `loss` counts"


@pytest.mark.parametrize(
    ("flags", "whose", "narrow"),
    [
        ("llm.c: C and CUDA, kernels fused by hand", "llm.c", 4.0),
        ("LLM.Q: C++ and CUDA as in llm.c", "llm.c", 4.0),
        ("LLM.Q; 4 chunks of the loss", "llm.c", 0.0),
        ("weights of another run, not llm.c", "megatron", 0.0),
        ("fused cross entropy", "", 0.0),
        ("Transformer Engine layers", "megatron", 0.0),
    ],
)
def test_one_kernel_of_the_loss_is_not_those_of_megatron(tmp_path: Path, flags: str, whose: str, narrow: float) -> None:
    """llm.c has no logits in fp32: 4 bytes less of each than Megatron's, where all are in memory."""
    told = {"tp": "1", "pp": "1", "dp": "8", "date": "2025-03", "flash_attention": "True"}
    software = machine(tmp_path, 1, **told, other_flags=flags)[0].software
    assert software.composed_loss == whose
    assert software.buffers == -narrow * 2 * 512 * 50257
