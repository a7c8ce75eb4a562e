"""Words of the page that are explained on hover: the rows of docs/glossary.md, as a test checks."""

import re
from collections.abc import Mapping
from html import escape

MEANINGS: Mapping[str, tuple[str, str]] = {
    "axis": (r"axis\d+", "a dimension of the device mesh; `axis0` has the slowest links"),
    "variant (in a report)": (
        r"\b[Vv]ariant(?: [A-Z])?\b",
        "blocks that run alike: equal strategies, stored layouts and recomputation; `A`, `B`, …",
    ),
    "MFU": (
        r"model FLOPs utilisation",
        "model FLOPs utilisation: FLOPs of the model over what the devices could do in that time",
    ),
    "ZeRO-1, ZeRO-2, ZeRO-3": (
        r"ZeRO[ -]?[123]?|optimizer sharding",
        "data-parallel devices share out optimizer states, gradients too, weights too",
    ),
    "DDP": (r"DDP", "distributed data parallel: every device has whole weights, and gradients are all-reduced"),
    "FSDP": (
        r"FSDP",
        "fully sharded data parallel: weights, gradients and states are cut, weights are gathered for use; ZeRO-3",
    ),
    "HSDP": (r"HSDP", "FSDP inside groups of devices, with replicas of the groups"),
    "micro-batch": (r"micro-batch(?:es)?", "a part of the global batch that goes through the model at once"),
    "recomputation": (
        r"recomputation",
        "activations are thrown away and computed again in the backward pass; selective: some are kept",
    ),
    "degree": (r"degrees?", "how many devices share a kind of parallelism"),
    "mesh": (r"mesh", "the devices of one pipeline stage as a grid"),
    "stage": (r"stages?", "consecutive blocks on the devices of one pipeline rank"),
    "sequence parallel": (
        r"sequence parallel",
        "norms and the like are cut along the sequence on the tensor-parallel axis",
    ),
    "column parallel, row parallel": (
        r"column parallel|row parallel",
        "a matrix product cut along its outputs, or along its inputs, on a tensor-parallel axis",
    ),
    "vocabulary parallel": (
        r"vocabulary parallel",
        "the embedding, the output layer and the loss are cut along the vocabulary",
    ),
    "factor": (r"factors?", "a loop index of an operator's rule, such as `o` and `i` of a linear layer"),
    "layout": (
        r"layouts?",
        "how a tensor lies on the axes of a mesh: `S0` cut along dim 0, `R` a full copy, `P` a term of a sum",
    ),
    "margin": (r"margin", "memory that is left free for the error of the predicted peak"),
}
"""By glossary word: its pattern on the page, and its meaning."""

_ANY = re.compile("|".join(f"(?P<m{at}>{pattern})" for at, (pattern, _) in enumerate(MEANINGS.values())))


class Html(str):
    """Text that is already HTML: templates do not escape it."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def explained(text: str, keyboard: bool = True) -> Html:
    """A text whose glossary words show their meaning on hover, each once; with `keyboard` also on focus."""
    meanings, pieces, seen, end = list(MEANINGS.values()), [], set[str](), 0
    focus = ' tabindex="0"' if keyboard else ""
    for found in _ANY.finditer(text):
        name = found.lastgroup or ""
        if name in seen:
            continue
        seen.add(name)
        meaning = escape(meanings[int(name[1:])][1].replace("`", ""))
        pieces += [escape(text[end : found.start()]), f'<abbr title="{meaning}"{focus}>{escape(found[0])}</abbr>']
        end = found.end()
    return Html("".join([*pieces, escape(text[end:])]))
