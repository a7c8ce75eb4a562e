"""Products in fp8 and TF32: what is stored, gathered and kept in fp8 for them, and how operands are scaled."""

import re
from dataclasses import replace

from hardware_profiles import Software
from planner.fp8_recipes import MXFP8, ROWWISE
from planner.validation.frameworks.recipes import of_bridge
from planner.validation.frameworks.traits import BLACKWELL, TRANSFORMER_ENGINE, flags_of
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions
from planner.validation.stack.flagged import gathers_float8, stores_fp8
from planner.validation.stack.gradients import NARROW_RECIPES, share_of_blocks

_ROWWISE_ON_BLACKWELL = 0.19
"""What is left on Blackwell of the time that fp8 products save, with a scale for each row (on Hopper: `ROWWISE`).
torchao makes 8,307.5 tokens/s of a B200 in bf16, 8,640.5 so, and 10,417 with one scale for a tensor
(docs/source/workflows/training.md)."""


def products_of(row: Row) -> str:
    """The dtype of matrix products if it differs from that of tensors, else empty: fp8 recipes keep everything else in
    bf16."""
    if row.precision() == "fp8":
        return "fp8"
    return "tf32" if mentions(row.text("precision_detail").lower(), "tf32") else ""


def with_narrow_gathers(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with weights that are gathered in fp8, or not, as flags and recipes have it."""
    flags = flags_of(row)
    if stack.name in TRANSFORMER_ENGINE and stores_fp8(f"{flags}; {row.text('precision_detail').lower()}"):
        return replace(stack, gathers_narrow=True)
    if products_of(row) == "fp8" and stack.name.startswith("fsdp") and gathers_float8(flags):
        return replace(stack, gathers_narrow=True)
    if stack.gathers_narrow and not re.search(NARROW_RECIPES, row.text("source").lower()):
        return replace(stack, gathers_narrow=False)  # Transformer Engine, but not a recipe that asks for it
    return stack


def with_products(row: Row, stack: Software, notes: list[str]) -> Software:
    """The stack with the dtype of its products, and what that changes of what it keeps and gathers."""
    products, detail = products_of(row), row.words("precision", "precision_detail")
    engine = products == "fp8" and stack.name in TRANSFORMER_ENGINE
    if engine:
        stack = replace(stack, keeps_fp8=True)
        if not stack.gathers_narrow and stack.name != "llm-foundry":  # which has them for one block at a time
            stack = replace(stack, stored=replace(stack.stored, beside=2.0 * share_of_blocks(row)))
    rowwise = _ROWWISE_ON_BLACKWELL if row.text("profile").startswith(BLACKWELL) else ROWWISE
    gained = rowwise if "rowwise" in detail else MXFP8 if re.search(r"mxf(?:p|loat)8|fp8[-_ ]mx", detail) else 1.0
    if products == "fp8" and stack.name.startswith("fsdp") and gained == 1.0:
        stack = replace(stack, gathers_inputs_narrow=gathers_float8(f"{detail}; {flags_of(row)}"))
    scaled = engine and _scales_as_they_are(row, detail)
    if scaled:
        notes.append("fp8 with current scaling: the largest element of each operand is found before it is cast")
    return replace(stack, products=products, gained=gained, current_scaling=scaled)


def _scales_as_they_are(row: Row, detail: str) -> bool:
    """Whether fp8 products use current scaling.

    Rows say so, or they are fp8 rows of Megatron Bridge without another recipe (the "FP8" of its tables is fp8_cs of
    perf_recipes).
    """
    if mentions(detail, r"current[-_ ]scaling|fp8[-_ ]?cs\b|tensorwise"):
        return True
    other = mentions(detail, r"mx|delayed|block|rowwise|nvfp4")
    return not other and of_bridge(row)
