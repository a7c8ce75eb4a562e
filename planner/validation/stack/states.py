"""The optimizer of a row and the states that it keeps: AdamW in fp32 unless the row says otherwise.

    optimizer=Muon; trained with LAMB                     another optimizer that is priced
    pure bf16, bf16-true, no master weights               weights, gradients and moments in 16 bits, as PyTorch has them
    exp-avg-dtype bf16, optimizer states in bf16          moments in 16 bits beside fp32 masters

    clip_grad=0.0, max_grad_norm 0, no clipping            gradients are not clipped; else they are, by a norm of 1

Trainers clip unless they are told not to. A row that names only layers or a launcher (Transformer Engine or accelerate)
has a loop of its own, which clips only if the row says so (docs/examples/te_llama/utils.py of TransformerEngine;
`Accelerator.clip_grad_norm_` has to be called).

The BF16_Optimizer of DeepSpeed keeps masters and moments in fp32, despite its name (deepspeed/runtime/
bf16_optimizer.py). `planner.validation.request.otherwise` refuses optimizers that are not priced.
"""

import re
from dataclasses import dataclass

from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says
from planner.validation.unsupported import UnsupportedError

FLAGS = ("model", "other_flags", "flag", "distributed_optimizer", "precision_detail")
"""Columns that say how a row was run."""

CLIP_NORM = 1.0
"""The usual clipping norm of gradients of language models (the default of Megatron-LM's --clip-grad, NeMo's
gradient_clip_val, torchtitan's max_norm, and max_grad_norm of transformers' Trainer). Clipping costs a pass for the
norm, its all-reduces, and a pass that scales."""

PRICED = ("muon", "lamb", "sgd")
"""Priced optimizers other than AdamW."""
_SGD = r"\boptim(?:izer)?\s*[=:]\s*sgd\b|optimizer sgd\b"
PURE = (
    r"pure[-_ ]bf(?:loat)?16|bf16[-_]true|\bbf16_optimizer_states\b|\btraining[._]dtype\W+bfloat16"
    r"|(?:no|without) (?:fp32 )?master[-_ ]weights|stochastic[-_ ]rounding"
)
"""Words for weights, gradients and moments in 16 bits."""

_MOMENTS = (
    r"\bbf16[- ](?:adamw?|moments)|optimi[sz]er states? in bf16|bf16 optimi[sz]er states?"
    r"|exp[-_]avg(?:[-_]sq)?[-_]dtype\W+(?:torch\.)?bf(?:loat)?16"
)
_CLIPPED = (
    r"clip[-_ ]?grad\w*|max[-_]grad[-_]norm|\bmax[-_]norm|(?<!logit[- ])(?<!qk[- ])\bclipp(?:ed|ing)\b"
    r"|grad(?:ient)?s?[-_ ]?(?:norm[-_ ])?clip(?:ped|ping)?(?:[-_]val)?"
)
_BY_HAND = r"transformer[- ]?engine|(?<!to )\baccelerate\b"
_TRAINED_BY = (
    r"megatron|nemo|deepspeed|lightning|torchtitan|llm-foundry|mosaic|composer|axolotl|llama[-_ ]?factory|ms-swift"
    r"|torchtune|\btrl\b"
)
"""Words for layers and launchers, and for software with a training loop of its own."""

_OPTIMIZER = r"\bbf16[- ]optimi[sz]er\b"


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """The optimizer of a run and its states.

    Attributes:
        optimizer: name of the optimizer.
        master_weights: whether there are fp32 master weights; without them gradients have 16 bits, too.
        moment_dtype: dtype of the moments.
        clip_norm: norm that gradients are clipped to; None without clipping.
    """

    optimizer: str = "adamw"
    master_weights: bool = True
    moment_dtype: str = "fp32"
    clip_norm: float | None = CLIP_NORM


USUAL = States()


def run_with(names: str) -> str:
    """A pattern for notes that name one of these optimizers as the run's own; other notes compare with other runs."""
    return (
        rf"(?:trained|run|ran) with (?P<with>{names})\b|\boptimi[sz]er\W+(?P<named>{names})\b"
        rf"|\b(?P<instead>{names}) (?:instead of|rather than) adam"
    )


def states_of(row: Row, notes: list[str]) -> States:
    """The optimizer and states that a row states. Raises UnsupportedError for pure fp16 weights."""
    flags = row.words(*FLAGS)
    optimizer = _optimizer(flags, row.text("notes").lower())
    pure = mentions(flags, PURE) and row.precision() != "fp32"
    narrow = mentions(flags, _MOMENTS) or (mentions(flags, _OPTIMIZER) and "deepspeed" not in flags)
    if pure and row.precision() == "fp16":
        raise UnsupportedError("weights or moments have no fp32 copy but fp16, which is not priced")
    found = States(
        optimizer=optimizer,
        master_weights=not pure,
        moment_dtype="bf16" if pure or narrow else USUAL.moment_dtype,
        clip_norm=CLIP_NORM if _clips(row, flags) else None,
    )
    if found.clip_norm is None:
        notes.append("gradients are not clipped")
    if optimizer != USUAL.optimizer:
        notes.append(f"optimizer: {optimizer}")
    if found.moment_dtype != USUAL.moment_dtype:
        notes.append(f"moments in bf16{'' if found.master_weights else ', no master weights'}")
    return found


def _clips(row: Row, flags: str) -> bool:
    """Whether a run clips gradients, by its words, else by the habit of its trainer."""
    if (clipped := says(flags, _CLIPPED)) is not None:
        return clipped
    named = f"{row.text('stack').lower()}; {flags}"
    by_trainer = mentions(named, "trainer") or mentions(f"{row.text('source').lower()}; {named}", _TRAINED_BY)
    return by_trainer or not mentions(named, _BY_HAND)


def _optimizer(flags: str, own: str) -> str:
    for name in PRICED:
        if mentions(flags, _SGD if name == "sgd" else rf"\b{name}\b"):
            return name
    if mentions(own, run_with("|".join(PRICED))):
        found = re.search(run_with("|".join(PRICED)), own)
        assert found is not None
        return next(name for name in found.groups() if name)
    return USUAL.optimizer
