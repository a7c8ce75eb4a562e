"""Which stack a row names."""

from pathlib import Path

import pytest

from tests.unit.validation.runs import BRIDGE, EXPERTS, machine


@pytest.mark.parametrize(
    ("zero", "changes", "stack"),
    [
        (0, {"date": "2021-04", "flash_attention": "False"}, "megatron-2021"),
        (0, {"date": "2022-06", "flash_attention": "", "stack": "Megatron-LM"}, "megatron-2021"),
        (0, {"date": "2022-06", "flash_attention": "True", "stack": "Megatron-LM"}, "megatron"),
        (0, {"date": "2022-06", "flash_attention": "", "stack": "megatron"}, "megatron"),
        (0, {"date": "2024-06", "flash_attention": "", "stack": "Megatron-LM"}, "megatron"),
        (0, {"date": "2024-06", "flash_attention": "True"}, "megatron"),
        (1, {"other_flags": "Megatron-DeepSpeed; 1F1B"}, "deepspeed"),
        (3, {"date": "2023-11", "compile": "False"}, "fsdp"),
        (3, {"date": "2024-12", "compile": "True"}, "fsdp-compiled"),
        (3, {"other_flags": "JAX, MaxText (XLA); Transformer Engine attention"}, "fsdp-compiled"),
        (0, {"source": "Google, MaxText on A3"}, "fsdp-compiled"),
        (0, {"stack": "MaxText"}, "fsdp-compiled"),
        (3, {"model": "Maxtext LLAMA3 70B"}, "fsdp-compiled"),
        (1, {"source": "NeMo 24.07", "flash_attention": "True"}, "nemo"),
        (1, {"profile": "ascend-910b-64gb", "flash_attention": "True"}, "mindspeed"),
        (1, {"profile": "ascend-910b-64gb", "source": "mindformers model cards (r1.3.0)"}, "mindformers"),
        (1, {"source": "NeMo 24.07", "stack": "deepspeed"}, "deepspeed"),
        (1, {"notes": "plain Megatron-LM, not NeMo", "flash_attention": "True"}, "megatron"),
        (1, {"notes": "other_flags: TE, attention-softmax-in-fp32", "flash_attention": "True"}, "megatron"),
        (1, {"notes": "run without the NeMo container; NeMo 2 recipe", "flash_attention": "True"}, "nemo"),
        (3, {"source": "Megatron-Bridge perf archive 26.04 NeMo Container"}, "nemo"),
        (1, {"other_flags": "Megatron-DeepSpeed", "notes": "beside NeMo", "flash_attention": "True"}, "deepspeed"),
        (3, {"stack": "DeepSpeed"}, "deepspeed-zero3"),
        (1, {"stack": "Megatron-Core 0.9"}, "megatron"),
        (1, {"stack": "PaddlePaddle"}, "paddle"),
        (0, {"stack": "nanotron"}, "megatron"),
        (0, {"stack": "Transformer Engine"}, "megatron"),
        (0, {"stack": "Hugging Face transformers", "source": "Transformer Engine tutorial"}, "fsdp"),
        (3, {"stack": "Hugging Face transformers", "other_flags": "LLaMA-Factory; DeepSpeed"}, "deepspeed-zero3"),
        (2, {"stack": "transformers", "other_flags": "DeepSpeed ZeRO-2"}, "deepspeed"),
        (3, {"stack": "Hugging Face transformers", "other_flags": "FSDP, not DeepSpeed"}, "fsdp"),
        (1, {"stack": "NeMo 2.0"}, "nemo"),
        (3, {"stack": "torchtitan", "compile": "True"}, "fsdp-compiled"),
        (2, {"zero_stage": "SHARD_GRAD_OP"}, "fsdp"),
        (3, {"source": "From DeepSpeed to FSDP and back", "other_flags": "FSDP full sharding"}, "fsdp"),
        (3, {"source": "From DeepSpeed to FSDP and back", "other_flags": "DeepSpeed ZeRO-3"}, "deepspeed-zero3"),
        (3, {"other_flags": "DeepSpeed ZeRO-3, not FSDP"}, "deepspeed-zero3"),
        (0, {"source": "DeepSpeed beside DDP", "other_flags": "Hugging Face transformers; DDP, native AMP"}, "fsdp"),
        (1, {"source": "DeepSpeed beside DDP", "other_flags": "DeepSpeed ZeRO-1 instead of DDP"}, "deepspeed"),
        (0, {"other_flags": "PyTorch; torch.compile; fused AdamW", "compile": "True"}, "fsdp-compiled"),
        (0, {"other_flags": "fused AdamW; PyTorch 2.8.0, bf16 autocast", "compile": "True"}, "fsdp-compiled"),
        (0, {"other_flags": "in-house framework in PyTorch; 1F1B", "compile": "True", "date": "2024"}, "megatron"),
        (0, {"other_flags": "Megatron-LM; PyTorch 2.8", "compile": "True", "date": "2025"}, "megatron"),
    ],
)
def test_stacks(tmp_path: Path, zero: int, changes: dict[str, str], stack: str) -> None:
    cluster, notes = machine(tmp_path, zero, **changes)
    assert cluster.software.name == stack
    assert any(note.startswith(f"taken for {stack}, attention") for note in notes)


