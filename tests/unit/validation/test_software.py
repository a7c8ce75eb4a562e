"""What flags of a row change in its stack."""

from pathlib import Path

import pytest

from planner.validation.stack.engine_launches import HOST
from tests.unit.validation.runs import machine


@pytest.mark.parametrize("flag", ["use-mc2", "use-ascend-mc2"])
def test_mc2_hides_collectives_of_tensor_parallelism(tmp_path: Path, flag: str) -> None:
    known = {"profile": "ascend-910b-64gb", "flash_attention": "True"}
    assert machine(tmp_path, **known)[0].software.hidden.tensor == 0
    assert machine(tmp_path, **known, other_flags=f"{flag}; use-fused-rmsnorm")[0].software.hidden.tensor > 0


def test_flags_name_what_is_overlapped(tmp_path: Path) -> None:
    flags = "use-fused-rmsnorm; overlap-grad-reduce; no-gradient-accumulation-fusion"
    software = machine(tmp_path, other_flags=flags)[0].software
    assert (software.hidden.tensor, software.hidden.gathers) == (0.0, 0.0)
    assert software.hidden.reductions > 0.5
    assert software.accumulates
    assert machine(tmp_path, precision="fp8", profile="h100-80gb")[0].software.products == "fp8"


def test_launches_that_wait_for_their_kernels_hide_nothing(tmp_path: Path) -> None:
    flags = "Megatron-LM; overlap-grad-reduce; CUDA_LAUNCH_BLOCKING={}"
    blocking, plain = (machine(tmp_path, other_flags=flags.format(on))[0].software for on in (1, 0))
    assert blocking.waits_for_kernels
    assert (blocking.hidden.reductions, blocking.hidden.ring) == (0.0, 0.0)
    assert not plain.waits_for_kernels
    assert plain.hidden.reductions > 0


def test_torchtitan_says_what_it_hides_and_gathers(tmp_path: Path) -> None:
    plain, _ = machine(tmp_path, 3, precision="fp8", other_flags="vanilla TP")
    found, _ = machine(tmp_path, 3, precision="fp8", other_flags="Float8 + async TP")
    assert (plain.software.hidden.tensor, plain.software.gathers_narrow) == (0.0, False)
    assert found.software.hidden.tensor > 0
    assert found.software.gathers_narrow
    assert found.software.hidden.gathers == plain.software.hidden.gathers
    denied, _ = machine(tmp_path, 3, precision="fp8", other_flags="no async-tp; without float8")
    assert (denied.software.hidden, denied.software.gathers_narrow) == (plain.software.hidden, False)
    assert (plain.software.rearranges, found.software.rearranges, denied.software.rearranges) == (True, False, True)


def test_paddle_copies_what_tensor_parallel_products_read(tmp_path: Path) -> None:
    assert machine(tmp_path, other_flags="PaddlePaddle", tp="2")[0].software.copies_inputs
    assert not machine(tmp_path, other_flags="PaddlePaddle", tp="1", dp="4")[0].software.copies_inputs


@pytest.mark.parametrize(
    ("flags", "hidden"), [("overlap_grad_reduce: true", 0.8), ("overlap-grad-reduce=False", 0.0), ("", 0.0)]
)
def test_flags_with_values(tmp_path: Path, flags: str, hidden: float) -> None:
    cluster, _ = machine(tmp_path, other_flags=flags, flash_attention="True", date="2024")
    assert cluster.software.hidden.reductions == hidden


@pytest.mark.parametrize(
    "flags",
    [
        "liger=False",
        "no Liger kernel",
        "optimizer_offload: false",
        "liger false; optimizer_offload off",
        "use_liger_kernel 0; offload_optimizer none",
    ],
)
def test_what_flags_deny_is_not_read(tmp_path: Path, flags: str) -> None:
    software = machine(tmp_path, other_flags=flags)[0].software
    assert not software.gates_in_place
    assert not software.offloaded


@pytest.mark.parametrize(
    ("changes", "autocasts"),
    [
        ({"other_flags": "bf16 autocast"}, True),
        ({"other_flags": "bf16 autocast", "precision": "fp32"}, False),
        ({"other_flags": "bf16 autocast; pure bf16"}, False),
        ({"other_flags": "bf16 autocast", "precision_detail": "MixedPrecision(param_dtype=bf16)"}, False),
    ],
)
def test_autocast_gathers_in_fp32_what_is_stored_so(tmp_path: Path, changes: dict[str, str], autocasts: bool) -> None:
    told = {"stack": "fsdp", "zero_stage": "3", "tp": "1", "pp": "1", "dp": "8"}
    assert machine(tmp_path, 3, **told, **changes)[0].software.autocasts == autocasts


