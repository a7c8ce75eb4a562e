"""What Megatron-LM core 0.16 can be told, NeMo and Megatron Bridge, which stand on it; see `planner.export.megatron`.

Left out of the spaces, though the exporters write them: ZeRO 0, which needs more memory than the distributed optimizer
and saves no time; Megatron-FSDP beside a pipeline; copies of what ZeRO shares out (HSDP); attention by heads inside of
a ring; selective recomputation; norms that are whole beside tensor parallelism; buckets of gradients.
"""

from planner.engines.space import EngineSpace, Settings

_OPTIMIZERS = ("adamw", "sgd")
_PRECISIONS = ("bf16", "fp16", "fp32")

_SETTINGS = (
    Settings(zero=(1,), recomputed=("equal",), context=("heads", "ring")),
    Settings(zero=(2, 3), recomputed=("equal",), context=("heads", "ring"), fixed=(("pipeline", 1),)),
)
"""The distributed optimizer, with everything; Megatron-FSDP without a pipeline."""

MEGATRON = EngineSpace(
    name="megatron",
    title="Megatron-LM",
    software="megatron",
    settings=_SETTINGS,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
    fp8=("tensorwise",),
)

MEGATRON_BRIDGE = EngineSpace(
    name="megatron-bridge",
    title="Megatron Bridge",
    software="nemo",
    settings=_SETTINGS,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
)

NEMO = EngineSpace(
    name="nemo",
    title="NeMo",
    software="nemo",
    settings=_SETTINGS,
    optimizers=_OPTIMIZERS,
    precisions=_PRECISIONS,
    wide=(2, 3),
)