@pytest.mark.parametrize(
    ("release", "changes", "stack"),
    [
        ("26.04.01", {"profile": "gb300-288gb"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb"}, "nemo-2606"),
        ("26.08", {"profile": "b300-288gb"}, "nemo-2606"),
        ("26.06", {"profile": "b300-288gb", "model": "GPT OSS 120B"}, "nemo"),
        ("26.06", {"profile": "gb200-186gb", "model": "GPT OSS 120B"}, "nemo-2606"),
        ("26.06", {"profile": "b200-180gb"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb", "precision": "bf16"}, "nemo"),
        ("26.06", {"profile": "gb300-288gb", "arch": "dense"}, "nemo"),
    ],
)
def test_recipes_fuse_kernels_of_experts_from_a_release_on(
    tmp_path: Path, release: str, changes: dict[str, str], stack: str
) -> None:
    cluster, _ = machine(tmp_path, 1, **{**EXPERTS, **changes}, source=BRIDGE.format(release))
    assert cluster.software.name == stack


@pytest.mark.parametrize(
    ("changes", "stack", "graphs"),
    [
        ({"stack": "Megatron Bridge"}, "nemo-2606", "none"),
        ({"stack": "Megatron Bridge", "other_flags": "CUDA graphs of moe_router and moe_preprocess"}, "nemo", "router"),
        ({"stack": "Megatron Bridge", "other_flags": "cuda_graph_scope=attn moe_router"}, "nemo", "attention"),
        ({"stack": "Megatron Bridge", "other_flags": "full-iteration CUDA graphs"}, "nemo-2606", "step"),
        ({"stack": "Megatron-LM", "other_flags": "full-iteration CUDA graphs; paged stash"}, "megatron", "step"),
        ({"stack": "Megatron-LM", "other_flags": "hybridep; cuda_graph_scope attn mlp"}, "megatron", "attention"),
        ({"stack": "Megatron-LM", "other_flags": "full_cuda_graph: true"}, "megatron", "step"),
        ({"stack": "Megatron-LM", "other_flags": "full-iteration CUDA graphs off"}, "megatron", "none"),
        ({"stack": "Megatron-LM", "other_flags": "--cuda-graph-scope none --attn flash"}, "megatron", "none"),
        ({"stack": "Megatron-LM", "other_flags": "cuda_graph_impl=none cuda_graph_scope=attn"}, "megatron", "none"),
        ({"stack": "nemo"}, "nemo", "router"),
        ({"source": "cards of Megatron Bridge"}, "nemo-2606", "none"),
        ({"other_flags": "Megatron Bridge; Megatron FSDP"}, "nemo-2606", "none"),
        ({"other_flags": "Megatron FSDP"}, "megatron", "none"),
    ],
)
def test_megatron_bridge_is_that_of_its_release_whatever_names_it(
    tmp_path: Path, changes: dict[str, str], stack: str, graphs: str
) -> None:
    row = {"arch": "moe", "model": "Qwen3-30B-A3B", "precision": "fp8", "precision_detail": "mxfp8", "date": "2026-07"}
    software = machine(tmp_path, profile="gb300-288gb", **row, **changes)[0].software
    assert (software.name, software.graphs) == (stack, graphs)
    assert software.fused_experts == (stack == "nemo-2606" or "stash" in changes.get("other_flags", ""))


@pytest.mark.parametrize(
    ("changes", "stack"),
    [
        ({"date": "2023-04", "flash_attention": "False"}, "megatron-2021"),
        ({"date": "2023-04", "flash_attention": "True"}, "nemo"),
        ({"date": "2024-03", "flash_attention": "False"}, "nemo"),
        ({"date": "", "flash_attention": "False"}, "nemo"),
    ],
)
def test_nemo_had_the_kernels_of_megatron_before_transformer_engine(
    tmp_path: Path, changes: dict[str, str], stack: str
) -> None:
    for named in ({"stack": "NeMo"}, {"source": "NeMo Framework Launcher"}):
        assert machine(tmp_path, **named, **changes)[0].software.name == stack
