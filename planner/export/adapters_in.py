"""Low-rank adapters that the settings of a fine-tuning ask for, in the words of several tools.

    finetuning_type: lora            LLaMA-Factory        lora_rank: 8, lora_target: all
    adapter: lora                    Axolotl              lora_r: 16, lora_target_modules: a list
    --tuner_type lora                ms-swift             --lora_rank 8 --target_modules all-linear
    --use_peft                       TRL                  --lora_r 16 --lora_target_modules q_proj v_proj
    peft_scheme: lora                NeMo                 adapter_dim: 32, target_modules: [attention_qkv]
    --lora-r 16                      MindSpeed-LLM        --lora-target-modules linear_qkv linear_proj

Keys are searched in the text, so YAML, JSON, Python and command lines are read the same way. Ranks of latent attention
(`q-lora-rank`) do not belong to adapters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_KEY = r"(?im)(?<![\w-])(?:--)?[\"']?(?:model\.|peft\.)*{}[\"']?[ \t]*(?:[:=]|[ \t])[ \t]*"
_VALUE = r"[\"']?(?P<value>[^\s\"',}}#\\\]]+)"
_COMMENT = re.compile(r"(?m)(?:^|(?<=[ \t]))#.*$")
_KINDS = r"(?:finetuning_type|train_type|tuner_type|adapter|peft_scheme|peft)"
_SWITCHES = r"use[-_](?:peft|lora)"
_ASKED = _KEY.format(_KINDS) + r"[\"']?q?(?:lora|dora)\b"
_SWITCHED = _KEY.format(_SWITCHES) + r"[\"']?(?:true|yes|1)\b"
_BARE = r"(?im)(?<![\w-])--use[-_](?:peft|lora)[ \t]*(?:\\?$|(?=--))"
_OTHERWISE = _KEY.format(_KINDS) + r"[\"']?(?:$|(?:full|freeze|none|null|false|~)\b)"
_OFF = _KEY.format(_SWITCHES) + r"[\"']?(?:false|no|0)\b"
_WIDER = (_KEY.format(r"use[-_]dora") + r"[\"']?(?:true|yes|1)\b", _KEY.format(_KINDS) + r"[\"']?dora\b")
_RANK, _ALPHA = r"(?:lora[-_](?:r|rank|dim)|adapter_dim)", r"lora[-_]alpha"
_DROPOUT, _LAYERS = r"lora[-_]dropout", r"(?:lora[-_]targets?(?:[-_]modules)?|target[-_]modules)"
_TRAINED = r"(?:additional_target|(?:lora[-_])?modules[-_]to[-_]save)"
_MOST_LAYERS = 64
_EVERY = frozenset({"all", "all-linear", "all_linear", "*"})
_USUAL_RANK = "8"
"""The default rank of peft, LLaMA-Factory and ms-swift."""

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
"""Layers that Megatron keeps together, and the names of their parts here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedAdapters:
    """Adapters as settings ask for them; empty values where the settings state nothing.

    Attributes:
        rank: as it is written.
        alpha: as it is written.
        dropout: as it is written.
        layers: layers with adapters, by the ends of their names.
        trained: layers that are trained in full, by the ends of their names.
        wider: whether they also have the length of each row of a weight (DoRA).
    """

    rank: str
    alpha: str = ""
    dropout: str = ""
    layers: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    wider: bool = False

    def changes(self, names: bool = True) -> list[str]:
        """The changes to the name of a model that ask for these adapters.

        Without `names`, adapters stand beside every linear layer of its blocks.
        """
        said = {"lora": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout}
        if names:
            said |= {"lora_layers": ",".join(self.layers), "lora_trained": ",".join(self.trained)}
        return [f"{key}={value}" for key, value in said.items() if value]


def adapters_in(settings: str) -> AskedAdapters | None:
    """The adapters that settings ask for; None if all weights are trained.

    A rank alone asks for adapters, unless a switch says otherwise.
    """
    text = _COMMENT.sub("", settings)
    ranked = re.search(_KEY.format(r"lora[-_]r(?:ank)?") + r"[\"']?[1-9]\d{0,3}\b", text)
    asked = any(re.search(pattern, text) for pattern in (_ASKED, _SWITCHED, _BARE))
    if not asked and (ranked is None or trains_all(settings)):
        return None
    return AskedAdapters(
        rank=_number(text, _RANK, r"[1-9]\d{0,3}") or _USUAL_RANK,
        alpha=_number(text, _ALPHA, r"0*[1-9]\d{0,5}(?:\.\d+)?"),
        dropout=_number(text, _DROPOUT, r"0(?:\.\d+)?"),
        layers=_listed(text, _LAYERS),
        trained=_listed(text, _TRAINED),
        wider=any(re.search(pattern, text) for pattern in _WIDER),
    )


def trains_all(settings: str) -> bool:
    """Whether a switch says that all weights are trained, whatever else is said about adapters."""
    text = _COMMENT.sub("", settings)
    return any(re.search(pattern, text) for pattern in (_OTHERWISE, _OFF))


def _number(text: str, key: str, form: str) -> str:
    found = re.search(_KEY.format(key) + _VALUE, text)
    return found["value"] if found and re.fullmatch(form, found["value"]) else ""


def _listed(text: str, key: str) -> tuple[str, ...]:
    found = re.search(_KEY.format(key), text)
    if found is None:
        return ()
    names = _names(text[found.end() :])[:_MOST_LAYERS]
    if not names or _EVERY & {name.lower() for name in names}:
        return ()
    return tuple(dict.fromkeys(part for name in names for part in _MEGATRON.get(name, (name,))))


def _names(rest: str) -> list[str]:
    """Names after a key: in brackets, separated by commas, bars or blanks, or one per line after a dash."""
    inside = re.match(r"\s*\[([^\]]*)\]", rest)
    if inside:
        return re.findall(r"[\w.-]+", inside[1])
    below = re.match(r"[ \t]*((?:\s*\n[ \t]*-[ \t]+[\"']?[\w.-]+[\"']?[ \t]*)+)", rest)
    if below:
        return re.findall(r"-[ \t]+[\"']?([\w.-]+)", below[1])
    line = re.match(r"[\"']?([^\"'\n\\}]*)", rest)
    words = re.split(r"[,|\s]+", line[1].strip()) if line else []
    until = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
    return [word for word in words[:until] if re.fullmatch(r"[\w.*-]+", word)]
