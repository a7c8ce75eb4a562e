"""Functions of Megatron Bridge that recipes import, each of which changes one setting of a given configuration.

Source: NVIDIA-NeMo/Megatron-Bridge 0.7 (067f987d), perf_recipes/{llama,qwen}/common.py, recipes/deepseek/h100/
deepseek_v3.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Set = tuple[tuple[str, ...], Any]
"""The path of a setting below the first argument of a function, and its value."""

_LAYERS = 64  # of DeepSeek-V3 with its embedding and its end, as in the table of layouts
_DEEPSEEK = 61
_KNOWN = ((4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4))  # pipeline ranks and virtual stages


def _global_batch(_: Mapping[str, Any], given: Sequence[Any]) -> Set | None:
    return (("train", "global_batch_size"), given[0]) if given else None


def _deepseek_layout(settings: Mapping[str, Any], given: Sequence[Any]) -> Set | None:
    """The given layout, or that of the table: the same number of layers in every stage, and the rest in the last."""
    where = ("pipeline_model_parallel_layout",)
    if given and isinstance(given[0], str):
        return where, given[0]
    ranks = settings.get("pipeline_model_parallel_size") or 1
    virtual = settings.get("virtual_pipeline_model_parallel_size") or 1
    if given or (ranks, virtual) not in _KNOWN:
        return None
    stages = ranks * virtual
    each = _LAYERS // stages
    counts = [each] * (stages - 1) + [_DEEPSEEK - each * (stages - 1)]
    return where, "E" + "|".join("t" * count for count in counts) + "mL"


SETTERS: Mapping[str, Callable[[Mapping[str, Any], Sequence[Any]], Set | None]] = {
    "_with_global_batch_size": _global_batch,
    "set_deepseek_v3_pipeline_model_parallel_layout": _deepseek_layout,
}
"""Functions by name: from the settings of the first argument and from the other arguments to the setting that it
changes."""
