"""Recipes of products in fp8, by name: what one scale is for, and what is cast to which dtype (`planner.graph.fp8`)."""

from dataclasses import dataclass
from typing import Literal

ROWWISE = 0.52
"""What is left of the time that products in fp8 save where rows have scales of their own: torchtitan at 7a04053a, 8
H100, makes 5,760 tokens/s of a device in bf16, 6,418 so, 7,186 with one scale for a tensor."""

MXFP8 = 0.90
"""What is left of it with scales for each 32 elements: fitted to the ratio of step times of five pairs of runs of
Megatron Bridge on Blackwell that differ in nothing else (3.7 to 11.8% longer): docs/validate-findings.md."""

BLOCK = 128
"""Elements of a row for which there is one scale, and of both dims of a weight (arXiv 2412.19437, section 3.3.2)."""

LINE = 32
"""Elements of a row of either operand for which there is one scale, a power of two (OCP Microscaling Formats, 1.0)."""


FORWARD = "float8_e4m3fn"
"""The dtype of operands that are no gradients, and of weights on their way, under every recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How products are computed in fp8: what one scale is for, the dtype that gradients are cast to (the others are
    e4m3), and whether weight gradients are products in fp8. Scales that are `delayed` are those of the largest elements
    of steps before (`runtime.ops.fp8.delayed_scales`)."""

    scales: Literal["tensor", "row", "block", "line"]
    gradients: str
    weight_gradients: bool
    delayed: bool = False
    forward: str = FORWARD

    @property
    def gained(self) -> float:
        """What is left of the time that products in fp8 save."""
        return {"row": ROWWISE, "line": MXFP8}.get(self.scales, 1.0)

    @property
    def rate(self) -> str:
        """The dtype of products, by the names of rates in profiles."""
        return "mxfp8" if self.scales == "line" else "fp8"

    @property
    def block(self) -> int:
        """Elements of a row that have a scale together; 0 where those of a whole row, or more, have."""
        return {"block": BLOCK, "line": LINE}.get(self.scales, 0)

    @property
    def powers(self) -> bool:
        """Whether scales are powers of two."""
        return self.scales == "line"

    @property
    def of_rows_alone(self) -> bool:
        """Whether what becomes of a token does not depend on the other tokens of its step."""
        return self.delayed or (self.scales == "row" and not self.weight_gradients)


RECIPES = {
    "tensorwise": Recipe(scales="tensor", gradients="float8_e5m2", weight_gradients=True),
    "rowwise": Recipe(scales="row", gradients="float8_e4m3fn", weight_gradients=True),
    "rowwise_with_gw_hp": Recipe(scales="row", gradients="float8_e4m3fn", weight_gradients=False),
    "blockwise": Recipe(scales="block", gradients="float8_e4m3fn", weight_gradients=True),
    "delayed": Recipe(scales="tensor", gradients="float8_e5m2", weight_gradients=True, delayed=True),
    "mxfp8": Recipe(scales="line", gradients="float8_e4m3fn", weight_gradients=True),
}
"""By their names in torchao, and of blocks, lines and delayed scales in Transformer Engine."""

LAYER_TENSORS, EXPERT_TENSORS = 3, {2: 6, 3: 8}
"""With a scale of their own where scales are delayed. Of a linear layer: what flows in, the weight, and the gradient of
what flows out. Of each expert, by how many matrices it has: what flows in, gate (of three), up, down, what goes into
down, and the gradients of the result and of what gate and up make."""

GRADIENTS_AMONG = {LAYER_TENSORS: 1, EXPERT_TENSORS[2]: 2, EXPERT_TENSORS[3]: 3}
"""How many of them, the last ones, are gradients."""

HISTORY = 1024
"""Steps of whose largest elements delayed scales are (Transformer Engine, `amax_history_len`)."""
