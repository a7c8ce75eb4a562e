"""What flags of a row say of how its stack ran."""

import pytest

from hardware_profiles import load_software
from planner.validation.stack.flagged import narrow_gradients, stores_fp8, with_kernels, with_overlaps


@pytest.mark.parametrize(
    ("stack", "flags", "hidden"),
    [
        ("megatron", "", (0.0, 0.0, 0.0)),
        ("megatron", "overlap-grad-reduce", (0.8, 0.0, 0.0)),
        ("megatron", "overlap-grad-reduce; overlap-param-gather; tp-comm-overlap", (0.8, 0.8, 0.5)),
        ("megatron", "overlap-grad-reduce; tp-comm-overlap=false", (0.8, 0.0, 0.0)),
        ("megatron", "tp_comm_overlap=true", (0.0, 0.0, 0.5)),
        ("nemo", "", (0.8, 0.8, 0.5)),
        ("nemo", "tp_comm_overlap=true", (0.8, 0.8, 0.5)),
        ("nemo", "tp_comm_overlap=false", (0.8, 0.8, 0.0)),
        ("nemo", "overlap_grad_reduce: false; overlap_param_gather: false", (0.0, 0.0, 0.5)),
        ("megatron", "overlapped-distributed-optimizer", (0.8, 0.8, 0.0)),  # of Megatron-LLaMA
        ("fsdp", "async tp", (0.9, 0.9, 0.5)),
        ("fsdp-compiled", "overlap_grad_reduce=false; overlap_param_gather=false", (0.0, 0.0, 0.0)),
    ],
)
def test_overlaps_that_flags_name_or_deny(stack: str, flags: str, hidden: tuple[float, float, float]) -> None:
    before = load_software(stack)
    found = with_overlaps(before, flags).hidden
    if stack == "fsdp":
        hidden = (before.hidden.reductions, before.hidden.gathers, hidden[2])
    assert (found.reductions, found.gathers, found.tensor) == hidden


@pytest.mark.parametrize(
    ("flags", "share"),
    [
        ("overlap-grad-reduce; overlap-moe-expert-parallel-comm", 0.5),
        ("no overlap-moe-expert-parallel-comm", 0.0),
        ("overlap-grad-reduce", 0.0),
    ],
)
def test_an_exchange_that_flags_hide(flags: str, share: float) -> None:
    assert with_overlaps(load_software("megatron"), flags).hidden.exchange == share


def test_fused_norms_and_gates_pass_memory_once() -> None:
    eager, megatron = load_software("fsdp"), load_software("megatron")
    notes: list[str] = []
    both = with_kernels(eager, "fused layernorm, fused swiglu", notes)
    assert (both.passes, both.fused) == (megatron.passes, megatron.fused) != (eager.passes, eager.fused)
    assert notes == ["norms and gated activations are one kernel each"]
    for flags in ("fused layernorm", "no fused layernorm; fused swiglu", "fused_adam"):
        assert with_kernels(eager, flags, []) == eager
    liger = with_kernels(eager, "liger: rmsnorm, rope, swiglu and cross entropy", [])
    assert (liger.passes, liger.fuses_chains, both.fuses_chains) == (megatron.passes, True, False)
    for flags in ("liger: cross entropy", "liger kernel cross entropy", "liger_rms_norm: true"):
        assert with_kernels(eager, flags, []) == eager
    compiled = load_software("fsdp-compiled")
    assert with_kernels(compiled, "fused rmsnorm, fused swiglu", []) == compiled


@pytest.mark.parametrize("flags", ["hugging face transformers; fsdp", "huggingface trainer", "accelerate; fsdp2"])
def test_modules_of_hugging_face_are_launched_from_python(flags: str) -> None:
    eager = load_software("fsdp")
    assert with_kernels(eager, flags, []).host == load_software("megatron").host > eager.host
    assert with_kernels(eager, "not transformers", []) == eager


@pytest.mark.parametrize(
    "flags",
    [
        "huggingface tokenizer",
        "huggingfacetokenizer",
        "hugging face's tokenizer",
        "weights from hugging face",
        "hugging face dataset; transformers checkpoint",
    ],
)
def test_files_of_hugging_face_are_no_modules(flags: str) -> None:
    eager = load_software("fsdp")
    assert with_kernels(eager, flags, []) == eager


