"""Dtypes that devices compute in, with all their properties. A new one is an entry of `DTYPES`, and a peak in the
profiles of the devices that have it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["accelerate", "mindformers", "nemo", "torchtitan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """A dtype under the name that profiles give to its rates.

    Attributes:
        tensors: PyTorch names of the dtypes that are stored so and computed at this rate; the first is that of weights.
        nbytes: bytes of an element of an operand; results of fp8 products are written in two bytes.
        tolerance: largest relative difference between losses of a sharded and an unsharded model, whose sums have
            another order; None if nothing is trained in this dtype alone.
        engines: names of this training precision in the engines.
        operands: for a dtype that only matrix products round to: PyTorch's name of the dtype in which weights are
            stored and everything else is computed; empty for other dtypes.
    """

    tensors: tuple[str, ...]
    nbytes: int
    tolerance: float | None = None
    engines: Mapping[Engine, str] = field(default_factory=dict)
    operands: str = ""

    @property
    def weights(self) -> str:
        """PyTorch's name of the dtype of weights that are trained in it."""
        return self.operands or self.tensors[0]


DTYPES: Mapping[str, DType] = {
    "bf16": DType(
        tensors=("bfloat16",),
        nbytes=2,
        tolerance=2e-2,
        engines={"accelerate": "bf16", "mindformers": "bfloat16", "nemo": "bf16-mixed", "torchtitan": "bfloat16"},
    ),
    "fp16": DType(
        tensors=("float16",), nbytes=2, tolerance=5e-3, engines={"mindformers": "float16", "nemo": "16-mixed"}
    ),
    "fp32": DType(
        tensors=("float32",),
        nbytes=4,
        tolerance=1e-4,
        engines={"accelerate": "no", "mindformers": "float32", "nemo": "32", "torchtitan": "float32"},
    ),
    "fp8": DType(tensors=("float8_e4m3fn", "float8_e5m2"), nbytes=1),
    "mxfp8": DType(tensors=(), nbytes=1),  # e4m3 with a scale for each 32 elements: 3% more, which is not counted
    "tf32": DType(tensors=(), nbytes=4, tolerance=5e-3, operands="float32"),  # 10 bits, as fp16 has
}
"""Dtypes by the names of their rates in profiles."""

TRAINED: Mapping[str, DType] = {name: dtype for name, dtype in DTYPES.items() if dtype.tolerance is not None}
"""Dtypes that a model can be trained in."""


def engine_words(engine: Engine) -> dict[str, str]:
    """The precisions that an engine trains in, with the engine's names of them."""
    return {name: dtype.engines[engine] for name, dtype in DTYPES.items() if engine in dtype.engines}
