"""What a row says about recomputation: how its blocks run, which of them, and what they recompute.

recompute     recompute_detail                                  what is recomputed
full          full (block n=5), block 5, every 2nd layer        those blocks of a stage as a whole
              25% of layers                                     that share of them
              first 5 layers, 2/3 layers                        refused: of the model, or of a stage?
selective     modules=[layernorm moe_act], selective op         the named parts, in every block
              layernorm moe, as Megatron-LM names modules       the same
              minimal, minimal_flash (JAX's policies)           all but products; and but for attention
              nothing                                           attention, as Megatron-LM does
nothing                                                         by the recipe, else nothing
"""

import math
import re
from typing import cast

from hardware_profiles import load_profile
from planner.plan.layout.kept import EVERY_SECOND_PRODUCT
from planner.plan.layout.parts import PARTS
from planner.strategy_search.request.space import Running
from planner.validation.frameworks.recipes import spared_by_recipe
from planner.validation.reading.rows import Row
from planner.validation.spared import NOTHING_SPARED, Spared
from planner.validation.unsupported import UnsupportedError

_CLASSES = {"layernorm": "normalisation", "moe_act": "elementwise", "core_attn": "attention"}
"""Modules of Megatron-LM that are op classes here."""

_REMADE = {"layernorm": "normalisation", "moe_act": "experts"}
"""Modules whose results Megatron-LM recomputes in models with experts (`Software.remakes`) without running anything
else for them, neither products nor communication (CheckpointWithoutOutput, megatron/core/tensor_parallel/random.py)."""

_POLICIES = (
    (r"minimal[-_](?:flash|with[-_]context)", ("elementwise", "normalisation")),
    (r"\bminimal\b|save[-_]dots?[-_]with[-_]no[-_]batch", ("attention", "elementwise", "normalisation")),
)
"""Policies of jax.checkpoint by their names in MaxText (layers/decoders.py) and Pax (AutodiffCheckpointType), and the
op classes that each recomputes. Products of weights are saved, and by MaxText's minimal_flash attention's output."""

_NEARLY_ALL = 0.85
"""Share of the blocks from which all are taken to be recomputed: HFU and MFU have two digits."""

_EVERY = 2
"""torchtitan recomputes one block of this many with selective recomputation of layers (train_configs, 2024)."""

_LAYERS = r"(?:layers|blocks)"


def spared_of(row: Row, layers: int, notes: list[str]) -> Spared | None:
    """What saves memory, by the words of a row whose stages have `layers` layers, or by its recipe; None if neither
    says."""
    if row.recomputation() in (None, "none") and (away := _offloaded(row)):
        notes.append(f"{away} blocks offload activations, as flags say")
        return Spared(offloaded=away)
    if (wanted := row.recomputation()) is None:
        spared = spared_by_recipe(row)
        if spared is not None:
            parts = [f"of {word} in every block" for word in spared.but]
            parts += [f"what comes of {' and '.join(spared.remade)}"] if spared.remade else []
            parts += [f"of {spared.recomputed} blocks of a stage"] if spared.recomputed else []
            notes.append(f"recomputation by the recipe: {', '.join(parts) or 'none'}")
            notes += [f"{spared.offloaded} blocks offload activations by the recipe"] if spared.offloaded else []
        return spared
    detail = row.text("recompute_detail").lower()
    if wanted == "selective" and "selective layer" in detail:
        notes.append("selective recomputation: of every second block (torchtitan's selective_ac_option = 2)")
        return Spared(recomputed=math.ceil(layers / _EVERY))
    if wanted == "selective" and _by_blocks(row) and (share := _share_again(row)) is not None and share < _NEARLY_ALL:
        notes.append(f"selective recomputation of fms-fsdp: {share:.0%} of the blocks, by HFU over MFU")
        return Spared(recomputed=max(1, round(share * layers)))
    experts = row.text("arch").lower() == "moe"
    if wanted == "selective" and (modules := _modules(row, detail)) and (experts or modules & PARTS.keys()):
        notes.append(f"selective recomputation: of {', '.join(sorted(modules))} in every block")
        remade = tuple(sorted(_REMADE[word] for word in modules if experts and word in _REMADE))
        again = modules - (_REMADE.keys() if experts else set())
        return Spared(but=tuple(sorted(_CLASSES.get(word, word) for word in again)), remade=remade)
    return _some_blocks(detail, layers, notes) if wanted == "full" else None


def _offloaded(row: Row) -> int:
    """Blocks of a pipeline rank whose activations are offloaded, by flags (Transformer Engine's CPU offloading)."""
    counted = (
        r"cpu[-_]offloading[-_]num[-_]layers\s*[=: ]\s*(\d{1,4})\b|activations of (\d{1,4}) (?:layers|blocks) offloaded"
    )
    found = re.search(counted, row.text("other_flags").lower())
    return int(found[1] or found[2]) if found else 0


def _by_blocks(row: Row) -> bool:
    """Whether selective recomputation recomputes a share of the blocks as a whole."""
    return "fms-fsdp" in f"{row.text('source')} {row.text('other_flags')}".lower()


