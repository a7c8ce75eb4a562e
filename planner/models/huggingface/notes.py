"""What a config says and its model leaves out: notes for the person who plans it.

transformers keeps every key of a config, and most classes read only their own. A key that nothing reads may be a relic,
or a part of the architecture that another program builds. Only a person can tell, so such keys are named. A key counts
as read if the sources of the model and of its config, of transformers or of this package, contain it as a word: that is
generous, and right for keys with names of their own.
"""

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
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
    r"for_llm_compressor"
)
"""Keys that say nothing about a training step."""

_USUAL = (("moe_layer_freq", 1), ("mlp_type", "default"))
"""Keys whose value asks for nothing that their classes lack."""

_OF_CONFIGS = ("transformers.configuration_utils", "transformers.modeling_rope_utils")
"""Modules that read configs for every class."""

_OF_DECODERS = ("decoders.py", "deepseek.py", "mixtures.py")
"""The files beside this one that read them for decoders of the planner."""

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


def notes_on_keys(content: Mapping[str, Any], config: Any, module: Any, path: Path) -> Iterator[str]:
    """Notes on keys of a config file that `module`, its model, does not read. `config` is the file as transformers
    reads it."""
    kinds = [type(config), type(module), *(type(part) for part in module.children())]
    text = config.get_text_config()
    inner: Any = next((content[key] for key in content if getattr(config, key, None) is text), {}) or {}
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
        if value and (key, value) not in _USUAL and key not in (*words, *_PREDICTED) and not _BOOKKEEPING.fullmatch(key)
    ]
    if unread:
        more = f" and {len(unread) - _MANY} more" if len(unread) > _MANY else ""
        yield (
            f"{path}: {type(module).__name__} does not read {', '.join(unread[:_MANY])}{more}: it computes the same"
            " whatever they say"
        )


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
