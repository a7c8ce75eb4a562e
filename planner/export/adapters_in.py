"""Low-rank adapters that the settings of a fine-tuning ask for, in the words of whoever wrote them.

    finetuning_type: lora            LLaMA-Factory        lora_rank: 8, lora_target: all
    adapter: lora                    Axolotl              lora_r: 16, lora_target_modules: a list
    --tuner_type lora                ms-swift             --lora_rank 8 --target_modules all-linear
    --use_peft                       TRL                  --lora_r 16 --lora_target_modules q_proj v_proj
    peft_scheme: lora                NeMo                 adapter_dim: 32, target_modules: [attention_qkv]
    --lora-r 16                      MindSpeed-LLM        --lora-target-modules linear_qkv linear_proj

Keys are looked for in the text, so YAML, JSON, Python and command lines are one to it. Ranks of latent attention
(`q-lora-rank`) are none of adapters.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_KEY = r"(?im)(?<![\w-])(?:--)?[\"']?(?:model\.|peft\.)*{}[\"']?[ \t]*(?:[:=]|[ \t])[ \t]*"
_VALUE = r"[\"']?(?P<value>[^\s\"',}}#\\\]]+)"
_ASKED = _KEY.format(r"(?:finetuning_type|train_type|tuner_type|adapter|peft_scheme|peft)") + r"[\"']?(?:q?lora)\b"
_SWITCHED = _KEY.format(r"use[-_](?:peft|lora)") + r"[\"']?(?:true|yes|1)\b"
_BARE = r"(?im)(?<![\w-])--use[-_](?:peft|lora)[ \t]*(?:\\?$|(?=--))"
_RANK, _ALPHA = r"(?:lora[-_](?:r|rank|dim)|adapter_dim)", r"lora[-_]alpha"
_DROPOUT, _LAYERS = r"lora[-_]dropout", r"(?:lora[-_]targets?(?:[-_]modules)?|target[-_]modules)"
_MOST_LAYERS = 64
_EVERY = frozenset({"all", "all-linear", "all_linear", "*"})
_USUAL_RANK = "8"
"""Of peft, LLaMA-Factory and ms-swift."""

_MEGATRON: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "attention_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "attention_dense": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "mlp_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "mlp_fc2": ("down_proj",),
}
"""Layers that Megatron keeps together, by the names of the parts here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAdapters:
    """Rank, alpha and dropout as they are written, and the layers by the ends of their names; "" and none where
    nothing is said."""

    rank: str
    alpha: str = ""
    dropout: str = ""
    layers: tuple[str, ...] = ()

    def changes(self, layers: bool = True) -> list[str]:
        """What asks for them in the name of a model; without the `layers` beside every linear layer of its blocks."""
        said = {"lora": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        said["lora_layers"] = ",".join(self.layers) if layers else ""
        return [f"{key}={value}" for key, value in said.items() if value]


def adapters_in(text: str) -> AskedAdapters | None:
    """The adapters of settings; None where all weights are trained."""
    ranked = re.search(_KEY.format(r"lora[-_]r(?:ank)?") + r"[\"']?[1-9]\d{0,3}\b", text)
    kind = re.search(_KEY.format(r"(?:finetuning_type|train_type|tuner_type)") + r"[\"']?full\b", text)
    if kind or not (ranked or any(re.search(pattern, text) for pattern in (_ASKED, _SWITCHED, _BARE))):
        return None
    return AskedAdapters(
        rank=_number(text, _RANK, r"[1-9]\d{0,3}") or _USUAL_RANK,
        alpha=_number(text, _ALPHA, r"\d{1,6}(?:\.\d+)?"),
        dropout=_number(text, _DROPOUT, r"0(?:\.\d+)?"),
        layers=_layers(text),
    )


def _number(text: str, key: str, form: str) -> str:
    found = re.search(_KEY.format(key) + _VALUE, text)
    return found["value"] if found and re.fullmatch(form, found["value"]) else ""


def _layers(text: str) -> tuple[str, ...]:
    found = re.search(_KEY.format(_LAYERS), text)
    if found is None:
        return ()
    names = list(_names(text[found.end() :]))[:_MOST_LAYERS]
    if not names or _EVERY & {name.lower() for name in names}:
        return ()
    return tuple(dict.fromkeys(part for name in names for part in _MEGATRON.get(name, (name,))))


def _names(rest: str) -> Sequence[str] | Iterator[str]:
    """Names behind a key: in brackets, with commas or blanks between them, or a line each behind a dash."""
    inside = re.match(r"\s*\[([^\]]*)\]", rest)
    if inside:
        return re.findall(r"[\w.-]+", inside[1])
    listed = re.match(r"[ \t]*((?:\n[ \t]*-[ \t]+[\"']?[\w.-]+[\"']?[ \t]*)+)", rest)
    if listed:
        return re.findall(r"-[ \t]+[\"']?([\w.-]+)", listed[1])
    line = re.match(r"[\"']?((?:[\w.*-]+(?:[ \t]*,[ \t]*|[ \t]+)?)+)", rest)
    words = re.split(r"[,\s]+", line[1]) if line else []
    return [word for word in words if word and not word.startswith("-")] if words else []
