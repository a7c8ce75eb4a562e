"""What AutoTP, the tensor parallelism of DeepSpeed, is told: which weights it splits, and how.

Without `partition_config` it follows the `tp_plan` of a model of transformers. It takes all of such a plan or refuses
it, and knows none of the styles of experts, "packed_colwise" and "moe_tp_experts". So models with experts, which AutoEP
places, are told the rest of their plan. Source: deepspeed 0.19.8, module_inject/{autotp_config,tp_plan_converter}.py,
runtime/engine.py (_apply_autotp_partitioning); transformers 5.24, configurations of Mixtral and Qwen3 MoE.
"""

from typing import Any

from planner.export.architecture import Architecture
from planner.export.description import Description

_GATE_UP, _DOWN = r"(gate|up)_proj\.weight$", r"down_proj\.weight$"
_BESIDE_EXPERTS: tuple[dict[str, Any], ...] = (
    {
        "patterns": [
            r".*\.self_attn\.[qkv]_proj\.weight$", rf".*\.mlp\.{_GATE_UP}", rf".*\.shared_experts?\.{_GATE_UP}",
        ],
        "partition_type": "column",
    },
    {
        "patterns": [
            r".*\.self_attn\.o_proj\.weight$", rf".*\.mlp\.{_DOWN}", rf".*\.shared_experts?\.{_DOWN}",
        ],
        "partition_type": "row",
    },
    {"patterns": [r".*\.self_attn\.[qk]_norm\.weight$"], "partition_type": "skip", "grad_allreduce": True},
    {"patterns": [r".*lm_head\.weight$"], "partition_type": "column", "gather_output": True},
)  # fmt: skip


def tensor_section(d: Description, a: Architecture | None) -> dict[str, Any]:
    """`tensor_parallel` of a configuration.

    From 0.19.8 on AutoTP shards a tied embedding along the vocabulary where the plan of the model has
    `embedding_rowwise`, unless it is told not to.
    """
    found: dict[str, Any] = {"autotp_size": d.tensor}
    if a is not None and a.tied:
        found["vocab_parallel_lm_head"] = False
    if d.expert is not None:
        found["partition_config"] = {"use_default_specs": False, "layer_specs": list(_BESIDE_EXPERTS)}
    return found
