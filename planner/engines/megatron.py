"""What Megatron-LM core 0.16 can be told, NeMo and Megatron Bridge, which stand on it; see `planner.export.megatron`.

Left out of the spaces, though the exporters write them: ZeRO 0, which needs more memory than the distributed optimizer
and saves no time, and with it SGD, for which there is no distributed optimizer; Megatron-FSDP beside a pipeline; copies
(HSDP) of states alone, or where a context alone shares out; attention by heads inside of a ring; recomputation of
attention (`core_attn`), which keeps what it makes there and saves nothing with a fused kernel, of norms, and of several
modules of MLA; norms that are whole beside tensor parallelism; buckets of gradients.
"""

from dataclasses import replace

from planner.engines.space import EngineSpace, Recomputed, Settings
from planner.plan.layout.kept import Kept

_OPTIMIZERS = ("adamw",)
_PRECISIONS = ("bf16", "fp16", "fp32")

MODULES: tuple[tuple[Recomputed, Kept], ...] = tuple(
    ("all", Kept(but=modules)) for modules in (("mlp",), ("moe",), ("mlp", "moe"), ("mla_up_proj",))
)
"""Modules that all blocks of a model compute again (--recompute-modules)."""

_STATES = Settings(zero=(1,), recomputed=("equal",), selective=MODULES, context=("heads", "ring"), samples_by="context")
_FSDP = Settings(
    zero=(2, 3), recomputed=("equal",), selective=MODULES, context=("heads", "ring"), samples_by="context",
    fixed=(("pipeline", 1),), replicated=True, replicated_experts=False,
)  # fmt: skip
_SETTINGS = (_STATES, _FSDP)
"""The distributed optimizer, with everything; Megatron-FSDP without a pipeline.

Up to core 0.16 Megatron-FSDP has no groups of experts in replicas (HSDP): it takes them for weights that all devices
share (megatron/core/distributed/fsdp/mcore_fsdp_adapter.py, _init_dist_index). Core 0.17 and later have them.
"""
_LATER = (_STATES, replace(_FSDP, replicated_experts=True))

_FP8 = ("tensorwise", "delayed", "mxfp8")

MEGATRON = EngineSpace(
    name="megatron",
    title="Megatron-LM",
    software="megatron",
    settings=_SETTINGS,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
    narrow_moments=(1,),
    fp8=_FP8,
)

MEGATRON_BRIDGE = EngineSpace(
    name="megatron-bridge",
    title="Megatron Bridge",
    software="nemo",
    settings=_LATER,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
    narrow_moments=(1,),
    fp8=_FP8,
)

NEMO = EngineSpace(
    name="nemo",
    title="NeMo",
    software="nemo",
    settings=_SETTINGS,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
    narrow_moments=(1,),
    fp8=_FP8,
)