@pytest.mark.parametrize(
    ("stack", "flags", "counted"),
    [
        ("fsdp", "pytorch ddp; eager", True),
        ("fsdp", "litgpt; eager; fused rmsnorm", True),
        ("fsdp", "not eager", False),
        ("fsdp", "aot_eager", False),
        ("fsdp-compiled", "eager loss", False),
    ],
)
def test_operators_of_eager_modules_pass_memory_as_often_as_the_graph_says(
    stack: str, flags: str, counted: bool
) -> None:
    before = load_software(stack)
    found = with_kernels(before, flags, []).passes
    assert (found == 1.0) == counted
    assert counted or found == before.passes > 1


@pytest.mark.parametrize(
    ("stack", "flags", "composed"),
    [
        ("fsdp", "hugging face transformers; fsdp", True),
        ("deepspeed-zero3", "transformers; deepspeed", True),
        ("megatron", "in-house framework in eager pytorch", True),
        ("megatron", "in-house framework in eager pytorch; rmsnorm kernel", False),
        ("fsdp", "eager; fused rmsnorm", False),
        ("pytorch", "eager", True),
        ("pytorch", "", False),
        ("fsdp-compiled", "hugging face transformers", False),
        ("megatron", "not eager", False),
        ("megatron", "megatron-lm, eager, no cuda graphs", False),
        ("nemo", "nemo, tokenizer of hugging face, eager", False),
        ("deepspeed", "hugging face trainer; deepspeed zero-2", True),
        ("megatron", "", False),
    ],
)
def test_norms_of_eager_modules_are_chains_unless_a_kernel_is_named(stack: str, flags: str, composed: bool) -> None:
    assert with_kernels(load_software(stack), flags, []).composed_norms is composed


def test_operators_of_hugging_face_under_fsdp_pass_memory_as_often_as_the_graph_says() -> None:
    for stack, passes in (("fsdp", 1.0), ("deepspeed-zero3", load_software("deepspeed-zero3").passes)):
        assert with_kernels(load_software(stack), "hugging face transformers", []).passes == passes
    assert with_kernels(load_software("fsdp"), "tokenizer of hugging face", []) == load_software("fsdp")


@pytest.mark.parametrize("flags", ["transformer engine transformerlayer", "transformer engine's layers; fp8"])
def test_layers_of_transformer_engine_under_fsdp_compute_as_megatrons_do(flags: str) -> None:
    megatron, eager, notes = load_software("megatron"), load_software("fsdp"), list[str]()
    found = with_kernels(eager, flags, notes)
    assert (found.passes, found.fused, found.host) == (megatron.passes, megatron.fused, megatron.host)
    assert found.loss == eager.loss
    assert notes == ["norms and gated activations are Transformer Engine's"]
    assert with_kernels(eager, "linear modules of transformer engine", []) == eager
    assert with_kernels(megatron, flags, []) == megatron


def test_what_is_eager_computes_as_eager_stacks_do() -> None:
    notes: list[str] = []
    found = with_kernels(load_software("megatron"), "in-house framework in eager pytorch", notes)
    like = load_software("internevo")
    assert (found.passes, found.fused, found.accumulates) == (like.passes, like.fused, like.accumulates)
    assert (found.stored.bf16, found.stored.fp16, found.loss) == (2, 2, "whole")
    assert 64 % found.softmax_heads  # PyTorch computes the softmax in fp32
    megatron = with_kernels(load_software("megatron"), "eager pytorch; fused softmax", [])
    assert megatron.softmax_heads == load_software("deepspeed").softmax_heads > 1
    assert any("eager" in note for note in notes)
    for stack, flags in (("nemo", "eager"), ("megatron", "transformer engine, eager mode")):
        assert with_kernels(load_software(stack), flags, []) == load_software(stack)


@pytest.mark.parametrize(
    ("words", "narrow"),
    [
        ("grad-reduce-in-bf16", True),
        ("grad_sync_dtype: bf16", True),
        ("grad_reduce_in_fp32=false", True),
        ("grad_reduce_in_fp32=true", False),
        ("accumulate_allreduce_grads_in_fp32: off", True),
        ("no grad-reduce-in-bf16; accumulate-allreduce-grads-in-fp32", False),
        ("accumulate-allreduce-grads-in-fp32", False),
        ("grad_sync_dtype: torch.float32", False),
        ("use-distributed-optimizer", None),
    ],
)
def test_width_of_gradients(words: str, narrow: bool | None) -> None:
    assert narrow_gradients(words) is narrow


def test_weights_in_fp8() -> None:
    for words in ("fp8-param-gather", "fp8_params=true", "fp8 hybrid, weights stored and gathered in fp8"):
        assert stores_fp8(words)
    for words in (
        "fp8_params=false",
        "fp8 hybrid",
        "fp8-param-gather: off",
        "weights in bf16, products in fp8",
        "weights and activations in fp8",
    ):
        assert not stores_fp8(words)
