"""What a config says and its model leaves out: notes for the person who plans it.

transformers keeps every key of a config, and most classes read only their own. A key that nothing reads may be a relic,
or a part of the architecture that another program builds. Only a person can tell, so such keys are named. A key counts
as read if the sources of the model and of its config, of transformers or of this package, contain it as a word: that is
generous, and right for keys with names of their own. A key is not named if its value is what the class computes in any
case.
"""

import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

LONG = 32_768
"""Tokens above which a length that nobody asked for is worth a note."""

_PREDICTED = (
    "num_nextn_predict_layers", "num_mtp_modules", "num_mtp_layers", "num_predict_layers", "mtp_num_layers",
    "mtp_num_hidden_layers",
)  # fmt: skip
"""Keys for layers that predict further tokens (multi-token prediction)."""

_OF_PREDICTED = ("mtp", "nextn", "eh_proj")
"""Parts of the names of their weights."""

_BOOKKEEPING = re.compile(
    r"_.*|auto_map|.*_token_(id|index)|.*(dtype|version|fusion).*|.*_init(_.*)?|init_.*|initializ.*|output_.*|"
    r"pretraining_tp|ep_size|model_max_length|task_specific_params|language|license|use_.*kernels?|max_window_layers|"
    r"for_llm_compressor|cache_implementation|aux_loss_alpha|seq_aux|initial_context_length|offset_alibi|"
    r"attention_softmax_in_fp32|skip_bias_add"
)
"""Keys that say nothing about a training step."""

_USUAL = (
    ("moe_layer_freq", 1), ("mlp_type", "default"), ("position_embedding_type", "absolute"), ("full_attn_mod", 1),
    ("interpolate_factor", 1), ("attn_type_list", 1), ("layernorm_full_attention_beta", 1),
    ("qk_norm_type", "per_layer"), ("moe_gate", "topk"), ("norm_type", "rms"),
)  # fmt: skip
"""Keys whose value, or every entry of it, asks for nothing that their classes lack."""

_NAMED_TWICE = {
    "n_ctx": "n_positions", "experts_per_token": "num_experts_per_tok", "attention_head_dim": "head_dim",
    "sliding_window_size": "sliding_window",
}  # fmt: skip
"""Keys that repeat another one."""

_SHOWN_BY = {
    "use_qk_norm": ("q_norm", "query_layernorm"),
    "use_rotary_pos_emb": ("apply_rotary_pos_emb",),
    "use_routing_bias": ("e_score_correction_bias",),
    "moe_use_aux_free": ("e_score_correction_bias",),
}
"""Switches that a class has on if its source has one of these words."""

_OF_ROUTERS = re.compile(r"scor(e|ing)_func(tion)?|topk_method|shared_moe_mode")
"""Keys for the scores by which routers choose experts."""

_OF_CONFIGS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
"""Modules that read configs for every class."""

_OF_DECODERS = ("decoders.py", "deepseek.py", "mixtures.py")
"""The files beside this one that read them for decoders of the planner."""

_BESIDE_TOKENS = ("pixel_values", "input_features", "input_values")
"""Arguments for images and sound."""

_MANY = 8
"""Keys that a note names."""


def notes_on_length(path: Path, key: str, length: int) -> Iterator[str]:
    """A note where a config, in its `key`, decides a long sequence, or where neither it nor the user says a length."""
    if not key:
        yield f"{path} gives no length of sequences: it is {length:,} here; say yours with --seq-len"
    elif length > LONG:
        yield (
            f"sequences have {length:,} tokens, the most that {path} allows ({key}); say the length that you train"
            " with: --seq-len"
        )


def notes_on_inputs(made: type, names: Collection[str], path: Path) -> Iterator[str]:
    """A note where a class that reads images or sound beside tokens is called on the arguments `names` alone."""
    taken = inspect.signature(made.forward).parameters  # type: ignore[attr-defined]
    left = [key for key in _BESIDE_TOKENS if key in taken]
    if left and not any(key in names for key in left):
        yield (
            f"{path}: {made.__name__} is planned on tokens alone, without {', '.join(left)}; parts that nothing reads"
            " then are in memory, are not trained and take no time"
        )


def notes_on_keys(content: Mapping[str, Any], config: Any, module: Any, path: Path) -> Iterator[str]:
    """Notes on keys of a config file that `module`, its model, does not read. `config` is the file as transformers
    reads it."""
    kinds = [type(config), type(module), *(type(part) for part in module.children())]
    text = config.get_text_config()
    inner: Any = next((content[key] for key in content if vars(config).get(key) is text), {}) or {}
    said = {**inner, **content} if isinstance(inner, Mapping) else dict(content)
    names = [name for name, _ in module.named_parameters()]
    further = [key for key in _PREDICTED if said.get(key)]
    if further and not any(part in name for name in names for part in _OF_PREDICTED):
        yield f"{path}: layers that predict further tokens are not built ({further[0]} {said[further[0]]})"
    if said.get("quantization_config"):
        yield f"{path}: quantization_config is not read: --precision and --fp8 say in which numbers a plan computes"
    own = _ours() if type(module).__module__.startswith("planner.") else ""
    modules = {*_OF_CONFIGS, *(kind.__module__ for kind in (*kinds, type(text)))}
    sources = own + "".join(_source(module) for module in sorted(modules))
    words = set(re.findall(r"\w+", sources))
    unread = [
        f"{key} {value!r:.40}"
        for key, value in said.items()
        if value and key not in words and not _BOOKKEEPING.fullmatch(key) and not _is_computed(key, value, said, words)
        if not (further and any(part in key for part in (*_PREDICTED, *_OF_PREDICTED)))
    ]
    if unread:
        more = f" and {len(unread) - _MANY} more" if len(unread) > _MANY else ""
        yield (
            f"{path}: {type(module).__name__} does not read {', '.join(unread[:_MANY])}{more}: it computes the same"
            " whatever they say"
        )


def _is_computed(key: str, value: Any, said: Mapping[str, Any], words: set[str]) -> bool:
    """Whether a class with these words in its source computes what an unread key of a config says."""
    if _OF_ROUTERS.fullmatch(key):
        sigmoid = "sigmoid" in words
        biased = "e_score_correction_bias" in words
        return bool({"sigmoid": sigmoid, "noaux_tc": biased, "softmax": not sigmoid}.get(str(value)))
    every = value if isinstance(value, list) else [value]
    usual = all((key, one) in _USUAL for one in every) or value == said.get(_NAMED_TWICE.get(key, ""))
    return usual or (value is True and any(word in words for word in _SHOWN_BY.get(key, ())))


@cache
def _ours() -> str:
    """The sources that read configs for decoders of the planner."""
    return "".join((Path(__file__).parent / name).read_text("utf-8") for name in _OF_DECODERS)


@cache
def _source(module: str) -> str:
    """The source of a loaded module; empty where it has none."""
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError, KeyError):
        return ""
