"""Words for runs of a kind that is not priced: such a row is refused, and not read as something else.

    models                  BERT, T5, ViT, Mamba and others that are no decoders of attention and MLPs; DPO
    passes                  inference, frozen weights, documents that attention keeps apart
    experts                 those of Hugging Face's modules, a loop in Python (transformers 4, modeling_qwen3_moe.py)
    schedules               GPipe, zero bubble, DualPipe of a pipeline, which is priced as 1F1B
    optimizers              Adafactor, eight-bit Adam and others: AdamW, SGD, LAMB and Muon are priced, in fp32 and bf16
    activations             on the host, by copies that PyTorch waits for
    sharding                ZeRO++, weights outside of the device
    PCIe                    every profile of a data center has NVLink, or its vendor's equivalent, in a node
    context                 a2a+p2p: Ulysses inside, a ring outside

Flags and the name of the model count. Notes count for schedules and optimizers only if they say that these are the
run's own, because other notes compare with other runs. A denied word ("no LoRA") does not count.
"""

import re

from planner.validation.frameworks.traits import HUGGING_FACE
from planner.validation.reading.rows import Row
from planner.validation.reading.words import mentions, says
from planner.validation.stack.states import FLAGS, run_with
from planner.validation.unsupported import UnsupportedError

_OTHER_OPTIMIZERS = r"adafactor|shampoo|sophia|lion|adagrad|galore|apollo|adam[-_]mini|prodigy"
_NOT_PRICED = "its optimizer is none of AdamW, SGD, LAMB and Muon with states in fp32 or bf16, which are priced"
_IN_FLAGS: tuple[tuple[str, str], ...] = (
    (
        r"adafactor|\bshampoo\b|\bsophia\b|\blion\b|\b(?:8|eight)[-_ ]?bit[-_ ]?adam|adamw?[-_]?8[-_ ]?bit|\bgalore\b"
        r"|\badam[-_]mini\b|paged[-_]adam",
        _NOT_PRICED,
    ),
    (
        r"zero\+\+|\bhpz\b|hpz_partition_size\s*[=: ]\s*(?![01]\b)\d|quantized[-_ ](?:weights|gradients)|\bq[wg]z\b",
        "it is ZeRO++, whose second copies and quantised messages are not priced",
    ),
    (
        r"offload[-_ ]param|param\w*[-_ ]offload|zero[-_ ]infinity|enable_cpu_offload\s*[=: ]\s*true"
        r"|(?<!act )\bcpu[-_]offload\s*[=: ]\s*true",
        "weights are outside of the device, which is not priced",
    ),
    (
        r"offload[-_ ]activations?\b|\bactivations?[-_ ]offload",
        "activations wait on the host, by copies that the run waits for (save_on_cpu of PyTorch), which is not priced:"
        " cpu_offloading_num_layers=N is, which Transformer Engine overlaps",
    ),
    (r"\binference\b|\bforward[- ]only\b|\bprefill\b|\bdecoding\b", "nothing is trained: the whole step is priced"),
    (r"\bfrozen\b|\bfreez(?:e|ing)\b", "some weights are frozen, and all are priced as trained"),
    (r"\b(?:dpo|ppo|grpo|rlhf|kto)\b|reward model", "a second model runs beside (DPO and others), which is not priced"),
    (
        r"(?:document|(?<![a-z])doc)[-_ ]mask|block[- ]causal|intra[- ]document|\bvarlen\b"
        r"|(?<![a-z])pack(?:ed|ing)(?![a-z])",
        "several documents share a sequence, and what attention leaves out between them is not priced",
    ),
    (
        r"(?<![a-z])(?:(?:ro)?bert|m?t5|ul2|vit|swin|mamba\d?|jamba|rwkv|retnet|hyena|unet|whisper|resnet)(?![a-z])"
        r"(?![-_ ]?env)|stable diffusion"
        r"|(?<![a-z])(?<!grad[-_ ])(?<!gradient[-_ ])(?<!norm[-_ ])clip"
        r"(?![a-z]|[-_ ]?(?:grad|norm|val|thresh)|\s*[=: ]\s*\d)",
        "its model is no decoder of attention and MLPs, which is what dimensions are priced as",
    ),
    (r"\bcp[-_ ]comm[-_ ]type\s*[=: ]\s*\W?a2a\+p2p", "context parallelism is by heads inside and by a ring outside"),
)
_UNUSUAL = (
    (
        r"includ\w+ (?:compilation|warm-?up|checkpoint\w*|evaluation)|of the first (?:step|iteration)",
        "what was measured is more than a step",
    ),
)
"""Patterns that also count in notes."""

_BY_PCIE = ("a100-pcie", "a10g", "h100-pcie", "l4-", "l40s", "rtx-")
"""Beginnings of the names of profiles whose devices are joined by PCIe."""

_SCHEDULES = (
    r"\bgpipe\b|zero[-_ ]?bubble|\bzb[-_]?(?:h1|h2|v|1p)\b|\bdual[-_ ]?pipe|\bafab\b|\bpipedream|\bchimera\b|\bhanayo\b"
    r"|\basync\w* pipeline"
)
_SCHEDULE_OF_THE_RUN = rf"schedule\W+(?:{_SCHEDULES})"


def refuse_otherwise(row: Row) -> None:
    """Raise UnsupportedError if the words of a row say that its run is of a kind that is not priced."""
    flags = row.words(*FLAGS)
    own = row.text("notes").lower()
    notes = f"{flags}; {own}"
    for pattern, reason in _IN_FLAGS:
        if mentions(flags, pattern):
            raise UnsupportedError(reason)
    told = f"{row.text('intra_bw').lower()}; {notes}"
    for pattern, reason in _UNUSUAL:
        if mentions(told, pattern):
            raise UnsupportedError(reason)
    by_pcie = row.text("profile").lower().startswith(_BY_PCIE)
    if not by_pcie and says(told, "nvlink") is False:
        raise UnsupportedError("its devices are not joined by NVLink, and those of its profile are")
    by_itself = not mentions(f"{row.text('source').lower()}; {flags}", r"megatron")
    modules = f"{row.text('stack').lower()}; {flags}"
    if row.text("arch").lower() == "moe" and by_itself and mentions(modules, HUGGING_FACE):
        raise UnsupportedError("modules of Hugging Face run experts one by one from Python, which is not priced")
    if mentions(own, run_with(_OTHER_OPTIMIZERS)):
        raise UnsupportedError(_NOT_PRICED)
    for words, pattern in ((flags, _SCHEDULES), (own, _SCHEDULE_OF_THE_RUN)):
        named = re.search(pattern, words.replace("_", "-"))
        if (row.integer("pp") or 1) > 1 and named and mentions(words, pattern):
            raise UnsupportedError(f"its pipeline has another schedule ({named[0]}) than 1F1B, which is priced")
    for column in () if by_pcie else ("device", "intra_bw"):
        text = row.text(column).lower()
        if ("pcie" in text and "nvlink" not in text) or re.search(r"h[12]00[- ]nvl", text):
            profile = row.text("profile")
            raise UnsupportedError(
                f"{column} '{row.text(column):.40}': devices are joined by PCIe, and profile {profile} has faster links"
            )
