"""What DeepSpeed by itself can be told; see `planner.export.pytorch.deepspeed`. Tensor, context and
pipeline parallelism do not go together there. Experts are spread by AutoEP: whole, over tensor parallel devices first,
with ZeRO 3 not beside a context or tensor parallelism, and not beside a pipeline.

ZeRO 3 beside tensor parallelism is there from 0.19.4 on (deepspeed/runtime/engine.py,
_configure_tensor_parallel_states); up to 0.19.3 it was refused.

Latent attention has no tensor parallelism: AutoTP refuses the plan that transformers has for DeepSeek, and has no
setting for gradients of the part of keys with positions, which all heads share.

Left out of the space, though the exporter writes it: ZeRO 0, and LAMB, which has no ZeRO there.
"""

from planner.engines.space import EngineSpace, Settings

LATENT_WITHOUT_TENSOR = tuple(
    (name, (("tensor", 1),)) for name in ("deepseek-tiny", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
)
_DEGREES = ("tensor", "context", "pipeline")


def _alone(*but: str) -> tuple[tuple[str, int], ...]:
    """Degrees of 1, but for some."""
    return tuple((name, 1) for name in _DEGREES if name not in but)


DEEPSPEED = EngineSpace(
    name="deepspeed",
    title="DeepSpeed",
    software="deepspeed-zero3",
    settings=(
        Settings(
            zero=(1, 2), recomputed=("none", "all"), context=("heads",), sequence_parallel=False, vocabulary=False,
            whole_experts=(False,), fixed=_alone("context"),
        ),
        Settings(
            zero=(3,), recomputed=("none", "all"), context=("heads",), sequence_parallel=False, vocabulary=False,
            whole_experts=(), fixed=_alone("context"),
        ),
        Settings(
            zero=(3,), recomputed=("none", "all"), context=("heads",), sequence_parallel=False, vocabulary=False,
            whole_experts=(False,), fixed=_alone("context"), beside_experts=(("context", 1),),
        ),
        Settings(
            zero=(1, 2, 3), recomputed=("none", "all"), sequence_parallel=False, vocabulary=False,
            whole_experts=(), fixed=_alone("tensor"),
        ),
        Settings(
            zero=(1, 2), recomputed=("none", "all"), sequence_parallel=False, vocabulary=False,
            whole_experts=(True,), fixed=_alone("tensor"),
        ),
        Settings(
            zero=(1,), recomputed=("none", "all"), sequence_parallel=False, vocabulary=False, whole_experts=(),
            fixed=_alone("pipeline"), interleaved=False, even=True,
        ),
    ),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp16", "fp32"),
    models=LATENT_WITHOUT_TENSOR,
)  # fmt: skip