def test_gates_that_are_not_fused_are_kept(tmp_path: Path) -> None:
    for flags, fused in (
        ("bias_activation_fusion=False", False),
        ("no-bias-swiglu-fusion", False),
        ("bias-swiglu-fusion disabled", False),
        ("bias_swiglu_fusion", True),
        ("", True),
    ):
        assert machine(tmp_path, stack="NeMo", date="2025-09", other_flags=flags)[0].software.fused == fused


def test_modules_of_hugging_face_are_eager_whatever_shares_their_states_out(tmp_path: Path) -> None:
    """Under DistributedDataParallel too, which is no Megatron-LM."""
    plain, notes = machine(
        tmp_path, 0, other_flags="Hugging Face transformers; DDP, native AMP", flash_attention="False"
    )
    assert (plain.software.name, plain.software.attention) == ("fsdp", "unfused")
    assert "operators are launched from Python, as in Megatron" in notes
    assert plain.software.softmax_heads > 2**20, "no head count is a multiple of it: softmax is a chain of kernels"
    fused, _ = machine(tmp_path, 0, other_flags="Hugging Face transformers; fused softmax", flash_attention="False")
    assert fused.software.softmax_heads == 1
    for flags, multiple in (
        ("Hugging Face transformers; DeepSpeed ZeRO-1", plain.software.softmax_heads),
        ("Hugging Face transformers; DeepSpeed ZeRO-1; fused softmax", 4),
        ("Megatron-DeepSpeed; weights for Hugging Face transformers", 4),
        ("Megatron-DeepSpeed", 4),
    ):
        engine = machine(tmp_path, 1, other_flags=flags, flash_attention="False")[0].software
        assert (engine.name, engine.softmax_heads) == ("deepspeed", multiple)
        assert engine.views_heads == ("Megatron" not in flags)
    compiled, _ = machine(tmp_path, 0, other_flags="Hugging Face transformers; DDP", compile="True")
    assert compiled.software.name == "fsdp-compiled"
    loop, _ = machine(tmp_path, 0, other_flags="PyTorch DDP; torch.compile", compile="True")
    assert loop.software.name == "fsdp-compiled"
    for stack, compiles, name in (("PyTorch DDP", "False", "fsdp"), ("PyTorch", "True", "fsdp-compiled")):
        assert machine(tmp_path, 0, stack=stack, compile=compiles)[0].software.name == name
    megatron, _ = machine(tmp_path, 0, other_flags="Megatron-LM; weights of Hugging Face")
    assert megatron.software.name == "megatron"


@pytest.mark.parametrize(
    ("row", "counted"),
    [
        ({"stack": "Megatron-LM"}, True),
        ({"stack": "NeMo 2.0", "profile": "h100-80gb"}, True),
        ({"stack": "Megatron-LM", "arch": "moe", "n_experts": "8", "topk": "2", "moe_ffn_hidden": "4096"}, False),
        ({"stack": "nanotron"}, False),
        ({"stack": "DeepSpeed", "other_flags": "Megatron-DeepSpeed"}, False),
    ],
)
def test_launches_of_dense_layers_are_counted_where_megatron_core_runs(
    tmp_path: Path, row: dict[str, str], counted: bool
) -> None:
    software = machine(tmp_path, **row)[0].software
    assert software.engine_launches == counted
    assert (software.host == HOST) == counted


@pytest.mark.parametrize(
    ("changes", "chain"),
    [
        ({"stack": "PyTorch", "other_flags": "eager; LayerNorm and GELU of single operators"}, True),
        ({"stack": "PyTorch", "other_flags": "eager; fused LayerNorm, fused GELU"}, False),
        ({"stack": "PyTorch", "other_flags": "torch.compile; gelu_new", "compile": "True"}, False),
        ({"stack": "FSDP", "model": "GPT2-XL", "other_flags": "Hugging Face transformers"}, True),
        ({"stack": "FSDP", "model": "Llama 2 7B", "other_flags": "Hugging Face transformers"}, False),
    ],
)
def test_a_gelu_of_gpt_2_is_a_chain_of_operators(tmp_path: Path, changes: dict[str, str], chain: bool) -> None:
    known = {"date": "2023-03", "tp": "1", "pp": "1", "dp": "8", "flash_attention": "SDPA"}
    assert machine(tmp_path, 0, **{**known, **changes})[0].software.composed_gelu == chain
