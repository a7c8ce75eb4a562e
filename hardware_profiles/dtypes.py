"""Dtypes that devices compute in, each with all that anybody asks of it. A new one is an entry of `DTYPES`, and a peak
in the profiles of the devices that have it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Engine: TypeAlias = Literal["accelerate", "mindformers", "nemo", "torchtitan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """A dtype under the name that profiles give to its rates.

    Attributes:
        tensors: what PyTorch calls dtypes that are stored so and computed at this rate; the first is that of weights.
        nbytes: of an element of an operand; results of fp8 products are written in two bytes.
        tolerance: by how much losses of a sharded and an unsharded model may differ, relatively, as sums are in another
            order; None where nothing is trained in it alone.
        engines: what engines call it as the precision of a training.
        operands: what PyTorch calls the dtype of what is rounded to it inside of matrix products, where it is nobody's
            own: weights are stored, and all else is computed, in that.
    """

    tensors: tuple[str, ...]
    nbytes: int
    tolerance: float | None = None
    engines: Mapping[Engine, str] = field(default_factory=dict)
    operands: str = ""

    @property
    def weights(self) -> str:
        """What PyTorch calls the dtype of weights that are trained in it."""
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
    "mxfp8": DType(tensors=(), nbytes=1),  # e4m3 with a scale for each 32 elements: 3% more, which nobody counts
    "tf32": DType(tensors=(), nbytes=4, tolerance=5e-3, operands="float32"),  # 10 bits, as fp16 has
}
"""By the names of rates in profiles."""

TRAINED: Mapping[str, DType] = {name: dtype for name, dtype in DTYPES.items() if dtype.tolerance is not None}
"""Those that a model can be trained in."""


def engine_words(engine: Engine) -> dict[str, str]:
    """The precisions that an engine trains in, and what it calls them."""
    return {name: dtype.engines[engine] for name, dtype in DTYPES.items() if engine in dtype.engines}
