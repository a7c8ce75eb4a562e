"""What can be told the engines that share weights out with PyTorch's FSDP2; see `planner.export.pytorch.torchtitan`,
`planner.export.pytorch.accelerate` and `planner.export.pytorch.torch_script`.

Beside a pipeline it is ZeRO 1, whatever FSDP is told: the schedules of `torch.distributed.pipelining` add gradients up
whole, keep weights after a backward pass, and reduce once a step (`backward_maybe_with_nosync` and
`perform_reduce_grad` of torch/distributed/pipelining/stage.py, PyTorch 2.13).

Tensor parallelism of Accelerate is that of transformers, which shards such a model itself: as ZeRO 3, without replicas
as Accelerate counts them, and without a context (transformers 5.24, distributed/configuration_utils.py, fsdp.py).

Left out of the spaces, though the exporters write them: plain data parallelism, copies (HSDP) where a context alone
shares out or beside ZeRO 1, recomputation of every nth layer, GPipe; for torchtitan configurations without FSDP, which
compute on weights in bf16 alone, and recomputation by operators beside experts, where it keeps what experts exchange
and computes their products again, which no plan says.

Experts of torchtitan are cut over the innermost devices of the mesh (distributed/parallel_dims.py, 0.2.2): over the
context and data parallel devices of a copy, each expert cut by the tensor parallel ones, or over tensor parallel
devices first. What cuts them over a part of a context alone is another mesh than that of a plan. Qwen3 has no
pipeline there, and its DeepSeek models no context parallelism (FlexAttention).
"""

from planner.engines.space import EngineSpace, Settings
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT, Kept

_QWEN3 = ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")
_MODELS = (
    *((f"qwen3-{size}", (("pipeline", 1),)) for size in _QWEN3),
    ("deepseek-v2-lite", (("context", 1),)),
    ("deepseek-v3", (("context", 1),)),
)
"""Degrees that torchtitan's models lack."""

_WITHOUT_TENSOR = (
    "bert-base", "bert-large", "bert-tiny", "deepseek-tiny", "deepseek-v3", "gpt-tiny", "gpt2", "gpt2-large",
    "gpt2-medium", "gpt2-xl", "gpt3-1.3b", "gpt3-125m", "gpt3-13b", "gpt3-175b", "gpt3-2.7b", "gpt3-350m", "gpt3-6.7b",
    "gpt3-760m", "t5-11b", "t5-base", "t5-large", "t5-small", "t5-tiny", "vit-b16", "vit-h14", "vit-l16", "vit-tiny",
)  # fmt: skip
"""Models for which transformers 5.24 has no `tp_plan`, or one without attention (DeepSeek-V3)."""

_PRODUCTS = Kept(but=("elementwise", EVERY_SECOND_PRODUCT, "normalisation"))
"""Of torchtitan's selective recomputation by operators ("op")."""

TORCHTITAN = EngineSpace(
    name="torchtitan",
    title="torchtitan",
    software="fsdp",
    settings=(
        Settings(
            zero=(2, 3), recomputed=("none", "all"), selective=(("all", _PRODUCTS),), context=("ring",),
            samples_by="context and tensor", fixed=(("pipeline", 1),), over_context=True, selective_experts=False,
            shards=2, replicated=True,
        ),
        Settings(
            zero=(1,), recomputed=("none", "all"), selective=(("all", _PRODUCTS),), context=("ring",),
            samples_by="context and tensor", over_context=True, selective_experts=False, shards=2, piped=True,
            filled=True,
        ),
    ),
    precisions=("bf16", "fp32"),
    wide=(2, 3),
    models=_MODELS,
    fp8=("tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8"),
    leaves_out=True,
    gathers=("tensorwise",),
)  # fmt: skip

ACCELERATE = EngineSpace(
    name="accelerate",
    title="Accelerate",
    software="fsdp",
    settings=(
        Settings(
            zero=(2, 3), recomputed=("none", "all"), context=("ring",), sequence_parallel=False, vocabulary=False,
            whole_experts=(), fixed=(("tensor", 1), ("pipeline", 1)), shards=2, replicated=True,
        ),
        Settings(
            zero=(3,), recomputed=("none", "all"), sequence_parallel=False, vocabulary=False, whole_experts=(),
            fixed=(("context", 1), ("pipeline", 1)), shards=2,
        ),
    ),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp32"),
    models=tuple((name, (("tensor", 1),)) for name in _WITHOUT_TENSOR),
)  # fmt: skip

_ATTENTION = Kept(calls=("attention",))

TORCH = EngineSpace(
    name="torch",
    title="plain PyTorch",
    software="pytorch",
    settings=(
        Settings(
            zero=(2, 3), recomputed=("any",), selective=(("any", _ATTENTION),), context=("heads", "ring"),
            whole_experts=(False,), fixed=(("pipeline", 1),), beside_experts=(("tensor", 1),), shards=2,
            replicated=True,
        ),
        Settings(
            zero=(1,), recomputed=("any",), selective=(("any", _ATTENTION),), context=("heads", "ring"),
            whole_experts=(False,), beside_experts=(("tensor", 1),), filled=True,
        ),
    ),
    optimizers=("adamw", "sgd"),
    precisions=("bf16", "fp32"),
)  # fmt: skip