def _share_again(row: Row) -> float | None:
    """Share of the forward pass that is recomputed, for a row that states its HFU; None if anything needed is unknown.

    3 (HFU / MFU - 1), because a forward pass is a third of a step. MFU is that of PaLM (arXiv 2204.02311, appendix B):
    6 FLOP per parameter and token, plus 12 per layer, hidden element and token of the sequence.
    """
    told = re.search(r"\bhfu\s*[=:]?\s*(0?\.\d+)", row.text("notes").lower())
    seconds, devices, batch = row.measured_seconds, row.integer("n_devices"), row.integer("global_batch")
    sizes = [row.integer(column) for column in ("n_layers", "hidden", "seq_len")]
    if told is None or None in (seconds, devices, batch, row.parameters, *sizes):
        return None
    layers, hidden, sequence = (size or 0 for size in sizes)
    each = 6 * (row.parameters or 0) + 12 * layers * hidden * sequence
    rate = each * sequence * (batch or 0) / (devices or 1) / (seconds or 1)
    mfu = rate / load_profile(row.text("profile")).device.peak("bf16")
    return max(0.0, 3 * (float(told[1]) / mfu - 1))


def _modules(row: Row, detail: str) -> set[str]:
    """Modules by their names in Megatron-LM; empty if the detail has other words."""
    named = re.search(r"modules=\[([^\]]*)\]", detail)
    words = set(re.findall(r"\w+", named[1] if named else detail)) - {"selective", "modules", "recompute", "and"}
    megatron = re.search(r"megatron|nemo", row.text("stack").lower())
    told = bool(named or megatron) or not words <= {"mlp", "moe"}  # other frameworks use these words, too
    return words if told and words <= {*_CLASSES, *PARTS} else set()


def _some_blocks(detail: str, layers: int, notes: list[str]) -> Spared | None:
    """Which blocks of a stage of `layers` layers are recomputed as a whole; None for all.

    Raises UnsupportedError for a detail that names some of them in another way.
    """
    if every := re.search(r"every ([2-9]|other|second|third)(?:nd|rd|th)?\b", detail):
        one = {"other": 2, "second": 2, "third": 3}.get(every[1]) or int(every[1])
        notes.append(f"full recomputation of one block in {one}")
        return Spared(recomputed=math.ceil(layers / one))
    words = r"block n=(\d{1,9})|block[-\s]+(\d{1,9})\b|recompute[-_]num[-_]layers\W{1,3}(\d{1,9})"
    if (some := re.search(words, detail)) and "uniform" not in detail:
        return Spared(recomputed=int(next(number for number in some.groups() if number)))
    if share := re.search(r"(\d{1,3})\s?% of (?:the |all )?" + _LAYERS, detail):
        notes.append(f"full recomputation of {share[1]}% of the blocks")
        return Spared(recomputed=math.ceil(layers * min(int(share[1]), 100) / 100))
    if re.search(
        r"\d\s*(?:/|of|out of)\s*\d+\s*"
        + _LAYERS
        + r"|(?:first|last|some)\s+(?:\d+\s+)?"
        + _LAYERS
        + r"|layers?\s+\d+\s*-",
        detail,
    ):
        raise UnsupportedError(f"recompute_detail '{detail:.40}': say the blocks of a stage, as in full (block n=5)")
    return None


def running(row: Row, spared: Spared | None, notes: list[str]) -> Running:
    """How blocks run, except those that are spared."""
    wanted = row.recomputation()
    if wanted is None:
        if spared is None:
            notes.append("recomputation unknown: none")
        return "selective" if spared is not None and spared.but else "none"
    if wanted == "full" and spared == NOTHING_SPARED:  # of 0 blocks
        return "none"
    apart = spared is not None and (spared.recomputed or (spared.remade and not spared.but))
    if not apart and wanted == "selective" and _by_blocks(row):
        notes.append("selective recomputation of fms-fsdp: whole blocks, all of them (selective_checkpointing = 1)")
        return "full"
    return "none" if apart else cast(Running, wanted)


def repeated(row: Row, recompute: Running | None, notes: list[str]) -> tuple[str, ...]:
    """The classes of operators that selective recomputation recomputes: attention (Megatron), or what the row names.

    Raises UnsupportedError for a detail that does not say.
    """
    if recompute != "selective":
        return ()
    detail = row.text("recompute_detail").lower()
    if re.search(r"selective op|selective \(op|per[- ]op\b|op-level", detail):  # torchtitan
        notes.append("selective recomputation: of everything but attention and every second product")
        return ("elementwise", "normalisation", "copy", EVERY_SECOND_PRODUCT)
    for words, policy in _POLICIES:
        if re.search(words, detail):
            notes.append(f"selective recomputation: of {', '.join(policy)}")
            return policy
    named = re.search(r"modules=\[([^\]]*)\]", detail)
    if named or _modules(row, detail):
        parts = re.findall(r"\w+", named[1] if named else detail)
        classes = tuple(sorted({_CLASSES[part] for part in parts if part in _CLASSES}))
        notes.append(f"selective recomputation: of {', '.join(classes) or 'the fastest choice of operators'}")
        return classes
    if re.search(r"\bmlp\b|\bffn\b|\bmoe\b|layers", detail):
        raise UnsupportedError(f"recompute_detail '{detail:.40}': what is computed again? modules=[...] names it")
    notes.append("selective recomputation: of attention")
    return ("attention",)
